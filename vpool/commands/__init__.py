"""The command line: one module a command.

A command's module has `HELP`, `prepare(parser)`, and `run(args)`, which returns what ``--json`` prints
and prints everything else itself when that was not asked for.  It may have `failure(result)`: one line that says why
what was done has failed all the same, or None; `status(result)`, the exit status of what was done; and `JSON`: how its
option ``--json`` differs from the others', of which the value True alone means to print.
"""

import argparse
import importlib
import json
import os
import sys

from vpool.errors import Error, OutOfMemoryError
from vpool.version import __version__

__all__ = ["main"]

COMMANDS = (
    "demo",
    "doctor",
    "run",
    "replay",
    "compare",
    "tune",
    "inspect",
    "plan",
    "view",
    "defrag",
    "convert",
    "top",
    "bench",
)

_JSON = {"action": "store_true", "help": "print the result as JSON"}


class _Parser(argparse.ArgumentParser):
    """Wrong usage is one line on standard error."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser():
    parser = _Parser(prog="vpool", description="A GPU memory pool for Python.")
    parser.add_argument("--version", action="version", version=f"vpool {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"vpool.commands.{name}")
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.prepare(command)
        command.add_argument("--json", **getattr(module, "JSON", _JSON))
        command.set_defaults(
            run=module.run,
            failure=getattr(module, "failure", lambda result: None),
            status=getattr(module, "status", lambda result: 0),
        )
    return parser


def main(argv=None):
    """Run one command.

    Returns
    -------
    int
        0 for done, 1 for a failure that one line on standard error explains; of a program that was run, its own.
        Wrong usage leaves through `SystemExit` with status 2.
    """
    if sys.stderr is None:  # closed: what is said there is lost, and would else go to standard output
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - to the end of the process
    args = _parser().parse_args(argv)
    try:
        result = args.run(args)
        if args.json is True:
            print(json.dumps(result, indent=2))
        if sys.stdout is not None:
            sys.stdout.flush()
        if failure := args.failure(result):
            print(f"vpool {args.command}: {failure}", file=sys.stderr)
            return 1
        return args.status(result)
    except (Error, OSError, ValueError, TypeError, OverflowError, MemoryError) as error:
        if isinstance(error, BrokenPipeError):
            # Whoever read has gone, as `head` does; nothing more can be told on this stream.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        print(f"vpool {args.command}: {_one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _one_line(error):
    # What else an error of memory has to say takes lines.
    text = error.args[0] if isinstance(error, OutOfMemoryError) else str(error)
    return " ".join(text.split()) or type(error).__name__

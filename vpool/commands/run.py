"""``vpool run``."""

import contextlib
import importlib
import importlib.util
import os
import sys
import threading
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from vpool import defaults
from vpool._interface.lender import pools
from vpool.commands.console import expect_output, table
from vpool.errors import Error
from vpool.integrations.on_import import after_import
from vpool.policy import Policy
from vpool.sizes import format_bytes

HELP = "Run an unmodified program under a pool, recorded if asked; the report at its end."

_NUMBA = "vpool.integrations.numba"
# Packages after whose import the `install` of their plug-in is called.  Numba asks for its plug-in itself.
_INSTALLED = ("torch", "cupy", "rmm")
_UNASKED = ("torch", "cupy")  # these where none is asked for, and Numba


def prepare(parser):
    for name, package in (("torch", "PyTorch"), ("cupy", "CuPy"), ("numba", "Numba"), ("rmm", "RMM")):
        parser.add_argument(f"--{name}", action="store_true", help=f"have {package} allocate from the pool")
    parser.add_argument("--policy", metavar="FILE", help="the policy that the pool works by")
    parser.add_argument("--record", metavar="FILE", help="record the default pool that vpool makes, into a .npz file")
    parser.add_argument("--report", action="store_true", help="the whole report of each pool at the end")
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module, as for python -m")
    parser.add_argument(
        "program", metavar="PROGRAM", nargs="A...", help="a script, or a module after -m, and its arguments"
    )


def run(args):
    name, *arguments = args.program[1:] if args.program[0] == "--" else args.program
    expect_output(args.record, None if args.module else name, args.policy)
    if args.policy:
        Policy.load(args.policy)  # errors in it are ours to tell, and not the program's
        os.environ["VPOOL_POLICY"] = os.path.abspath(args.policy)
    process = os.getpid()
    watched = _Watched(args.record and os.path.abspath(args.record))
    missed: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(watched.stop)
        asked = [one for one in (*_INSTALLED, "numba") if getattr(args, one)]
        if args.numba or not (asked or "NUMBA_CUDA_MEMORY_MANAGER" in os.environ):
            os.environ["NUMBA_CUDA_MEMORY_MANAGER"] = _NUMBA
        for framework in [one for one in asked if one != "numba"] if asked else _UNASKED:
            stack.callback(_hook(framework, missed))
        defaults.when_made.append(watched.add)
        stack.callback(defaults.when_made.remove, watched.add)
        status = _status_of(_module if args.module else _script, name, arguments)
        if os.getpid() != process:
            raise SystemExit(status)  # a fork of the program: the report is its parent's
        _wait_for_threads()
    known = watched.pools + sorted((pool for pool in pools() if pool not in watched.pools), key=lambda one: one.name)
    result = {
        "exit_status": status,
        "not_hooked": missed,
        "recorded": watched.save(),
        "pools": [pool.inspect().to_dict() for pool in known],
    }
    _show(known, result, args)
    return result


def status(result):
    """The program's own."""
    return result["exit_status"]


# The frameworks.


def _hook(framework, missed):
    """Have a framework allocate from default pools once the program imports it; what takes that back."""

    def install(module):
        try:
            importlib.import_module(f"vpool.integrations.{framework}").install()
        except Exception as error:  # the program can do without: it is told, and goes on
            missed[framework] = " ".join(str(error).split())
            print(f"vpool run: {framework} does not allocate from a pool: {missed[framework]}", file=sys.stderr)

    return after_import(framework, install)


# The pools.


class _Watched:
    """The default pools of a program from their first block on, each recorded if there is a file for it."""

    def __init__(self, path):
        self.pools = []
        self._path = path
        self._recordings = []

    def add(self, pool):
        self.pools.append(pool)
        if self._path:
            self._recordings.append((pool, pool.record()))
            self._recordings[-1][1].__enter__()

    def stop(self):
        """End the recordings; in a fork of the program they are its parent's."""
        for pool, recording in self._recordings:
            if not pool.forked:
                recording.__exit__(None, None, None)

    def save(self):
        """Write a file for each pool that was recorded, the first one's with the name that was given."""
        written = []
        for number, (pool, recording) in enumerate(self._recordings):
            path = Path(self._path)
            if number:
                path = path.with_name(f"{path.stem}-{pool.name}-{number}{path.suffix}")
            recording.save(path)
            written.append(str(path))
        return written


def _show(known, result, args):
    """The report, on standard error: standard output is the program's."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the program may have closed them
        sys.stdout.flush()
        if not known:
            print("vpool run: no pool was used", file=sys.stderr)
        elif args.report:
            print(*(pool.inspect() for pool in known), sep="\n\n", file=sys.stderr)
        else:
            header = ("pool", "source", "peak live", "peak reserved", "allocations", "source calls", "out of memory")
            print(table(header, map(_row, known)), file=sys.stderr)
        for path in result["recorded"]:
            print(f"recorded: {path}", file=sys.stderr)
        if args.record and not result["recorded"]:
            why = "vpool made no default pool, and a program's own pools are recorded by Pool.record() alone"
            print(f"vpool run: {args.record} was not written: {why}", file=sys.stderr)


def _row(pool):
    stats = pool.stats
    peaks = format_bytes(stats.peak_allocated_bytes), format_bytes(stats.peak_reserved_bytes)
    return pool.name, pool.source.name, *peaks, f"{stats.allocations:,}", f"{stats.source_calls:,}", stats.ooms


# The program.  From its first line on the process is the program's: what `sys` says of it stays so.


def _status_of(execute, name, arguments):
    """Run a program to the end of its main thread; the exit status that Python would end with."""
    try:
        execute(name, arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except _NotStarted as error:
        raise error.reason from None
    except BaseException as error:
        kind, trace = type(error), error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next  # the program's own frames come after these
        sys.excepthook(kind, error.with_traceback(trace), trace)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


class _NotStarted(Exception):
    """There is no program to run: why not."""

    def __init__(self, reason):
        super().__init__(reason)
        self.reason = reason


def _script(path, arguments):
    """As ``python path``: a file of Python, or a folder or an archive that has a `__main__`."""
    file = os.path.abspath(path)
    spec = _main_of(file)
    if spec is not None:
        _execute(spec.loader.get_code("__main__"), spec, spec.loader, spec.origin, file, [path, *arguments])
        return
    loader = SourceFileLoader("__main__", file)
    try:
        source = loader.get_data(file)
    except OSError as error:
        raise _NotStarted(error) from None
    code = compile(source, file, "exec", dont_inherit=True)
    _execute(code, None, loader, file, os.path.dirname(os.path.realpath(path)), [path, *arguments])


def _main_of(path):
    """The spec of the `__main__` in a folder or an archive; None for anything else."""
    for hook in sys.path_hooks:
        with contextlib.suppress(ImportError):
            return hook(path).find_spec("__main__")
    return None


def _module(name, arguments):
    """As ``python -m name``."""
    _put_first(os.getcwd())
    sys.argv[:] = ["-m", *arguments]
    try:
        spec: Any = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        loader: Any = None if spec is None else spec.loader
        code = None if loader is None else loader.get_code(spec.name)
    except ModuleNotFoundError as error:
        raise _NotStarted(Error(str(error))) from None
    if code is None:
        raise _NotStarted(Error(f"there is no module {name} that can be executed"))
    _execute(code, spec, loader, spec.origin, os.getcwd(), [spec.origin, *arguments])


def _put_first(folder):
    """Where a program's own modules are found."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _execute(code, spec, loader, file, folder, argv):
    main = types.ModuleType("__main__")
    main.__file__, main.__spec__, main.__loader__ = file, spec, loader
    if spec is not None:
        main.__package__ = spec.parent
    sys.modules["__main__"] = main
    sys.argv[:] = argv
    _put_first(folder)
    exec(code, main.__dict__)


def _wait_for_threads():
    """As Python does at its end, for those that are no daemons."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()

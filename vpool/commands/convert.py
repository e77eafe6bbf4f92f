"""``vpool convert``."""

import argparse
import sys

from vpool.commands.console import expect_output
from vpool.formats.writers import FORMATS, by_suffix
from vpool.placing import placed
from vpool.sizes import plural
from vpool.trace import Trace

# Formats of a viewer that shows segments.
_PLACED = ("torch-pickle", "torch-json")

HELP = "Convert a trace file to another format."


def prepare(parser):
    parser.add_argument("trace", metavar="IN", help="a trace file of any format that vpool reads")
    parser.add_argument("out", metavar="OUT", help="the file to write, compressed if it ends in .gz")
    parser.add_argument(
        "--to",
        choices=FORMATS,
        metavar="FORMAT",
        help=f"{', '.join(FORMATS)}; what the ending of OUT means if not given",
    )
    parser.add_argument(
        "--events",
        type=_span,
        metavar="A:B",
        help="only the events from A to before B, and what was live before; PyTorch's viewer is slow beyond 100,000",
    )
    parser.add_argument(
        "--strategy",
        metavar="NAME|FILE",
        help="for PyTorch's viewer: place the blocks as this strategy of vpool replay would; if not given, where they "
        "were recorded, or else as dynamic",
    )
    parser.add_argument("--device", metavar="N", help="the device to read, of a file that has several")


def _span(text):
    """Two numbers of events on the command line; the first and the last event where one is not there."""
    begin, colon, end = text.partition(":")
    try:
        if not colon:
            raise ValueError
        first, last = int(begin or 0), int(end) if end else sys.maxsize
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be two numbers as 1000:2000, not {text!r}") from None
    if not 0 <= first < last:
        raise argparse.ArgumentTypeError(f"must be a number and a larger one, not {text!r}")
    return first, last


def run(args):
    form = args.to or by_suffix(args.out)
    if form is None:
        raise ValueError(f"the ending of {args.out} means no format; name one with --to: {', '.join(FORMATS)}")
    expect_output(args.out, args.trace, args.strategy)
    trace = Trace.load(args.trace, args.device)
    if args.events:
        trace = trace.part(*args.events)
    if args.strategy is not None and form not in _PLACED:
        raise ValueError(f"--strategy places blocks for {' and '.join(_PLACED)}, not for {form}")
    # The trace as it was is what is told of; made-up addresses would say nothing of what a pool reserves.
    moved = form in _PLACED and (args.strategy is not None or trace.details is None)
    (placed(trace, args.strategy) if moved else trace).save(args.out, form)
    result = {
        "format": form,
        "events": len(trace),
        "allocations": trace.allocations,
        "peak_live_bytes": trace.peak_live_bytes,
        "notes": trace.notes,
    }
    if not args.json:
        print(
            f"{args.out}: {plural(result['events'], 'event')}, {plural(result['allocations'], 'allocation')}, as {form}"
        )
        for note in trace.notes:
            print(f"note: {note}")
    return result

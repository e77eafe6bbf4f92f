"""``vpool convert``."""

import os

from vpool.formats.writers import FORMATS, by_suffix
from vpool.trace import Trace

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
    parser.add_argument("--device", metavar="N", help="the device to read, of a file that has several")


def run(args):
    form = args.to or by_suffix(args.out)
    if form is None:
        raise ValueError(f"the ending of {args.out} means no format; name one with --to: {', '.join(FORMATS)}")
    if os.path.exists(args.out) and os.path.samefile(args.trace, args.out):
        # A trace lacks what only the file had, and a write that fails would leave neither.
        raise ValueError(f"{args.out} is the file to read: name another one to write")
    trace = Trace.load(args.trace, args.device)
    trace.save(args.out, form)
    result = {
        "format": form,
        "events": len(trace),
        "allocations": trace.allocations,
        "peak_live_bytes": trace.peak_live_bytes,
        "notes": trace.notes,
    }
    if not args.json:
        print(f"{args.out}: {result['events']} events, {result['allocations']} allocations, as {form}")
        for note in trace.notes:
            print(f"note: {note}")
    return result

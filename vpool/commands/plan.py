"""``vpool plan``."""

import argparse
import math

from vpool.commands.console import expect_output, progress
from vpool.commands.replay import count, size
from vpool.plan import SECONDS, plan
from vpool.trace import Trace

HELP = "Place the blocks of a recorded step with all of it known, for pools to serve from."


def seconds(text):
    """A time on the command line."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return number


def number(text):
    """A number of at least 0 on the command line."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value


def prepare(parser):
    parser.add_argument("trace", metavar="TRACE", help="a trace file of any format that vpool reads")
    parser.add_argument("-o", "--output", metavar="FILE", help="the file to write the plan to (.npz)")
    parser.add_argument("--step", type=number, metavar="N", help="which step, from 0; that with the highest peak")
    parser.add_argument("--stream", type=number, metavar="N", help="plan the requests of this stream alone")
    parser.add_argument("--capacity", type=size, metavar="N", help="bytes that are enough: stop at the first plan")
    parser.add_argument(
        "--rounding", type=size, metavar="N", help="bytes that sizes are rounded up to; as a pool does if not given"
    )
    parser.add_argument(
        "--seconds", type=seconds, default=SECONDS, metavar="S", help=f"for the search, {SECONDS:g} if not given"
    )
    parser.add_argument("--seed", type=number, default=0, metavar="N", help="of the search")
    parser.add_argument("--workers", type=count, metavar="N", help="threads; one a core if not given")
    parser.add_argument("--device", metavar="N", help="the device to read, of a file that has several")


def run(args):
    expect_output(args.output, args.trace)
    trace = Trace.load(args.trace, args.device)
    with progress("planning") as show:
        found = plan(
            trace,
            args.step,
            stream=args.stream,
            capacity=args.capacity,
            rounding=args.rounding,
            seconds=args.seconds,
            seed=args.seed,
            workers=args.workers,
            progress=show,
        )
    if args.output:
        found.save(args.output)
    fits = args.capacity is None or found.peak_bytes <= args.capacity
    if not args.json:
        print(found)
        if not fits:
            print(f"it does not fit {args.capacity:,} bytes")
        for note in trace.notes:
            print(f"note: {note}")
    return {**found.to_dict(), "fits": fits, "notes": trace.notes}

"""``vpool replay``."""

import argparse

from vpool import sources
from vpool.commands.console import progress, table
from vpool.replay import replay
from vpool.sizes import format_bytes, parse_size, plural
from vpool.trace import Trace

HELP = "Replay a recorded trace through a pool, and show what it reserved and how fast it was."


def size(text):
    """A size on the command line."""
    try:
        nbytes = parse_size(text)
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if nbytes == 0:
        raise argparse.ArgumentTypeError("must be at least 1 byte")
    return nbytes


def count(text):
    """A number of at least 1 on the command line."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text!r}")
    return number


def prepare(parser):
    parser.add_argument("trace", metavar="TRACE", help="a trace file of any format that vpool reads")
    parser.add_argument(
        "--strategy",
        default="dynamic",
        metavar="NAME|FILE",
        help="dynamic (the default), adaptive, fixed (a slab of --capacity, or the smallest that completes), "
        "hybrid (made from the trace), or a policy file (.toml)",
    )
    parser.add_argument(
        "--source",
        default="simulated",
        choices=("simulated", "simulated-vmm", "host", "cuda", "cuda-vmm"),
        help="simulated if not given",
    )
    parser.add_argument(
        "--tight", action="store_true", help="of the sources simulated-vmm and cuda-vmm: least memory, more driver time"
    )
    parser.add_argument("--capacity", type=size, metavar="N", help="bytes that the pool may take, as 20GiB")
    parser.add_argument("--maintain", action="store_true", help="call the pool's maintain() before each event")
    parser.add_argument("--device", metavar="N", help="the device to read, of a file that has several")
    parser.add_argument("--passes", type=count, default=1, metavar="N", help="replays into the same pool")
    parser.add_argument(
        "--pessimistic", action="store_true", help="let a free be complete for other streams only at the next step"
    )
    parser.add_argument(
        "--patterns", action="store_true", help="write a pattern into each block and verify it when it is freed"
    )


def source_of(args):
    """The source that the arguments mean."""
    if not args.tight:
        return args.source
    if args.source == "cuda-vmm":
        return sources.CudaVmm(tight=True)
    if args.source == "simulated-vmm":
        return sources.SimulatedVmm(args.capacity, tight=True)
    raise ValueError(f"--tight is of the sources simulated-vmm and cuda-vmm, not {args.source}")


def run(args):
    trace = Trace.load(args.trace, args.device)
    with progress("replaying") as show:
        result = replay(
            trace,
            args.strategy,
            source_of(args),
            args.capacity,
            args.passes,
            args.pessimistic,
            patterns=args.patterns,
            maintain=args.maintain,
            progress=show,
        )
    if not args.json:
        print(render(result))
    return result.to_dict()


def failure(result):
    """Why a replay is no success, of what `run` returned; None where it is one."""
    return _out_of_memory(result["oom"], result["events"]) if result["oom"] else None


def _out_of_memory(oom, events):
    return (
        f"out of memory at event {oom['event']:,} of {events:,}: {format_bytes(oom['requested'])} more were asked for "
        f"with {format_bytes(oom['live_bytes'])} live"
    )


def render(result):
    """The result as text for a terminal."""
    figures = [
        ("events", f"{result.events:,}"),
        ("peak live", format_bytes(result.peak_live_bytes)),
        ("peak reserved", format_bytes(result.peak_reserved_bytes)),
        ("reserved / live", f"{result.reserved_over_live:.3f}"),
        ("source calls", f"{result.source_calls:,}"),
        ("waited for the source", plural(result.waited, "request")),
        ("utilization at the peak", f"{result.utilization:.1%}"),
        ("external fragmentation", f"{result.external_fragmentation:.1%}"),
        ("internal fragmentation", f"{result.internal_fragmentation:.1%}"),
    ]
    for number, (ns, driver) in enumerate(zip(result.warm_ns_per_event, result.driver_ns, strict=True), start=1):
        speed = "patterns written" if ns is None else f"{ns:.1f} ns an event"
        figures.append((f"pass {number}", f"{speed}, {driver / 1e6:.3f} ms in the driver"))
    if result.core_share is not None:
        figures.append(("served by the core", f"{result.core_share:.1%} of requests"))
    if result.verified_bytes:
        figures.append(("patterns verified", f"{format_bytes(result.verified_bytes)} of blocks"))
    text = table(("", ""), figures).lstrip("\n")
    if result.notes:
        text += "\n\n" + "\n".join(f"note: {note}" for note in result.notes)
    if result.oom:
        # First, since it makes what follows figures of a part.
        text = f"{_out_of_memory(result.oom, result.events)}\n\n{result.shortage}\n\n{text}"
    return text

"""``vpool view``."""

from pathlib import Path

from vpool.commands.console import expect_output
from vpool.commands.inspect import is_snapshot
from vpool.commands.replay import size
from vpool.files import whole_file
from vpool.pages import page_of_snapshot, page_of_trace
from vpool.placing import placed
from vpool.sizes import format_bytes, plural
from vpool.snapshot import Snapshot
from vpool.trace import Trace

HELP = "Write a page that shows a trace or a snapshot: memory map, curves, and tables of any moment."


def prepare(parser):
    parser.add_argument("file", metavar="FILE", help="a snapshot, or a trace file of any format that vpool reads")
    parser.add_argument("-o", "--out", required=True, metavar="PAGE", help="the page to write, as page.html")
    parser.add_argument(
        "--strategy",
        metavar="NAME|FILE",
        help="place the blocks of a trace as this strategy would: dynamic, adaptive, fixed, hybrid, or a policy file; "
        "if not given, where they were recorded, or else as dynamic",
    )
    parser.add_argument("--capacity", type=size, metavar="N", help="bytes that the strategy may take, as 20GiB")
    parser.add_argument("--device", metavar="N", help="the device to read, of a file that has several")


def run(args):
    expect_output(args.out, args.file, args.strategy)
    title = Path(args.file).name
    notes: list[str] = []
    if is_snapshot(args.file):
        if args.strategy is not None or args.capacity is not None:
            raise ValueError("a snapshot's blocks are where they were: --strategy and --capacity are for traces")
        snapshot = Snapshot.load(args.file)
        page, found = page_of_snapshot(snapshot, title), {"kind": "snapshot", "blocks": len(snapshot.blocks)}
    else:
        trace, placement = _with_addresses(args)
        page = page_of_trace(trace, title, placement)
        notes = trace.notes
        found = {"kind": "trace", "events": len(trace), "allocations": trace.allocations, "notes": notes}
    written = page.encode()
    with whole_file(args.out) as file:
        file.write(written)
    if not args.json:
        count = plural(found["blocks"], "block") if "blocks" in found else plural(found["events"], "event")
        print(f"{args.out}: {count}, {format_bytes(len(written))}")
        for note in notes:
            print(f"note: {note}")
    return {**found, "page_bytes": len(written)}


def _with_addresses(args):
    """The trace, and in words how it got its addresses."""
    trace = Trace.load(args.file, args.device)
    if trace.details is not None and args.strategy is None and args.capacity is None:
        return trace, "where the blocks were recorded"
    strategy = args.strategy or "dynamic"
    trace = placed(trace, strategy, args.capacity)
    within = f" within {format_bytes(args.capacity)}" if args.capacity is not None else ""
    return trace, f"placed by a replay, strategy {Path(strategy).name}{within}"

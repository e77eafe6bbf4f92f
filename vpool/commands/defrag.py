"""``vpool defrag``."""

from vpool.commands.inspect import is_snapshot
from vpool.commands.replay import size
from vpool.defrag import report
from vpool.moments import moment
from vpool.placing import placed
from vpool.snapshot import Snapshot
from vpool.trace import Trace

HELP = "Tell what keeps free memory from being whole, in a snapshot or at the worst moment of a trace."


def prepare(parser):
    parser.add_argument("file", metavar="FILE", help="a snapshot, or a trace file of any format that vpool reads")
    parser.add_argument(
        "--need", type=size, metavar="BYTES", help="the free range to be made, as 3GiB; the longest if not given"
    )
    parser.add_argument("--device", metavar="N", help="the device to read, of a file that has several")
    parser.add_argument("--strategy", metavar="S", help="replay the trace with a strategy or a policy file")
    parser.add_argument(
        "--capacity", type=size, metavar="N", help="what the replay's pool may take, as 20GiB; no bound if not given"
    )


def run(args):
    snapshot, notes = _snapshot(args)
    found = report(snapshot, args.need)
    if not args.json:
        print(found)
        if notes:
            print("\n" + "\n".join(f"note: {note}" for note in notes))
    return {**found.to_dict(), "notes": notes}


def _snapshot(args):
    """The moment to tell of, and what was odd in a trace or its replay: one that fails ends before its worst moment."""
    replays = args.strategy is not None or args.capacity is not None
    if is_snapshot(args.file):
        if replays:
            raise ValueError("a snapshot's blocks are where they were: --strategy and --capacity are for traces")
        return Snapshot.load(args.file), []
    trace = Trace.load(args.file, args.device)
    if trace.details is None or replays:
        trace = placed(trace, args.strategy, args.capacity)
    return moment(trace, trace.peak_event), trace.notes

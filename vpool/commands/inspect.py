"""``vpool inspect``."""

import zipfile

from vpool.commands.console import expect_plot, progress, save_plot, table
from vpool.errors import FormatError
from vpool.moments import moment
from vpool.replay import replay
from vpool.sizes import format_bytes
from vpool.snapshot import Snapshot
from vpool.trace import Trace

HELP = "Show the report of a saved snapshot, or of the moment of a trace when the most bytes are live."


def prepare(parser):
    parser.add_argument("file", metavar="FILE", help="a snapshot, or a trace file of any format that vpool reads")
    parser.add_argument("--device", metavar="N", help="the device to read, of a file that has several")
    parser.add_argument("--plot", metavar="OUT", help="draw it, as .png, .svg or .pdf")


def run(args):
    expect_plot(args.plot, args.file)
    if is_snapshot(args.file):
        snapshot = Snapshot.load(args.file)
        trace, report = None, snapshot.report
        found = {"kind": "snapshot", "taken": snapshot.taken}
    else:
        trace = Trace.load(args.file, args.device)
        report = _worst(trace)
        found = {
            "kind": "trace",
            "events": len(trace),
            "allocations": trace.allocations,
            "live_at_end": 2 * trace.allocations - len(trace),
            "live_bytes_at_end": int(trace.live_bytes[-1]) if len(trace) else 0,
            "peak_live_bytes": trace.peak_live_bytes,
            "peak_event": trace.peak_event,
            "failures": len(trace.failures),
            "figures": trace.figures,
            "notes": trace.notes,
        }
    if args.plot:
        save_plot(report.plot(trace), args.plot)
    if not args.json:
        if trace is not None:
            print(_head(args.file, found, recorded=trace.details is not None))
        print(report)
    return {**found, "report": report.to_dict()}


def is_snapshot(path):
    """Whether a file is one of `Snapshot.save`; what is none may be a trace."""
    try:
        with zipfile.ZipFile(path) as archive:
            return "kind.npy" in archive.namelist() and "block_address.npy" in archive.namelist()
    except (zipfile.BadZipFile, NotImplementedError):
        return False


def _worst(trace):
    """The report of a trace's worst moment: as it was recorded, or as the default strategy would have it."""
    if trace.details is not None:
        return moment(trace, trace.peak_event).report
    with progress("replaying") as show:
        result = replay(trace, progress=show)
    if result.report is None:
        raise FormatError("the trace could not be replayed")
    return result.report


def _head(path, found, recorded):
    """What the file itself says."""
    names = ("events", "allocations", "live_at_end", "failures")
    rows = [(name.replace("_", " "), f"{found[name]:,}") for name in names]
    for name in ("peak_live_bytes", "live_bytes_at_end"):
        rows.append((name.replace("_", " "), _bytes(found[name])))
    for name, value in found["figures"].items():
        if isinstance(value, dict):
            rows += [(f"{name}: {part}", _figure(number)) for part, number in value.items()]
        else:
            rows.append((name, _bytes(value) if name.endswith("_bytes") else _figure(value)))
    how = "as it was recorded" if recorded else "in a pool of the default strategy, without bounds"
    return "\n".join(
        [
            f"{path}:",
            table(("", ""), rows).lstrip("\n"),
            *(f"note: {note}" for note in found["notes"]),
            "",
            f"Behind event {found['peak_event']:,}, when the most is live, {how}:",
            "",
        ]
    )


def _bytes(number):
    return f"{number:,} ({format_bytes(number)})"


def _figure(value):
    """A figure of a reader as text."""
    if isinstance(value, list | tuple):
        return ", ".join(map(_figure, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)

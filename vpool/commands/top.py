"""``vpool top``."""

import argparse
import sys
import time

from vpool.commands.console import table
from vpool.commands.replay import count
from vpool.live import ask
from vpool.sizes import format_bytes, plural
from vpool.tables import cut, printable

HELP = "Show the pools of a running process that has called vpool.serve(), again and again."

_CLEAR = "\033[H\033[J"
_HEADER = ("pool", "source", "reserved", "allocated", "pending", "peak", "allocs/s", "hits", "calls", "ooms")


def prepare(parser):
    parser.add_argument("pid", metavar="PID", type=count, help="number of the process")
    parser.add_argument(
        "--interval", metavar="S", type=_seconds, default=1.0, help="seconds between two looks; 1 if not given"
    )
    parser.add_argument("--once", action="store_true", help="look once; so it is where the output is no terminal")


def _seconds(text):
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"must be 0.05 to 3600 seconds, got {text!r}")
    return seconds


def run(args):
    told = ask(args.pid)
    if args.json:
        return told
    if args.once or not sys.stdout.isatty():
        print(render(told))
        return told
    while True:
        time.sleep(args.interval)
        before, told = told, ask(args.pid)
        print(f"{_CLEAR}{render(told, before)}\n\nCtrl-C ends", flush=True)


def render(told, before=None):
    """A moment as text, with the rates since one before."""
    rows = []
    for pool in told["pools"]:
        allocations = pool["allocations"]
        rows.append(
            (
                cut(f"{pool['name']}, device {pool['device']}", 40),
                pool["source"],
                *(
                    format_bytes(pool[f"{name}_bytes"])
                    for name in ("reserved", "allocated", "pending", "peak_reserved")
                ),
                _rate(pool, told, before),
                f"{pool['hits'] / allocations:.1%}" if allocations else "",
                f"{pool['source_calls']:,}",
                f"{pool['ooms']:,}",
            )
        )
    when = time.strftime("%H:%M:%S", time.localtime(told["time"]))
    head = f"{when}  process {told['pid']}, {printable(told['program'] or 'interactive')}: {plural(len(rows), 'pool')}"
    return f"{head}\n{table(_HEADER, rows)}" if rows else head


def _rate(pool, told, before):
    """Allocations a second; nothing for a pool that was not there before."""
    if before is None:
        return ""
    same = [one for one in before["pools"] if all(one[key] == pool[key] for key in ("name", "device", "source"))]
    seconds = told["time"] - before["time"]
    if len(same) != 1 or seconds <= 0 or pool["allocations"] < same[0]["allocations"]:
        return ""
    return f"{(pool['allocations'] - same[0]['allocations']) / seconds:,.0f}"

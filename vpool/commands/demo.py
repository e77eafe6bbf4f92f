"""``vpool demo``."""

import time

from vpool.commands.console import progress, table
from vpool.commands.replay import render
from vpool.data import bundled_trace
from vpool.replay import replay
from vpool.sizes import format_bytes
from vpool.sources import resolve
from vpool.strategies import Dynamic

HELP = "Replay a recorded training run through a pool on the best source here, and check every byte."

# Real memory is written and verified, so sizes are scaled down to what takes a few seconds.
_MOST = {"host": 512 << 20, "cuda": 512 << 20}
_SHARE_OF_FREE = 8
_STRATEGIES: dict[str, str | Dynamic] = {
    "fixed": "fixed",
    "hybrid": "hybrid",
    "dynamic, adaptive": Dynamic(adaptive=True),
    "dynamic, growth 1.25": Dynamic(growth=1.25),
    "dynamic, growth 1.5": Dynamic(),
    "dynamic, growth 2": Dynamic(growth=2.0),
    "dynamic, steps of 512 MiB": Dynamic(growth="512MiB"),
}


def prepare(parser):
    parser.add_argument("--source", choices=tuple(_MOST), help="the best one here if not given")


def run(args):
    source = resolve(args.source)
    whole = bundled_trace()
    most = min(_MOST[source.name], source.memory()[0] // _SHARE_OF_FREE)
    trace = whole.scaled(most)
    started = time.perf_counter()
    with progress("replaying") as show:
        result = replay(trace, source=source, patterns=True, progress=show)
    seconds = time.perf_counter() - started
    compared = {name: replay(whole, strategy, passes=2) for name, strategy in _STRATEGIES.items()}
    if not args.json:
        print(
            f"A recorded training run ({len(whole):,} events, peak {format_bytes(whole.peak_live_bytes)} live) "
            f"on source {source.name!r}.\n"
            f"Sizes were scaled down to a peak of {format_bytes(trace.peak_live_bytes)}, since every "
            f"block is written and verified here.\n"
        )
        print(render(result))
        print(f"\nEvery block held its pattern to the end ({seconds:.1f} s).  The pool at its worst moment:\n")
        print(result.report)
        print("\nThe same run in full size, on simulated memory:\n")
        rows = [
            (
                name,
                f"{one.reserved_over_live:.3f}",
                format_bytes(one.peak_reserved_bytes),
                one.source_calls,
                f"{one.utilization:.1%}",
                f"{one.warm_ns_per_event[-1]:.0f}",
            )
            for name, one in compared.items()
        ]
        header = ("strategy", "reserved / live", "reserved", "source calls", "utilization", "ns an event, warm")
        print(table(header, rows))
    return {
        "source": source.name,
        "scaled_peak_live_bytes": trace.peak_live_bytes,
        "result": result.to_dict(),
        "strategies": {name: one.to_dict() for name, one in compared.items()},
    }

"""The best policies of an exhaustive grid, which `vpool.tune` is measured against.

    python -m tests.tune_grid [TRACE...]
    python -m tests.tune_grid --table [TRACE...]

replays each recorded trace (or those named) once by every policy of the grid below, some 14,000, and writes the best of
each kind into `tests/data/tune_grid.json`.  It takes about half an hour on one core.  Run it anew when the allocator's
figures change: the tests compare the figures of the best policies with the file.

The second form prints the rows of the table in `docs/tune.rst`: what `vpool.tune` makes of the same traces, and what it
makes of their second halves having seen the first.

The grid knows nothing of the search: its values are evenly spaced, where those of the search follow what it found.
"""

import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np

from tests.helpers.traces import ALL, recorded
from vpool import Dynamic, Fixed, Hybrid, Policy, replay, tune
from vpool.runs import measure
from vpool.sizing import block_lists, smallest_slab
from vpool.trials import halves

PATH = Path(__file__).parent / "data" / "tune_grid.json"
GRANULE = 4096
ROUNDINGS = (256, 512, 2048, 65536)
REMAINDERS = (256, 65536)
FACTORS = (1.05, 1.1, 1.25, 1.5, 2.0)
QUANTILES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)


def policies(trace):
    """Every policy of the grid, with the name of its kind."""
    peak = trace.peak_live_bytes

    def share(of):
        return int(peak * of) // GRANULE * GRANULE

    steps = [(peak >> bits) // GRANULE * GRANULE for bits in range(5, 16)]
    firsts = [share(tenths / 20) for tenths in range(22)] + [share(of) for of in (0.92, 0.94, 0.96, 0.98, 1.02)]
    for first, growth, adaptive, rounding, remainder in itertools.product(
        firsts, (*steps, *FACTORS), (False, True), ROUNDINGS, REMAINDERS
    ):
        yield (
            "adaptive" if adaptive else "dynamic",
            Policy(Dynamic(first, growth, adaptive=adaptive), rounding, remainder),
        )
    requests = trace.bytes[trace.op == 0]
    sizes = np.unique(np.quantile(requests[requests > 0], QUANTILES, method="higher")).tolist()
    for core, size, small, first, growth, rounding in itertools.product(
        range(1, 21), sizes, (False, True), (0, 0.1, 0.3), (steps[2], steps[6], steps[9]), (256, 2048)
    ):
        band = {"largest" if small else "smallest": int(size)}
        dynamic = Dynamic(share(first), growth, adaptive=True)
        yield "hybrid", Policy(Hybrid(share(core / 20), watermark=1.0, dynamic=dynamic, **band), rounding)
    slab = smallest_slab(trace)
    for percent, rounding, remainder in itertools.product(range(-4, 2), ROUNDINGS, REMAINDERS):
        yield "fixed", Policy(Fixed(slab * (100 + percent) // 100), rounding, remainder)
    for core, blocks in block_lists([trace]):
        yield "blocks", Policy(Fixed(core, blocks))


def best_of(trace):
    """The least peak reserved of each kind, and its policy."""
    best, count = {}, 0
    for kind, policy in policies(trace):
        count += 1
        figures = measure(trace, policy)
        if figures.completes and figures[:2] < best.get(kind, ((float("inf"),),))[0][:2]:
            best[kind] = (figures, policy)
    kinds = {
        kind: {
            "peak_reserved_bytes": figures.reserved_bytes,
            "source_calls": figures.source_calls,
            "policy": policy.dumps(),
        }
        for kind, (figures, policy) in sorted(best.items(), key=lambda item: item[1][0])
    }
    return {"policies": count, "peak_live_bytes": trace.peak_live_bytes, "kinds": kinds}


def least_of(name):
    """The least peak reserved that the grid's file has for a trace."""
    kinds = json.loads(PATH.read_text())[name]["kinds"].values()
    return min(kind["peak_reserved_bytes"] for kind in kinds)


def tuned(name):
    """What `tune` makes of a recorded trace, as the recommendation and replays of the whole and the second half.

    The second half is replayed by what was tuned on the first, and by the default policy.
    """
    trace = recorded(name)
    first, second = halves(trace)
    found, half = tune(trace), tune(first)
    return found, replay(trace, found.policy), replay(second, half.policy), replay(second)


def row_of(name, found, whole, second, default):
    """The row of a trace in the page's table."""
    cells = (
        name,
        f"{least_of(name) / whole.peak_live_bytes:.4f}",
        f"{whole.reserved_over_live:.4f}",
        f"{whole.source_calls:,}",
        f"{second.reserved_over_live:.4f}",
        f"{default.reserved_over_live:.4f}",
    )
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, (14, 6, 9, 19, 13, 15), strict=True)).rstrip()


def main(names):
    if names[:1] == ["--table"]:
        for name in names[1:] or ALL:
            print(row_of(name, *tuned(name)), flush=True)
        return
    found = json.loads(PATH.read_text()) if PATH.exists() else {}
    for name in names or ALL:
        started = time.perf_counter()
        found[name] = best_of(recorded(name))
        kind, best = next(iter(found[name]["kinds"].items()))
        print(
            f"{name}: {found[name]['policies']:,} policies, the best {kind}, "
            f"{best['peak_reserved_bytes'] / found[name]['peak_live_bytes']:.4f} of the peak, "
            f"{time.perf_counter() - started:.0f} s",
            flush=True,
        )
        PATH.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

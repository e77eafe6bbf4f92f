"""What an allocation costs here: every figure beside the machine's own floor, from one run."""

import time

import numpy as np

from vpool._interface import bench as loops
from vpool._interface.pool import Pool
from vpool.data import bundled_trace
from vpool.replay import replay
from vpool.strategies import Dynamic, Fixed, Hybrid

__all__ = ["bench"]

REPEATS = 7
SMALLEST, LARGEST = 512, 4 << 20  # bytes; sizes are log-uniform between
_PAIR_BYTES = 4096
_NEIGHBOURS = 10_000


def bench(scale=1.0, progress=None):
    """Measure the paths of an allocation.

    The measurements take turns, so that a slow moment of the machine falls on all of them.

    Parameters
    ----------
    scale : float
        Of the number of operations.
    progress : callable, optional
        Called with the measurements done and those in all.

    Returns
    -------
    dict
        ``repeats``, and ``rows`` with ``name``, ``what``, and the median ``ns``, the ``best_ns``
        and all ``samples`` in nanoseconds an operation.  The first row is the floor.
    """
    measurements = _measurements(scale)
    samples: dict[str, list[float]] = {name: [] for name, _, _ in measurements}
    for repeat in range(REPEATS):
        for number, (name, _, measure) in enumerate(measurements):
            samples[name].append(measure())
            if progress:
                progress(repeat * len(measurements) + number + 1, REPEATS * len(measurements))
    rows = [
        {
            "name": name,
            "what": what,
            "ns": float(np.median(samples[name])),
            "best_ns": min(samples[name]),
            "samples": samples[name],
        }
        for name, what, _ in measurements
    ]
    return {"repeats": REPEATS, "rows": rows}


def _measurements(scale):
    """Name, description and function of each measurement; a function gives nanoseconds an operation."""
    many = max(1000, int(1_000_000 * scale))
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(np.log(SMALLEST), np.log(LARGEST), 1 << 16)).astype(np.uint64)
    empty, used, python = _pool(), _populated_pool(), _populated_pool()
    fixed = _populated_pool(Fixed("1GiB", block=_PAIR_BYTES, limit=1.0))
    slab = _populated_pool(Hybrid("1GiB", dynamic=Dynamic(limit=1.0)))

    def random(live):
        with _pool() as pool:
            return loops.random_toggles(pool, sizes, live, many, 1) / many

    def trace(which):
        return replay(bundled_trace(), passes=3).warm_ns_per_event[which]

    return [
        ("lock", "lock and unlock (the floor)", lambda: loops.lock_and_unlock(many) / many),
        ("pair", "compiled pair, 4 KiB, among 10,000 blocks", lambda: loops.pair(used, _PAIR_BYTES, many) / many),
        (
            "pair_fixed",
            "compiled pair, equal blocks of a fixed pool",
            lambda: loops.pair(fixed, _PAIR_BYTES, many) / many,
        ),
        ("pair_hybrid", "compiled pair, slab of a hybrid", lambda: loops.pair(slab, _PAIR_BYTES, many) / many),
        ("pair_empty", "compiled pair, 4 KiB, in an empty pool", lambda: loops.pair(empty, _PAIR_BYTES, many) / many),
        ("random_1000", "compiled random sizes, 1,000 live, an operation", lambda: random(1_000)),
        ("random_10000", "compiled random sizes, 10,000 live, an operation", lambda: random(10_000)),
        ("random_100000", "compiled random sizes, 100,000 live, an operation", lambda: random(100_000)),
        ("trace_cold", "recorded training run, first pass, an event", lambda: trace(0)),
        ("trace_warm", "recorded training run, third pass, an event", lambda: trace(2)),
        ("python_calls", "Python: two calls of an empty builtin, for comparison", lambda: _empty_calls(many)),
        ("python_pair", "Python: deallocate(allocate(n))", lambda: _python_pair(python, many)),
        ("python_buffer", "Python: empty(n) made and dropped", lambda: _python_buffer(python, many)),
    ]


def _pool(strategy=None):
    return Pool(strategy or Dynamic(initial="1TiB", limit=1.0), "simulated", name="bench", debug=())


def _populated_pool(strategy=None):
    """A pool with many live blocks and a hole beside each, as a program in the middle has."""
    pool = _pool(strategy)
    blocks = [pool.allocate(_PAIR_BYTES) for _ in range(2 * _NEIGHBOURS + 1)]
    for address in blocks[1::2]:
        pool.deallocate(address)
    return pool


def _empty_calls(repeats):
    call = [].__len__
    started = time.perf_counter_ns()
    for _ in range(repeats):
        call()
        call()
    return (time.perf_counter_ns() - started) / repeats


def _python_pair(pool, repeats):
    allocate, deallocate = pool.allocate, pool.deallocate
    started = time.perf_counter_ns()
    for _ in range(repeats):
        deallocate(allocate(_PAIR_BYTES))
    return (time.perf_counter_ns() - started) / repeats


def _python_buffer(pool, repeats):
    empty = pool.empty
    started = time.perf_counter_ns()
    for _ in range(repeats):
        empty(_PAIR_BYTES)
    return (time.perf_counter_ns() - started) / repeats

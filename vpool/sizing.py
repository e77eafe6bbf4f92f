"""Sizes for strategies, found by replaying a trace on simulated memory."""

import numpy as np

from vpool.arrays import distinct
from vpool.errors import OutOfMemoryError
from vpool.policy import Policy
from vpool.runs import run
from vpool.strategies import GRANULE, Dynamic, Fixed, Hybrid
from vpool.trace import Trace

__all__ = ["block_lists", "fixed_for", "hybrid_for", "smallest_slab"]

PRECISION = 0.001  # of a capacity
_DOUBLINGS = 12
_CUTS = 6  # upper ends of the band of common sizes that are tried
_MOST_SIZES = 16  # so many kinds of equal blocks at most
# Equal blocks are faster and never fragment, so they may cost a little more than the slab that would do.
_BLOCKS_MAY_COST = 1.02


def smallest_slab(trace, precision=PRECISION, passes=1):
    """Bytes of the smallest slab found in which a trace completes.

    Parameters
    ----------
    trace : Trace
    precision : float
        How far above a capacity that is not enough the answer may be.
    passes : int
        How often the trace shall complete in it, one after the other.

    Returns
    -------
    int
        Bytes, in whole granules; 0 for a trace that needs nothing.

    Notes
    -----
    Halves the interval between peak live bytes and a capacity that is enough, with one replay for each step:
    about log2(0.3 / precision) of them.  A larger slab can fail where a smaller one does not, so a still
    smaller one may be enough by luck.
    """

    def completes(granules):
        return run(trace, Policy(Fixed(granules * GRANULE)), passes=passes).oom is None

    low = -(-trace.peak_live_bytes // GRANULE)
    if low == 0:
        return 0
    high = low
    if passes > 1:
        # What is enough for one pass mostly is for more, and if not, they need no less.
        low = high = smallest_slab(trace, precision) // GRANULE
    for doubling in range(_DOUBLINGS):
        if completes(high):
            break
        low, high = high, int(high * (1.1 if doubling < 2 else 2)) + 1
    else:
        raise OutOfMemoryError("no slab of up to a thousand times the peak is enough for the trace")
    while high - low > max(1, low * precision):
        middle = (low + high) // 2
        if completes(middle):
            high = middle
        else:
            low = middle
    return high * GRANULE


def fixed_for(trace, passes=1):
    """A slab that is just enough for a trace."""
    return Fixed(max(GRANULE, smallest_slab(trace, passes=passes)))


def hybrid_for(trace, coverage=0.9):
    """A hybrid for a trace: see `vpool.Hybrid.from_trace`."""
    if not isinstance(trace, Trace):
        trace = Trace.load(trace)
    if isinstance(coverage, bool) or not isinstance(coverage, (int, float)):
        raise TypeError(f"coverage must be a number, not {type(coverage).__name__}")
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage must be above 0 and at most 1, got {coverage}")
    sizes = _sizes(trace)
    requests = np.sort(sizes[sizes > 0])
    if not len(requests):
        raise ValueError("a trace without an allocation says nothing about a core")
    # Two passes: what the first leaves behind must not make the second need more.
    whole = smallest_slab(trace, passes=2)
    best, least = _hybrid(whole, None, 0), whole
    for largest in _cuts(requests, coverage):
        common = sizes <= largest
        core = smallest_slab(_part(trace, common), passes=2)
        rest = smallest_slab(_part(trace, ~common), passes=2)
        if core + rest < least:
            best, least = _hybrid(core, largest, rest), core + rest
    blocks = _equal_blocks(trace, sizes, requests, coverage)
    if blocks is not None:
        core, kinds, largest = blocks
        rest = smallest_slab(_part(trace, sizes > largest))
        if core + rest <= least * _BLOCKS_MAY_COST:
            best = _hybrid(core, largest if rest else None, rest, kinds)
    return best


def block_lists(traces, coverages=(0.5, 0.9, 1.0)):
    """Equal blocks, as many of each size as were ever live, for several traces and shares of the requests.

    Returns
    -------
    list of (int, tuple)
        Bytes of all blocks, and pairs of size and count; nothing for traces with too many sizes.
    """
    found: dict[tuple, int] = {}
    for coverage in coverages:
        most: dict[int, int] = {}
        for trace in traces:
            sizes = _sizes(trace)
            blocks = _equal_blocks(trace, sizes, np.sort(sizes[sizes > 0]), coverage)
            if blocks is None:
                return []
            for size, count in blocks[1]:
                most[size] = max(count, most.get(size, 0))
        found[tuple(sorted(most.items()))] = sum(size * count for size, count in most.items())
    return [(core, pairs) for pairs, core in found.items()]


def _hybrid(core, largest, rest, block=None):
    # What is left over grows by what is needed, and a tenth: the trace says that it is rarely asked for.
    return Hybrid(
        core=core,
        block=block,
        dynamic=Dynamic(initial=rest, growth=1.1),
        largest=None if largest is None else int(largest),
        headroom=0 if rest else None,
    )


def _sizes(trace):
    """Bytes of each allocation, by its number."""
    sizes = np.zeros(trace.allocations, np.uint64)
    births = trace.op == 0
    sizes[trace.number[births]] = trace.bytes[births]
    return sizes


def _cuts(requests, coverage):
    """Sizes that, as the largest common one, leave different shares of the requests in the core."""
    shares = np.linspace(coverage, 1, _CUTS, endpoint=False)
    cuts = distinct(np.quantile(requests, shares, method="higher"))
    return cuts[cuts < requests[-1]]


def _part(trace, chosen):
    """The events of some allocations."""
    mask = chosen[trace.number]
    return Trace(
        trace.op[mask], trace.id[mask], trace.bytes[mask], trace.stream[mask], trace.t_us[mask], trace.marks_us
    )


def _equal_blocks(trace, sizes, requests, coverage):
    """Bytes, kinds and largest size of a core of equal blocks, each as many as were ever live; None for too many."""
    rounded = -(-sizes.astype(np.int64) // GRANULE) * GRANULE
    kinds = distinct(rounded[sizes > 0])
    if len(kinds) > _MOST_SIZES:
        return None
    change = np.where(trace.op == 0, 1, -1)
    kind_of_event = rounded[trace.number]
    pairs = []
    for kind in kinds.tolist():
        most = int(np.cumsum(change * (kind_of_event == kind)).max())
        pairs.append((kind, most))
        if np.searchsorted(requests, kind, side="right") >= coverage * len(requests) and kind != kinds[-1]:
            # Enough is covered; the largest sizes share the rest.
            break
    return sum(kind * most for kind, most in pairs), pairs, pairs[-1][0]

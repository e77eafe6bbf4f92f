"""Loops of calls from Python: the same for vpool, its floors and its peers, without a call around each call."""

import statistics
import time
from itertools import repeat

__all__ = ["dropped", "in_parts", "pairs"]

_PARTS = 9


def in_parts(run, count):
    """The figures of so many operations in parts.

    The median part counts, since another program may have run in one.

    Parameters
    ----------
    run : callable
        Does as many operations as it is told, and returns their nanoseconds.
    count : int
    """
    part = max(1, count // _PARTS)
    each = [run(part) for _ in range(_PARTS)]
    return {"elapsed": sum(each), "ns": statistics.median(each) / part}


def pairs(allocate, deallocate, nbytes, count):
    """Nanoseconds of so many allocations, each with its free."""
    begin = time.perf_counter_ns()
    for _ in repeat(None, count):
        deallocate(allocate(nbytes))
    return time.perf_counter_ns() - begin


def dropped(make, nbytes, count):
    """Nanoseconds of so many objects that are made and dropped."""
    begin = time.perf_counter_ns()
    for _ in repeat(None, count):
        make(nbytes)
    return time.perf_counter_ns() - begin

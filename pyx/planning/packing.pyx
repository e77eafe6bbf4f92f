"""Blocks with known lifetimes, placed one after the other in a given order: the quick half of a planner.

Each block gets the lowest place that no block placed before it needs while it lives.  Times are sections: see
`vpool.placement.sections_of`.
"""
import numpy as np

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport qsort

cdef enum:
    MOST_LEVELS = 64


cdef struct Taken:
    int64_t begin
    int64_t end


cdef int by_begin(const void* one, const void* other) noexcept nogil:
    cdef int64_t a = (<const Taken*> one).begin
    cdef int64_t b = (<const Taken*> other).begin
    return (a > b) - (a < b)


cdef Py_ssize_t find_taken(const int32_t* first, const int32_t* end, const int64_t* size, const int64_t* offset,
                           const int32_t* latest, Py_ssize_t leaves, int32_t begins, int32_t ends,
                           Taken* found) noexcept nogil:
    """Collect the places of all placed blocks that live between two times; how many there are.

    `latest` is a binary tree over the blocks in the order of their birth: the latest end among the placed
    ones of each subtree, 0 where none is placed.
    """
    cdef Py_ssize_t stack[MOST_LEVELS]
    cdef Py_ssize_t depth = 1
    cdef Py_ssize_t count = 0
    cdef Py_ssize_t node, leaf, leftmost
    stack[0] = 1
    while depth:
        depth -= 1
        node = stack[depth]
        if latest[node] <= begins:
            continue
        if node >= leaves:
            leaf = node - leaves
            if first[leaf] < ends:
                found[count].begin = offset[leaf]
                found[count].end = offset[leaf] + size[leaf]
                count += 1
            continue
        # Births rise to the right: where the right half begins too late, nothing in it counts.
        leftmost = 2 * node + 1
        while leftmost < leaves:
            leftmost *= 2
        if latest[2 * node + 1] > begins and first[leftmost - leaves] < ends:
            stack[depth] = 2 * node + 1
            depth += 1
        stack[depth] = 2 * node
        depth += 1
    return count


cdef int64_t find_gap(Taken* taken, Py_ssize_t count, int64_t nbytes) noexcept nogil:
    """The lowest gap between places that holds `nbytes`; above them all if there is none."""
    cdef int64_t top = 0
    cdef Py_ssize_t i
    qsort(taken, count, sizeof(Taken), by_begin)
    for i in range(count):
        if taken[i].begin - top >= nbytes:
            return top
        if taken[i].end > top:
            top = taken[i].end
    return top


def pack(const int32_t[::1] first, const int32_t[::1] end, const int64_t[::1] size, const int32_t[::1] order):
    """Offsets of blocks that are placed in an order.

    Parameters
    ----------
    first, end : array of int32
        The sections in which each block lives, from `first` to before `end`; `first` never falls.
    size : array of int64
        Bytes of each block, more than 0.
    order : array of int32
        Each block once.

    Returns
    -------
    array of int64

    Notes
    -----
    O(log n + k log k) for a block that lives beside k placed ones.
    """
    cdef Py_ssize_t n = first.shape[0]
    cdef Py_ssize_t leaves = 1
    cdef Py_ssize_t place, node, count
    cdef int32_t block
    cdef int64_t[::1] offset = np.zeros(n, np.int64)
    cdef int32_t[::1] births, latest
    cdef int64_t[:, ::1] taken = np.empty((n + 1, 2), np.int64)
    if n == 0:
        return np.asarray(offset)
    while leaves < n:
        leaves *= 2
    latest = np.zeros(2 * leaves, np.int32)
    births = np.full(leaves, np.iinfo(np.int32).max, np.int32)
    births[:n] = first
    with nogil:
        for place in range(n):
            block = order[place]
            count = find_taken(&births[0], &end[0], &size[0], &offset[0], &latest[0], leaves, first[block],
                               end[block], <Taken*> &taken[0, 0])
            offset[block] = find_gap(<Taken*> &taken[0, 0], count, size[block])
            node = leaves + block
            while node and latest[node] < end[block]:
                latest[node] = end[block]
                node //= 2
    return np.asarray(offset)

"""Figures of a pool that are read at once, without its blocks."""
cimport cython
from libc.stdint cimport uint64_t

from vpool._interface.diagnosis cimport forked
from vpool._interface.snapshot cimport read_stats
from vpool._management.areas cimport Areas
from vpool._management.core cimport PeakFigures
from vpool._management.state cimport STATE_FORKED
from vpool._management.walk cimport Totals, walk_totals


@cython.no_gc   # refers to the areas alone: no cycle, and none may take them away
cdef class Gauge:
    """The peaks of a pool, and its counts.  Takes no lock of arenas."""

    def __cinit__(self, Areas areas not None, str name):
        self.areas = areas
        self.name = name

    cdef int must_be_mine(self) except -1:
        if self.areas.state.word & STATE_FORKED:
            raise forked(self.name)
        return 0

    def peaks(self):
        """The highest allocated, requested and reserved bytes."""
        cdef Totals totals
        self.must_be_mine()
        walk_totals(self.areas.core, &totals)
        return totals.peak_allocated_bytes, totals.peak_requested_bytes, self.areas.peak_reserved()

    def begin_peaks(self, uint64_t allocated, uint64_t requested, uint64_t reserved):
        """Begin anew with the highest values: what is given, or what is there now if that is more; those before."""
        cdef PeakFigures floor
        cdef PeakFigures before
        self.must_be_mine()
        floor.allocated = allocated
        floor.requested = requested
        floor.reserved = reserved
        with nogil:
            self.areas.begin_peaks(&floor, &before)
        return before.allocated, before.requested, before.reserved

    def counts(self):
        """Allocations and frees so far."""
        self.must_be_mine()
        stats = read_stats(self.areas)
        return stats.allocations, stats.frees

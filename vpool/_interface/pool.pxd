"""Pools, for Python and for cimport."""
from libc.stdint cimport uint64_t

from vpool._interface.buffer cimport Buffer
from vpool._interface.upkeep cimport Upkeep


cdef class Pool(Upkeep):
    cdef readonly object strategy
    cdef readonly object debug    # vpool.modes.Modes
    cdef readonly object plan     # vpool.Plan, or None
    cdef object numbers           # what the strategy comes to here
    cdef object maintainer        # its helper thread, if one is wanted

    cdef uint64_t lent_address(self, ptr) except? 0
    cdef int must_own(self, Buffer buffer) except -1

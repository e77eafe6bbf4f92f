"""Figures of a pool that are read at once, without its blocks."""
from vpool._management.areas cimport Areas


cdef class Gauge:
    cdef Areas areas
    cdef str name                 # of the pool

    cdef int must_be_mine(self) except -1

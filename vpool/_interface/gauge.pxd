"""Figures of a pool that are read at once, without its blocks."""
from vpool._management.areas cimport Areas


cdef class Gauge:
    cdef Areas areas

"""Pools, for Python and for cimport."""
from vpool._interface.mover cimport Mover


cdef class Pool(Mover):
    cdef readonly object strategy
    cdef readonly object debug    # vpool.modes.Modes
    cdef readonly object plan     # vpool.Plan, or None
    cdef object numbers           # what the strategy comes to here
    cdef object maintainer        # its helper thread, if one is wanted

"""Copies of a pool's records, as arrays and plain figures."""
from vpool._management.core cimport Core


cdef tuple copy_records(Core core, str name)
cdef read_stats(Core core)
cdef read_ladder(Core core)
cdef read_crossings(Core core)

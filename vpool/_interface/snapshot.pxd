"""Copies of a pool's records, as arrays and plain figures."""
from vpool._management.areas cimport Areas


cdef tuple copy_records(Areas areas, str name)
cdef tuple told_records(Areas areas, str name, measures, debugger)
cdef read_stats(Areas areas)
cdef read_limit(Areas areas)
cdef read_ladder(Areas areas)
cdef read_core_share(Areas areas)
cdef read_crossings(Areas areas)

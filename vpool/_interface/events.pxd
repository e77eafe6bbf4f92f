"""The events of a pool that are in its ring now."""
from vpool._management.areas cimport Areas


cdef tuple copy_events(Areas areas)
cdef tuple read_origins(Areas areas, sites, debugger, blocks)

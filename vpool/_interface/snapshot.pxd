"""Copies of a pool's records, as arrays and plain figures."""
from vpool._management.core cimport Core
from vpool._storage.source cimport Source


cdef tuple copy_records(Core core, str name, list handles)
cdef tuple memory_info(Source source)

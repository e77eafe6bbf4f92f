"""Copies of a pool's records, as arrays and plain figures."""
from vpool._management.core cimport Core


cdef tuple copy_records(Core core, str name)

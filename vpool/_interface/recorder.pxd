"""What a recording does to its pool."""
from vpool._interface.lender cimport Lender


cdef class Recorder:
    cdef Lender pool

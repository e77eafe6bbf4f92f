"""Blocks for other processes."""
from libc.stdint cimport uint64_t

from vpool._interface.lender cimport Lender


cdef handle_of(Lender pool, uint64_t address)

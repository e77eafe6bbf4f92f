"""Blocks for other libraries."""
from libc.stdint cimport uint64_t

from vpool._interface.lender cimport Lender


cdef tuple device_of(Lender pool)
cdef dlpack(Lender pool, owner, uint64_t address, uint64_t nbytes, int slot, stream, max_version, dl_device, copy)
cdef int for_host(Lender pool, int slot) except -1
cdef dict array_interface(Lender pool, uint64_t address, uint64_t nbytes, int slot)

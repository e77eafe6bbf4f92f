"""Buffers: blocks that free themselves."""
from libc.stdint cimport uint16_t, uint64_t

from vpool._base.types cimport BlockId
from vpool._interface.lender cimport Lender
from vpool._management.arena cimport Arena


cdef class Buffer:
    cdef readonly Lender pool
    cdef Arena* arena
    cdef uint64_t address
    cdef BlockId block_id         # 0: of zero bytes, or given back
    cdef uint16_t generation

    cdef int must_be_mine(self) except -1
    cdef bint put(self) noexcept
    cdef bint put_on(self, int slot) noexcept
    cdef bint close_held(self, stream) except -1
    cdef bint drop_held(self) noexcept

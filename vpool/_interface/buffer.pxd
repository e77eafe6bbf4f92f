"""Buffers: blocks that free themselves."""
from libc.stdint cimport uint16_t, uint64_t

from vpool._base.types cimport BlockId
from vpool._interface.lender cimport Lender
from vpool._management.arena cimport Arena


cdef class Buffer:
    cdef readonly Lender pool
    cdef Arena* arena
    cdef uint64_t address
    cdef BlockId block_id         # 0: of zero bytes, given back, or with others
    cdef uint16_t generation
    # Others that use the memory: meanwhile the block's number is here, so that neither a drop nor a close that is
    # not concerned has anything to look at.
    cdef BlockId shared_id
    cdef unsigned int sharers

    cdef int must_be_mine(self) except -1
    cdef int must_be_usable(self) except -1
    cdef int share(self) except -1
    cdef void unshare(self) noexcept
    cdef bint put(self) noexcept
    cdef bint put_on(self, int slot) noexcept
    cdef bint close_held(self, stream) except -1
    cdef bint drop_held(self) noexcept

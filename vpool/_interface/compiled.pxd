"""Pools for compiled callers: allocations and frees without the GIL."""
from libc.stdint cimport uint64_t

from vpool._interface.pool cimport Pool
from vpool._management.arena cimport Arena

# What a function returns; those of vpool/capi.h.
cdef enum Status:
    OK = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    INVALID_POINTER = 3
    CLOSED = 4
    FORKED = 5

# A stream as one pool knows it: of that pool alone, and as long as that.
ctypedef Arena* Stream


# With the GIL; ask again when a capture begins or ends.
cdef Stream stream_of(Pool pool, stream) except NULL

# Without the GIL, from any thread.
cdef int allocate(Pool pool, Stream stream, uint64_t nbytes, uint64_t* address) noexcept nogil
cdef int allocate_aligned(Pool pool, Stream stream, uint64_t nbytes, uint64_t alignment,
                          uint64_t* address) noexcept nogil
cdef int deallocate(Pool pool, Stream stream, uint64_t address) noexcept nogil
cdef int deallocate_on(Pool pool, Stream stream, uint64_t address) noexcept nogil
cdef int record_stream(Pool pool, Stream stream, uint64_t address) noexcept nogil

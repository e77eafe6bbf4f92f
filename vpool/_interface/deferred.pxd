"""Blocks of which nobody says which streams use them."""
from libc.stdint cimport uint16_t, uint32_t, uint64_t

from vpool._base.lock cimport SpinLock
from vpool._interface.lender cimport Lender
from vpool._management.arena cimport Arena
from vpool._management.areas cimport Areas


cdef class Deferred:
    cdef readonly Lender pool
    cdef Areas areas
    cdef Arena* arena             # of the host's slot
    cdef SpinLock lock            # of what waits
    cdef uint64_t* parked         # addresses
    cdef uint32_t capacity
    cdef unsigned long long count
    cdef unsigned long long parked_bytes
    cdef unsigned long long holds
    cdef bint gone                # the memory is not the pool's any more
    cdef uint32_t most
    cdef uint64_t most_bytes
    cdef uint16_t tag             # of blocks for threads that have none
    cdef object __weakref__

    cdef uint64_t lend(self, uint64_t nbytes) noexcept nogil
    cdef void park(self, uint64_t address, uint64_t nbytes) noexcept nogil
    cdef int settle_all(self) noexcept nogil

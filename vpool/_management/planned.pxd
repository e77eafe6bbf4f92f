"""A plan at work: requests that come as recorded get the places that were planned for them."""
from libc.stdint cimport int64_t, uint8_t, uint64_t

from vpool._base.lock cimport SpinLock
from vpool._base.types cimport BlockId
from vpool._management.arena cimport Arena
from vpool._management.core cimport Core


cdef class Planned:
    cdef Core fixed               # the planned memory
    cdef SpinLock lock            # of what follows; taken before an arena's
    cdef const uint64_t[::1] nbytes
    cdef const int64_t[::1] offset
    cdef const int64_t[::1] below
    cdef int64_t count
    cdef int64_t next             # the request that is expected
    cdef int trust                # in that
    cdef uint64_t recent[4]       # sizes that were requested last, the last first
    # Where in the sequence a run of sizes ends: a hash table with open addressing.
    cdef int64_t[::1] runs
    cdef uint64_t run_mask
    cdef uint8_t[::1] is_ambiguous
    cdef uint64_t base            # address of the planned memory
    cdef BlockId edge             # the record before its first block
    cdef unsigned long long served, refused, strange

    cdef Py_ssize_t find_run(self) noexcept nogil
    cdef int64_t follow(self, uint64_t requested) noexcept nogil
    cdef int64_t look_ahead(self, uint64_t requested) noexcept nogil
    cdef BlockId find_free(self, Arena* arena, int64_t entry, uint64_t nbytes) noexcept nogil
    cdef BlockId cut_out(self, Arena* arena, int64_t entry, uint64_t requested) noexcept nogil
    cdef BlockId take(self, Arena* arena, uint64_t requested, uint64_t alignment, uint64_t* address) noexcept nogil

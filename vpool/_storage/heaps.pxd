"""What a profiler or sanitizer is told of memory that is lent in parts: NVTX's heaps and regions."""
from libc.stdint cimport uint32_t, uint64_t

from vpool._base.lock cimport SpinLock

cdef struct Heap:
    uint64_t address
    uint64_t nbytes
    void* handle                  # the tool's


cdef class Heaps:
    cdef void* domain
    cdef bytes name
    cdef const char* text         # of `name`
    cdef void* functions[5]
    cdef SpinLock lock            # of what follows; no tool is called under it
    cdef Heap* known
    cdef uint32_t count

    cdef void add(self, uint64_t address, uint64_t nbytes) noexcept nogil
    cdef void drop(self, uint64_t address) noexcept nogil
    cdef void* heap_of(self, uint64_t address) noexcept nogil
    cdef void cover(self, uint64_t address, uint64_t nbytes, const char* name) noexcept nogil
    cdef void uncover(self, uint64_t address) noexcept nogil

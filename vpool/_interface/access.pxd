"""Device memory, written, read and copied in stream order."""
from libc.stdint cimport uint64_t

from vpool._management.areas cimport Areas
from vpool._storage.heaps cimport Heaps


cdef class Access:
    cdef Areas areas
    cdef Heaps heaps

    cdef int cover(self, block) except -1
    cdef int uncover(self, block) except -1
    cdef bint enter(self, int slot, bint named) noexcept nogil
    cdef int leave(self, int slot, int status) noexcept nogil
    cdef int get_ready(self, int slot, bint named) noexcept nogil
    cdef int fill_on(self, int slot, bint named, uint64_t address, int byte, uint64_t nbytes) noexcept nogil
    cdef int read_on(self, int slot, bint named, void* host, uint64_t address, uint64_t nbytes) noexcept nogil
    cdef int copy_on(self, int slot, bint named, uint64_t to, uint64_t address, uint64_t nbytes) noexcept nogil
    cdef int come_after(self, int slot, int other, bint named) noexcept nogil

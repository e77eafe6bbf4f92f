"""A source whose address space and memory are two things: handles are mapped where they are needed."""
from libc.stdint cimport uint64_t

from vpool._base.lock cimport SpinLock
from vpool._storage.source cimport Handle, Range, Source

cdef enum:
    MOST_PEERS = 64
    MOST_STRAYS = 64


cdef class MappedSource(Source):
    cdef readonly uint64_t handle_bytes           # of a handle where nothing else decides
    cdef readonly double slack                    # share of what is live that may be reserved beyond it
    cdef readonly bint exportable
    cdef int peers[<int> MOST_PEERS]
    cdef int peer_count
    cdef SpinLock lock                            # of the strays
    cdef Range strays[<int> MOST_STRAYS]          # that the driver did not free when it was asked
    cdef int stray_count

    cdef int map_at(self, uint64_t address, Handle* handle, bint* stays) noexcept nogil
    cdef int unmap_at(self, uint64_t address, uint64_t nbytes) noexcept nogil
    cdef int _open_mapping(self, uint64_t address, uint64_t nbytes) noexcept nogil
    cdef int _free_range(self, uint64_t address, uint64_t nbytes) noexcept nogil
    cdef void _free_later(self, Range* span) noexcept nogil
    cdef void _free_strays(self) noexcept nogil

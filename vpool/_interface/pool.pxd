"""Pools and buffers: the interface layer's types, for Python and for cimport."""
from libc.stdint cimport uint16_t, uint64_t

from vpool._base.types cimport BlockId
from vpool._interface.pressure cimport Pressure
from vpool._interface.streams cimport StreamTable
from vpool._management.arena cimport Arena
from vpool._management.core cimport Core


cdef class Pool:
    cdef Core core
    cdef Arena* default_arena     # of slot 0, the legacy default stream
    cdef StreamTable streams
    cdef Pressure pressure
    cdef readonly str name
    cdef readonly object strategy
    cdef object __weakref__

    cdef Arena* arena_for(self, stream) except NULL
    cdef BlockId lend(self, Arena* arena, uint64_t requested, uint64_t alignment, uint64_t* address) except? 0
    cdef int freeing_slot(self, stream, int gone) except -1
    cdef int take_back(self, uint64_t address, stream) except -1
    cdef release_idle(self)
    cdef void after_free(self) noexcept
    cdef bint holds(self, uint64_t address) noexcept
    cdef _stray(self, uint64_t address)


cdef class Buffer:
    cdef readonly Pool pool
    cdef Arena* arena
    cdef uint64_t address
    cdef BlockId block_id         # 0: of zero bytes, or given back
    cdef uint16_t generation

    cdef bint put(self) noexcept
    cdef bint put_on(self, stream) except -1

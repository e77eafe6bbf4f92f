"""The way of a block out of a pool and back, as pools and buffers share it."""
from libc.stdint cimport uint64_t

from vpool._base.types cimport BlockId
from vpool._interface.pressure cimport Pressure
from vpool._interface.streams cimport StreamTable
from vpool._management.arena cimport Arena
from vpool._management.areas cimport Areas
from vpool._management.core cimport Core
from vpool._management.state cimport Request


cdef class Lender:
    cdef Areas areas
    cdef Core core                # the area that grows
    cdef Arena* default_arena     # of slot 0, the legacy default stream
    cdef StreamTable streams
    cdef Pressure pressure
    cdef object debugger          # vpool.debugging.Debugger, or None
    cdef object sites             # what numbers the places that allocate, while a recording wants them, or None
    cdef uint64_t front           # bytes that a block with a guard begins before its caller's address
    cdef readonly str name
    cdef bint complained          # that the source does not take memory of a closed pool back
    cdef object measures          # vpool.measure.Measures, once one was asked for, or None
    cdef object __weakref__

    cdef Arena* arena_for(self, stream) except NULL
    cdef BlockId lend(self, Arena** arena, uint64_t requested, uint64_t alignment, uint64_t* address) except? 0
    cdef BlockId lend_watched(self, Arena** arena, uint64_t requested, uint64_t alignment, uint64_t* address,
                              bint named) except? 0
    cdef int tag(self, Request* request) except -1
    cdef int show(self, Request* request, uint64_t front, bint named) except -1
    cdef int watch(self, debugger) except -1
    cdef int must_be_mine(self) except -1
    cdef int must_be_open(self) except -1
    cdef int freeing_slot(self, stream, int gone) except -1
    cdef bint held(self, uint64_t address, stream) except -1
    cdef int take_back(self, uint64_t address, stream) except -1
    cdef int take_back_on(self, uint64_t address, int slot) except -1
    cdef release_idle(self, uint64_t keep, uint64_t* released)
    cdef release_slices(self, uint64_t keep, uint64_t deadline, uint64_t* released, bint* late)
    cdef void after_free(self) noexcept
    cdef uint64_t base_of(self, uint64_t address) except? 0
    cdef bint holds(self, uint64_t address) noexcept
    cdef records(self)
    cdef stray_error(self, uint64_t address)


cdef int register(Lender lender) except -1

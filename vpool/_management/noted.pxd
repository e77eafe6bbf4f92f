"""Calls of a pool that are noted: recorded, or counted by tag.  The ways that others take know nothing of it."""
from libc.stdint cimport uint16_t, uint64_t

from vpool._base.types cimport BlockId
from vpool._management.arena cimport Arena
from vpool._management.areas cimport Areas
from vpool._management.state cimport Request


cdef bint noted_switch(Areas areas, bint on) noexcept nogil
cdef BlockId noted_try_lend(Areas areas, Arena** arena, uint64_t requested, uint64_t* address) noexcept nogil
cdef bint noted_try_free(Areas areas, Arena* arena, uint64_t address) noexcept nogil
cdef BlockId noted_lend(Areas areas, Arena* arena, uint64_t requested, uint64_t* address) noexcept nogil
cdef bint noted_begin(Areas areas, Request* request) noexcept nogil
cdef void noted_end(Areas areas, Request* request) noexcept nogil
cdef void noted_failure(Areas areas, Request* request) noexcept nogil
cdef bint noted_free(Areas areas, uint64_t address, uint16_t hint, int freer) noexcept nogil

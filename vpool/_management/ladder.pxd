"""The ladder of a miss: what is tried before a request fails, and how a pool grows."""
from libc.stdint cimport uint64_t

from vpool._base.types cimport BlockId
from vpool._management.core cimport Core
from vpool._management.state cimport Request


cdef BlockId ladder_climb(Core core, Request* request, int first, int last) noexcept nogil
cdef BlockId ladder_search_all(Core core, Request* request) noexcept nogil
cdef int ladder_ensure(Core core, uint64_t nbytes) noexcept nogil
cdef bint ladder_reserve(Core core, Request* request) noexcept nogil

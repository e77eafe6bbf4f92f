"""Room for a request that no free block holds, where memory can be moved."""
from libc.stdint cimport uint32_t

from vpool._management.core cimport Core
from vpool._management.state cimport Request

cdef int room_make(Core core, Request* request) noexcept nogil
cdef uint32_t room_pieces(Core core) noexcept nogil

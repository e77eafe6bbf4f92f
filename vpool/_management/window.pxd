"""What to do about a request that no free block holds: pure decisions on the pieces of a range."""
from libc.stdint cimport uint32_t, uint64_t

from vpool._management.mapped cimport Mapped, Piece

cdef struct Window:
    uint32_t first                # piece that it begins in
    uint64_t address
    uint64_t nbytes
    uint64_t block                # address in it at which the request shall lie
    uint64_t holes                # bytes of it that have no memory yet


cdef void window_link(Piece* pieces, uint32_t count) noexcept nogil
cdef bint window_best(Piece* pieces, uint32_t count, uint64_t nbytes, uint64_t granularity,
                      Window* window) noexcept nogil
cdef bint window_last(Piece* pieces, uint32_t count, uint64_t nbytes, uint64_t granularity,
                      Window* window) noexcept nogil
cdef uint32_t window_victims(Mapped* mapped, Piece* pieces, uint32_t count, Window* window,
                             uint64_t* nbytes) noexcept nogil

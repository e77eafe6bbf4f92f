"""What to do about a request that no free block holds: pure decisions on the pieces of a range."""
from libc.stdint cimport uint32_t, uint64_t

from vpool._management.mapped cimport Mapped, Piece

cdef struct Window:
    uint32_t first                # piece that it begins in
    uint64_t address
    uint64_t nbytes
    uint64_t block                # address in it at which the request shall lie
    uint64_t holes                # bytes of it that have no memory yet
    uint64_t score                # of these, or nanoseconds: the less the better


cdef void window_link(Piece* pieces, uint32_t count) noexcept nogil
cdef void window_costs(Mapped* mapped, uint32_t count) noexcept nogil
cdef bint window_best(Mapped* mapped, uint32_t count, uint64_t nbytes, bint by_cost, Window* window) noexcept nogil
cdef bint window_at(Mapped* mapped, uint32_t count, uint64_t address, uint64_t nbytes, Window* window) noexcept nogil
cdef uint32_t window_victims(Mapped* mapped, uint32_t count, Window* window, uint64_t* nbytes) noexcept nogil
cdef void window_forget(Mapped* mapped, uint32_t count) noexcept nogil

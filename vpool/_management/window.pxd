"""What to do about a request that no free block holds: pure decisions on the pieces of a range."""
from libc.stdint cimport uint32_t, uint64_t

from vpool._management.mapped cimport Mapped, Piece

cdef enum By:
    # What the best window has the least of.
    BY_MEMORY                     # new memory
    BY_TIME                       # of the driver, to move memory there
    BY_SHORTAGE                   # new memory, less what can be moved there: what lies in the window cannot

cdef struct Window:
    uint32_t first                # piece that it begins in
    uint64_t address
    uint64_t nbytes
    uint64_t block                # address in it at which the request shall lie
    uint64_t holes                # bytes of it that have no memory yet
    uint64_t score                # what it costs, in bytes or nanoseconds


cdef void window_link(Piece* pieces, uint32_t count) noexcept nogil
cdef void window_costs(Mapped* mapped, uint32_t count, By by) noexcept nogil
cdef bint window_best(Mapped* mapped, uint32_t count, uint64_t nbytes, By by, Window* window) noexcept nogil
cdef bint window_at(Mapped* mapped, uint32_t count, uint64_t address, uint64_t nbytes, Window* window) noexcept nogil
cdef uint32_t window_victims(Mapped* mapped, uint32_t count, Window* window, uint64_t* nbytes) noexcept nogil
cdef void window_forget(Mapped* mapped, uint32_t count) noexcept nogil

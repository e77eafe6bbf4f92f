"""What a mapped pool does with memory that nobody has.  Each takes the growth turn."""
from libc.stdint cimport uint64_t

from vpool._management.core cimport Core

cdef int idle_trim(Core core, uint64_t keep, uint64_t* released) noexcept nogil
cdef bint idle_wanted(Core core) noexcept nogil
cdef void idle_look(Core core) noexcept nogil
cdef uint64_t idle_movable(Core core) noexcept nogil

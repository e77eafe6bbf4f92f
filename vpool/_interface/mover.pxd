"""What a pool does with memory below live blocks: it gives them another size, suspends them, and brings them back."""
from libc.stdint cimport uint16_t, uint64_t

from vpool._interface.buffer cimport Buffer
from vpool._interface.upkeep cimport Upkeep


cdef class Mover(Upkeep):
    cdef uint64_t lent_address(self, ptr) except? 0
    cdef int must_own(self, Buffer buffer) except -1
    cdef Buffer lent_for(self, uint64_t requested, uint16_t slot)
    cdef int free_on(self, Buffer buffer, int slot) except -1
    cdef int resize_elsewhere(self, Buffer buffer, uint64_t requested, int slot, bint named) except -1

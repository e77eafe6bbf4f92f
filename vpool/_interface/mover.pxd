"""What a pool does with memory below live blocks: it gives them another size, suspends them, and brings them back."""
from cpython.object cimport PyObject
from libc.stdint cimport uint16_t, uint64_t

from vpool._base.types cimport Block, BlockId
from vpool._interface.buffer cimport Buffer
from vpool._interface.upkeep cimport Upkeep
from vpool._management.arena cimport Arena


cdef class _Mover:
    # What may be done with one block, as long as its record is the same.
    cdef Arena* arena
    cdef BlockId block_id
    cdef uint16_t generation
    cdef object on_move
    cdef PyObject* buffer         # that has it, borrowed; NULL where the owner has the address alone


cdef class Mover(Upkeep):
    cdef dict movers              # of blocks that may be moved, by address; None before the first

    cdef uint64_t lent_address(self, ptr) except? 0
    cdef int must_own(self, Buffer buffer) except -1
    cdef Buffer lent_for(self, uint64_t requested, uint16_t slot, bint named)
    cdef BlockId find(self, uint64_t address, Block* found) except? 0
    cdef dict moving(self)
    cdef bint move(self, _Mover mover, uint64_t target) except -1
    cdef int free_on(self, Buffer buffer, int slot) except -1
    cdef int resize_elsewhere(self, Buffer buffer, uint64_t requested, int slot, bint named) except -1

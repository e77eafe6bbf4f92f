"""Live blocks of another size where they are."""
from libc.stdint cimport uint16_t, uint64_t

from vpool._base.types cimport BlockId
from vpool._management.arena cimport Arena
from vpool._management.areas cimport Areas

cdef enum Resized:
    RESIZED_NOT = 0               # there is no room beside it
    RESIZED = 1
    RESIZED_STRANGE = 2           # it is not that block any more

cdef int resize_in_place(Areas areas, Arena* arena, BlockId block_id, uint16_t generation,
                         uint64_t requested) noexcept nogil

"""Unmapped blocks: what a mapped segment has no memory for.  The arena's lock is held."""
from libc.stdint cimport uint64_t

from vpool._base.types cimport BlockId
from vpool._management.arena cimport Arena

cdef BlockId holes_add_segment(Arena* arena, uint64_t address, uint64_t nbytes) noexcept nogil
cdef bint holes_remove_segment(Arena* arena, BlockId edge_id, uint64_t nbytes) noexcept nogil
cdef bint holes_may_fill(Arena* arena) noexcept nogil
cdef bint holes_punch(Arena* arena, BlockId block_id, uint64_t address, uint64_t nbytes) noexcept nogil
cdef void holes_adopt(Arena* arena, BlockId block_id) noexcept nogil
cdef bint holes_fill(Arena* arena, BlockId hole_id, uint64_t address, uint64_t nbytes, uint64_t stamp) noexcept nogil

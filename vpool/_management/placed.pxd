"""Blocks at addresses that are chosen: a live one is found, and a free place becomes one."""
from libc.stdint cimport uint16_t, uint64_t

from vpool._base.types cimport Block, BlockId
from vpool._management.arena cimport Arena
from vpool._management.areas cimport Areas
from vpool._management.core cimport Core
from vpool._management.state cimport CoreState

cdef BlockId placed_find(CoreState* state, uint64_t address, Block* found) noexcept nogil
cdef bint placed_exported(CoreState* state) noexcept nogil
cdef bint placed_is(Arena* arena, BlockId block_id, uint16_t generation) noexcept nogil
cdef BlockId placed_take(Areas areas, Core core, Arena* arena, uint64_t address, Block* like) noexcept nogil

"""Block records: taking one from the slab and giving it back.  The arena's lock is held."""
from vpool._base.types cimport BLOCK_UNUSED, Block, BlockId, unlikely
from vpool._management.arena cimport Arena


cdef inline BlockId record_new(Arena* arena) noexcept nogil:
    """A record of unspecified content, or 0 where the slab is full."""
    cdef BlockId block_id = arena.spare
    if block_id:
        arena.spare = arena.blocks[block_id].next
        return block_id
    if unlikely(arena.fresh == arena.capacity):
        return 0
    block_id = arena.fresh
    arena.fresh += 1
    return block_id


cdef inline void record_delete(Arena* arena, BlockId block_id) noexcept nogil:
    cdef Block* block = &arena.blocks[block_id]
    block.state = BLOCK_UNUSED
    block.generation += 1
    block.next = arena.spare
    arena.spare = block_id

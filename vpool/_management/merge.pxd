"""Making a block free: it merges with its free neighbours at once.  The arena's lock is held."""
from libc.stdint cimport uint64_t

from vpool._base.lock cimport lone_read
from vpool._base.types cimport BLOCK_FREE, FLAG_SOLID, Block, BlockId
from vpool._management.arena cimport Arena
from vpool._management.freelist cimport freelist_insert, freelist_remove, freelist_resize
from vpool._management.record cimport record_delete


cdef inline void free_alone(Arena* arena, BlockId block_id) noexcept nogil:
    """Make an unlisted block free that has no free neighbour, or is solid."""
    cdef Block* block = &arena.blocks[block_id]
    block.generation += 1
    block.state = BLOCK_FREE
    block.stamp = lone_read(arena.sequence)
    freelist_insert(arena, block_id, block)


cdef inline void merge_free(Arena* arena, BlockId block_id) noexcept nogil:
    """Make an unlisted block free.  Neighbours that merge keep a listed record."""
    cdef Block* block = &arena.blocks[block_id]
    cdef BlockId prev_id = block.prev
    cdef BlockId next_id = block.next
    cdef Block* prev = &arena.blocks[prev_id]
    cdef Block* next = &arena.blocks[next_id]
    cdef uint64_t nbytes = block.nbytes
    # A segment begins with an edge, and the sentinel is what follows its last block: neither is free.
    if prev.state == BLOCK_FREE:
        if next.state == BLOCK_FREE:
            freelist_remove(arena, next)
            nbytes += next.nbytes
            record_delete(arena, block_id)
            block_id = next_id
            next_id = next.next
        prev.next = next_id
        arena.blocks[next_id].prev = prev_id
        prev.stamp = lone_read(arena.sequence)
        freelist_resize(arena, prev_id, prev, prev.nbytes + nbytes)
        record_delete(arena, block_id)
    elif next.state == BLOCK_FREE:
        prev.next = next_id
        next.prev = prev_id
        next.address = block.address
        next.stamp = lone_read(arena.sequence)
        freelist_resize(arena, next_id, next, next.nbytes + nbytes)
        record_delete(arena, block_id)
    else:
        free_alone(arena, block_id)


cdef inline void free_block(Arena* arena, BlockId block_id) noexcept nogil:
    """Make an unlisted block of either kind free."""
    if arena.blocks[block_id].flags & FLAG_SOLID:
        free_alone(arena, block_id)
    else:
        merge_free(arena, block_id)

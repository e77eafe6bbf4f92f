"""Unmapped blocks: a part of a free block loses its memory, a part of a hole gets some.

Holes tile their segment together with the other blocks; they are in no list, and no two of them are neighbours.
They begin and end at multiples of what a source maps.
"""
from libc.stdint cimport uint32_t, uint64_t

from vpool._base.types cimport BLOCK_EDGE, BLOCK_FREE, BLOCK_UNMAPPED, Block, BlockId
from vpool._management.arena cimport Arena
from vpool._management.freelist cimport freelist_insert, freelist_take_out
from vpool._management.hit cimport hit_cut
from vpool._management.merge cimport merge_free
from vpool._management.record cimport record_delete, record_new


cdef bint _has_records(Arena* arena, uint32_t count) noexcept nogil:
    """Whether so many more records can be had, so that what is begun can be ended.  O(count)."""
    cdef uint32_t left = arena.capacity - arena.fresh
    cdef BlockId spare_id = arena.spare
    while left < count and spare_id:
        left += 1
        spare_id = arena.blocks[spare_id].next
    return left >= count


cdef bint holes_may_fill(Arena* arena) noexcept nogil:
    """Whether there are records for `holes_fill`, whatever the hole."""
    return _has_records(arena, 2)


cdef void _be_hole(Block* block) noexcept nogil:
    block.state = BLOCK_UNMAPPED
    block.stamp = 0
    block.flags = 0
    block.tag = 0
    block.list_prev = 0
    block.list_next = 0


cdef BlockId holes_add_segment(Arena* arena, uint64_t address, uint64_t nbytes) noexcept nogil:
    """Put address space into the arena as one hole behind an edge; the edge's number, or 0 without a record left."""
    cdef BlockId edge_id, hole_id
    cdef Block* edge
    cdef Block* hole
    if not holes_may_fill(arena):
        return 0
    edge_id = record_new(arena)
    hole_id = record_new(arena)
    edge = &arena.blocks[edge_id]
    hole = &arena.blocks[hole_id]
    edge.address = address
    edge.nbytes = 0
    edge.stamp = 0
    edge.list_next = 0
    edge.state = BLOCK_EDGE
    edge.prev = 0
    edge.next = hole_id
    hole.address = address
    hole.nbytes = nbytes
    hole.slot = arena.slot
    hole.prev = edge_id
    hole.next = 0
    _be_hole(hole)
    return edge_id


cdef bint holes_remove_segment(Arena* arena, BlockId edge_id, uint64_t nbytes) noexcept nogil:
    """Forget a segment of `nbytes` if it is one hole."""
    cdef BlockId hole_id = arena.blocks[edge_id].next
    if arena.blocks[hole_id].state != BLOCK_UNMAPPED or arena.blocks[hole_id].nbytes != nbytes:
        return False
    record_delete(arena, hole_id)
    record_delete(arena, edge_id)
    return True


cdef void _drop_behind(Arena* arena, BlockId block_id) noexcept nogil:
    """Let a hole swallow the hole behind it."""
    cdef Block* block = &arena.blocks[block_id]
    cdef BlockId next_id = block.next
    cdef Block* next = &arena.blocks[next_id]
    block.nbytes += next.nbytes
    block.next = next.next
    arena.blocks[next.next].prev = block_id
    record_delete(arena, next_id)


cdef bint holes_punch(Arena* arena, BlockId block_id, uint64_t address, uint64_t nbytes) noexcept nogil:
    """Make a part of a free block a hole, merged with its neighbours; False where no record is left.

    There have to be as many again: what loses its memory here gets it back, or another hole gets it.
    """
    cdef Block* block = &arena.blocks[block_id]
    cdef uint64_t before = address - block.address
    cdef BlockId front_id
    if not _has_records(arena, 4):
        return False
    if before:
        front_id = hit_cut(arena, block_id, before)
        arena.blocks[front_id].state = BLOCK_FREE
        freelist_insert(arena, front_id, &arena.blocks[front_id])
    if block.nbytes > nbytes:
        block_id = hit_cut(arena, block_id, nbytes)
    else:
        freelist_take_out(arena, block_id)
        block.generation += 1
    holes_adopt(arena, block_id)
    return True


cdef void holes_adopt(Arena* arena, BlockId block_id) noexcept nogil:
    """Make an unlisted block a hole, merged with its neighbours."""
    _be_hole(&arena.blocks[block_id])
    if arena.blocks[arena.blocks[block_id].next].state == BLOCK_UNMAPPED and arena.blocks[block_id].next:
        _drop_behind(arena, block_id)
    if arena.blocks[arena.blocks[block_id].prev].state == BLOCK_UNMAPPED:
        _drop_behind(arena, arena.blocks[block_id].prev)


cdef BlockId _cut_hole(Arena* arena, BlockId hole_id, uint64_t nbytes) noexcept nogil:
    """Cut the first `nbytes` off a hole; the front's number.  A record is left."""
    cdef BlockId front_id = record_new(arena)
    cdef Block* hole = &arena.blocks[hole_id]
    cdef Block* front = &arena.blocks[front_id]
    front.address = hole.address
    front.nbytes = nbytes
    front.slot = hole.slot
    front.prev = hole.prev
    front.next = hole_id
    _be_hole(front)
    arena.blocks[hole.prev].next = front_id
    hole.prev = front_id
    hole.address += nbytes
    hole.nbytes -= nbytes
    return front_id


cdef bint holes_fill(Arena* arena, BlockId hole_id, uint64_t address, uint64_t nbytes, uint64_t stamp) noexcept nogil:
    """Make a part of a hole free memory, merged with its neighbours; False where no record is left.

    The stamp is of the last free of what is put there: 0 for memory fresh from the source.
    """
    cdef uint64_t before = address - arena.blocks[hole_id].address
    cdef BlockId prev_id, next_id
    if not holes_may_fill(arena):
        return False
    if before:
        _cut_hole(arena, hole_id, before)
    if arena.blocks[hole_id].nbytes > nbytes:
        hole_id = _cut_hole(arena, hole_id, nbytes)
    prev_id = arena.blocks[hole_id].prev
    next_id = arena.blocks[hole_id].next
    if next_id and arena.blocks[next_id].state == BLOCK_FREE:
        stamp = max(stamp, arena.blocks[next_id].stamp)
    else:
        next_id = 0
    if arena.blocks[prev_id].state == BLOCK_FREE:
        stamp = max(stamp, arena.blocks[prev_id].stamp)
    else:
        prev_id = 0
    merge_free(arena, hole_id)
    # A merge counts as a free of now; this one is as old as its parts.
    arena.blocks[prev_id if prev_id else next_id if next_id else hole_id].stamp = stamp
    return True

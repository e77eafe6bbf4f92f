"""The hot path: a free block lent, a live block taken back.  The arena's lock is held.

A block that is cut keeps its record for the rest, and neighbours that merge keep a listed record, so
that a free block whose class does not change stays where it is in its list.
"""
from libc.stdint cimport int64_t, uint16_t, uint64_t

from vpool._base.lock cimport lone_count, lone_read
from vpool._base.types cimport BLOCK_FREE, BLOCK_LIVE, FLAG_SOLID, FLAG_USED, Block, BlockId, likely, round_up, unlikely
from vpool._management.arena cimport Arena, arena_put, arena_raise_peaks, arena_take_listed
from vpool._management.freelist cimport freelist_find, freelist_remove, freelist_resize, freelist_take_out
from vpool._management.index cimport index_remove, live_insert, live_remove, solid_find
from vpool._management.merge cimport free_alone, merge_free
from vpool._management.pending cimport pending_put
from vpool._management.record cimport record_new


cdef inline BlockId hit_cut(Arena* arena, BlockId block_id, uint64_t nbytes) noexcept nogil:
    """Cut the first `nbytes` off a listed free block; the unlisted front's number, or 0 for want of a record."""
    cdef BlockId front_id = record_new(arena)
    cdef Block* block = &arena.blocks[block_id]
    cdef Block* front = &arena.blocks[front_id]
    if front_id == 0:
        return 0
    front.address = block.address
    front.nbytes = nbytes
    front.stamp = block.stamp
    front.slot = block.slot
    front.flags = 0
    front.prev = block.prev
    front.next = block_id
    arena.blocks[block.prev].next = front_id
    block.prev = front_id
    block.address += nbytes
    freelist_resize(arena, block_id, block, block.nbytes - nbytes)
    return front_id


cdef inline BlockId hit_take_from(Arena* arena, BlockId block_id, uint64_t nbytes, uint64_t requested,
                                  uint16_t tag) noexcept nogil:
    """Lend the first `nbytes` of a listed free block, or all of it where the rest is too small to keep."""
    cdef Block* block = &arena.blocks[block_id]
    cdef BlockId front_id = 0
    if block.nbytes - nbytes >= arena.minimum_remainder:
        front_id = hit_cut(arena, block_id, nbytes)
    if front_id:
        block_id = front_id
        block = &arena.blocks[front_id]
    else:
        freelist_take_out(arena, block_id)
    block.state = BLOCK_LIVE
    block.stamp = requested
    block.tag = tag
    block.slot = arena.slot
    live_insert(arena, block_id, block)
    lone_count(arena.allocations, 1)
    lone_count(arena.served_bytes, requested)
    lone_count(arena.allocated_bytes, block.nbytes)
    lone_count(arena.requested_bytes, requested)
    if unlikely(arena.allocated_bytes > lone_read(arena.allocated_ceiling)
                or arena.requested_bytes > lone_read(arena.requested_ceiling)):
        arena_raise_peaks(arena)
    return block_id


cdef inline BlockId hit_take(Arena* arena, uint64_t nbytes, uint64_t requested, uint16_t tag) noexcept nogil:
    """Lend a block of `nbytes`, a multiple of the granule; its number, or 0 where none fits."""
    cdef BlockId block_id = freelist_find(arena, nbytes)
    return hit_take_from(arena, block_id, nbytes, requested, tag) if block_id else 0


cdef inline void hit_put(Arena* arena, BlockId block_id) noexcept nogil:
    """Take back a block that `index_remove` has just taken out of the index."""
    cdef Block* block = &arena.blocks[block_id]
    lone_count(arena.allocated_bytes, -<int64_t> block.nbytes)
    lone_count(arena.requested_bytes, -<int64_t> block.stamp)
    if likely(block.flags == 0):
        merge_free(arena, block_id)
    elif likely(block.flags & FLAG_USED == 0):
        free_alone(arena, block_id)
    else:
        pending_put(arena, block_id)


cdef inline bint hit_put_record(Arena* arena, BlockId block_id, uint16_t generation, uint64_t address) noexcept nogil:
    """Take a block back by its record, if that is still the block it was."""
    cdef Block* block = &arena.blocks[block_id]
    if block.state != BLOCK_LIVE or block.generation != generation or block.address != address:
        return False
    live_remove(arena, block.address)
    hit_put(arena, block_id)
    return True


# The same of solid blocks that are found by their place: a pop and a push.  Their list is linked forwards
# only; `freelist_take_out` walks it where another than its first block is wanted.

cdef inline BlockId solid_take(Arena* arena, uint64_t requested) noexcept nogil:
    """Lend a solid block; its number, or 0 where all are lent."""
    cdef BlockId block_id = arena.heads[arena.solid_class]
    cdef Block* block = &arena.blocks[block_id]
    if unlikely(block_id - arena.solid_first >= arena.solid_count):
        # None, or one that was lent and came back as a loan: it has another record, which is found by its hash.
        return arena_take_listed(arena, block_id, requested) if block_id else 0
    if likely(block.list_next != 0):
        arena.heads[arena.solid_class] = block.list_next
    else:
        block.list_prev = 0
        freelist_remove(arena, block)
    block.state = BLOCK_LIVE
    block.stamp = requested
    lone_count(arena.live_blocks, 1)
    lone_count(arena.allocations, 1)
    lone_count(arena.served_bytes, requested)
    lone_count(arena.requested_bytes, requested)
    if unlikely(arena.live_blocks * arena.solid_size > lone_read(arena.allocated_ceiling)
                or arena.requested_bytes > lone_read(arena.requested_ceiling)):
        arena_raise_peaks(arena)
    return block_id


cdef inline bint solid_put(Arena* arena, uint64_t address) noexcept nogil:
    """Take back the live solid block at `address`, which lies in their segment; False where there is none."""
    cdef BlockId block_id = solid_find(arena, address)
    cdef Block* block = &arena.blocks[block_id]
    cdef BlockId head
    if unlikely(block_id == 0):
        return False
    lone_count(arena.live_blocks, -1)
    head = arena.heads[arena.solid_class]
    if unlikely(block.flags != FLAG_SOLID or head == 0):
        arena_put(arena, block_id)
        return True
    lone_count(arena.requested_bytes, -<int64_t> block.stamp)
    block.generation += 1
    block.state = BLOCK_FREE
    block.stamp = lone_read(arena.sequence)
    block.list_next = head
    arena.heads[arena.solid_class] = block_id
    return True


cdef inline BlockId hit_any(Arena* arena, uint64_t requested) noexcept nogil:
    """Lend a block of the kind that the arena has; its number, or 0 where none fits."""
    if arena.solid_size:
        return solid_take(arena, requested) if likely(requested <= arena.solid_size) else 0
    return hit_take(arena, round_up(requested, arena.rounding), requested, 0)


cdef inline bint put_any(Arena* arena, uint64_t address) noexcept nogil:
    """Take back the live block at `address`; False where the arena has none there."""
    cdef BlockId block_id
    if arena.solid_size and likely(solid_put(arena, address)):
        return True
    block_id = index_remove(arena, address)
    if likely(block_id != 0):
        hit_put(arena, block_id)
    return block_id != 0

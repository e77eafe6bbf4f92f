"""Blocks at addresses that are chosen: a live one is found, and a free place becomes one, for a block that moves."""
from libc.stdint cimport uint16_t, uint32_t, uint64_t

from vpool._base.bias cimport bias_drop, bias_take
from vpool._base.lock cimport atomic_read, spin_lock, spin_unlock
from vpool._base.types cimport BLOCK_FREE, BLOCK_LIVE, FLAG_SOLID, Block, BlockId
from vpool._management.arena cimport Arena, arena_containing, arena_take_behind
from vpool._management.areas cimport Areas
from vpool._management.core cimport Core
from vpool._management.hit cimport hit_put
from vpool._management.index cimport live_find, live_remove
from vpool._management.journal cimport journal_charge, journal_lent
from vpool._management.state cimport STATE_NOTED, CoreState, Segment, slot_count


cdef BlockId placed_find(CoreState* state, uint64_t address, Block* found) noexcept nogil:
    """A copy of the live block that starts at an address, and its number in the arena of its slot; 0 for none."""
    cdef Arena* arena
    cdef BlockId block_id = 0
    cdef uint32_t slot
    for slot in range(slot_count(state)):
        arena = state.arenas[slot]
        bias_take(&arena.lock)
        block_id = live_find(arena, address)
        found[0] = arena.blocks[block_id]
        bias_drop(&arena.lock)
        if block_id:
            break
    return block_id


cdef bint placed_exported(CoreState* state) noexcept nogil:
    """Whether another process may use some segment.  O(segments)."""
    cdef uint32_t i
    cdef bint found = False
    spin_lock(&state.lock)
    for i in range(state.segment_count):
        found = found or state.segments[i].exported
    spin_unlock(&state.lock)
    return found


cdef bint placed_is(Arena* arena, BlockId block_id, uint16_t generation) noexcept nogil:
    """Whether a record still is of the live block that it was."""
    cdef bint same
    bias_take(&arena.lock)
    same = arena.blocks[block_id].state == BLOCK_LIVE and arena.blocks[block_id].generation == generation
    bias_drop(&arena.lock)
    return same


cdef bint _note(Areas areas, Arena* arena, Block* block, Block* like) noexcept nogil:
    """Note an allocation, if calls are; False where the limit of its tag forbids it.  The arena's lock is held."""
    cdef bint fits
    if atomic_read(areas.state.word) & STATE_NOTED == 0:
        return True
    spin_lock(&areas.journal.lock)
    fits = journal_charge(&areas.journal, like.tag, like.stamp)
    if fits:
        journal_lent(&areas.journal, block.address, block.nbytes, like.stamp, arena.slot, like.tag, 0)
    spin_unlock(&areas.journal.lock)
    return fits


cdef BlockId placed_take(Areas areas, Core core, Arena* arena, uint64_t address, Block* like) noexcept nogil:
    """Lend a place to a block that is like another one; its number, or 0 where the place is not free for the arena.

    Only within segments of its area that are the arena's own.  O(blocks of the segment).
    """
    cdef Segment* segment
    cdef Block* block
    cdef BlockId block_id = 0
    spin_lock(&core.state.lock)
    segment = core.segment_of(address)
    if segment != NULL and segment.arena == arena and segment.edge:
        bias_take(&arena.lock)
        block_id = arena_containing(arena, segment.edge, address)
        block = &arena.blocks[block_id]
        if block_id and (block.state != BLOCK_FREE or block.flags & FLAG_SOLID
                         or like.nbytes > block.nbytes - (address - block.address)):
            block_id = 0
        if block_id:
            block_id = arena_take_behind(arena, block_id, address - block.address, like.nbytes, like.stamp, like.tag)
        if block_id and not _note(areas, arena, &arena.blocks[block_id], like):
            live_remove(arena, address)
            hit_put(arena, block_id)
            block_id = 0
        bias_drop(&arena.lock)
    spin_unlock(&core.state.lock)
    return block_id

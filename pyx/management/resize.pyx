"""Live blocks of another size where they are.

A block that shrinks is cut, and its rest is free in the order of its stream's work, as after any free.  One that
grows takes the begin of the free block behind it, which its own stream had last; where memory can be moved, a hole
behind it is given some first.
"""
from libc.stdint cimport int64_t, uint16_t, uint64_t

from vpool._base.bias cimport bias_drop, bias_take
from vpool._base.lock cimport atomic_read, lone_count, spin_lock, spin_unlock
from vpool._base.turn cimport turn_give, turn_take
from vpool._base.types cimport BLOCK_FREE, BLOCK_LIVE, FLAG_SOLID, GRANULE, Block, BlockId, round_up
from vpool._management.arena cimport Arena, arena_raise_peaks
from vpool._management.areas cimport Areas, request_init
from vpool._management.freelist cimport freelist_take_out
from vpool._management.hit cimport hit_cut
from vpool._management.journal cimport journal_resized
from vpool._management.merge cimport merge_free
from vpool._management.record cimport record_delete, record_new
from vpool._management.room cimport room_make
from vpool._management.state cimport STATE_MAPPED, STATE_NOTED, Request
from vpool._storage.driver cimport STATUS_OK


cdef bint _note(Areas areas, Arena* arena, Block* block, uint64_t nbytes, uint64_t requested) noexcept nogil:
    """Note the new size, if calls are noted; False where the limit of the block's tag forbids it."""
    cdef bint fits
    if atomic_read(areas.state.word) & STATE_NOTED == 0:
        return True
    spin_lock(&areas.journal.lock)
    fits = journal_resized(&areas.journal, block.address, block.nbytes, block.stamp, nbytes, requested, arena.slot,
                           block.tag)
    spin_unlock(&areas.journal.lock)
    return fits


cdef void _count(Arena* arena, Block* block, uint64_t before, uint64_t requested) noexcept nogil:
    """Bring the arena's figures up to date with a block's new size."""
    lone_count(arena.allocated_bytes, <int64_t> (block.nbytes - before))
    lone_count(arena.requested_bytes, <int64_t> (requested - block.stamp))
    block.stamp = requested
    if arena.allocated_bytes > atomic_read(arena.allocated_ceiling) or (
            arena.requested_bytes > atomic_read(arena.requested_ceiling)):
        arena_raise_peaks(arena)


cdef bint _shrink(Areas areas, Arena* arena, BlockId block_id, uint64_t nbytes, uint64_t requested) noexcept nogil:
    """Keep the first bytes of a block, or all where nothing that is worth it would be left."""
    cdef Block* block = &arena.blocks[block_id]
    cdef uint64_t before = block.nbytes
    cdef BlockId rest_id = 0
    cdef Block* rest
    # What other streams use too is pending once it is free, and that has the block whole.
    if block.flags == 0 and before - nbytes >= arena.minimum_remainder:
        rest_id = record_new(arena)
    if not _note(areas, arena, block, nbytes if rest_id else before, requested):
        if rest_id:
            record_delete(arena, rest_id)
        return False
    if rest_id:
        rest = &arena.blocks[rest_id]
        rest.address = block.address + nbytes
        rest.nbytes = before - nbytes
        rest.slot = arena.slot
        rest.flags = 0
        rest.prev = block_id
        rest.next = block.next
        arena.blocks[block.next].prev = rest_id
        block.next = rest_id
        block.nbytes = nbytes
        merge_free(arena, rest_id)
    _count(arena, block, before, requested)
    return True


cdef bint _grow(Areas areas, Arena* arena, BlockId block_id, uint64_t nbytes, uint64_t requested) noexcept nogil:
    """Take what is missing of the free block behind; False where there is none, or too little."""
    cdef Block* block = &arena.blocks[block_id]
    cdef uint64_t before = block.nbytes
    cdef uint64_t more = nbytes - before
    cdef BlockId next_id = block.next
    cdef Block* next = &arena.blocks[next_id]
    cdef BlockId part_id = 0
    if next_id == 0 or next.state != BLOCK_FREE or next.flags & FLAG_SOLID or next.nbytes < more:
        return False
    if next.nbytes - more < arena.minimum_remainder:
        more = next.nbytes
    if not _note(areas, arena, block, before + more, requested):
        return False
    if more < next.nbytes:
        part_id = hit_cut(arena, next_id, more)
    if part_id == 0:                              # all of it, also where no record is left
        more = next.nbytes
        freelist_take_out(arena, next_id)
        part_id = next_id
    block.nbytes += more
    block.next = arena.blocks[part_id].next
    arena.blocks[block.next].prev = block_id
    record_delete(arena, part_id)
    _count(arena, block, before, requested)
    return True


cdef int _try(Areas areas, Arena* arena, BlockId block_id, uint16_t generation, uint64_t requested,
              uint64_t* behind, uint64_t* more) noexcept nogil:
    """Resize a block with what its arena has; else where its end is, and how many bytes it needs there."""
    cdef Block* block = &arena.blocks[block_id]
    cdef uint64_t nbytes = round_up(requested, arena.rounding)
    cdef bint done
    bias_take(&arena.lock)
    if block.state != BLOCK_LIVE or block.generation != generation:
        bias_drop(&arena.lock)
        return RESIZED_STRANGE
    if requested <= block.nbytes:
        done = _shrink(areas, arena, block_id, min(nbytes, block.nbytes), requested)
    else:
        done = block.flags & FLAG_SOLID == 0 and _grow(areas, arena, block_id, nbytes, requested)
        behind[0] = block.address + block.nbytes
        more[0] = nbytes - block.nbytes
    bias_drop(&arena.lock)
    return RESIZED if done else RESIZED_NOT


cdef int resize_in_place(Areas areas, Arena* arena, BlockId block_id, uint16_t generation,
                         uint64_t requested) noexcept nogil:
    """Give a live block another size where it is, by its record.  O(1), and O(blocks) where memory is mapped."""
    cdef Request request
    cdef uint64_t behind = 0
    cdef uint64_t more = 0
    cdef int done = _try(areas, arena, block_id, generation, requested, &behind, &more)
    cdef int status
    # The range with the holes is the default stream's.
    if done != RESIZED_NOT or behind == 0 or arena != areas.state.arenas[0] or (
            atomic_read(areas.state.word) & STATE_MAPPED == 0):
        return done
    request_init(areas, &request, arena, more, GRANULE)
    request.nbytes = more
    request.requested = 0                         # nobody is served by it
    request.behind = behind
    turn_take(&areas.state.growth_turn)
    status = room_make(areas.core, &request)
    turn_give(&areas.state.growth_turn)
    return _try(areas, arena, block_id, generation, requested, &behind, &more) if status == STATUS_OK else done

"""Walks over all blocks of a pool: a consistent copy, and the proof of every invariant."""
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from vpool._base.lock cimport spin_lock, spin_unlock
from vpool._base.types cimport BLOCK_EDGE, BLOCK_FREE, BLOCK_LIVE, BLOCK_UNUSED, GRANULE, Block, BlockId
from vpool._management.arena cimport CLASS_BITS, CLASSES_PER_ROW, ROWS, Arena
from vpool._management.core cimport Core, CoreState, Segment
from vpool._management.freelist cimport class_of
from vpool._management.index cimport index_find


cdef void _lock_all(Core core) noexcept nogil:
    """The pool's lock, then every arena's in the order of their slots: the one place that holds several."""
    cdef uint32_t slot
    spin_lock(&core.state.lock)
    for slot in range(core.state.slots):
        if core.arenas[slot] != NULL:
            spin_lock(&core.arenas[slot].lock)


cdef void _unlock_all(Core core) noexcept nogil:
    cdef uint32_t slot
    for slot in range(core.state.slots):
        if core.arenas[slot] != NULL:
            spin_unlock(&core.arenas[slot].lock)
    spin_unlock(&core.state.lock)


cdef void walk_totals(Core core, Totals* totals) noexcept nogil:
    """Add the arenas' counters up.  Takes no lock: each figure is right, their relation may be a moment old."""
    cdef uint32_t slot
    cdef Arena* arena
    memset(totals, 0, sizeof(Totals))
    totals.reserved_bytes = core.state.reserved
    totals.peak_reserved_bytes = core.state.peak_reserved
    for slot in range(core.state.slots):
        arena = core.arenas[slot]
        if arena == NULL:
            continue
        totals.allocated_bytes += arena.allocated_bytes
        totals.requested_bytes += arena.requested_bytes
        totals.peak_allocated_bytes += arena.peak_allocated_bytes
        totals.peak_requested_bytes += arena.peak_requested_bytes
        totals.allocations += arena.allocations
        totals.live_blocks += arena.live_blocks
        totals.served_bytes += arena.served_bytes


cdef uint64_t walk_copy(Core core, BlockCopy* blocks, uint64_t capacity, SegmentCopy* segments,
                        uint32_t segment_capacity, uint32_t* segment_count, Totals* totals) noexcept nogil:
    """Copy every block and segment out; the number of blocks there are, all copied only if they fit."""
    cdef CoreState* state = &core.state
    cdef uint64_t count = 0
    cdef uint32_t i
    cdef Segment* segment
    cdef Block* block
    cdef BlockCopy* copy
    cdef BlockId block_id
    core.settle()
    _lock_all(core)
    segment_count[0] = state.segment_count
    walk_totals(core, totals)
    for i in range(state.segment_count):
        segment = &state.segments[i]
        if i < segment_capacity:
            segments[i].address = segment.address
            segments[i].nbytes = segment.span.nbytes
            segments[i].stream = segment.arena.slot
        block_id = segment.arena.blocks[segment.edge].next
        while block_id:
            block = &segment.arena.blocks[block_id]
            if count < capacity:
                copy = &blocks[count]
                copy.address = block.address
                copy.nbytes = block.nbytes
                copy.requested = block.stamp if block.state == BLOCK_LIVE else 0
                copy.segment = i
                copy.stream = block.slot
                copy.tag = block.tag if block.state == BLOCK_LIVE else 0
                copy.state = block.state
            count += 1
            block_id = block.next
    _unlock_all(core)
    return count


cdef struct Tally:
    uint64_t edges
    uint64_t live
    uint64_t free
    uint64_t allocated
    uint64_t requested


cdef bint _expect(Broken* broken, bint holds, const char* what, uint64_t address, uint64_t found,
                  uint64_t expected) noexcept nogil:
    if not holds and broken.what == NULL:
        broken.what = what
        broken.address = address
        broken.found = found
        broken.expected = expected
    return holds


cdef bint _check_segment(Segment* segment, Tally* tally, Broken* broken) noexcept nogil:
    """Blocks tile the segment, link both ways, and no two neighbours are free."""
    cdef Arena* arena = segment.arena
    cdef uint64_t at = segment.address
    cdef BlockId before = segment.edge
    cdef BlockId block_id = arena.blocks[before].next
    cdef Block* block
    tally.edges += 1
    if not _expect(broken, arena.blocks[before].state == BLOCK_EDGE, b"a segment begins with its edge", at,
                   arena.blocks[before].state, BLOCK_EDGE):
        return False
    while block_id:
        block = &arena.blocks[block_id]
        if not (
            _expect(broken, block_id < arena.fresh, b"record number within the slab", at, block_id, arena.fresh)
            and _expect(broken, block.address == at, b"blocks tile their segment", at, block.address, at)
            and _expect(broken, block.nbytes > 0 and block.nbytes % GRANULE == 0, b"size is whole granules", at,
                        block.nbytes, GRANULE)
            and _expect(broken, block.prev == before, b"neighbours link both ways", at, block.prev, before)
            and _expect(broken, block.state == BLOCK_LIVE or block.state == BLOCK_FREE, b"state is live or free", at,
                        block.state, BLOCK_LIVE)
        ):
            return False
        if block.state == BLOCK_LIVE:
            tally.live += 1
            tally.allocated += block.nbytes
            tally.requested += block.stamp
            if not (
                _expect(broken, index_find(arena, at) == block_id, b"the index finds a live block", at,
                        index_find(arena, at), block_id)
                and _expect(broken, block.stamp <= block.nbytes, b"requested bytes fit the block", at, block.stamp,
                            block.nbytes)
                and _expect(broken, block.slot == arena.slot, b"a block's slot is its arena's", at, block.slot,
                            arena.slot)
            ):
                return False
        else:
            tally.free += 1
            if not _expect(broken, arena.blocks[before].state != BLOCK_FREE,
                           b"no two free neighbours", at, before, 0):
                return False
        at += block.nbytes
        before = block_id
        block_id = block.next
    return _expect(broken, at == segment.address + segment.nbytes, b"blocks fill their segment", segment.address,
                   at - segment.address, segment.nbytes)


cdef bint _check_class(Arena* arena, uint32_t number, uint64_t* listed, Broken* broken) noexcept nogil:
    """A class's list holds free blocks of its sizes, and its bit says whether it is empty."""
    cdef BlockId before = 0
    cdef BlockId block_id = arena.heads[number]
    cdef bint bit = arena.columns[number >> CLASS_BITS] >> (number & (CLASSES_PER_ROW - 1)) & 1
    cdef Block* block
    if not _expect(broken, bit == (block_id != 0), b"class bit equals class list", 0, bit, number):
        return False
    while block_id:
        block = &arena.blocks[block_id]
        listed[0] += 1
        if not (
            _expect(broken, block.state == BLOCK_FREE, b"listed blocks are free", block.address, block.state,
                    BLOCK_FREE)
            and _expect(broken, class_of(block.nbytes) == number, b"blocks lie in their class", block.address,
                        class_of(block.nbytes), number)
            and _expect(broken, block.list_prev == before, b"lists link both ways", block.address, block.list_prev,
                        before)
            and _expect(broken, listed[0] <= arena.free_blocks, b"lists have no cycle", block.address, listed[0],
                        arena.free_blocks)
        ):
            return False
        before = block_id
        block_id = block.list_next
    return True


cdef bint _check_arena(Arena* arena, Tally* tally, Broken* broken) noexcept nogil:
    """Lists, bitmaps, index, counters and records agree with the blocks that were walked."""
    cdef uint64_t listed = 0
    cdef uint64_t indexed = 0
    cdef uint64_t spare = 0
    cdef uint32_t number
    cdef BlockId block_id
    for number in range(<uint32_t> (ROWS * CLASSES_PER_ROW)):
        if not _check_class(arena, number, &listed, broken):
            return False
    for number in range(<uint32_t> ROWS):
        if not _expect(broken, (arena.rows >> number & 1) == (arena.columns[number] != 0),
                       b"row bit equals its columns", 0, arena.rows >> number & 1, number):
            return False
    for number in range(arena.bucket_count):
        block_id = arena.buckets[number]
        while block_id and indexed <= arena.live_blocks:
            indexed += 1
            block_id = arena.blocks[block_id].list_next
    block_id = arena.spare
    while block_id and spare <= arena.fresh:
        if not _expect(broken, arena.blocks[block_id].state == BLOCK_UNUSED, b"spare records are unused", 0,
                       arena.blocks[block_id].state, BLOCK_UNUSED):
            return False
        spare += 1
        block_id = arena.blocks[block_id].next
    return (
        _expect(broken, listed == tally.free, b"every free block is listed once", 0, listed, tally.free)
        and _expect(broken, arena.free_blocks == tally.free, b"free blocks are counted", 0, arena.free_blocks,
                    tally.free)
        and _expect(broken, indexed == tally.live, b"every live block is indexed once", 0, indexed, tally.live)
        and _expect(broken, arena.live_blocks == tally.live, b"live blocks are counted", 0, arena.live_blocks,
                    tally.live)
        and _expect(broken, arena.allocated_bytes == tally.allocated, b"allocated bytes add up", 0,
                    arena.allocated_bytes, tally.allocated)
        and _expect(broken, arena.requested_bytes == tally.requested, b"requested bytes add up", 0,
                    arena.requested_bytes, tally.requested)
        and _expect(broken, arena.peak_allocated_bytes >= arena.allocated_bytes, b"a peak is no less than the figure",
                    0, arena.peak_allocated_bytes, arena.allocated_bytes)
        and _expect(broken, arena.peak_requested_bytes >= arena.requested_bytes, b"a peak is no less than the figure",
                    0, arena.peak_requested_bytes, arena.requested_bytes)
        and _expect(broken, 1 + tally.edges + tally.live + tally.free + spare == arena.fresh, b"no record is lost", 0,
                    1 + tally.edges + tally.live + tally.free + spare, arena.fresh)
    )


cdef void walk_check(Core core, Broken* broken) noexcept nogil:
    """Look whether every invariant holds; `broken` names the first that does not."""
    cdef CoreState* state = &core.state
    cdef Tally tally
    cdef uint64_t reserved = 0
    cdef uint32_t slot, i
    memset(broken, 0, sizeof(Broken))
    core.settle()
    _lock_all(core)
    for i in range(state.segment_count):
        reserved += state.segments[i].span.nbytes
    for slot in range(state.slots):
        if core.arenas[slot] == NULL:
            continue
        memset(&tally, 0, sizeof(Tally))
        for i in range(state.segment_count):
            if state.segments[i].arena == core.arenas[slot] and not _check_segment(&state.segments[i], &tally, broken):
                break
        if broken.what != NULL or not _check_arena(core.arenas[slot], &tally, broken):
            break
    _expect(broken, reserved == state.reserved, b"reserved bytes add up", 0, state.reserved, reserved)
    _expect(broken, state.committed >= state.reserved, b"what is reserved is committed", 0, state.committed,
            state.reserved)
    _expect(broken, state.committed <= state.limit, b"the limit holds", 0, state.committed, state.limit)
    _expect(broken, state.peak_reserved >= state.reserved, b"a peak is no less than the figure", 0, state.peak_reserved,
            state.reserved)
    _unlock_all(core)

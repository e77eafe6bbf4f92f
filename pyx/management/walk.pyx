"""Walks over all blocks of a pool: a consistent copy, and the proof of every invariant."""
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memset

from vpool._base.lock cimport atomic_read, spin_lock, spin_unlock
from vpool._base.turn cimport turn_give, turn_take
from vpool._base.types cimport (
    BLOCK_EDGE,
    BLOCK_FREE,
    BLOCK_LENT,
    BLOCK_LIVE,
    BLOCK_PENDING,
    BLOCK_SUSPENDED,
    BLOCK_UNMAPPED,
    BLOCK_UNUSED,
    FLAG_SOLID,
    FLAG_USED,
    GRANULE,
    Block,
    BlockId,
)
from vpool._management.arena cimport (
    CLASS_BITS,
    CLASSES_PER_ROW,
    ROWS,
    Arena,
    Dependency,
    arena_allocated,
    arena_containing,
    peaks_look,
)
from vpool._management.core cimport Core
from vpool._management.freelist cimport class_of
from vpool._management.index cimport live_find
from vpool._management.lend cimport lend_edge
from vpool._management.mapped cimport Mapped, MappedHandle
from vpool._management.order cimport order_proved
from vpool._management.state cimport CoreState, Segment, lock_all, slot_count, unlock_all


cdef void walk_totals(Core core, Totals* totals) noexcept nogil:
    """Add the arenas' counters up.  Takes no lock: each figure is right, their relation may be a moment old."""
    cdef uint32_t slot
    cdef Arena* arena
    memset(totals, 0, sizeof(Totals))
    totals.reserved_bytes = atomic_read(core.state.reserved)
    totals.peak_reserved_bytes = atomic_read(core.state.peak_reserved)
    for slot in range(slot_count(&core.state)):
        arena = core.state.arenas[slot]
        totals.allocated_bytes += arena_allocated(arena)
        totals.requested_bytes += atomic_read(arena.requested_bytes)
        totals.allocations += atomic_read(arena.allocations)
        totals.live_blocks += atomic_read(arena.live_blocks)
        totals.pending_bytes += atomic_read(arena.pending_bytes)
        totals.served_bytes += atomic_read(arena.served_bytes)
    peaks_look(core.state.peaks)
    totals.peak_allocated_bytes = atomic_read(core.state.peaks.allocated_bytes)
    totals.peak_requested_bytes = atomic_read(core.state.peaks.requested_bytes)


cdef void walk_link_loans(CoreState* state) noexcept nogil:
    """Set `list_next` of every lent block to the edge of its extent, so that a walk can go on there."""
    cdef uint32_t slot
    cdef BlockId edge_id
    cdef Arena* arena
    for slot in range(state.slots):
        arena = state.arenas[slot]
        edge_id = arena.adopted
        while edge_id:
            (<Arena*> arena.blocks[edge_id].stamp).blocks[arena.blocks[edge_id].list_next].list_next = edge_id
            edge_id = arena.blocks[edge_id].list_prev


cdef BlockId walk_next(CoreState* state, Place* place) noexcept nogil:
    """The next block in the order of addresses, 0 behind the last one; those of a loan stand where the loan does.

    The caller sets `before` to it, unless it has changed the chain behind `before`.  No recursion, since loans may nest
    deeper than a stack: an extent's edge, which has no bytes, keeps the edge that the walk came from meanwhile.
    """
    cdef BlockId block_id, loan_id, from_id
    cdef Block* edge
    cdef Block* block
    while True:
        block_id = place.arena.blocks[place.before].next
        if block_id == 0:                         # behind the last one: up again
            edge = &place.arena.blocks[place.edge_id]
            from_id = <BlockId> edge.nbytes
            if from_id == 0:
                return 0
            edge.nbytes = 0
            place.arena = <Arena*> edge.stamp
            place.before = edge.list_next
            place.edge_id = from_id
            continue
        block = &place.arena.blocks[block_id]
        loan_id = 0
        if block.state == BLOCK_LENT:
            loan_id = lend_edge(place.arena, block_id, state.arenas[block.slot])
        if loan_id == 0:
            return block_id
        place.arena = state.arenas[block.slot]
        place.arena.blocks[loan_id].nbytes = place.edge_id
        place.before = place.edge_id = loan_id


cdef uint16_t _waits_for(CoreState* state, Arena* arena, BlockId block_id) noexcept nogil:
    """The slot whose work a block waits for."""
    cdef Block* block = &arena.blocks[block_id]
    cdef uint32_t number
    cdef Dependency* dependency
    if block.state == BLOCK_LENT:
        return block.slot
    if block.state == BLOCK_PENDING:
        number = arena.uses[block_id]
        while number:
            dependency = &arena.dependencies[number]
            if not order_proved(state, arena.slot, dependency.arena.slot, dependency.number):
                return dependency.arena.slot
            number = dependency.next
    return WAITS_FOR_NOTHING


cdef struct Copying:
    BlockCopy* blocks
    uint64_t capacity
    uint64_t count


cdef void _copy_block(CoreState* state, Arena* arena, BlockId block_id, uint32_t segment,
                      Copying* copying) noexcept nogil:
    cdef Block* block = &arena.blocks[block_id]
    cdef BlockCopy* copy
    cdef bint lent
    if copying.count < copying.capacity:
        copy = &copying.blocks[copying.count]
        copy.address = block.address
        copy.nbytes = block.nbytes
        lent = block.state == BLOCK_LIVE or block.state == BLOCK_SUSPENDED and block.stamp
        copy.requested = block.stamp if lent else 0
        copy.segment = segment
        # A pending block's slot is that of whom it waits for.
        copy.stream = block.slot if block.state == BLOCK_LENT else arena.slot
        copy.tag = block.tag if lent else 0
        # A loan on its way from one arena to another is free, but nobody's yet.
        copy.serial = <uint64_t> block_id << 16 | block.generation
        copy.waits_for = _waits_for(state, arena, block_id)
        copy.state = <uint8_t> (BLOCK_PENDING if block.state == BLOCK_LENT else block.state)
        if block.state == BLOCK_SUSPENDED and not lent:
            copy.state = <uint8_t> BLOCK_UNMAPPED
    copying.count += 1


cdef uint64_t walk_copy(Core core, BlockCopy* blocks, uint64_t capacity, SegmentCopy* segments,
                        uint32_t segment_capacity, uint32_t* segment_count, Totals* totals) noexcept nogil:
    """Copy every block and segment out; the number of blocks there are, all copied only if they fit."""
    cdef CoreState* state = &core.state
    cdef Copying copying
    cdef uint32_t i
    cdef Segment* segment
    cdef Place place
    copying.blocks = blocks
    copying.capacity = capacity
    copying.count = 0
    core.settle()
    lock_all(state)
    segment_count[0] = state.segment_count
    walk_totals(core, totals)
    # What threads have noted only: all of them stand still now.
    totals.peak_allocated_bytes = max(totals.peak_allocated_bytes, totals.allocated_bytes)
    totals.peak_requested_bytes = max(totals.peak_requested_bytes, totals.requested_bytes)
    totals.noted = atomic_read(state.journal.count)
    walk_link_loans(state)
    for i in range(state.segment_count):
        segment = &state.segments[i]
        if i < segment_capacity:
            segments[i].address = segment.address
            segments[i].nbytes = segment.handle.nbytes
            segments[i].stream = segment.arena.slot
        if segment.edge == 0:
            continue
        place.arena = segment.arena
        place.edge_id = place.before = segment.edge
        while walk_next(state, &place):
            place.before = place.arena.blocks[place.before].next
            _copy_block(state, place.arena, place.before, i, &copying)
    unlock_all(state)
    return copying.count


cdef bint walk_covers(Core core, uint64_t address) noexcept nogil:
    """Whether an address lies in a segment that `walk_copy` copies.  O(segments)."""
    cdef CoreState* state = &core.state
    cdef uint32_t i = 0
    cdef bint found
    spin_lock(&state.lock)
    while i < state.segment_count and address - state.segments[i].address >= state.segments[i].handle.nbytes:
        i += 1
    found = i < state.segment_count
    spin_unlock(&state.lock)
    return found


cdef uint64_t walk_pieces(Core core, PieceCopy* pieces, uint64_t capacity, uint64_t* span,
                          uint64_t* noted) noexcept nogil:
    """Copy where the mapped range has memory; the number of pieces there are, all copied only if they fit.

    Also where the range begins, 0 without one, and how many events were recorded up to then.  Takes the growth turn
    where memory moves.  O(pieces).
    """
    cdef Mapped* mapped = &core.state.mapped
    cdef MappedHandle* handle
    cdef uint64_t count = 0
    cdef uint32_t number
    if core.source.granularity == 0:
        span[0] = 0                               # and the source may be calling: see `turn_is_mine`
        noted[0] = atomic_read(core.state.journal.count)
        return 0
    turn_take(&core.state.growth_turn)
    for number in range(1, mapped.fresh if mapped.handles != NULL else 1):
        handle = &mapped.handles[number]
        if handle.memory.token:
            if count < capacity:
                pieces[count].address = handle.places[handle.active].address if handle.active >= 0 else 0
                pieces[count].nbytes = handle.memory.nbytes
            count += 1
    span[0] = mapped.span.address
    noted[0] = atomic_read(core.state.journal.count)
    turn_give(&core.state.growth_turn)
    return count


cdef bint walk_find(Core core, uint64_t address, Block* found) noexcept nogil:
    """Copy the block that an address lies in, also inside a loan; whether there is one.  O(blocks of a segment)."""
    cdef CoreState* state = &core.state
    cdef Segment* segment
    cdef Arena* arena
    cdef BlockId block_id = 0
    cdef BlockId edge_id
    lock_all(state)
    walk_link_loans(state)
    segment = core.segment_of(address)
    arena = segment.arena if segment != NULL else NULL
    edge_id = segment.edge if segment != NULL else 0
    while edge_id:
        block_id = arena_containing(arena, edge_id, address)
        found[0] = arena.blocks[block_id]
        edge_id = 0
        if block_id and found.state == BLOCK_LENT:
            edge_id = lend_edge(arena, block_id, state.arenas[found.slot])
            arena = state.arenas[found.slot]
    unlock_all(state)
    return block_id != 0


cdef struct Tally:
    uint64_t edges
    uint64_t live
    uint64_t indexed
    uint64_t free
    uint64_t pending
    uint64_t lent
    uint64_t holes
    uint64_t hole_bytes
    uint64_t absent               # suspended blocks that are nobody's
    uint64_t suspended
    uint64_t suspended_bytes
    uint64_t allocated
    uint64_t requested
    uint64_t pending_bytes
    uint64_t lent_bytes


cdef bint _expect(Broken* broken, bint holds, const char* what, uint64_t address, uint64_t found,
                  uint64_t expected) noexcept nogil:
    if not holds and broken.what == NULL:
        broken.what = what
        broken.address = address
        broken.found = found
        broken.expected = expected
    return holds


cdef bint _check_live(Arena* arena, BlockId block_id, Tally* tally, Broken* broken) noexcept nogil:
    cdef Block* block = &arena.blocks[block_id]
    tally.live += 1
    tally.indexed += block_id - arena.solid_first >= arena.solid_count
    tally.allocated += block.nbytes
    tally.requested += block.stamp
    return (
        _expect(broken, live_find(arena, block.address) == block_id, b"the index finds a live block", block.address,
                live_find(arena, block.address), block_id)
        and _expect(broken, block.stamp <= block.nbytes, b"requested bytes fit the block", block.address, block.stamp,
                    block.nbytes)
        and _expect(broken, block.slot == arena.slot, b"a live block's slot is its arena's", block.address, block.slot,
                    arena.slot)
        and _expect(broken, (block.flags & FLAG_USED != 0) == (arena.uses[block_id] != 0),
                    b"a block that is used elsewhere says so", block.address, block.flags, arena.uses[block_id])
    )


cdef bint _check_state(Arena* arena, BlockId block_id, BlockId before, Tally* tally, Broken* broken) noexcept nogil:
    """What a block in its state promises."""
    cdef Block* block = &arena.blocks[block_id]
    if block.state == BLOCK_LIVE:
        return _check_live(arena, block_id, tally, broken)
    if block.state == BLOCK_FREE:
        tally.free += 1
        return block.flags & FLAG_SOLID or _expect(
            broken, arena.blocks[before].state != BLOCK_FREE, b"no two free neighbours", block.address, before, 0)
    if block.state == BLOCK_PENDING:
        tally.pending += 1
        tally.pending_bytes += block.nbytes
        return _expect(broken, block.stamp != 0 or arena.uses[block_id] != 0, b"a pending block waits for something",
                       block.address, 0, 1)
    if block.state == BLOCK_UNMAPPED:
        tally.holes += 1
        tally.hole_bytes += block.nbytes
        return _expect(broken, arena.blocks[before].state != BLOCK_UNMAPPED, b"no two holes are neighbours",
                       block.address, before, 0)
    if block.state == BLOCK_SUSPENDED:
        tally.absent += block.stamp == 0
        if block.stamp:
            tally.suspended += 1
            tally.suspended_bytes += block.nbytes
        return _expect(broken, block.stamp <= block.nbytes, b"requested bytes fit the block", block.address,
                       block.stamp, block.nbytes)
    tally.lent += 1
    tally.lent_bytes += block.nbytes
    return _expect(broken, block.state == BLOCK_LENT, b"a block's state is one of a block's", block.address,
                   block.state, BLOCK_LENT)


cdef bint _check_blocks(Arena* arena, BlockId edge_id, uint64_t address, uint64_t nbytes, Tally* tally,
                        Broken* broken) noexcept nogil:
    """Blocks tile their segment or extent, link both ways, and no two neighbours are free."""
    cdef uint64_t at = address
    cdef BlockId before = edge_id
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
            and _check_state(arena, block_id, before, tally, broken)
        ):
            return False
        at += block.nbytes
        before = block_id
        block_id = block.next
    return _expect(broken, at == address + nbytes, b"blocks fill their segment", address, at - address, nbytes)


cdef bint _check_extents(Arena* arena, Tally* tally, uint64_t* adopted, Broken* broken) noexcept nogil:
    """Every extent is a loan of its owner's, in itself as sound as a segment, and has no holes."""
    cdef BlockId edge_id = arena.adopted
    cdef uint64_t holes = tally.holes
    cdef BlockId before = 0
    cdef Block* edge
    cdef Block* loan
    while edge_id:
        edge = &arena.blocks[edge_id]
        loan = &(<Arena*> edge.stamp).blocks[edge.list_next]
        adopted[0] += loan.nbytes
        if not (
            _expect(broken, edge.prev == before, b"extents link both ways", edge.address, edge.prev, before)
            and _expect(broken, loan.state == BLOCK_LENT and loan.address == edge.address, b"an extent is lent",
                        edge.address, loan.address, edge.address)
            and _check_blocks(arena, edge_id, edge.address, loan.nbytes, tally, broken)
            and _expect(broken, tally.holes == holes, b"holes are where their segment's edge is", edge.address,
                        tally.holes, holes)
        ):
            return False
        before = edge_id
        edge_id = edge.list_prev
    return True


cdef bint _check_class(Arena* arena, uint32_t number, uint64_t free, uint64_t* listed, Broken* broken) noexcept nogil:
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
            # Solid blocks that are found by their place are listed forwards only.
            and _expect(broken, block.list_prev == before or arena.solid_size != 0, b"lists link both ways",
                        block.address, block.list_prev, before)
            and _expect(broken, listed[0] <= free, b"lists have no cycle", block.address, listed[0], free)
        ):
            return False
        before = block_id
        block_id = block.list_next
    return True


cdef bint _check_ceilings(Arena* arena, Broken* broken) noexcept nogil:
    """An arena is below its ceilings, unless it has passed one while somebody looked, and that is noted."""
    cdef bint sound
    spin_lock(&arena.peaks.lock)
    sound = atomic_read(arena.peaks.again) != 0 or (
        _expect(broken, arena.allocated_ceiling >= arena_allocated(arena), b"an arena is below its ceiling", 0,
                arena.allocated_ceiling, arena_allocated(arena))
        and _expect(broken, arena.requested_ceiling >= arena.requested_bytes, b"an arena is below its ceiling", 0,
                    arena.requested_ceiling, arena.requested_bytes))
    spin_unlock(&arena.peaks.lock)
    return sound


cdef bint _check_arena(Arena* arena, Tally* tally, Broken* broken) noexcept nogil:
    """Lists, bitmaps, index, counters and records agree with the blocks that were walked."""
    cdef uint64_t listed = 0
    cdef uint64_t indexed = 0
    cdef uint64_t spare = 0
    cdef uint64_t pending = 0
    cdef uint64_t records = (1 + tally.edges + tally.live + tally.free + tally.pending + tally.lent + tally.holes
                             + tally.absent + tally.suspended)
    cdef uint32_t number
    cdef BlockId block_id
    block_id = arena.pending_first
    while block_id and pending <= arena.pending_blocks:
        pending += 1
        block_id = arena.blocks[block_id].list_next
    for number in range(<uint32_t> (ROWS * CLASSES_PER_ROW)):
        if not _check_class(arena, number, tally.free, &listed, broken):
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
        and _expect(broken, indexed == tally.indexed, b"every live block is indexed once", 0, indexed, tally.indexed)
        and _expect(broken, arena.live_blocks == tally.live, b"live blocks are counted", 0, arena.live_blocks,
                    tally.live)
        and _expect(broken, arena_allocated(arena) == tally.allocated, b"allocated bytes add up", 0,
                    arena_allocated(arena), tally.allocated)
        and _expect(broken, arena.requested_bytes == tally.requested, b"requested bytes add up", 0,
                    arena.requested_bytes, tally.requested)
        and _check_ceilings(arena, broken)
        and _expect(broken, records + spare == arena.fresh, b"no record is lost", 0, records + spare, arena.fresh)
        and _expect(broken, pending == tally.pending, b"every pending block is listed once", 0, pending, tally.pending)
        and _expect(broken, arena.pending_blocks == tally.pending, b"pending blocks are counted", 0,
                    arena.pending_blocks, tally.pending)
        and _expect(broken, arena.pending_bytes == tally.pending_bytes, b"pending bytes add up", 0,
                    arena.pending_bytes, tally.pending_bytes)
        and _expect(broken, arena.lent_blocks == tally.lent, b"lent blocks are counted", 0, arena.lent_blocks,
                    tally.lent)
        and _expect(broken, arena.lent_bytes == tally.lent_bytes, b"lent bytes add up", 0, arena.lent_bytes,
                    tally.lent_bytes)
    )


cdef bint _check_mapped(Mapped* mapped, uint64_t empty_bytes, Broken* broken) noexcept nogil:
    """What has blocks has memory, and each handle is where it says."""
    cdef uint64_t nbytes = 0
    cdef uint64_t spare = 0
    cdef uint64_t handles = 0
    cdef uint64_t stale = 0
    cdef uint32_t number
    cdef MappedHandle* handle
    cdef int place
    cdef uint64_t at
    for number in range(1, mapped.fresh):
        handle = &mapped.handles[number]
        if handle.memory.token == 0:
            continue
        handles += 1
        stale += handle.place_count - (handle.active >= 0)
        if handle.active >= 0:
            nbytes += handle.memory.nbytes
        else:
            spare += handle.memory.nbytes
        for place in range(handle.place_count):
            at = handle.places[place].address
            while at < handle.places[place].address + handle.memory.nbytes:
                if not _expect(broken, mapped.at[(at - mapped.span.address) // mapped.granularity] == number,
                               b"a handle is mapped where it says", at, number, place):
                    return False
                at += mapped.granularity
    return (
        _expect(broken, handles == mapped.handle_count, b"handles are counted", 0, mapped.handle_count, handles)
        and _expect(broken, stale == mapped.stale, b"stale mappings are counted", 0, mapped.stale, stale)
        and _expect(broken, nbytes == mapped.nbytes, b"mapped bytes add up", 0, mapped.nbytes, nbytes)
        and _expect(broken, spare == mapped.spare_bytes, b"spare bytes add up", 0, mapped.spare_bytes, spare)
        and _expect(broken, mapped.span.nbytes - empty_bytes == nbytes, b"what is no hole has memory", 0,
                    mapped.span.nbytes - empty_bytes, nbytes)
    )


cdef bint _check_holes(Mapped* mapped, Arena* arena, Broken* broken) noexcept nogil:
    """No handle's blocks are in a hole."""
    cdef BlockId block_id = arena.blocks[mapped.edge].next
    cdef Block* block
    cdef MappedHandle* handle
    cdef uint64_t at
    cdef uint32_t number
    while block_id:
        block = &arena.blocks[block_id]
        # Behind the last block there is more address space than anybody should walk.
        at = block.address if block.next else block.address + block.nbytes
        while block.state == BLOCK_UNMAPPED and at < block.address + block.nbytes:
            number = mapped.at[(at - mapped.span.address) // mapped.granularity]
            handle = &mapped.handles[number]
            if number and not _expect(broken, handle.active < 0 or at - handle.places[handle.active].address >= (
                    handle.memory.nbytes), b"a hole has no memory", at, number, 0):
                return False
            at += mapped.granularity
        block_id = block.next
    return True


cdef void walk_check(Core core, Broken* broken) noexcept nogil:
    """Look whether every invariant holds; `broken` names the first that does not."""
    cdef CoreState* state = &core.state
    cdef Tally tally
    cdef Arena* arena
    cdef Segment* segment
    cdef uint64_t reserved = 0
    cdef uint64_t lent = 0
    cdef uint64_t adopted = 0
    cdef uint64_t suspended = 0
    cdef uint64_t suspended_bytes = 0
    cdef uint32_t slot, i
    memset(broken, 0, sizeof(Broken))
    core.settle()
    lock_all(state)
    for i in range(state.segment_count):
        reserved += state.segments[i].handle.nbytes
    for slot in range(state.slots):
        arena = state.arenas[slot]
        memset(&tally, 0, sizeof(Tally))
        for i in range(state.segment_count):
            segment = &state.segments[i]
            if segment.arena == arena and segment.edge and not _check_blocks(
                    arena, segment.edge, segment.address, segment.nbytes, &tally, broken):
                break
        if broken.what != NULL or not _check_extents(arena, &tally, &adopted, broken):
            break
        if not _check_arena(arena, &tally, broken):
            break
        if slot == 0 and state.mapped.span.address and not (
                _check_mapped(&state.mapped, tally.hole_bytes + state.suspended.absent, broken)
                and _check_holes(&state.mapped, arena, broken)):
            break
        lent += tally.lent_bytes
        suspended += tally.suspended
        suspended_bytes += tally.suspended_bytes
    # Loans on their way are with neither side; they are the rest.
    _expect(broken, broken.what != NULL or adopted <= lent, b"what arenas have of others is lent", 0, adopted, lent)
    _expect(broken, broken.what != NULL or suspended == state.suspended.blocks, b"suspended blocks are counted", 0,
            state.suspended.blocks, suspended)
    _expect(broken, broken.what != NULL or suspended_bytes == state.suspended.nbytes, b"suspended bytes add up", 0,
            state.suspended.nbytes, suspended_bytes)
    _expect(broken, reserved == state.reserved, b"reserved bytes add up", 0, state.reserved, reserved)
    _expect(broken, state.committed >= state.reserved, b"what is reserved is committed", 0, state.committed,
            state.reserved)
    _expect(broken, state.committed <= state.limit, b"the limit holds", 0, state.committed, state.limit)
    _expect(broken, state.peak_reserved >= state.reserved, b"a peak is no less than the figure", 0, state.peak_reserved,
            state.reserved)
    unlock_all(state)

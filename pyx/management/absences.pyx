"""Absences: places of handles that were given up below suspended blocks, and what these blocks are by what is there.

A suspended block is live again once all of its memory is back.  What is nobody's becomes free where there is memory;
where nobody needs any it becomes a hole, at the end of its way home if another stream has borrowed it.
"""
from libc.stdint cimport uint32_t, uint64_t

from vpool._base.lock cimport lone_count
from vpool._base.types cimport (
    BLOCK_FREE,
    BLOCK_LIVE,
    BLOCK_SUSPENDED,
    BLOCK_UNMAPPED,
    Block,
    BlockId,
)
from vpool._management.arena cimport Arena, arena_raise_peaks
from vpool._management.core cimport Core
from vpool._management.holes cimport holes_adopt
from vpool._management.index cimport live_insert
from vpool._management.lend cimport Extent, lend_home, lend_isolate, lend_unadopt
from vpool._management.mapped cimport Mapped, mapped_active_at, mapped_at
from vpool._management.merge cimport free_alone, merge_free
from vpool._management.record cimport record_new
from vpool._management.state cimport Absence, CoreState, Suspended, lock_all, unlock_all
from vpool._management.walk cimport Place, walk_link_loans, walk_next


cdef void absences_visit(Core core, visit_t visit, void* context) noexcept nogil:
    """Visit every block of the mapped range, also those in loans, in the order of addresses.  All locks are held.

    A visit may cut its own block and merge it with its neighbours, and says whether the chain has changed there; the
    record before it stays, and what follows that one is visited next.
    """
    cdef Place place
    cdef BlockId block_id
    place.arena = core.state.arenas[0]
    place.edge_id = place.before = core.state.mapped.edge
    walk_link_loans(&core.state)
    block_id = walk_next(&core.state, &place)
    while block_id:
        if not visit(core, place.arena, place.edge_id, block_id, context):
            place.before = block_id
        block_id = walk_next(&core.state, &place)


cdef void absences_make(Block* block) noexcept nogil:
    block.state = BLOCK_SUSPENDED
    block.stamp = 0
    block.flags = 0
    block.tag = 0
    block.list_prev = 0
    block.list_next = 0


cdef bint absences_may_cut(Core core, uint64_t handles) noexcept nogil:
    """Whether each arena has records for all cuts that so many handles can ask for."""
    cdef uint32_t slot
    for slot in range(core.state.slots):
        if core.state.arenas[slot].capacity - core.state.arenas[slot].fresh < 4 * handles + 4:
            return False
    return True


cdef Absence* _absence_at(Suspended* suspended, uint64_t address) noexcept nogil:
    """The absence that an address lies in, or NULL."""
    cdef uint32_t low = 0
    cdef uint32_t high = suspended.count
    cdef uint32_t middle
    while low < high:
        middle = (low + high) // 2
        if suspended.absences[middle].address + suspended.absences[middle].nbytes <= address:
            low = middle + 1
        else:
            high = middle
    if low < suspended.count and suspended.absences[low].address <= address:
        return &suspended.absences[low]
    return NULL


# What blocks are, by what has memory.

cdef uint64_t _next_granule(Core core, uint64_t address) noexcept nogil:
    return address // core.state.mapped.granularity * core.state.mapped.granularity + core.state.mapped.granularity


cdef bint _is_there(Core core, uint64_t address) noexcept nogil:
    """Whether there is memory at an address, with its content."""
    cdef Absence* absence = _absence_at(&core.state.suspended, address)
    return absence == NULL or absence.back


cdef bint _has_memory(Core core, Block* block) noexcept nogil:
    cdef uint64_t at = block.address
    while at < block.address + block.nbytes:
        if not _is_there(core, at):
            return False
        at = _next_granule(core, at)
    return True


cdef bint _need(Core core, Arena* arena, BlockId edge_id, BlockId block_id, void* context) noexcept nogil:
    """Note on the absences below a block that is somebody's that its memory is needed."""
    cdef Suspended* suspended = &core.state.suspended
    cdef Block* block = &arena.blocks[block_id]
    cdef uint64_t at = block.address
    cdef Absence* absence
    if block.state != BLOCK_SUSPENDED or block.stamp == 0:
        return False
    while at < block.address + block.nbytes:
        absence = _absence_at(suspended, at)
        if absence == NULL:
            at = _next_granule(core, at)
        else:
            absence.needed = True
            at = absence.address + absence.nbytes
    return False


cdef int _becomes(Core core, uint64_t address) noexcept nogil:
    """What a suspended block without requested bytes becomes at an address."""
    cdef Absence* absence = _absence_at(&core.state.suspended, address)
    if absence == NULL or absence.back:
        return BLOCK_FREE
    # Where the driver did not unmap what came back in vain, the place stays.
    return BLOCK_SUSPENDED if absence.needed or mapped_at(&core.state.mapped, address) else BLOCK_UNMAPPED


cdef BlockId _cut(Arena* arena, BlockId block_id, uint64_t nbytes) noexcept nogil:
    """Cut the first bytes off a suspended block; the front's number.  A record is left."""
    cdef BlockId front_id = record_new(arena)
    cdef Block* block = &arena.blocks[block_id]
    cdef Block* front = &arena.blocks[front_id]
    front.address = block.address
    front.nbytes = nbytes
    front.slot = block.slot
    front.prev = block.prev
    front.next = block_id
    absences_make(front)
    arena.blocks[block.prev].next = front_id
    block.prev = front_id
    block.address += nbytes
    block.nbytes -= nbytes
    return front_id


cdef void _be_free(Arena* arena, BlockId block_id) noexcept nogil:
    """Make memory free that no work has touched since it came back."""
    cdef Block* block = &arena.blocks[block_id]
    cdef BlockId prev_id = block.prev
    cdef BlockId next_id = block.next
    cdef uint64_t stamp = 0
    cdef BlockId whole_id = block_id
    if arena.blocks[next_id].state == BLOCK_FREE and next_id:
        stamp = arena.blocks[next_id].stamp
        whole_id = next_id
    if arena.blocks[prev_id].state == BLOCK_FREE:
        stamp = max(stamp, arena.blocks[prev_id].stamp)
        whole_id = prev_id
    merge_free(arena, block_id)
    # A merge counts as a free of now; this one is as old as its parts.
    arena.blocks[whole_id].stamp = stamp


cdef bint _restore(Core core, Arena* arena, BlockId edge_id, BlockId block_id, void* context) noexcept nogil:
    """Make a suspended block what its memory says."""
    cdef Suspended* suspended = &core.state.suspended
    cdef Block* block = &arena.blocks[block_id]
    cdef uint64_t end = block.address + block.nbytes
    cdef uint64_t at = block.address
    cdef int becomes
    if block.state != BLOCK_SUSPENDED:
        return False
    if block.stamp:
        if _has_memory(core, block):
            suspended.blocks -= 1
            suspended.nbytes -= block.nbytes
            block.state = BLOCK_LIVE
            live_insert(arena, block_id, block)
            lone_count(arena.allocated_bytes, block.nbytes)
            lone_count(arena.requested_bytes, block.stamp)
        return False
    becomes = _becomes(core, at)
    while at < end and _becomes(core, at) == becomes:
        at = _next_granule(core, at)
    if at < end:
        block_id = _cut(arena, block_id, at - block.address)
    if becomes == BLOCK_FREE:
        _be_free(arena, block_id)
    elif becomes == BLOCK_UNMAPPED and arena == core.state.arenas[0] and edge_id == core.state.mapped.edge:
        holes_adopt(arena, block_id)
    else:
        # Holes are the default stream's, and not what it has back from another one: see `_send_home`.
        return at < end
    return True


cdef bint _send_home(Core core, Arena* arena) noexcept nogil:
    """Let a part without memory of what an arena has borrowed be its owner's again; False where there is none."""
    cdef BlockId edge_id = arena.adopted
    cdef BlockId block_id
    cdef Block* block
    cdef Extent extent
    while edge_id:
        block_id = arena.blocks[edge_id].next
        while block_id:
            block = &arena.blocks[block_id]
            if block.state == BLOCK_SUSPENDED and block.stamp == 0 and (
                    _becomes(core, block.address) == BLOCK_UNMAPPED):
                if not lend_isolate(arena, edge_id, block_id):
                    return False
                free_alone(arena, block_id)       # nobody sees it so: all locks are held
                lend_unadopt(arena, block.prev, &extent)
                lend_home(&extent)
                absences_make(&extent.owner.blocks[extent.lent])   # a hole, or on its way, see `_restore`
                return True
            block_id = block.next
        edge_id = arena.blocks[edge_id].list_prev
    return False


cdef bint absences_have(Mapped* mapped, Absence* absence) noexcept nogil:
    """Whether there is memory at the place of an absence, which may lack its content."""
    return mapped_active_at(mapped, absence.address) != 0


cdef void _drop_copy(Core core, Absence* absence) noexcept nogil:
    if absence.copy.token:
        core.host.surrender(&absence.place, &absence.copy)
    absence.copy.token = 0


cdef bint absences_settle(Core core) noexcept nogil:
    """Make every suspended block what its memory says, and end the absences that are none; False without records."""
    cdef CoreState* state = &core.state
    cdef Suspended* suspended = &state.suspended
    cdef Absence* absence
    cdef uint32_t i, slot
    cdef uint32_t kept = 0
    cdef bint any_home = False
    cdef bint done, came_home
    for i in range(suspended.count):
        suspended.absences[i].needed = False
    lock_all(state)
    done = absences_may_cut(core, suspended.count)
    if done:
        absences_visit(core, _need, NULL)
        for i in range(suspended.count):
            # What came back in vain and the driver did not take again, and nobody waits for any more, is free.
            absence = &suspended.absences[i]
            absence.back = absence.back or not absence.needed and absences_have(&state.mapped, absence)
        absences_visit(core, _restore, NULL)
        slot = 0
        while slot < state.slots:
            # What comes home to another borrower, the default stream among them, goes on from there.
            came_home = _send_home(core, state.arenas[slot])
            any_home = any_home or came_home
            slot = 0 if came_home else slot + 1
        if any_home:
            absences_visit(core, _restore, NULL)
        for slot in range(state.slots):
            arena_raise_peaks(state.arenas[slot])
    unlock_all(state)
    if not done:
        return False
    suspended.absent = 0
    for i in range(suspended.count):
        absence = &suspended.absences[i]
        if not absence.back and (absence.needed or mapped_at(&state.mapped, absence.address)):
            suspended.absent += 0 if absences_have(&state.mapped, absence) else absence.nbytes
            suspended.absences[kept] = absence[0]
            kept += 1
        else:
            _drop_copy(core, absence)
    suspended.count = kept
    return True

"""Suspended blocks: the memory under them is given up, and their addresses stay theirs.

A block is suspended once a handle below it is given up, and a handle is given up whole: only where every live block
on it is chosen.  What is free there becomes a suspended block of no requested bytes, so that nobody gets it.  Both
are in no list and no index, so whoever allocates or frees passes them by.  The places without memory are *absences*;
they are no holes, and nothing is mapped there before they end.

All changes of blocks are made under all locks, all calls to the driver under none.  Where one fails every block is
what its memory says: live where all of it is there.
"""
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport qsort

from vpool._base.lock cimport atomic_add, atomic_read, lone_count, spin_lock, spin_unlock
from vpool._base.memory cimport lazy_reserve
from vpool._base.turn cimport turn_give, turn_take
from vpool._base.types cimport (
    BLOCK_FREE,
    BLOCK_LENT,
    BLOCK_LIVE,
    BLOCK_PENDING,
    BLOCK_SUSPENDED,
    BLOCK_UNMAPPED,
    Block,
    BlockId,
)
from vpool._management.absences cimport absences_have, absences_make, absences_may_cut, absences_settle, absences_visit
from vpool._management.arena cimport Arena
from vpool._management.core cimport Core
from vpool._management.freelist cimport freelist_insert, freelist_take_out
from vpool._management.hit cimport hit_cut
from vpool._management.idle cimport idle_trim
from vpool._management.index cimport live_remove
from vpool._management.journal cimport journal_freed
from vpool._management.mapped cimport (
    MOST_HANDLES,
    Mapped,
    MappedHandle,
    mapped_activate,
    mapped_active_at,
    mapped_at,
    mapped_create,
    mapped_map,
    mapped_place_at,
    mapped_release,
    mapped_unmap,
)
from vpool._management.moves cimport STATUS_NO_ROOM, moves_count
from vpool._management.order cimport order_waited
from vpool._management.pending cimport pending_forget
from vpool._management.state cimport STATE_NOTED, Absence, CoreState, Suspended, lock_all, unlock_all
from vpool._storage.driver cimport STATUS_OK, STATUS_OUT_OF_MEMORY
from vpool._storage.mapped_source cimport MappedSource

cdef enum:
    # What is on a handle, as bits of its `candidate`, which no plan uses meanwhile.
    CHOSEN = 1
    OTHERS = 2                    # live blocks that stay, or whose memory is partly gone already
    IN_USE = 4

cdef struct Choice:
    bint every
    uint16_t tag

cdef struct Sought:
    uint64_t address
    Arena* arena
    BlockId block_id


# Which handles can go.

cdef bint _classify(Core core, Arena* arena, BlockId edge_id, BlockId block_id, void* context) noexcept nogil:
    """Note on a block's handles what it is."""
    cdef Mapped* mapped = &core.state.mapped
    cdef Choice* choice = <Choice*> context
    cdef Block* block = &arena.blocks[block_id]
    cdef MappedHandle* handle
    cdef uint64_t at = block.address
    cdef uint32_t number
    cdef int bits = OTHERS
    if block.state == BLOCK_FREE or block.state == BLOCK_UNMAPPED:
        return False
    if block.state == BLOCK_LIVE and (choice.every or block.tag == choice.tag):
        bits = CHOSEN
    elif block.state == BLOCK_PENDING or block.state == BLOCK_LENT:
        bits = IN_USE
    while at < block.address + block.nbytes:
        number = mapped_active_at(mapped, at)
        handle = &mapped.handles[number]
        if number == 0:
            at = at // mapped.granularity * mapped.granularity + mapped.granularity
        else:
            handle.candidate |= bits
            at = handle.places[handle.active].address + handle.memory.nbytes
    return False


cdef bint _is_chosen(Mapped* mapped, uint64_t address) noexcept nogil:
    return mapped.handles[mapped_at(mapped, address)].candidate == CHOSEN


cdef uint64_t _end_of(Mapped* mapped, uint64_t address, uint64_t end, bint chosen) noexcept nogil:
    """How far from an address on, to an end at most, handles are all chosen or all not."""
    cdef MappedHandle* handle
    while address < end and _is_chosen(mapped, address) == chosen:
        handle = &mapped.handles[mapped_at(mapped, address)]
        address = handle.places[handle.active].address + handle.memory.nbytes
    return min(address, end)


cdef bint _mark(Core core, Arena* arena, BlockId edge_id, BlockId block_id, void* context) noexcept nogil:
    """Suspend a block of a chosen handle; of a free one the part that lies there."""
    cdef Mapped* mapped = &core.state.mapped
    cdef Suspended* suspended = &core.state.suspended
    cdef Block* block = &arena.blocks[block_id]
    cdef uint64_t end = block.address + block.nbytes
    cdef uint64_t at
    cdef BlockId front_id
    if block.state != BLOCK_LIVE and block.state != BLOCK_FREE:
        return False
    at = _end_of(mapped, block.address, end, False)
    if at == end:
        return False
    if block.state == BLOCK_LIVE:
        live_remove(arena, block.address)
        lone_count(arena.allocated_bytes, -<int64_t> block.nbytes)
        lone_count(arena.requested_bytes, -<int64_t> block.stamp)
        block.state = BLOCK_SUSPENDED
        suspended.blocks += 1
        suspended.nbytes += block.nbytes
        return False
    if at > block.address:
        front_id = hit_cut(arena, block_id, at - block.address)
        arena.blocks[front_id].state = BLOCK_FREE
        freelist_insert(arena, front_id, &arena.blocks[front_id])
        return True                               # what follows is visited next
    at = _end_of(mapped, block.address, end, True)
    if at < end:
        block_id = hit_cut(arena, block_id, at - block.address)
    else:
        freelist_take_out(arena, block_id)
        block.generation += 1
    absences_make(&arena.blocks[block_id])
    return True


cdef int _by_address(const void* one, const void* other) noexcept nogil:
    return -1 if (<const Absence*> one).address < (<const Absence*> other).address else 1


cdef uint32_t _choose(Core core, Choice* choice, GivenUp* result) noexcept nogil:
    """Suspend the blocks of every handle that can go, and list these; how many.  Takes all locks."""
    cdef CoreState* state = &core.state
    cdef Mapped* mapped = &state.mapped
    cdef Suspended* suspended = &state.suspended
    cdef MappedHandle* handle
    cdef Absence* absence
    cdef uint32_t number
    cdef uint32_t count = 0
    lock_all(state)
    absences_visit(core, _classify, choice)
    for number in range(1, mapped.fresh):
        count += mapped.handles[number].candidate == CHOSEN
    if not absences_may_cut(core, count):
        count = 0
    for number in range(1, mapped.fresh):
        handle = &mapped.handles[number]
        if handle.candidate == CHOSEN and count:
            absence = &suspended.absences[suspended.count]
            absence.address = handle.places[handle.active].address
            absence.nbytes = handle.memory.nbytes
            absence.number = number
            absence.back = False
            absence.copy.token = 0
            absence.place.address = 0
            suspended.count += 1
        elif handle.candidate & IN_USE:
            result.in_use += handle.memory.nbytes
        elif handle.candidate & CHOSEN:
            result.shared += handle.memory.nbytes
    if count:
        absences_visit(core, _mark, NULL)
    unlock_all(state)
    for number in range(1, mapped.fresh):
        mapped.handles[number].candidate = 0
    return count


cdef void suspended_settle(Core core) noexcept nogil:
    """Let go of what was suspended and is freed: addresses, and copies on the host."""
    cdef Mapped* mapped = &core.state.mapped
    cdef uint64_t address
    cdef uint32_t i, number
    turn_take(&core.state.growth_turn)
    for i in range(core.state.suspended.count):
        address = core.state.suspended.absences[i].address
        number = mapped_at(mapped, address)
        if number and mapped_active_at(mapped, address) == 0:
            # The driver failed in the middle of mapping it; it may serve elsewhere since.
            mapped_unmap(mapped, <MappedSource> core.source, number,
                         mapped_place_at(&mapped.handles[number], address))
    if core.state.suspended.count and absences_settle(core):
        core.coalesce()                           # what is free on another stream's loan goes home
    turn_give(&core.state.growth_turn)


# Giving up.

cdef int _offload(Core core, uint32_t first) noexcept nogil:
    """Copy what is on chosen handles to the host."""
    cdef Suspended* suspended = &core.state.suspended
    cdef Absence* absence
    cdef uint32_t i
    cdef int status
    for i in range(first, suspended.count):
        absence = &suspended.absences[i]
        status = core.host.acquire(absence.nbytes, &absence.place, &absence.copy)
        if status == STATUS_OK:
            status = core.source.read(<void*> absence.place.address, absence.address, absence.nbytes)
        if status != STATUS_OK:
            return status
    return STATUS_OK


cdef int _unmap(Core core, uint32_t number) noexcept nogil:
    """Unmap a handle, from the place of its blocks last."""
    cdef Mapped* mapped = &core.state.mapped
    cdef MappedHandle* handle = &mapped.handles[number]
    cdef int place, status
    while handle.place_count > 1:
        place = 0 if handle.active != 0 else 1
        status = mapped_unmap(mapped, <MappedSource> core.source, number, place)
        if status != STATUS_OK:
            return status
    return mapped_unmap(mapped, <MappedSource> core.source, number, 0)


cdef void _map_again(Core core, Absence* absence) noexcept nogil:
    cdef Mapped* mapped = &core.state.mapped
    if mapped.handles[absence.number].active < 0 and mapped_map(
            mapped, <MappedSource> core.source, absence.number, absence.address) == STATUS_OK:
        mapped_activate(mapped, absence.number, mapped.handles[absence.number].place_count - 1, 0)


cdef void _release(Core core, uint32_t number) noexcept nogil:
    """Give a handle's memory back; it is spare where the source does not take it."""
    cdef Mapped* mapped = &core.state.mapped
    cdef uint64_t nbytes = mapped.handles[number].memory.nbytes
    atomic_add(core.state.source_calls, 1)
    mapped_release(mapped, <MappedSource> core.source, number)
    if mapped.handles[number].memory.token == 0:
        moves_count(core)
        core.not_taken(nbytes)


cdef int _give_up(Core core, Choice* choice, bint copies, GivenUp* result) noexcept nogil:
    cdef CoreState* state = &core.state
    cdef Suspended* suspended = &state.suspended
    cdef uint32_t first = suspended.count
    cdef uint32_t count = _choose(core, choice, result)
    cdef uint64_t before
    cdef uint32_t i
    cdef int status
    if count == 0:
        return STATUS_OK
    # Behind the choice, since free memory may have been lent and freed again meanwhile.  The whole device: live
    # blocks are used on streams that no pool needs to be told of.
    status = core.drain()
    if status == STATUS_OK:
        status = core.source.synchronize()
    if status == STATUS_OK and copies:
        status = _offload(core, first)
    i = first
    while status == STATUS_OK and i < suspended.count:
        status = _unmap(core, suspended.absences[i].number)
        i += 1
    before = atomic_read(state.reserved)
    for i in range(first, suspended.count):
        if status == STATUS_OK:
            _release(core, suspended.absences[i].number)
        else:
            _map_again(core, &suspended.absences[i])
            suspended.absences[i].back = state.mapped.handles[suspended.absences[i].number].active >= 0
    result.released += before - atomic_read(state.reserved)
    result.refused += state.mapped.spare_bytes
    qsort(suspended.absences, suspended.count, sizeof(Absence), _by_address)
    absences_settle(core)
    return status


cdef int suspended_give_up(Core core, bint every, uint16_t tag, bint copies, GivenUp* result) noexcept nogil:
    """Give up the memory of blocks, all or those of a tag, and all that is free; the status of what failed.

    Where it fails what was given up is as before, as far as the driver lets it be.
    """
    cdef CoreState* state = &core.state
    cdef Choice choice
    cdef int status = core.drain()
    result.released = result.shared = result.in_use = result.refused = 0
    choice.every = every
    choice.tag = tag
    if status == STATUS_OK:
        status = idle_trim(core, 0, &result.released)
    if status != STATUS_OK:
        return status
    turn_take(&state.growth_turn)
    if state.suspended.absences == NULL:
        state.suspended.absences = <Absence*> lazy_reserve(MOST_HANDLES * sizeof(Absence))
    if state.suspended.absences == NULL:
        status = STATUS_OUT_OF_MEMORY
    elif state.mapped.span.address:
        status = _give_up(core, &choice, copies, result)
    turn_give(&state.growth_turn)
    return status


# Bringing back.

cdef int _fetch(Core core, Absence* absence) noexcept nogil:
    """Put memory where there is none, with what was there."""
    cdef CoreState* state = &core.state
    cdef Mapped* mapped = &state.mapped
    cdef int status = STATUS_OK
    absence.number = mapped_at(mapped, absence.address)
    if absence.number and not absences_have(mapped, absence):
        # The driver failed in the middle of mapping it, and did not undo that.
        status = mapped_unmap(mapped, <MappedSource> core.source, absence.number,
                              mapped_place_at(&mapped.handles[absence.number], absence.address))
        if status != STATUS_OK:
            return status
        absence.number = 0
    if absence.number == 0:
        if core.may_take(absence.nbytes, absence.nbytes, 0) == 0:
            return STATUS_NO_ROOM
        atomic_add(state.source_calls, 1)
        status = mapped_create(mapped, <MappedSource> core.source, absence.nbytes, &absence.number)
        if mapped.handles[absence.number].memory.token == 0:
            core.not_taken(absence.nbytes)
            absence.number = 0
            return status
        moves_count(core)
        if status == STATUS_OK:
            status = mapped_map(mapped, <MappedSource> core.source, absence.number, absence.address)
        if status == STATUS_OK:
            mapped_activate(mapped, absence.number, 0, 0)
    if status == STATUS_OK and absence.copy.token:
        status = core.source.write(absence.address, <void*> absence.place.address, absence.nbytes)
    absence.back = status == STATUS_OK
    return status


cdef int _bring_back(Core core, uint64_t* nbytes) noexcept nogil:
    cdef CoreState* state = &core.state
    cdef Suspended* suspended = &state.suspended
    cdef Absence* absence
    cdef uint32_t i
    cdef int status = STATUS_OK
    nbytes[0] = 0
    absences_settle(core)
    for i in range(suspended.count):
        absence = &suspended.absences[i]
        absence.number = 0
        if status == STATUS_OK:
            status = _fetch(core, absence)
            nbytes[0] += absence.nbytes
    if status == STATUS_OK and not absences_settle(core):
        status = STATUS_OUT_OF_MEMORY
    if status != STATUS_OK:
        for i in range(suspended.count):
            suspended.absences[i].back = False
            if suspended.absences[i].number:
                _release(core, suspended.absences[i].number)
        absences_settle(core)
    return status


cdef int suspended_bring_back(Core core, uint64_t* nbytes) noexcept nogil:
    """Give all suspended blocks memory again, and what was copied; all or none.

    Where there is none what is idle goes back first.
    """
    cdef CoreState* state = &core.state
    cdef uint64_t released = 0
    cdef int status
    if core.source.granularity == 0:
        nbytes[0] = 0                             # and its source may be calling: see `turn_is_mine`
        return STATUS_OK
    turn_take(&state.growth_turn)
    status = _bring_back(core, nbytes)
    turn_give(&state.growth_turn)
    if status != STATUS_OUT_OF_MEMORY and status != STATUS_NO_ROOM:
        return status
    if not order_waited(core.drain()) or idle_trim(core, 0, &released) != STATUS_OK or released == 0:
        return status
    turn_take(&state.growth_turn)
    status = _bring_back(core, nbytes)
    turn_give(&state.growth_turn)
    return status


# Freeing meanwhile.

cdef bint _seek(Core core, Arena* arena, BlockId edge_id, BlockId block_id, void* context) noexcept nogil:
    cdef Sought* sought = <Sought*> context
    cdef Block* block = &arena.blocks[block_id]
    if block.address == sought.address and block.state == BLOCK_SUSPENDED and block.stamp:
        sought.arena = arena
        sought.block_id = block_id
    return False


cdef void _free(Core core, Arena* arena, BlockId block_id, int freer) noexcept nogil:
    """Let a suspended block be nobody's.  All locks are held.  Nothing can touch it: there was a wait for that."""
    cdef CoreState* state = &core.state
    cdef Block* block = &arena.blocks[block_id]
    if atomic_read(state.word) & STATE_NOTED:
        spin_lock(&state.journal.lock)
        journal_freed(state.journal, block.address, block.nbytes, block.stamp, arena.slot if freer < 0 else freer,
                      block.tag, 0)
        spin_unlock(&state.journal.lock)
    pending_forget(arena, block_id)
    state.suspended.blocks -= 1
    state.suspended.nbytes -= block.nbytes
    block.generation += 1
    absences_make(block)


cdef bint suspended_free(Core core, uint64_t address, int freer) noexcept nogil:
    """Free a suspended block; False where there is none at the address.  O(blocks).

    Its memory, if there is some, and its address serve others once the pool is resumed or trimmed.
    """
    cdef CoreState* state = &core.state
    cdef Sought sought
    sought.address = address
    sought.arena = NULL
    if atomic_read(state.suspended.blocks) == 0:
        return False
    lock_all(state)
    absences_visit(core, _seek, &sought)
    if sought.arena != NULL:
        _free(core, sought.arena, sought.block_id, freer)
    unlock_all(state)
    return sought.arena != NULL


cdef bint suspended_free_record(Core core, Arena* arena, BlockId block_id, uint16_t generation,
                                int freer) noexcept nogil:
    """The same of a block by its record, if that is still the block it was.  O(streams)."""
    cdef CoreState* state = &core.state
    cdef Block* block = &arena.blocks[block_id]
    cdef bint mine
    if atomic_read(state.suspended.blocks) == 0:
        return False
    lock_all(state)
    mine = block.state == BLOCK_SUSPENDED and block.stamp != 0 and block.generation == generation
    if mine:
        _free(core, arena, block_id, freer)
    unlock_all(state)
    return mine

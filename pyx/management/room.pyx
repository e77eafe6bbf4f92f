"""Room for what no free block holds, in a range whose memory can be moved.

A mapped pool has one range of addresses, in the arena of the default stream, from which the other streams borrow.
Its blocks lie on handles, which are mapped whole.  A request that misses gets a *window*: free blocks and the holes
between and beside them, chosen by `window`.  Memory for the holes comes from handles with nothing but free blocks
on them while more would be reserved than the pool has needed, else from the source.

A handle that moves stays mapped where it was, in what is a hole then: such a *stale* mapping costs nothing, and the
handle comes back there without a driver call.  No data moves, and no live block's memory.

The growth turn is the caller's where no function says that it takes it; driver calls are made under no lock.
"""
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from vpool._base.bias cimport bias_drop, bias_take
from vpool._base.lock cimport atomic_read, atomic_write, spin_lock, spin_unlock
from vpool._base.types cimport BLOCK_FREE, BLOCK_UNMAPPED, GRANULE, Block, BlockId, round_up
from vpool._management.arena cimport Arena, arena_take_behind
from vpool._management.core cimport Core, core_live_bytes
from vpool._management.holes cimport holes_add_segment
from vpool._management.mapped cimport (
    MOST_PIECES,
    Mapped,
    MappedHandle,
    Piece,
    mapped_at,
    mapped_is_open,
    mapped_open,
    mapped_place_at,
)
from vpool._management.moves cimport STATUS_NO_ROOM, moves_create, moves_find, moves_release, moves_take
from vpool._management.state cimport CoreState, Request, Segment
from vpool._management.window cimport (
    BY_MEMORY,
    BY_SHORTAGE,
    BY_TIME,
    By,
    Window,
    window_at,
    window_best,
    window_costs,
    window_forget,
    window_link,
    window_victims,
)
from vpool._storage.driver cimport STATUS_NOT_READY, STATUS_OK, STATUS_OUT_OF_MEMORY
from vpool._storage.mapped_source cimport MappedSource

cdef uint64_t MOST_RANGE = <uint64_t> 1 << 44     # bytes of address space
cdef uint64_t LEAST_RANGE = <uint64_t> 1 << 32

# Of what is reserved: no handle is smaller where it can as well be larger.  Smaller ones cost driver calls, larger
# ones memory; measured on nine traces.
cdef double LEAST_SHARE = 0.006
cdef uint64_t LARGEST = 4         # handles of the usual size that such a one has at most
cdef uint64_t AT_ONCE = 64        # handles that one request takes from the source at most, unless memory is short

cdef struct Plan:
    Window window
    uint32_t victim_count
    uint32_t used                 # of these, so many from the first on were taken
    bint busy                     # none of the others can go back to the source: work may touch it
    uint64_t most                 # bytes that may be reserved before memory is taken from victims
    uint64_t excess               # bytes that have to come from them still
    uint64_t movable              # bytes that they have
    uint64_t unit                 # bytes of a new handle
    bint short                    # of memory: handles are made small, whatever that costs
    bint rises                    # more is live than ever, so that what is reserved may rise too
    BlockId hole                  # that is being filled


cdef int _open(Core core) noexcept nogil:
    """Reserve the range: more than enough, since addresses cost nothing and what is fragmented are addresses."""
    cdef CoreState* state = &core.state
    cdef Mapped* mapped = &state.mapped
    cdef uint64_t limit = min(state.limit, MOST_RANGE // 4)
    cdef uint64_t nbytes = max(round_up(4 * limit, core.source.granularity), LEAST_RANGE)
    cdef Segment segment
    cdef int status = STATUS_OUT_OF_MEMORY
    while status != STATUS_OK and nbytes >= limit and nbytes >= core.source.granularity:
        status = mapped_open(mapped, <MappedSource> core.source, nbytes)
        nbytes = nbytes // 2 // core.source.granularity * core.source.granularity
    if status != STATUS_OK:
        return status
    segment.span = mapped.span
    segment.handle.token = 0
    segment.handle.nbytes = 0
    segment.address = mapped.span.address
    segment.nbytes = mapped.span.nbytes
    segment.arena = state.arenas[0]
    segment.exported = False
    segment.mapped = True
    spin_lock(&state.lock)
    bias_take(&segment.arena.lock)
    segment.edge = holes_add_segment(segment.arena, segment.address, segment.nbytes)
    bias_drop(&segment.arena.lock)
    if segment.edge:
        core.enlist(&segment)
    spin_unlock(&state.lock)
    mapped.edge = segment.edge
    if segment.edge == 0:
        core.source.unreserve(&mapped.span)
        return STATUS_OUT_OF_MEMORY
    return STATUS_OK


cdef uint32_t room_pieces(Core core) noexcept nogil:
    """Copy the free blocks and holes of the range; how many.  O(blocks)."""
    cdef Mapped* mapped = &core.state.mapped
    cdef Arena* arena = core.state.arenas[0]
    cdef BlockId block_id
    cdef Block* block
    cdef Piece* piece
    cdef uint32_t count = 0
    bias_take(&arena.lock)
    block_id = arena.blocks[mapped.edge].next
    while block_id and count < MOST_PIECES:
        block = &arena.blocks[block_id]
        if block.state == BLOCK_FREE or block.state == BLOCK_UNMAPPED:
            piece = &mapped.pieces[count]
            piece.address = block.address
            piece.nbytes = block.nbytes
            piece.stamp = block.stamp
            piece.block_id = block_id
            piece.hole = block.state == BLOCK_UNMAPPED
            count += 1
        block_id = block.next
    bias_drop(&arena.lock)
    window_link(mapped.pieces, count)
    return count


cdef bint _comes_back(MappedHandle* handle, uint64_t address) noexcept nogil:
    """Whether a place of a handle, which blocks may be at, begins at an address."""
    cdef int place = mapped_place_at(handle, address)
    return mapped_is_open(handle, place) and handle.places[place].address == address


cdef int _move(Core core, Plan* plan, uint32_t victim, uint64_t address, uint64_t* made) noexcept nogil:
    """Move a victim's handle to a place in the hole that is being filled."""
    cdef Mapped* mapped = &core.state.mapped
    cdef int status
    made[0] = mapped.handles[mapped.victims[victim].number].memory.nbytes
    status = moves_take(core, &mapped.victims[victim], plan.hole, address)
    if status == STATUS_OK:
        plan.excess -= min(plan.excess, made[0])
    return status


cdef int _come_back(Core core, Plan* plan, uint64_t address, uint64_t most, uint64_t* made) noexcept nogil:
    """Let a victim of at most so many bytes be where it is mapped still; NOT_READY where there is none."""
    cdef Mapped* mapped = &core.state.mapped
    cdef uint32_t number = mapped_at(mapped, address)
    cdef MappedHandle* handle = &mapped.handles[number]
    if number == 0 or handle.candidate == 0 or handle.memory.nbytes > most or (
            mapped.victims[handle.candidate - 1].used or not _comes_back(handle, address)):
        return STATUS_NOT_READY
    return _move(core, plan, handle.candidate - 1, address, made)


cdef int _move_any(Core core, Plan* plan, uint64_t address, uint64_t most, uint64_t* made) noexcept nogil:
    """Move the first victim of at most so many bytes that can be moved; NOT_READY where there is none."""
    cdef Mapped* mapped = &core.state.mapped
    cdef uint32_t i
    cdef int status
    while plan.used < plan.victim_count and mapped.victims[plan.used].used:
        plan.used += 1
    for i in range(plan.used, plan.victim_count):
        if not mapped.victims[i].used and mapped.handles[mapped.victims[i].number].memory.nbytes <= most:
            status = _move(core, plan, i, address, made)
            if status != STATUS_NOT_READY:
                return status
    return STATUS_NOT_READY


cdef int _release_any(Core core, Plan* plan) noexcept nogil:
    """Give the first victim back that no work can touch; NOT_READY where there is none.

    What is made in its stead is smaller.
    """
    cdef Mapped* mapped = &core.state.mapped
    cdef uint32_t i
    cdef uint64_t nbytes
    cdef int status
    for i in range(plan.used, 0 if plan.busy else plan.victim_count):
        if not mapped.victims[i].used:
            nbytes = mapped.handles[mapped.victims[i].number].memory.nbytes
            status = moves_release(core, &mapped.victims[i])
            if status == STATUS_OK:
                plan.excess -= min(plan.excess, nbytes)
            if status != STATUS_NOT_READY:
                return status
    plan.busy = True
    return STATUS_NOT_READY


cdef int _from_victims(Core core, Plan* plan, uint64_t address, uint64_t left, uint64_t room,
                       uint64_t* made) noexcept nogil:
    """Take memory from a victim for a hole: OK with nothing `made` where it went back to the source instead.

    A handle may hang over what is needed, where there is room: that it moves takes no time of the device.  One that
    goes back has to wait until its work is complete; a pool that is short of memory prefers that, for small ones.
    """
    cdef uint64_t whole = core.state.mapped.granularity if plan.short else left
    cdef int status = _come_back(core, plan, address, whole, made)
    if status == STATUS_NOT_READY:
        status = _move_any(core, plan, address, whole, made)
    if status == STATUS_NOT_READY and plan.short:
        made[0] = 0
        status = _release_any(core, plan)
    if status == STATUS_NOT_READY:
        status = _move_any(core, plan, address, room, made)
    if status == STATUS_NOT_READY and not plan.short:
        made[0] = 0
        status = _release_any(core, plan)
    return status


cdef int _step(Core core, Plan* plan, uint64_t address, uint64_t left, uint64_t room, uint64_t* made) noexcept nogil:
    """Give a hole memory from its begin on: `made` bytes, of `left` that are needed and `room` that it has."""
    cdef Mapped* mapped = &core.state.mapped
    cdef uint64_t reserved = atomic_read(core.state.reserved)
    cdef uint64_t nbytes, more
    cdef int status
    made[0] = 0
    if plan.excess:
        status = _from_victims(core, plan, address, left, room, made)
        if status != STATUS_NOT_READY:
            return status
        # More is reserved than it should be, rather than fail.
    nbytes = left if 2 * left < 3 * plan.unit else plan.unit
    if nbytes == left and plan.unit > mapped.granularity:
        # What follows would need a small handle again, which costs as much as a larger one.  Who asked for the
        # smallest ones gets them.
        more = min(round_up(<uint64_t> (reserved * LEAST_SHARE), mapped.granularity), LARGEST * plan.unit)
        if more > nbytes and reserved + more <= plan.most:
            nbytes = min(more, room)
    return moves_create(core, plan.hole, address, nbytes, made)


cdef int _fill_window(Core core, Plan* plan, uint32_t count) noexcept nogil:
    """Give every hole of a window memory, from its begin to its end."""
    cdef Mapped* mapped = &core.state.mapped
    cdef uint64_t end = plan.window.address + plan.window.nbytes
    cdef uint64_t at, stop, hole_end
    cdef uint64_t made = 0
    cdef uint32_t i = plan.window.first
    cdef int status
    while i < count and mapped.pieces[i].address < end:
        if mapped.pieces[i].hole:
            plan.hole = mapped.pieces[i].block_id
            at = max(mapped.pieces[i].address, plan.window.address)
            hole_end = mapped.pieces[i].address + mapped.pieces[i].nbytes
            stop = min(hole_end, round_up(end, mapped.granularity))
            while at < stop:
                status = _step(core, plan, at, stop - at, hole_end - at, &made)
                if status != STATUS_OK:
                    return status
                at += made
        i += 1
    return STATUS_OK


cdef bint _is_short(Core core, uint64_t live) noexcept nogil:
    """Whether every byte counts: the source has refused some, or more was live than the pool's limit leaves at ease.

    For good, unless the limit changes: small handles help only where all are small.
    """
    cdef Mapped* mapped = &core.state.mapped
    if live > core.state.ease * core.state.limit:
        mapped.short_at = core.state.limit
    return mapped.short_at == core.state.limit


cdef uint64_t _unit(Core core, Plan* plan, uint64_t nbytes) noexcept nogil:
    """Bytes of a new handle: half the usual ones where memory moves, for what moves best is small."""
    cdef uint64_t granularity = core.state.mapped.granularity
    cdef uint64_t unit = (<MappedSource> core.source).handle_bytes
    if plan.short or unit == granularity:
        return granularity
    if plan.excess:
        unit //= 2
    return round_up(max(unit, nbytes // AT_ONCE), granularity)


cdef void _list_victims(Core core, Plan* plan, uint32_t count) noexcept nogil:
    """List whom a window's memory can come from, where it is not all to be new."""
    cdef uint64_t reserved = atomic_read(core.state.reserved)
    plan.excess = plan.victim_count = plan.movable = 0
    if reserved + plan.window.holes > plan.most:
        plan.excess = reserved + plan.window.holes - plan.most
        plan.victim_count = window_victims(&core.state.mapped, count, &plan.window, &plan.movable)


cdef void _look_for_window(Core core, Plan* plan, uint32_t count, uint64_t nbytes, bint anywhere) noexcept nogil:
    """Choose a window, and list whom its memory can come from; that of the least memory is chosen already.

    Where so much can be moved that any window will do, and it may be anywhere, it is the one that takes the least time.
    Where too little can, and more is live than ever, it is the one that leaves the least to be reserved: it holds what
    is free beside live memory.
    """
    cdef Mapped* mapped = &core.state.mapped
    cdef uint64_t reserved = atomic_read(core.state.reserved)
    cdef uint64_t spare = 2 * (<MappedSource> core.source).handle_bytes
    cdef uint64_t movable = 0
    cdef uint32_t all_count
    cdef bint short
    cdef By by
    cdef Window none
    _list_victims(core, plan, count)
    if plan.excess == 0 or not anywhere:
        return
    short = plan.rises and plan.excess > plan.movable
    window_forget(mapped, plan.victim_count)
    none.address = none.nbytes = 0
    all_count = window_victims(mapped, count, &none, &movable)
    if short or reserved + nbytes + spare <= plan.most + movable:
        by = BY_SHORTAGE if short else BY_TIME
        window_costs(mapped, count, by)
        window_best(mapped, count, nbytes, by, &plan.window)
    window_forget(mapped, all_count)
    _list_victims(core, plan, count)


cdef int _make(Core core, uint64_t nbytes, Request* request, bint scarce) noexcept nogil:
    """Give some window of `nbytes` memory; where the source has none, that of others."""
    cdef CoreState* state = &core.state
    cdef Mapped* mapped = &state.mapped
    cdef Plan plan
    cdef uint32_t count = room_pieces(core)
    cdef uint64_t live = core_live_bytes(state) + request.nbytes
    cdef uint64_t reserved = atomic_read(state.reserved)
    cdef uint64_t peak_live = max(mapped.peak_live, live, atomic_read(state.peaks.allocated_bytes))
    cdef int status
    memset(&plan, 0, sizeof(Plan))
    if request.behind:
        if not window_at(mapped, count, request.behind, nbytes, &plan.window):
            return STATUS_NO_ROOM
    elif not window_best(mapped, count, nbytes, BY_MEMORY, &plan.window):
        return STATUS_NO_ROOM
    plan.most = reserved if scarce else min(
        state.limit, max(<uint64_t> (peak_live * (1 + (<MappedSource> core.source).slack)),
                         atomic_read(state.peak_reserved)))
    plan.short = _is_short(core, live)
    plan.rises = live >= peak_live
    _look_for_window(core, &plan, count, nbytes, request.behind == 0)
    plan.unit = _unit(core, &plan, nbytes)
    if reserved + plan.window.holes > state.limit + plan.movable + mapped.spare_bytes:
        status = STATUS_NO_ROOM
    else:
        status = _fill_window(core, &plan, count)
    window_forget(mapped, plan.victim_count)
    request.grown += plan.window.holes
    if status == STATUS_OK:
        atomic_write(mapped.peak_live, peak_live)    # of a request that fails nothing is ever live
        _take(core, &plan, nbytes, request)
    return status


cdef void _take(Core core, Plan* plan, uint64_t nbytes, Request* request) noexcept nogil:
    """Serve a request of the default stream where its window was meant to have it, unless somebody was quicker."""
    cdef Arena* arena = request.arena
    cdef BlockId block_id
    cdef uint64_t address = round_up(plan.window.block, request.alignment)
    if arena != core.state.arenas[0] or request.requested == 0:
        return
    bias_take(&arena.lock)
    block_id = moves_find(core, 0, address, request.nbytes, BLOCK_FREE)
    if block_id:
        request.block_id = arena_take_behind(arena, block_id, address - arena.blocks[block_id].address,
                                             request.nbytes, request.requested, request.tag)
        request.address = arena.blocks[request.block_id].address
    bias_drop(&arena.lock)


cdef int room_make(Core core, Request* request) noexcept nogil:
    """Make some free block of the range hold a request; the source's status.  O(blocks)."""
    cdef uint64_t nbytes
    cdef int status = STATUS_OK
    if core.state.keeps or core.state.limit < core.source.granularity:
        return STATUS_NO_ROOM
    if core.state.mapped.span.address == 0:
        status = _open(core)
    if status == STATUS_OK:
        # A block may begin at any multiple of the granule, so an alignment can cost that much more.
        nbytes = request.nbytes + request.alignment - GRANULE
        status = _make(core, nbytes, request, False)
        if status == STATUS_OUT_OF_MEMORY:
            core.state.mapped.short_at = core.state.limit
            status = _make(core, nbytes, request, True)
    if status != STATUS_OK and status != STATUS_NOT_READY and status != STATUS_NO_ROOM:
        request.status = status
        request.refused = request.nbytes
    return status

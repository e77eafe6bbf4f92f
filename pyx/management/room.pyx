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

from vpool._base.bias cimport bias_drop, bias_take
from vpool._base.lock cimport atomic_read, spin_lock, spin_unlock
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
from vpool._management.window cimport Window, window_best, window_last, window_link, window_victims
from vpool._storage.driver cimport STATUS_NOT_READY, STATUS_OK, STATUS_OUT_OF_MEMORY
from vpool._storage.mapped_source cimport MappedSource

cdef uint64_t MOST_RANGE = <uint64_t> 1 << 44     # bytes of address space
cdef uint64_t LEAST_RANGE = <uint64_t> 1 << 32

cdef enum:
    # Nanoseconds, as measured: to map a handle somewhere else and set its access, and to unmap one.
    MOVE_NS = 34_500
    UNMAP_NS = 21_000
    DEAR_NS = 1_000_000           # a window that costs more is compared with fresh addresses

# Of what is reserved: no handle is smaller where it can as well be larger.  Smaller ones cost driver calls, larger
# ones memory; measured on nine traces.
cdef double LEAST_SHARE = 0.006
cdef uint64_t LARGEST = 4         # handles of the usual size that such a one has at most

cdef struct Plan:
    Window window
    uint32_t victim_count
    uint64_t most                 # bytes that may be reserved before memory is taken from victims
    uint64_t excess               # bytes that have to come from them still
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
    if core.heaps is not None:
        core.heaps.add(segment.address, segment.nbytes)
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


cdef int _step(Core core, Plan* plan, uint64_t address, uint64_t left, uint64_t room, uint64_t* made) noexcept nogil:
    """Give a hole memory from its begin on: `made` bytes, of `left` that are needed and `room` that it has."""
    cdef Mapped* mapped = &core.state.mapped
    cdef uint64_t unit = (<MappedSource> core.source).handle_bytes
    cdef uint32_t number, i
    cdef uint64_t nbytes, more
    cdef int status
    made[0] = 0
    if plan.excess:
        number = mapped_at(mapped, address)
        if number and mapped.handles[number].candidate and mapped.handles[number].memory.nbytes <= left and (
                _comes_back(&mapped.handles[number], address)):
            i = mapped.handles[number].candidate - 1
            if not mapped.victims[i].used:
                made[0] = mapped.handles[number].memory.nbytes
                status = moves_take(core, &mapped.victims[i], plan.hole, address)
                if status != STATUS_NOT_READY:
                    plan.excess -= min(plan.excess, made[0])
                    return status
        for i in range(plan.victim_count):
            if not mapped.victims[i].used and mapped.handles[mapped.victims[i].number].memory.nbytes <= left:
                made[0] = mapped.handles[mapped.victims[i].number].memory.nbytes
                status = moves_take(core, &mapped.victims[i], plan.hole, address)
                if status != STATUS_NOT_READY:
                    plan.excess -= min(plan.excess, made[0])
                    return status
        made[0] = 0
        for i in range(plan.victim_count):
            if not mapped.victims[i].used:
                nbytes = mapped.handles[mapped.victims[i].number].memory.nbytes
                status = moves_release(core, &mapped.victims[i])
                if status != STATUS_NOT_READY:
                    plan.excess -= min(plan.excess, nbytes)
                    return status
        plan.excess = 0                           # more is reserved than it should be, rather than fail
    nbytes = left if 2 * left < 3 * unit else unit
    if nbytes == left and unit > mapped.granularity:
        # What follows would need a small handle again, which costs as much as a larger one.  Who asked for the
        # smallest ones gets them.
        more = round_up(<uint64_t> (atomic_read(core.state.reserved) * LEAST_SHARE), mapped.granularity)
        more = min(more, LARGEST * unit)
        if more > nbytes and atomic_read(core.state.reserved) + more <= plan.most:
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


cdef uint64_t _cost(Core core, Window* window) noexcept nogil:
    """Nanoseconds that a window may take, if all its memory is moved."""
    cdef Mapped* mapped = &core.state.mapped
    cdef uint64_t mean = mapped.nbytes // mapped.handle_count if mapped.handle_count else 1
    return window.holes * MOVE_NS // max(mean, <uint64_t> 1)


cdef uint64_t _stale_cost(Core core, Window* window, uint32_t count) noexcept nogil:
    """And to unmap what is stale in its holes."""
    cdef Mapped* mapped = &core.state.mapped
    cdef uint64_t end = window.address + window.nbytes
    cdef uint64_t at, total
    cdef uint32_t i = window.first
    cdef uint32_t number
    cdef uint32_t before = 0
    total = 0
    while i < count and mapped.pieces[i].address < end:
        if mapped.pieces[i].hole:
            at = max(mapped.pieces[i].address, window.address)
            while at < min(mapped.pieces[i].address + mapped.pieces[i].nbytes, end):
                number = mapped_at(mapped, at)
                if number and number != before:
                    total += UNMAP_NS
                before = number
                at += mapped.granularity
        i += 1
    return total


cdef int _make(Core core, uint64_t nbytes, Request* request, bint scarce) noexcept nogil:
    """Give some window of `nbytes` memory; where the source has none, that of others."""
    cdef CoreState* state = &core.state
    cdef Mapped* mapped = &state.mapped
    cdef Plan plan
    cdef Window fresh
    cdef uint32_t count = room_pieces(core)
    cdef uint64_t live = core_live_bytes(state) + request.nbytes
    cdef uint64_t reserved = atomic_read(state.reserved)
    cdef uint64_t movable = 0
    cdef uint64_t cost
    cdef uint32_t i
    cdef int status
    if not window_best(mapped.pieces, count, nbytes, mapped.granularity, &plan.window):
        return STATUS_NO_ROOM
    cost = _cost(core, &plan.window) + _stale_cost(core, &plan.window, count)
    if cost > DEAR_NS and window_last(mapped.pieces, count, nbytes, mapped.granularity, &fresh) and (
            _cost(core, &fresh) + _stale_cost(core, &fresh, count) < cost):
        plan.window = fresh
    mapped.peak_live = max(mapped.peak_live, live, atomic_read(state.peaks.allocated_bytes))
    plan.most = reserved if scarce else min(
        state.limit, max(<uint64_t> (mapped.peak_live * (1 + (<MappedSource> core.source).slack)),
                         atomic_read(state.peak_reserved)))
    plan.excess = reserved + plan.window.holes - plan.most if reserved + plan.window.holes > plan.most else 0
    plan.victim_count = 0
    if plan.excess:
        plan.victim_count = window_victims(mapped, mapped.pieces, count, &plan.window, &movable)
    if reserved + plan.window.holes > state.limit + movable + mapped.spare_bytes:
        status = STATUS_NO_ROOM
    else:
        status = _fill_window(core, &plan, count)
    for i in range(plan.victim_count):
        mapped.handles[mapped.victims[i].number].candidate = 0
    request.grown += plan.window.holes
    if status == STATUS_OK:
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
            status = _make(core, nbytes, request, True)
    if status != STATUS_OK and status != STATUS_NOT_READY and status != STATUS_NO_ROOM:
        request.status = status
        request.refused = request.nbytes
    return status

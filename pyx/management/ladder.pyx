"""The ladder of a miss: what is tried before a request fails, and how a pool grows."""
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from vpool._base.bias cimport bias_drop, bias_take
from vpool._base.lock cimport atomic_add, atomic_read, atomic_write, spin_lock, spin_unlock
from vpool._base.turn cimport turn_give, turn_is_mine, turn_take
from vpool._base.types cimport BLOCK_FREE, GRANULE, SEGMENT_ROUNDING, Block, BlockId, round_down, round_up
from vpool._management.arena cimport ANY_STAMP, Arena, arena_allocated, arena_find_aligned
from vpool._management.core cimport STATUS_MISALIGNED, Core, core_live_bytes, request_broken
from vpool._management.cross cimport cross_merge, cross_ready, cross_recall, cross_steal, cross_take_own
from vpool._management.freelist cimport freelist_find
from vpool._management.order cimport order_await, order_is_host, order_proved_upto, order_reachable, order_waited
from vpool._management.room cimport room_make
from vpool._management.state cimport (
    RUNG_GROW,
    RUNG_MERGE,
    RUNG_SEARCH,
    RUNG_TRIM,
    RUNGS,
    STATE_ADAPTIVE,
    CoreState,
    GrowthRule,
    Request,
    Segment,
    slot_count,
)
from vpool._storage.driver cimport STATUS_OK, STATUS_OUT_OF_MEMORY

cdef enum:
    MOST_FOR_CAPTURES = 32 << 20  # bytes that a capture takes beyond what it needs
    MOST_TRIES = 8                # to make room that other threads take first
    # Where idle segments go back before the pool grows, measured on nine traces at four scales each.
    MOST_STEP = 640 << 20         # bytes that a segment has beyond what it needs at most
    OWN_SEGMENT = 128 << 20       # requests of as much get a segment of their own, which can go back when they do

RUNG_NAMES = (
    "search the whole size class",
    "pending blocks that are ready",
    "other streams' free blocks",
    "merge across streams",
    "grow",
    "give idle segments back and grow",
    "pressure callbacks",
    "collect Python's garbage",
    "wait for pending work",
)

ctypedef BlockId (*rung_t)(Core core, Request* request) noexcept nogil


cdef BlockId _search(Core core, Request* request) noexcept nogil:
    return cross_take_own(request)


cdef void take_crossing(Core core, Request* request) noexcept nogil:
    """The crossing turn, for a request whose stream its caller has just named."""
    turn_take(&core.state.crossing_turn)
    core.state.table[request.arena.slot].asking = True


cdef void give_crossing(Core core, Request* request) noexcept nogil:
    core.state.table[request.arena.slot].asking = False
    turn_give(&core.state.crossing_turn)


cdef BlockId _ready(Core core, Request* request) noexcept nogil:
    if atomic_read(request.arena.pending_blocks):
        take_crossing(core, request)
        cross_ready(&core.state, core.source, request.arena)
        give_crossing(core, request)
    return 0


cdef bint _is_at_home(Core core, Arena* arena) noexcept nogil:
    """Whether it pays that all free memory goes home before an arena gets some.

    Not where other streams than the default one have most of what is live: they would only borrow it once more.
    """
    cdef Arena* home = core.state.arenas[0]
    return arena == home or 2 * arena_allocated(home) > core_live_bytes(&core.state)


cdef BlockId _steal(Core core, Request* request) noexcept nogil:
    if slot_count(&core.state) > 1:
        take_crossing(core, request)
        if core.source.granularity and not request.arena.captured and _is_at_home(core, request.arena):
            # Whole again at home, free memory is worth more than in parts with whoever had it last.
            cross_recall(&core.state, core.source)
            if cross_take_own(request):
                give_crossing(core, request)
                return request.block_id
        cross_steal(&core.state, core.source, request)
        give_crossing(core, request)
    return request.block_id


cdef BlockId _merge(Core core, Request* request) noexcept nogil:
    if slot_count(&core.state) > 1:
        take_crossing(core, request)
        cross_merge(&core.state, core.source, request)
        give_crossing(core, request)
    return request.block_id


cdef BlockId _grow(Core core, Request* request) noexcept nogil:
    """Ask the source for a segment by the growth rule, for less near a limit, at last for the need."""
    if turn_is_mine(&core.state.growth_turn):
        request.refused = request.nbytes          # the source calls its pool: it cannot be asked meanwhile
        return 0
    if not turn_take(&core.state.growth_turn) or not _search(core, request):
        _grow_in_turn(core, request)
    turn_give(&core.state.growth_turn)
    return request.block_id


cdef uint64_t _next_step(CoreState* state, uint64_t need) noexcept nogil:
    cdef GrowthRule* rule = &state.rule
    cdef uint64_t reserved = atomic_read(state.reserved)
    cdef uint64_t step = rule.step
    if reserved == 0:
        return rule.initial
    if step == 0:
        step = <uint64_t> (<double> reserved * (rule.factor - 1))
    if atomic_read(state.word) & STATE_ADAPTIVE:
        return _adapted(state, step, reserved)
    if rule.trims:
        return need if need >= OWN_SEGMENT else min(step, <uint64_t> MOST_STEP)
    return step


cdef uint64_t _adapted(CoreState* state, uint64_t step, uint64_t reserved) noexcept nogil:
    """A step that follows recent demand: a quarter of what live memory has risen by, an eighth of all at most."""
    cdef uint64_t live = core_live_bytes(state)
    cdef uint64_t low = min(state.demand.low, state.demand.low_before)
    cdef uint64_t risen = live - low if live > low else 0
    step = min(step, reserved // 8)
    return min(step, risen // 4)


cdef uint64_t _capture_step(Arena* arena) noexcept nogil:
    """Of the memory of a capture, which nothing else can use: by a quarter of what is live there."""
    return min(max(arena_allocated(arena) // 4, <uint64_t> SEGMENT_ROUNDING), <uint64_t> MOST_FOR_CAPTURES)


cdef bint _has_whole(CoreState* state) noexcept nogil:
    """Whether some segment is one free block, perhaps one that work may still touch.  O(segments)."""
    cdef Segment* segment
    cdef Block* block
    cdef uint32_t i
    cdef bint found = False
    spin_lock(&state.lock)
    for i in range(state.segment_count):
        segment = &state.segments[i]
        if segment.edge and not segment.mapped and not found:
            bias_take(&segment.arena.lock)
            block = &segment.arena.blocks[segment.arena.blocks[segment.edge].next]
            found = block.state == BLOCK_FREE and block.nbytes == segment.nbytes
            bias_drop(&segment.arena.lock)
    spin_unlock(&state.lock)
    return found


cdef void _make_room(Core core, uint64_t want) noexcept nogil:
    """Give idle segments, which did not fit the request, back before another one comes."""
    cdef CoreState* state = &core.state
    cdef uint64_t live = core_live_bytes(state)
    cdef uint64_t reserved = atomic_read(state.reserved)
    if atomic_read(state.word) & STATE_ADAPTIVE:
        if reserved > live + live // 16:
            core.prove_idle()
            core.give_idle(live, live + live // 32)
    elif state.rule.trims and reserved + want > atomic_read(state.peak_reserved) and _has_whole(state):
        core.prove_idle()
        core.give_idle(0, 0)


cdef void _grow_mapped(Core core, Request* request) noexcept nogil:
    """Make room where memory can be moved: in the arena of the default stream, from which the others borrow."""
    cdef int _i
    for _i in range(MOST_TRIES):
        if room_make(core, request) != STATUS_OK or request.block_id or request.requested == 0 or (
                _search(core, request)):
            return
        if request.arena != core.state.arenas[0] and _steal(core, request):
            return


cdef void _grow_in_turn(Core core, Request* request) noexcept nogil:
    cdef CoreState* state = &core.state
    # A segment may begin at any multiple of the granule, so an alignment can cost that much more.
    cdef uint64_t need = request.nbytes + request.alignment - GRANULE + state.base_slack
    cdef uint64_t want, granted
    cdef uint64_t unit = core.source.granularity
    cdef int status
    if unit and not request.arena.captured:
        _grow_mapped(core, request)
        return
    if request.arena.captured:
        want = _capture_step(request.arena)
    else:
        if request.requested or atomic_read(state.word) & STATE_ADAPTIVE:     # 0: nobody waits for it
            _make_room(core, max(need, _next_step(state, need)))
        want = _next_step(state, need)
    # What a request alone decides has its size: a tail would take small blocks, which outlive it and pin all of it.
    want = round_up(want, SEGMENT_ROUNDING if want >= SEGMENT_ROUNDING else GRANULE) if want > need else need
    if unit:
        need = round_up(need, unit)
        want = round_up(want, unit)
    while True:
        granted = core.may_take(need, want, request.tag)
        if granted == 0:
            return
        status = core.add_segment(granted, request)
        if status == STATUS_MISALIGNED:
            need += GRANULE
            want = need if need > want else want
            continue
        if status == STATUS_OK:
            if request.requested and request.nbytes > state.largest_growth:
                atomic_write(state.largest_growth, request.nbytes)
            return
        request.status = status
        request.refused = granted
        if granted == need or status != STATUS_OUT_OF_MEMORY or request.no_record:
            return
        want = need + round_down((granted - need) >> 1, SEGMENT_ROUNDING)


cdef BlockId _trim(Core core, Request* request) noexcept nogil:
    """Give back what is idle and surely complete, then grow by what the request needs."""
    cdef uint64_t released = 0
    if request_broken(request):
        return 0
    core.prove_idle()
    core.release_idle(0, &released)
    return _grow(core, request) if released or core.source.granularity else 0


cdef int _slot_of_busy(CoreState* state) noexcept nogil:
    """Slot of the largest segment that is one free block which work may still touch; -1 for none.  O(segments)."""
    cdef Segment* segment
    cdef Block* block
    cdef uint64_t largest = 0
    cdef uint32_t i
    cdef int slot = -1
    spin_lock(&state.lock)
    for i in range(0 if state.keeps else state.segment_count):
        segment = &state.segments[i]
        if segment.edge == 0 or segment.mapped or segment.exported or segment.arena.captured or (
                segment.nbytes <= largest):
            continue
        bias_take(&segment.arena.lock)
        block = &segment.arena.blocks[segment.arena.blocks[segment.edge].next]
        if block.state == BLOCK_FREE and block.nbytes == segment.nbytes and (
                block.stamp > atomic_read(state.table[segment.arena.slot].done)):
            largest = segment.nbytes
            slot = segment.arena.slot
        bias_drop(&segment.arena.lock)
    spin_unlock(&state.lock)
    return slot


cdef BlockId _wait_for_some(Core core, Request* request) noexcept nogil:
    """Wait for one stream after another that keeps a whole segment from going back, until there is enough room."""
    cdef int status = STATUS_OK
    cdef int slot = _slot_of_busy(&core.state)
    cdef int _i
    for _i in range(MOST_TRIES):
        if slot < 0 or status != STATUS_OK:
            break
        take_crossing(core, request)
        status = order_await(&core.state, core.source, slot)
        give_crossing(core, request)
        if status == STATUS_OK and _trim(core, request):
            break
        slot = _slot_of_busy(&core.state)
    return request.block_id


cdef BlockId _wait(Core core, Request* request) noexcept nogil:
    """Wait for the streams whose idle memory would do, else for all; then what is pending is free, and idle can go."""
    cdef int status
    if _wait_for_some(core, request) or request_broken(request):
        return request.block_id
    status = core.drain()
    if not order_waited(status):
        request.status = status
        return 0
    return request.block_id if _search(core, request) or _merge(core, request) else _trim(core, request)


cdef rung_t[<int> RUNGS] LADDER = [_search, _ready, _steal, _merge, _grow, _trim, NULL, NULL, _wait]
# In a capture nothing is waited for, and nothing goes back to the source.
cdef rung_t[<int> RUNGS] CAPTURE_LADDER = [_search, NULL, _steal, NULL, _grow, NULL, NULL, NULL, NULL]
# The host has no stream that could wait behind an event.
cdef rung_t[<int> RUNGS] HOST_LADDER = [_search, _ready, _steal, NULL, _grow, _trim, NULL, NULL, _wait]


cdef BlockId ladder_climb(Core core, Request* request, int first, int last) noexcept nogil:
    """Try some rungs of the ladder.  Takes no lock but for moments."""
    cdef CoreState* state = &core.state
    cdef rung_t* rungs = &CAPTURE_LADDER[0] if request.arena.captured else &LADDER[0]
    cdef int rung
    if order_is_host(&state.table[request.arena.slot]):
        rungs = &HOST_LADDER[0]
    core.settle()
    for rung in range(first, last + 1):
        if rungs[rung] == NULL:
            continue
        atomic_add(state.rung_tries[rung], 1)
        request.tried |= <uint32_t> 1 << rung
        if rungs[rung](core, request) or (rung > RUNG_SEARCH and _search(core, request)):
            atomic_add(state.rung_hits[rung], 1)
            break
    if request.grown and request.block_id:
        atomic_add(state.misses, 1)
        atomic_add(state.missed_bytes, request.requested)
    return request.block_id


cdef BlockId ladder_search_all(Core core, Request* request) noexcept nogil:
    """The last search: no list is too long, and no block that is complete stands behind one that is not."""
    cdef uint32_t looks = request.looks
    request.looks = 0
    if not _search(core, request):
        _steal(core, request)
    request.looks = looks
    if request.block_id:
        atomic_add(core.state.rung_tries[<int> RUNG_SEARCH], 1)
        atomic_add(core.state.rung_hits[<int> RUNG_SEARCH], 1)
    return request.block_id


cdef uint64_t _usable_upto(Core core, uint32_t slot) noexcept nogil:
    """The highest stamp of a slot whose free memory the default stream can have without growth.  Takes the turn.

    Any, where something may be waited for; in a pool that never waits what a stream out of reach freed has to be
    complete, for no event tells when it is.
    """
    cdef CoreState* state = &core.state
    cdef uint64_t upto = ANY_STAMP
    if slot == 0 or not state.never_waits:
        return upto
    turn_take(&state.crossing_turn)
    if not order_reachable(core.source, &state.table[slot]):
        upto = order_proved_upto(state, 0, slot)
    turn_give(&state.crossing_turn)
    return upto


cdef bint _at_hand(Core core, uint64_t nbytes) noexcept nogil:
    """Whether some stream has a free block of `nbytes` that others could have.

    Looks as hard as a request does before it grows.  O(slots + blocks of the size's class).
    """
    cdef CoreState* state = &core.state
    cdef Arena* arena
    cdef uint64_t upto
    cdef uint32_t slot
    cdef bint found = False
    for slot in range(slot_count(state)):
        arena = state.arenas[slot]
        if found or arena.captured:
            continue
        upto = _usable_upto(core, slot)
        bias_take(&arena.lock)
        found = arena_find_aligned(arena, nbytes, GRANULE, upto, 0) != 0 or (
            upto == ANY_STAMP and freelist_find(arena, nbytes) != 0)
        bias_drop(&arena.lock)
    return found


cdef int ladder_ensure(Core core, uint64_t nbytes) noexcept nogil:
    """Grow by the growth rule unless a free block of `nbytes` is at hand; the source's status."""
    cdef CoreState* state = &core.state
    cdef Request request
    memset(&request, 0, sizeof(Request))
    request.arena = state.arenas[0]
    request.nbytes = round_up(nbytes, GRANULE)
    request.alignment = GRANULE
    if turn_is_mine(&state.growth_turn):
        return STATUS_OK                          # the source calls its pool, which grows just now
    turn_take(&state.growth_turn)
    if not _at_hand(core, request.nbytes):
        _grow_in_turn(core, &request)
    turn_give(&state.growth_turn)
    return request.status


cdef bint _reserve_in_turn(Core core, Request* request) noexcept nogil:
    cdef uint64_t released = 0
    request.tried |= <uint32_t> 1 << <int> RUNG_MERGE
    core.coalesce()
    if _at_hand(core, request.nbytes):
        return True
    request.tried |= <uint32_t> 1 << <int> RUNG_GROW
    _grow_in_turn(core, request)
    if request_broken(request):
        return False
    # A new segment is what was asked for, also if others took it meanwhile.
    if request.grown and core.source.granularity == 0 or _at_hand(core, request.nbytes):
        return True
    request.tried |= <uint32_t> 1 << <int> RUNG_TRIM
    core.prove_idle()
    core.release_idle(0, &released)
    if released or core.source.granularity:
        _grow_in_turn(core, request)
    return _at_hand(core, request.nbytes)


cdef bint ladder_reserve(Core core, Request* request) noexcept nogil:
    """Have a free block for a request at hand, until somebody takes it; False, with the reasons in the request."""
    cdef uint64_t requested = request.requested
    cdef bint found
    if turn_is_mine(&core.state.growth_turn):
        request.refused = request.nbytes          # the source calls its pool: it cannot be asked meanwhile
        return False
    request.requested = 0                         # nobody waits for it
    turn_take(&core.state.growth_turn)
    found = _reserve_in_turn(core, request)
    turn_give(&core.state.growth_turn)
    request.requested = requested
    return found

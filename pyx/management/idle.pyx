"""What a mapped pool does with memory that nobody has: it goes back, comes home, or is counted."""
from libc.stdint cimport uint32_t, uint64_t

from vpool._base.bias cimport bias_drop, bias_take
from vpool._base.lock cimport atomic_read, atomic_write, spin_lock, spin_unlock
from vpool._base.memory cimport lazy_release
from vpool._base.turn cimport turn_give, turn_take
from vpool._management.arena cimport Arena, arena_allocated
from vpool._management.core cimport Core, core_live_bytes
from vpool._management.cross cimport cross_gather
from vpool._management.holes cimport holes_remove_segment
from vpool._management.mapped cimport Mapped, MappedHandle, Victim, mapped_is_open, mapped_release, mapped_unmap
from vpool._management.moves cimport (
    moves_complete,
    moves_complete_everywhere,
    moves_count,
    moves_punch,
    moves_put,
    moves_release,
    moves_segment,
)
from vpool._management.room cimport room_pieces
from vpool._management.state cimport STATE_CLOSED, CoreState, Segment, slot_count
from vpool._management.window cimport Window, window_forget, window_victims
from vpool._storage.driver cimport STATUS_NOT_READY, STATUS_OK
from vpool._storage.mapped_source cimport MappedSource

cdef enum:
    AT_REST = 100                 # live memory below this part of its peak: handles go home
    AT_WORK = 50                  # and above this one: they may again
    PARKED = 64                   # part of what is reserved that other streams may keep free


cdef void _unmap_stale(Core core) noexcept nogil:
    """Unmap whatever is stale and no work can touch."""
    cdef Mapped* mapped = &core.state.mapped
    cdef MappedHandle* handle
    cdef uint32_t number
    cdef int place
    for number in range(1, mapped.fresh):
        handle = &mapped.handles[number]
        for place in range(handle.place_count - 1 if handle.memory.token else -1, -1, -1):
            if place != handle.active and moves_complete(core, handle.places[place].stamp, False):
                mapped_unmap(mapped, <MappedSource> core.source, number, place)


cdef int _release_spare(Core core) noexcept nogil:
    """Give back what has no blocks, where no work can touch it."""
    cdef Mapped* mapped = &core.state.mapped
    cdef MappedHandle* handle
    cdef uint32_t number
    cdef uint64_t nbytes
    cdef int first = STATUS_OK
    cdef int status
    for number in range(1, mapped.fresh):
        handle = &mapped.handles[number]
        if handle.memory.token and handle.active < 0 and moves_complete_everywhere(core, handle, 0):
            nbytes = handle.memory.nbytes
            status = mapped_release(mapped, <MappedSource> core.source, number)
            first = status if first == STATUS_OK else first
            if handle.memory.token == 0:
                moves_count(core)
                core.not_taken(nbytes)
    return first


cdef int _close_range(Core core) noexcept nogil:
    """Of a closed pool: give the addresses back too, once nothing is mapped there."""
    cdef CoreState* state = &core.state
    cdef Mapped* mapped = &state.mapped
    cdef Arena* arena = state.arenas[0]
    cdef Segment* segment
    cdef uint64_t granules = mapped.span.nbytes // mapped.granularity
    cdef bint empty
    spin_lock(&state.lock)
    segment = moves_segment(core)
    bias_take(&arena.lock)
    empty = mapped.handle_count == 0 and holes_remove_segment(arena, mapped.edge, mapped.span.nbytes)
    bias_drop(&arena.lock)
    if empty:
        state.segment_count -= 1
        segment[0] = state.segments[state.segment_count]
    spin_unlock(&state.lock)
    if not empty:
        return STATUS_OK
    lazy_release(mapped.at, granules * sizeof(uint32_t))
    mapped.at = NULL
    return core.source.unreserve(&mapped.span)


cdef int idle_trim(Core core, uint64_t keep, uint64_t* released) noexcept nogil:
    """Give wholly free handles back as far as `keep` bytes stay reserved, and what is stale.  Takes the growth turn.

    Goes on where the source refuses one, and returns the first status that was none of success.
    """
    cdef CoreState* state = &core.state
    cdef Mapped* mapped = &state.mapped
    cdef Window none
    cdef Victim* victim
    cdef uint64_t movable, before
    cdef uint32_t count, i
    cdef int first, status
    turn_take(&state.growth_turn)
    if mapped.span.address == 0:
        turn_give(&state.growth_turn)
        return STATUS_OK
    before = atomic_read(state.reserved)
    first = _release_spare(core)
    none.address = none.nbytes = 0
    count = window_victims(mapped, room_pieces(core), &none, &movable)
    for i in range(count):
        victim = &mapped.victims[i]
        mapped.handles[victim.number].candidate = 0
        if atomic_read(state.reserved) >= keep + mapped.handles[victim.number].memory.nbytes:
            status = moves_release(core, victim)
            if status != STATUS_NOT_READY and first == STATUS_OK:
                first = status
    _unmap_stale(core)
    released[0] += before - min(before, atomic_read(state.reserved))
    if atomic_read(state.word) & STATE_CLOSED:
        status = _close_range(core)
        first = status if first == STATUS_OK else first
    turn_give(&state.growth_turn)
    return first


cdef void _go_home(Core core, uint32_t number) noexcept nogil:
    """Let a wholly free handle's memory be at its first place again."""
    cdef Mapped* mapped = &core.state.mapped
    cdef MappedHandle* handle = &mapped.handles[number]
    cdef uint64_t from_address = handle.places[handle.active].address
    cdef uint64_t stamp = 0
    if moves_punch(core, 0, from_address, handle.memory.nbytes, &stamp):
        mapped.returns += moves_put(core, number, 0, 0, stamp) == STATUS_OK


cdef bint _is_parked(Core core, uint64_t live) noexcept nogil:
    """Whether streams keep more free of the range than before, and the default stream has lent more than that anew."""
    cdef CoreState* state = &core.state
    cdef uint64_t home, lent, parked
    lent = atomic_read(state.arenas[0].lent_bytes)
    if lent == 0:
        return False
    home = arena_allocated(state.arenas[0]) + atomic_read(state.arenas[0].pending_bytes)
    parked = lent + home - live if lent + home > live else 0
    return parked > atomic_read(state.reserved) // PARKED and (
        atomic_read(state.arenas[0].served_bytes) - atomic_read(state.mapped.served) > parked)


cdef bint _comes_to_rest(Core core, uint64_t live) noexcept nogil:
    """Whether little is live, for the first time since much was, or half as much as the last time."""
    cdef Mapped* mapped = &core.state.mapped
    cdef uint64_t peak = max(atomic_read(core.state.peaks.allocated_bytes), atomic_read(mapped.peak_live))
    cdef uint64_t before = atomic_read(mapped.home_live)
    if live * AT_WORK > peak:
        atomic_write(mapped.home_live, live)
        return False
    return live * AT_REST < peak and 2 * live <= before and before != 0


cdef bint idle_wanted(Core core) noexcept nogil:
    """Whether `idle_look` has something to do.  Takes no lock."""
    cdef uint64_t live = core_live_bytes(&core.state)
    return _comes_to_rest(core, live) or _is_parked(core, live)


cdef void _release_large(Core core) noexcept nogil:
    """Give back what is larger than a granule, so that it comes again in small handles: see `room`."""
    cdef Mapped* mapped = &core.state.mapped
    cdef Window none
    cdef uint64_t movable
    cdef uint32_t count, i
    none.address = none.nbytes = 0
    count = window_victims(mapped, room_pieces(core), &none, &movable)
    window_forget(mapped, count)
    for i in range(count):
        if mapped.handles[mapped.victims[i].number].memory.nbytes > mapped.granularity:
            moves_release(core, &mapped.victims[i])


cdef void idle_look(Core core) noexcept nogil:
    """Where little is live, let handles go home, so that the next step finds what the first one made.

    Once, and again whenever half as much is live.  What other streams keep goes home before, and the default stream
    comes after their work, so that what is found does not depend on what was complete.  Called after frees; takes
    the growth turn where there is something to do.
    """
    cdef CoreState* state = &core.state
    cdef Mapped* mapped = &state.mapped
    cdef uint64_t live = core_live_bytes(state)
    cdef uint32_t number
    if _is_parked(core, live):
        atomic_write(mapped.served, atomic_read(state.arenas[0].served_bytes))
        core.coalesce()
    if not _comes_to_rest(core, live):
        return
    turn_take(&state.growth_turn)
    atomic_write(mapped.home_live, live)
    if slot_count(state) > 1:
        turn_take(&state.crossing_turn)
        cross_gather(state, core.source)
        turn_give(&state.crossing_turn)
    for number in range(1, mapped.fresh):
        if mapped.handles[number].memory.token and mapped.handles[number].active > 0 and (
                mapped_is_open(&mapped.handles[number], 0)):
            _go_home(core, number)
    if mapped.short_at == state.limit:
        _release_large(core)
    turn_give(&state.growth_turn)


cdef uint64_t idle_movable(Core core) noexcept nogil:
    """Bytes of handles that hold nothing but free memory.  Takes the growth turn."""
    cdef Mapped* mapped = &core.state.mapped
    cdef Window none
    cdef uint64_t movable = 0
    cdef uint32_t count
    turn_take(&core.state.growth_turn)
    if mapped.span.address:
        none.address = none.nbytes = 0
        count = window_victims(mapped, room_pieces(core), &none, &movable)
        window_forget(mapped, count)
        movable += mapped.spare_bytes
    turn_give(&core.state.growth_turn)
    return movable

"""Single moves of a mapped segment's memory: the block that a handle leaves or gets, and the handle, together.

Each has an effect or none: what the driver refuses leaves the memory where it was.  Blocks change under the arena's
lock, and before the driver is called where memory goes, after it where memory comes, so that whoever allocates
meanwhile only ever finds what has memory.  The growth turn is the caller's, and no lock.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from vpool._base.bias cimport bias_drop, bias_take
from vpool._base.lock cimport atomic_add, atomic_read, atomic_write, lone_count, spin_lock, spin_unlock
from vpool._base.turn cimport turn_give, turn_take
from vpool._base.types cimport BLOCK_FREE, BLOCK_UNMAPPED, Block, BlockId
from vpool._management.arena cimport Arena, arena_containing
from vpool._management.core cimport Core
from vpool._management.cross cimport cross_prove
from vpool._management.holes cimport holes_fill, holes_may_fill, holes_punch
from vpool._management.mapped cimport (
    MOST_PLACES,
    Mapped,
    MappedHandle,
    Victim,
    mapped_activate,
    mapped_at,
    mapped_create,
    mapped_deactivate,
    mapped_is_open,
    mapped_map,
    mapped_place_at,
    mapped_release,
    mapped_unmap,
)
from vpool._management.order cimport order_await
from vpool._management.state cimport CoreState, Segment
from vpool._storage.driver cimport STATUS_NOT_READY, STATUS_OK, STATUS_OUT_OF_MEMORY
from vpool._storage.mapped_source cimport MappedSource


cdef Segment* moves_segment(Core core) noexcept nogil:
    """The mapped segment.  The pool's lock is held."""
    cdef uint32_t i
    for i in range(core.state.segment_count):
        if core.state.segments[i].mapped:
            return &core.state.segments[i]
    return NULL


cdef BlockId moves_find(Core core, BlockId hint, uint64_t address, uint64_t nbytes, int wanted) noexcept nogil:
    """The block in a state that `nbytes` at an address lie in, or 0.  The arena's lock is held."""
    cdef Arena* arena = core.state.arenas[0]
    cdef Block* block = &arena.blocks[hint]
    if hint == 0 or block.state != wanted or address - block.address >= block.nbytes:
        hint = arena_containing(arena, core.state.mapped.edge, address)
        block = &arena.blocks[hint]
    if hint and block.state == wanted and nbytes <= block.nbytes - (address - block.address):
        return hint
    return 0


cdef bint moves_punch(Core core, BlockId hint, uint64_t address, uint64_t nbytes, uint64_t* stamp) noexcept nogil:
    """Make free memory a hole, if it still is free."""
    cdef Arena* arena = core.state.arenas[0]
    cdef BlockId block_id
    cdef bint done
    bias_take(&arena.lock)
    block_id = moves_find(core, hint, address, nbytes, BLOCK_FREE)
    stamp[0] = arena.blocks[block_id].stamp
    done = block_id != 0 and holes_punch(arena, block_id, address, nbytes)
    bias_drop(&arena.lock)
    return done


cdef bint moves_fill(Core core, BlockId hint, uint64_t address, uint64_t nbytes, uint64_t stamp) noexcept nogil:
    """Make a part of a hole, which has memory now, free; False where no record is left."""
    cdef Arena* arena = core.state.arenas[0]
    cdef BlockId hole_id
    cdef bint done
    bias_take(&arena.lock)
    hole_id = moves_find(core, hint, address, nbytes, BLOCK_UNMAPPED)
    done = hole_id != 0 and holes_fill(arena, hole_id, address, nbytes, stamp)
    bias_drop(&arena.lock)
    return done


cdef bint moves_complete(Core core, uint64_t stamp, bint may_wait) noexcept nogil:
    """Whether all work on what the default stream freed up to a stamp is complete; waits for it if that may be."""
    cdef CoreState* state = &core.state
    if stamp <= atomic_read(state.table[0].done):
        return True
    turn_take(&state.crossing_turn)
    cross_prove(state, core.source, 0)
    if may_wait and not state.never_waits and stamp > atomic_read(state.table[0].done):
        order_await(state, core.source, 0)
    turn_give(&state.crossing_turn)
    return stamp <= atomic_read(state.table[0].done)


cdef void moves_count(Core core) noexcept nogil:
    """Bring the pool's figures up to date with what is mapped."""
    cdef CoreState* state = &core.state
    cdef uint64_t now = state.mapped.nbytes + state.mapped.spare_bytes
    cdef Segment* segment
    spin_lock(&state.lock)
    segment = moves_segment(core)
    lone_count(state.reserved, <int64_t> (now - segment.handle.nbytes))
    segment.handle.nbytes = now
    if state.reserved > state.peak_reserved:
        atomic_write(state.peak_reserved, state.reserved)
    spin_unlock(&state.lock)


cdef int _clear(Core core, uint64_t address, uint64_t nbytes) noexcept nogil:
    """Unmap what is stale in the way of a mapping."""
    cdef Mapped* mapped = &core.state.mapped
    cdef uint64_t at = address
    cdef uint32_t number
    cdef MappedHandle* handle
    cdef int place, status
    while at < address + nbytes:
        number = mapped_at(mapped, at)
        if number:
            handle = &mapped.handles[number]
            place = mapped_place_at(handle, at)
            if not moves_complete(core, handle.places[place].stamp, True):
                return STATUS_NOT_READY
            status = mapped_unmap(mapped, <MappedSource> core.source, number, place)
            if status != STATUS_OK:
                return status
        at += mapped.granularity
    return STATUS_OK


cdef bint _make_place(Core core, MappedHandle* handle, uint32_t number) noexcept nogil:
    """See that a handle can be mapped at one more place: all but the first and the active one can be given up."""
    cdef int place
    if handle.place_count < MOST_PLACES:
        return True
    for place in range(MOST_PLACES - 1, 0, -1):
        if place != handle.active and moves_complete(core, handle.places[place].stamp, False):
            return mapped_unmap(&core.state.mapped, <MappedSource> core.source, number, place) == STATUS_OK
    return False


cdef int _put_back(Core core, uint32_t number, BlockId hint, uint64_t stamp) noexcept nogil:
    """Let a handle's memory be free where it is, after a stamp; where no record is left for that it is spare."""
    cdef Mapped* mapped = &core.state.mapped
    cdef MappedHandle* handle = &mapped.handles[number]
    if moves_fill(core, hint, handle.places[handle.active].address, handle.memory.nbytes, stamp):
        return STATUS_OK
    mapped_deactivate(mapped, number, stamp)
    return STATUS_OUT_OF_MEMORY


cdef int moves_put(Core core, uint32_t number, int place, BlockId hint, uint64_t stamp) noexcept nogil:
    """Let a handle's memory be free at one of its places, after a stamp, up to which the place before was used."""
    mapped_activate(&core.state.mapped, number, place, stamp)
    return _put_back(core, number, hint, stamp)


cdef int moves_take(Core core, Victim* victim, BlockId hole_id, uint64_t address) noexcept nogil:
    """Move a victim's handle to a place in a hole: NOT_READY where it is no victim any more."""
    cdef Mapped* mapped = &core.state.mapped
    cdef MappedHandle* handle = &mapped.handles[victim.number]
    cdef uint64_t nbytes = handle.memory.nbytes
    cdef uint64_t stamp = 0
    cdef int place, status
    victim.used = True
    place = mapped_place_at(handle, address)
    if not mapped_is_open(handle, place) or handle.places[place].address != address:
        place = -1                                # what is in the way, perhaps of this very handle, is unmapped
    if place < 0 and not _make_place(core, handle, victim.number):
        return STATUS_NOT_READY
    if not moves_punch(core, victim.block_id, victim.address, nbytes, &stamp):
        return STATUS_NOT_READY
    if place < 0:
        status = _clear(core, address, nbytes)
        if status == STATUS_OK:
            atomic_add(core.state.source_calls, 1)
            status = mapped_map(mapped, <MappedSource> core.source, victim.number, address)
        if status != STATUS_OK:
            _put_back(core, victim.number, 0, stamp)
            return status
        place = handle.place_count - 1
        mapped.moves += 1
    else:
        mapped.returns += 1
    return moves_put(core, victim.number, place, hole_id, stamp)


cdef bint moves_complete_everywhere(Core core, MappedHandle* handle, uint64_t stamp) noexcept nogil:
    """Whether all work is complete on what was freed up to a stamp, and on all that is stale.  Does not wait."""
    cdef int place
    for place in range(handle.place_count):
        if place != handle.active and not moves_complete(core, handle.places[place].stamp, False):
            return False
    return moves_complete(core, stamp, False)


cdef int moves_release(Core core, Victim* victim) noexcept nogil:
    """Give a victim's memory back to the source: NOT_READY where some work may still touch it."""
    cdef Mapped* mapped = &core.state.mapped
    cdef MappedHandle* handle = &mapped.handles[victim.number]
    cdef uint64_t nbytes = handle.memory.nbytes
    cdef uint64_t stamp = 0
    cdef int status
    if not moves_complete_everywhere(core, handle, victim.stamp):
        return STATUS_NOT_READY                   # but it may be moved
    victim.used = True
    if not moves_punch(core, victim.block_id, victim.address, nbytes, &stamp):
        return STATUS_NOT_READY
    if not moves_complete(core, stamp, False):         # freed anew meanwhile
        _put_back(core, victim.number, 0, stamp)
        return STATUS_NOT_READY
    atomic_add(core.state.source_calls, 1)
    status = mapped_release(mapped, <MappedSource> core.source, victim.number)
    if handle.memory.token == 0:
        moves_count(core)
        core.not_taken(nbytes)
    elif handle.active >= 0:
        _put_back(core, victim.number, 0, stamp)
    return status


cdef uint32_t _spare(Mapped* mapped, uint64_t most) noexcept nogil:
    """A handle without blocks that can be mapped, of at most so many bytes; or 0."""
    cdef uint32_t number
    if mapped.spare_bytes == 0:
        return 0
    for number in range(1, mapped.fresh):
        if mapped.handles[number].memory.token and mapped.handles[number].active < 0 and (
                mapped.handles[number].memory.nbytes <= most and mapped.handles[number].place_count < MOST_PLACES):
            return number
    return 0


cdef uint64_t _used_up_to(MappedHandle* handle) noexcept nogil:
    """The last free of what a spare handle's memory was, as a stamp; 0 where it is fresh from the source."""
    cdef uint64_t stamp = 0
    cdef int place
    for place in range(handle.place_count):
        stamp = max(stamp, handle.places[place].stamp)
    return stamp


cdef bint _may_fill(Core core) noexcept nogil:
    """Whether there are records to put memory into a hole with, as things are."""
    cdef Arena* arena = core.state.arenas[0]
    cdef bint may
    bias_take(&arena.lock)
    may = holes_may_fill(arena)
    bias_drop(&arena.lock)
    return may


cdef int moves_create(Core core, BlockId hole_id, uint64_t address, uint64_t nbytes, uint64_t* made) noexcept nogil:
    """Put new memory, or some that is spare, at a place in a hole."""
    cdef Mapped* mapped = &core.state.mapped
    cdef uint32_t number = _spare(mapped, nbytes)
    cdef uint64_t stamp = _used_up_to(&mapped.handles[number]) if number else 0
    cdef int status = STATUS_OUT_OF_MEMORY
    if _may_fill(core):
        status = _clear(core, address, mapped.handles[number].memory.nbytes if number else nbytes)
    if status != STATUS_OK:
        return status
    if number == 0:
        if core.may_take(nbytes, nbytes, 0) == 0:
            return STATUS_NO_ROOM
        atomic_add(core.state.source_calls, 1)
        status = mapped_create(mapped, <MappedSource> core.source, nbytes, &number)
        if mapped.handles[number].memory.token == 0:
            core.not_taken(nbytes)
            return status
        moves_count(core)
        if status != STATUS_OK:
            return status
    made[0] = mapped.handles[number].memory.nbytes
    status = mapped_map(mapped, <MappedSource> core.source, number, address)
    if status != STATUS_OK:
        return status                             # it is spare, for the next one
    return moves_put(core, number, mapped.handles[number].place_count - 1, hole_id, stamp)

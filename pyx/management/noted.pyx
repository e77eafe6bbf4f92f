"""Calls of a pool that are noted: recorded, or counted by tag."""
from libc.stdint cimport uint16_t, uint32_t, uint64_t

from vpool._base.bias cimport Seat, bias_drop, bias_enter, bias_leave, bias_take, bias_try_enter
from vpool._base.lock cimport atomic_write, spin_lock, spin_try, spin_unlock
from vpool._base.types cimport GRANULE, Block, BlockId, likely
from vpool._management.arena cimport Arena
from vpool._management.areas cimport Areas, in_fixed, is_common, request_init, state_at
from vpool._management.hit cimport hit_any, put_any
from vpool._management.index cimport live_find
from vpool._management.journal cimport (
    EVENT_FAILURE,
    journal_charge,
    journal_count_tags,
    journal_discharge,
    journal_freed,
    journal_lent,
    journal_note,
    journal_tag,
    journal_tags_in_use,
)
from vpool._management.state cimport STATE_NOTED, CoreState, Request, slot_count


cdef bint noted_switch(Areas areas, bint on) noexcept nogil:
    """Have every call noted, or none unless there are tags; False where there is no room to count them.

    One thread at a time, since it writes the state word.
    """
    cdef bint tagged = journal_tags_in_use()
    if tagged and not journal_count_tags(&areas.journal):
        return False
    if on or tagged:
        atomic_write(areas.state.word, areas.state.word | STATE_NOTED)
    else:
        atomic_write(areas.state.word, areas.state.word & ~<uint32_t> STATE_NOTED)
    return True


cdef inline BlockId lend_here(Areas areas, Arena* first, uint64_t requested, uint16_t tag,
                              uint64_t* address) noexcept nogil:
    """A noted block of the arena's lists, or 0.  The arena's lock and the journal's are held."""
    # A plan has to see every request, in `Areas.take`.
    cdef BlockId block_id = hit_any(first, requested) if areas.planned is None else 0
    cdef Block* block = &first.blocks[block_id]
    if likely(block_id != 0):
        block.tag = tag
        address[0] = block.address
        journal_lent(&areas.journal, block.address, block.nbytes, requested, first.slot, tag, 0)
    return block_id


cdef inline BlockId note_free(Areas areas, Arena* arena, uint64_t address, int freer) noexcept nogil:
    """Note the end of a live block, if the arena has one there; its number, or 0.  The arena's lock is held."""
    cdef BlockId block_id = live_find(arena, address)
    cdef Block* block = &arena.blocks[block_id]
    if block_id:
        journal_freed(
            &areas.journal, address, block.nbytes, block.stamp, arena.slot if freer < 0 else freer, block.tag, 0)
    return block_id


cdef inline BlockId note_free_locked(Areas areas, Arena* arena, uint64_t address, int freer) noexcept nogil:
    cdef BlockId block_id
    spin_lock(&areas.journal.lock)
    block_id = note_free(areas, arena, address, freer)
    spin_unlock(&areas.journal.lock)
    return block_id


cdef BlockId noted_try_lend(Areas areas, Arena** arena, uint64_t requested, uint64_t* address) noexcept nogil:
    """Lend a block if no lock is taken, for callers with the GIL; 0 for whatever takes longer.

    The caller gives the arena in the area that grows, and gets the block's.
    """
    cdef uint16_t tag = journal_tag()
    cdef Arena* first = arena[0].fixed if is_common(areas, requested) else arena[0]
    cdef BlockId block_id = 0
    cdef Seat* seat
    if not spin_try(&areas.journal.lock):
        return 0
    if journal_charge(&areas.journal, tag, requested):
        # Tried only, so it makes no difference that this lock comes last elsewhere.
        if bias_try_enter(&first.lock, &seat):
            block_id = lend_here(areas, first, requested, tag, address)
            bias_leave(&first.lock, seat)
        if block_id:
            arena[0] = first
        else:
            journal_discharge(&areas.journal, tag, requested)
    spin_unlock(&areas.journal.lock)
    return block_id


cdef bint noted_try_free(Areas areas, Arena* arena, uint64_t address) noexcept nogil:
    """Take back a block of an arena if no lock is taken, for callers with the GIL; False for whatever takes longer."""
    cdef BlockId block_id = 0
    cdef Seat* seat
    if in_fixed(areas, address):
        arena = arena.fixed
    if not spin_try(&areas.journal.lock):
        return False
    if bias_try_enter(&arena.lock, &seat):
        block_id = note_free(areas, arena, address, -1)
        if block_id:
            put_any(arena, address)
        bias_leave(&arena.lock, seat)
    spin_unlock(&areas.journal.lock)
    return block_id != 0


cdef BlockId noted_lend(Areas areas, Arena* arena, uint64_t requested, uint64_t* address) noexcept nogil:
    """Lend a block, for callers without the GIL; 0 also beyond the limit of the thread's tag."""
    cdef uint16_t tag = journal_tag()
    cdef Arena* first = arena.fixed if is_common(areas, requested) else arena
    cdef Request request
    cdef BlockId block_id = 0
    cdef bint fits
    cdef Seat* seat = bias_enter(&first.lock)
    spin_lock(&areas.journal.lock)
    fits = journal_charge(&areas.journal, tag, requested)
    if fits:
        block_id = lend_here(areas, first, requested, tag, address)
    spin_unlock(&areas.journal.lock)
    bias_leave(&first.lock, seat)
    if likely(block_id != 0) or not fits:
        return block_id
    request_init(areas, &request, arena, requested, GRANULE)
    request.tag = tag
    areas.take(&request)
    noted_end(areas, &request)
    address[0] = request.address
    return request.block_id


cdef bint noted_begin(Areas areas, Request* request) noexcept nogil:
    """Tag a request that is about to be served; False where that would pass its tag's limit."""
    cdef bint fits
    request.tag = journal_tag()
    spin_lock(&areas.journal.lock)
    fits = journal_charge(&areas.journal, request.tag, request.requested)
    spin_unlock(&areas.journal.lock)
    return fits


cdef void noted_end(Areas areas, Request* request) noexcept nogil:
    """Note what became of a request."""
    cdef Block* block
    if request.block_id:
        # The block is ours: nobody else writes its record now.
        block = &request.arena.blocks[request.block_id]
        block.tag = request.tag
        spin_lock(&areas.journal.lock)
        journal_lent(&areas.journal, block.address, block.nbytes, request.requested, request.arena.slot, request.tag,
                     request.site)
        spin_unlock(&areas.journal.lock)
    else:
        spin_lock(&areas.journal.lock)
        journal_discharge(&areas.journal, request.tag, request.requested)
        spin_unlock(&areas.journal.lock)
        noted_failure(areas, request)


cdef void noted_failure(Areas areas, Request* request) noexcept nogil:
    """Note that a request failed."""
    journal_note(&areas.journal, EVENT_FAILURE, 0, request.nbytes, request.requested, request.arena.slot, request.tag,
                 request.site)


cdef bint noted_free(Areas areas, uint64_t address, uint16_t hint, int freer) noexcept nogil:
    """Take back a live block: on the stream of slot `freer`, or on its own for -1.  False where there is none.

    The hinted slot's arena is looked into first.
    """
    cdef CoreState* state = state_at(areas, address)
    cdef Arena* arena = state.arenas[hint]
    cdef uint32_t slot = 0
    cdef Seat* seat = bias_enter(&arena.lock)
    cdef BlockId block_id = note_free_locked(areas, arena, address, freer)
    if likely(block_id != 0) and (freer < 0 or freer == hint):
        put_any(arena, address)
        bias_leave(&arena.lock, seat)
        return True
    bias_leave(&arena.lock, seat)
    while block_id == 0 and slot < slot_count(state):
        arena = state.arenas[slot]
        bias_take(&arena.lock)
        # Before the free itself, behind which the memory may be lent again.
        block_id = note_free_locked(areas, arena, address, freer)
        bias_drop(&arena.lock)
        slot += 1
    return areas.put(address, arena.slot) if freer < 0 else areas.free_on(address, freer)

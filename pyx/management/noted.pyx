"""Calls of a pool that are noted: recorded, or counted by tag."""
from libc.stdint cimport uint16_t, uint32_t, uint64_t

from vpool._base.bias cimport Seat, bias_drop, bias_enter, bias_leave, bias_take
from vpool._base.lock cimport atomic_write
from vpool._base.types cimport GRANULE, Block, BlockId, likely
from vpool._management.arena cimport Arena
from vpool._management.areas cimport Areas, is_common, request_init, state_at
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


cdef BlockId noted_lend(Areas areas, Arena* arena, uint64_t requested, uint64_t* address) noexcept nogil:
    """Lend a block, for callers without the GIL; 0 also beyond the limit of the thread's tag."""
    cdef uint16_t tag = journal_tag()
    cdef Arena* first = arena.fixed if is_common(areas, requested) else arena
    cdef Request request
    cdef BlockId block_id = 0
    cdef Block* block
    cdef Seat* seat
    if tag and not journal_charge(&areas.journal, tag, requested):
        return 0
    if areas.planned is None:                     # a plan has to see every request
        seat = bias_enter(&first.lock)
        block_id = hit_any(first, requested)
        if likely(block_id != 0):
            block = &first.blocks[block_id]
            block.tag = tag
            address[0] = block.address
            journal_lent(&areas.journal, block.address, block.nbytes, requested, first.slot, tag, 0)
        bias_leave(&first.lock, seat)
    if likely(block_id != 0):
        return block_id
    request_init(areas, &request, arena, requested, GRANULE)
    request.tag = tag
    areas.take(&request)
    noted_end(areas, &request)
    address[0] = request.address
    return request.block_id


cdef bint noted_begin(Areas areas, Request* request) noexcept nogil:
    """Tag a request that is about to be served; False where that would pass its tag's limit."""
    request.tag = journal_tag()
    return journal_charge(&areas.journal, request.tag, request.requested)


cdef void noted_end(Areas areas, Request* request) noexcept nogil:
    """Note what became of a request."""
    cdef Block* block
    if request.block_id:
        # The block is ours: nobody else writes its record now.
        block = &request.arena.blocks[request.block_id]
        block.tag = request.tag
        journal_lent(&areas.journal, block.address, block.nbytes, request.requested, request.arena.slot, request.tag,
                     request.site)
    else:
        journal_discharge(&areas.journal, request.tag, request.requested)
        journal_note(&areas.journal, EVENT_FAILURE, 0, request.nbytes, request.requested, request.arena.slot,
                     request.tag, request.site)


cdef bint noted_free(Areas areas, uint64_t address, uint16_t hint, int freer) noexcept nogil:
    """Take back a live block: on the stream of slot `freer`, or on its own for -1.  False where there is none.

    The hinted slot's arena is looked into first.
    """
    cdef CoreState* state = state_at(areas, address)
    cdef Arena* arena = state.arenas[hint]
    cdef Block* block
    cdef BlockId block_id
    cdef uint32_t slot = 0
    cdef Seat* seat = bias_enter(&arena.lock)
    block_id = live_find(arena, address)
    if likely(block_id != 0):
        block = &arena.blocks[block_id]
        journal_freed(&areas.journal, address, block.nbytes, block.stamp, hint if freer < 0 else freer, block.tag, 0)
        if freer < 0 or freer == hint:
            put_any(arena, address)
            bias_leave(&arena.lock, seat)
            return True
    bias_leave(&arena.lock, seat)
    while block_id == 0 and slot < slot_count(state):
        arena = state.arenas[slot]
        bias_take(&arena.lock)
        block_id = live_find(arena, address)
        if block_id:
            # Before the free itself, behind which the memory may be lent again.
            block = &arena.blocks[block_id]
            journal_freed(&areas.journal, address, block.nbytes, block.stamp, slot if freer < 0 else freer, block.tag,
                          0)
        bias_drop(&arena.lock)
        slot += 1
    return areas.put(address, arena.slot) if freer < 0 else areas.free_on(address, freer)

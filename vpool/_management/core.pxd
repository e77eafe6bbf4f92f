"""The core of a pool: its arenas and segments, what it may take, and the ladder that a miss climbs."""
from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.string cimport memset

from vpool._base.lock cimport SpinLock, spin_lock, spin_unlock
from vpool._base.turn cimport Turn
from vpool._base.types cimport GRANULE, MAX_SLOTS, BlockId, round_up, unlikely
from vpool._management.arena cimport Arena
from vpool._management.hit cimport hit_put, hit_take
from vpool._management.index cimport index_remove
from vpool._storage.source cimport Handle, Range, Source

cdef enum StateBit:
    # The state word is 0 in the common case, the only test that a hit makes.  Whatever must see every
    # call (recording, debugging, tags, limits by tag) sets a bit of its own and is looked at there.
    STATE_CLOSED = 1

cdef enum Rung:
    # What a miss tries, in this order; after each the lists are searched again.
    RUNG_SEARCH                   # all of the request's own class, not only its head
    RUNG_GROW
    RUNGS

cdef struct GrowthRule:
    uint64_t initial              # bytes of the first segment
    double factor                 # of the total, if `step` is 0
    uint64_t step                 # bytes of each further segment

cdef struct Segment:
    Range span                    # what the source gave
    Handle handle
    uint64_t address              # the part of it that whole granules cover
    uint64_t nbytes
    Arena* arena
    BlockId edge                  # the record before its first block

cdef struct Request:
    # In: what is asked for.
    Arena* arena
    uint64_t requested            # bytes, as the caller said
    uint64_t nbytes               # after rounding
    uint64_t alignment
    uint16_t tag
    # Out: the block, and what happened on the way.
    BlockId block_id
    uint64_t address
    uint32_t tried                # bit r: rung r was tried
    uint64_t grown                # bytes of the segment that was added
    uint64_t refused              # bytes of the smallest request that the source refused
    int status                    # of the source's last refusal
    bint no_record                # host memory for block records ran out

cdef struct CoreState:
    uint32_t word                 # StateBits
    # Guards the segments and what is committed.  Taken before an arena's lock, never after it.
    SpinLock lock
    Segment* segments
    uint32_t segment_count
    uint32_t slots                # arenas made so far
    uint64_t limit                # bytes that `committed` never exceeds
    uint64_t committed            # reserved, and what is being asked of the source right now
    uint64_t reserved
    uint64_t peak_reserved
    GrowthRule rule
    uint64_t base_slack           # bytes that a base which is no multiple of the granule costs
    # Counters, atomic.
    unsigned long long source_calls
    unsigned long long misses
    unsigned long long missed_bytes
    unsigned long long ooms
    unsigned long long rung_tries[<int> RUNGS]
    unsigned long long rung_hits[<int> RUNGS]
    # One thread at a time asks the source for memory; it holds no lock meanwhile.
    Turn growth_turn


cdef class Core:
    cdef CoreState state
    cdef Arena* arenas[<int> MAX_SLOTS]
    cdef readonly Source source

    cdef Arena* arena_of(self, uint16_t slot) noexcept nogil
    cdef void settle(self) noexcept nogil
    cdef uint64_t may_take(self, uint64_t least, uint64_t most, uint16_t tag) noexcept nogil
    cdef void not_taken(self, uint64_t nbytes) noexcept nogil
    cdef BlockId take(self, Request* request) noexcept nogil
    cdef BlockId miss(self, Request* request) noexcept nogil
    cdef bint put(self, uint64_t address, uint16_t hint) noexcept nogil
    cdef int add_segment(self, uint64_t nbytes, Request* request) noexcept nogil
    cdef int _give_back(self, Segment* segment) noexcept nogil
    cdef bint _next_idle(self, uint64_t keep, Segment* idle) noexcept nogil
    cdef bint _enlist(self, Segment* segment) noexcept nogil
    cdef int release_idle(self, uint64_t keep, uint64_t* released) noexcept nogil
    cdef Segment* segment_of(self, uint64_t address) noexcept nogil


cdef inline BlockId core_allocate(Core core, Arena* arena, uint64_t requested, uint64_t* address) noexcept nogil:
    """Lend a block of at least `requested` > 0 bytes; its number and address, or 0.

    For callers without the GIL: waits for the lock.
    """
    cdef Request request
    cdef BlockId block_id
    if unlikely(core.state.word != 0):
        return 0
    spin_lock(&arena.lock)
    block_id = hit_take(arena, round_up(requested, GRANULE), requested, 0)
    address[0] = arena.blocks[block_id].address
    spin_unlock(&arena.lock)
    if unlikely(block_id == 0):
        memset(&request, 0, sizeof(Request))
        request.arena = arena
        request.requested = requested
        request.nbytes = round_up(requested, GRANULE)
        request.alignment = GRANULE
        block_id = core.take(&request)
        address[0] = request.address
    return block_id


cdef inline bint core_deallocate(Core core, Arena* arena, uint64_t address) noexcept nogil:
    """Take back a block of this arena; False where it is none.  Waits for the lock."""
    cdef BlockId block_id
    spin_lock(&arena.lock)
    block_id = index_remove(arena, address)
    if block_id:
        hit_put(arena, block_id)
    spin_unlock(&arena.lock)
    return block_id != 0

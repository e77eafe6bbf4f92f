"""The state of a pool: its stream slots, segments and counters, and what a request carries along."""
from libc.stdint cimport uint16_t, uint32_t, uint64_t

from vpool._base.bias cimport bias_drop, bias_take
from vpool._base.lock cimport SpinLock, atomic_acquire, spin_lock, spin_unlock
from vpool._base.turn cimport Turn
from vpool._base.types cimport MAX_SLOTS, BlockId
from vpool._management.arena cimport Arena, Peaks
from vpool._management.journal cimport Journal
from vpool._management.mapped cimport Mapped
from vpool._storage.source cimport Handle, Range

cdef enum StateBit:
    # The state word is 0 in the common case, the only test that a hit makes.  Whatever must see every
    # call sets a bit of its own and is looked at there.
    STATE_CLOSED = 1
    STATE_ADAPTIVE = 2            # frees are counted, and idle memory goes back
    STATE_FORKED = 4              # this process is a child of the pool's: nothing of it may be used here
    STATE_DEBUG = 8               # blocks are checked
    STATE_NOTED = 16              # calls are recorded, or counted by tag
    STATE_PLANNED = 32            # requests are looked up in a plan
    STATE_MAPPED = 64             # memory moves: where little is live, it goes home
    # The bits that an allocation looks at, and those that a free looks at first.
    STATE_STOPS = STATE_CLOSED | STATE_FORKED | STATE_DEBUG | STATE_NOTED | STATE_PLANNED
    STATE_HOLDS = STATE_FORKED | STATE_DEBUG | STATE_NOTED

cdef enum Rung:
    # What a miss tries, in this order; after each the request's own lists are searched again.
    RUNG_SEARCH                   # all of the request's own class, not only its head
    RUNG_READY                    # own pending blocks whose work is complete
    RUNG_STEAL                    # other streams' free blocks: proven complete, else behind an event
    RUNG_MERGE                    # what streams lent one another goes home and merges, behind events
    RUNG_GROW
    RUNG_TRIM                     # idle segments go back, then grow
    RUNG_CALL                     # the pool's pressure callbacks; only with the GIL
    RUNG_COLLECT                  # Python's garbage; only with the GIL
    RUNG_WAIT                     # for work on the device; only if the pool may wait
    RUNGS

cdef enum:
    MARKERS = 4                   # events a slot keeps; a fifth re-records the newest, which over-waits

cdef struct GrowthRule:
    uint64_t initial              # bytes of the first segment
    double factor                 # of the total, if `step` is 0
    uint64_t step                 # bytes of each further segment
    bint trims                    # idle segments go back before another one comes

cdef struct Demand:
    # What an adaptive pool remembers of its recent past.  Written by whoever has `busy`, or the growth turn.
    unsigned long long frees      # counted so far
    unsigned long long busy
    uint64_t low                  # the least live bytes since this window began, and in the one before
    uint64_t low_before
    uint64_t least_excess         # the least that was reserved beyond what is live, in this streak of looks
    uint64_t first_live           # what was live at the first of them
    uint32_t looks                # at which that was too much
    uint64_t next_try             # number of the free from which on idle memory is looked for again
    uint64_t tried_live           # what was live at the last try that found none
    uint64_t patience             # frees until then after the next try that finds none

cdef struct Segment:
    Range span                    # what the source gave
    Handle handle
    uint64_t address              # the part of it that whole granules cover
    uint64_t nbytes
    Arena* arena
    BlockId edge                  # the record before its first block; 0: the source did not take it back
    bint exported                 # another process may use it: it stays until the pool is closed
    bint mapped                   # the range of `CoreState.mapped`; the handle only tells how much is mapped

cdef struct Marker:
    uint64_t event
    uint64_t number               # frees stamped with this number or less are covered

cdef struct Slot:
    # Who the slot stands for.
    uint64_t stream               # handle
    uint64_t unique_id            # what the driver calls it for good; 0: a default stream, always there
    uint64_t thread               # whose per-thread default stream it is, 0 for other streams
    bint gone                     # destroyed: its handle is never used again
    int held                      # stream objects that are known and alive, which keep the stream alive
    bint asking                   # its stream was passed by the call that has the crossing turn
    bint quiet                    # and the device was waited for since: nothing of it can still run
    # Order of its work.  `done` and `waited` only rise and are read without a lock: a stale value
    # proves less, never something false.  All is written by whoever has the pool's crossing turn.
    uint64_t done                 # frees stamped up to this are complete
    uint64_t* waited              # [slot]: work queued here from now on comes after that slot's frees up to this
    Marker markers[<int> MARKERS]        # recorded and not known complete, oldest first
    int marker_count
    uint64_t draining             # these two of `order_drain`, between its passes
    bint ending

cdef struct Request:
    # In: what is asked for.
    Arena* arena
    uint64_t requested            # bytes, as the caller said
    uint64_t nbytes               # after rounding
    uint64_t alignment
    uint16_t tag
    uint32_t site                 # where it was asked for, as the recording numbers them; 0: not known
    bint common                   # the fixed core may serve it, if the pool has one
    uint64_t usable               # bytes of a new segment to lend from; 0: all of it
    uint64_t guards               # bytes beside the block that are lent with it
    uint32_t looks                # free blocks that one search looks at, under a lock; 0: every one
    uint64_t behind               # address at which memory that moves shall be free; 0: anywhere
    # Out: the block, and what happened on the way.
    BlockId block_id
    uint64_t address
    uint32_t tried                # bit r: rung r was tried
    uint64_t grown                # bytes of the segment that was added
    uint64_t refused              # bytes of the smallest request that the source refused
    int status                    # of the source's last refusal
    bint no_record                # host memory for block records ran out
    Range overlaps                # what the source gave although the pool has it, or a part of it, already
    Range before                  # and the segment that has it

cdef struct Absence:
    # The place of a handle that was given up below suspended blocks.  Nothing else is mapped there.
    uint64_t address
    uint64_t nbytes
    Range place                   # of its content in the host's memory, if that was copied
    Handle copy                   # token 0: it was not
    uint32_t number               # of its handle, while that goes or comes
    bint back                     # the memory is there, with its content
    bint needed                   # some block that is still somebody's is there

cdef struct Suspended:
    # Written by whoever has the growth turn, the figures of blocks under all locks.
    Absence* absences             # in the order of addresses; NULL before the first
    uint32_t count
    uint64_t absent               # bytes of all absences that have no memory
    uint64_t blocks               # lent, and without memory
    uint64_t nbytes               # of these

cdef struct CoreState:
    uint32_t word                 # StateBits
    # Guards the segments, what is committed and the making of slots.  Taken before an arena's lock.
    SpinLock lock
    Segment* segments
    uint32_t segment_count
    uint32_t slots                # made so far; without the lock only by `slot_count`
    bint never_waits              # a request fails rather than wait for the device
    bint keeps                    # a fixed core: nothing goes back to the source before the pool is closed
    uint64_t limit                # bytes that `committed` never exceeds
    double ease                   # share of it that may be live before memory that moves is saved at any price
    uint64_t committed            # reserved, and what is being asked of the source right now
    uint64_t reserved
    uint64_t peak_reserved
    GrowthRule rule
    Demand demand
    uint64_t largest_growth       # bytes of the largest request that had to wait for the source
    Peaks* peaks
    Journal* journal              # of the whole pool
    Mapped mapped                 # of a source whose memory can be moved
    Suspended suspended
    uint64_t base_slack           # bytes that a base which is no multiple of the granule costs
    int last_failure              # status of the source when a request last failed; OK: the limit
    # Counters, atomic.
    unsigned long long source_calls
    unsigned long long misses
    unsigned long long missed_bytes
    unsigned long long ooms
    unsigned long long rung_tries[<int> RUNGS]
    unsigned long long rung_hits[<int> RUNGS]
    unsigned long long crossings          # blocks that went from one stream to another
    unsigned long long waits              # event waits that this queued on a stream
    unsigned long long overwaits          # of those, how many wait for more than the block asked for
    unsigned long long drains             # waits for the whole device
    # One thread at a time asks the source for memory, one at a time moves memory between streams.
    # Neither holds a lock meanwhile.  Who has the growth turn may take the crossing turn, never the
    # other way round.
    Turn growth_turn
    Turn crossing_turn
    Slot* table                   # [MAX_SLOTS]
    Arena* arenas[<int> MAX_SLOTS]


cdef inline uint32_t slot_count(CoreState* state) noexcept nogil:
    """Slots made so far.  All of them are complete, and stay where they are as long as the pool."""
    return atomic_acquire(state.slots)


cdef inline void lock_all(CoreState* state) noexcept nogil:
    """The pool's lock, then every arena's in the order of their slots."""
    cdef uint32_t slot
    spin_lock(&state.lock)
    for slot in range(state.slots):
        bias_take(&state.arenas[slot].lock)


cdef inline void unlock_all(CoreState* state) noexcept nogil:
    cdef uint32_t slot
    for slot in range(state.slots):
        bias_drop(&state.arenas[slot].lock)
    spin_unlock(&state.lock)

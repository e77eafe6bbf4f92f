"""The areas of a pool: one that grows, and for some strategies a fixed core before it.

Each area is a `Core` with arenas, lists and segments of its own; both know the same slots.  A request
that is common, by its size, is served from the fixed core while that has room.
"""
from libc.stdint cimport uint16_t, uint64_t

from vpool._base.bias cimport Seat, bias_enter, bias_leave
from vpool._base.lock cimport lone_read
from vpool._base.types cimport BlockId, likely, unlikely
from vpool._management.arena cimport Arena
from vpool._management.core cimport Core, PeakFigures
from vpool._management.hit cimport hit_any, put_any
from vpool._management.journal cimport Journal
from vpool._management.planned cimport Planned
from vpool._management.state cimport STATE_HOLDS, STATE_STOPS, CoreState, Request
from vpool._management.walk cimport Broken


cdef class Areas:
    cdef readonly Core core       # grows
    cdef readonly Core fixed      # None where the strategy has no fixed core
    cdef readonly Planned planned  # what the fixed core is for, in a pool with a plan; otherwise None
    cdef CoreState* state         # of the two, for callers that hold a reference to this
    cdef CoreState* fixed_state
    cdef uint64_t smallest        # requests of `smallest` to `smallest` + `band` bytes are common
    cdef uint64_t band
    cdef uint64_t fixed_address   # where the fixed core's memory is
    cdef uint64_t fixed_bytes
    cdef uint64_t watermark       # live bytes of it from which on the other area grows ahead
    cdef bint grows               # beyond the fixed core
    cdef bint core_only           # common requests are served from the core or not at all
    cdef bint only_blocks         # a request larger than every block of the core is an error
    cdef uint64_t largest_block
    cdef uint64_t largest_oversize  # bytes of the largest request that no block of the core could hold
    cdef unsigned long long oversize  # how many there were
    cdef readonly tuple block_sizes
    cdef uint64_t headroom        # see `maintain`
    cdef uint64_t peak_seen
    # Where a pool watches its blocks, compiled callers go its way too: through the interface, with the GIL.
    cdef void* watcher
    cdef BlockId (*watcher_lends)(void* watcher, Arena* arena, uint64_t requested, uint64_t* address) noexcept nogil
    cdef bint (*watcher_takes)(void* watcher, uint64_t address) noexcept nogil
    cdef Journal journal
    cdef uint64_t live_when_looked  # live blocks when a closed pool last looked for idle segments

    cdef BlockId climb(self, Request* request, int first, int last) noexcept nogil
    cdef void turn_to(self, Core core, Request* request) noexcept nogil
    cdef bint hopeless(self, Request* request) noexcept nogil
    cdef BlockId take(self, Request* request) noexcept nogil
    cdef int open_slot(self, uint64_t stream, uint64_t unique_id, uint64_t thread, uint64_t capture) noexcept nogil
    cdef int reopen_slot(self, uint64_t stream, uint64_t unique_id, uint64_t thread, uint64_t capture,
                         bint may_drain) noexcept nogil
    cdef void retire_slot(self, int slot) noexcept nogil
    cdef void slot_is_gone(self, int slot) noexcept nogil
    cdef void hold_slot(self, int slot, int by) noexcept nogil
    cdef void finish_crossings(self) noexcept nogil
    cdef bint crossing_now(self) noexcept nogil
    cdef bint is_empty(self) noexcept nogil
    cdef void end_capture(self, int slot) noexcept nogil
    cdef void give_to_host(self, int slot) noexcept nogil
    cdef int drain(self) noexcept nogil
    cdef int drain_device(self) noexcept nogil
    cdef bint put(self, uint64_t address, uint16_t hint) noexcept nogil
    cdef bint free_on(self, uint64_t address, uint16_t freer) noexcept nogil
    cdef int use_on(self, uint64_t address, uint16_t user) noexcept nogil
    cdef int release_idle(self, uint64_t keep, uint64_t* released) noexcept nogil
    cdef void coalesce(self) noexcept nogil
    cdef uint64_t peak_reserved(self) noexcept nogil
    cdef void begin_peaks(self, PeakFigures* floor, PeakFigures* before) noexcept nogil
    cdef void check(self, Broken* broken) noexcept nogil
    cdef bint set_limit(self, uint64_t nbytes) noexcept nogil
    cdef int maintain(self) noexcept nogil
    cdef bint reserve(self, uint64_t nbytes, uint64_t guards, Request* request) noexcept nogil
    cdef bint has_room(self, Request* request, uint64_t nbytes) noexcept nogil
    cdef bint has_free(self, uint64_t nbytes) noexcept nogil
    cdef void after_free(self) noexcept nogil
    cdef void look_at_idle(self) noexcept nogil
    cdef bint may_have_idle(self) noexcept nogil
    cdef bint holds(self, uint64_t address) noexcept nogil
    cdef bint put_held(self, Arena* arena, uint64_t address) noexcept nogil
    cdef bint take_back(self, uint64_t address, int freer) noexcept nogil
    cdef bint put_suspended(self, uint64_t address) noexcept nogil
    cdef BlockId slow(self, Arena* arena, uint64_t requested, uint64_t* address) noexcept nogil
    cdef Core area_at(self, uint64_t address)
    cdef CoreState* state_of(self, Arena* arena) noexcept nogil


cdef void request_init(Areas areas, Request* request, Arena* arena, uint64_t requested,
                       uint64_t alignment) noexcept nogil


cdef inline bint is_common(Areas areas, uint64_t requested) noexcept nogil:
    """Whether the fixed core may serve a request.  Never without one: `smallest` is 2**64 - 1 then."""
    return requested - areas.smallest <= areas.band


cdef inline CoreState* state_at(Areas areas, uint64_t address) noexcept nogil:
    """Of the area that an address is in."""
    return areas.fixed_state if in_fixed(areas, address) else areas.state


cdef inline bint in_fixed(Areas areas, uint64_t address) noexcept nogil:
    """Whether an address lies in the fixed core."""
    return address - areas.fixed_address < areas.fixed_bytes


cdef inline BlockId areas_allocate(Areas areas, Arena* arena, uint64_t requested, uint64_t* address) noexcept nogil:
    """Lend a block of at least `requested` > 0 bytes; its number and address, or 0.

    The arena is the one of the stream's slot in the area that grows.  For callers without the GIL: waits
    for the lock.
    """
    # What is fixed for a caller comes in registers: the lock makes every load behind it wait.
    cdef Arena* first = arena
    cdef BlockId block_id
    cdef Seat* seat
    if unlikely(lone_read(areas.state.word) & STATE_STOPS):
        return areas.slow(arena, requested, address)
    if is_common(areas, requested):
        first = arena.fixed
    seat = bias_enter(&first.lock)
    block_id = hit_any(first, requested)
    address[0] = first.blocks[block_id].address
    bias_leave(&first.lock, seat)
    return block_id if likely(block_id != 0) else areas.slow(arena, requested, address)


cdef inline bint areas_deallocate(Areas areas, Arena* arena, uint64_t address) noexcept nogil:
    """Take back a block of a slot; False where it is none.  Waits for the lock."""
    cdef bint found
    cdef Seat* seat
    if unlikely(lone_read(areas.state.word) & STATE_HOLDS):
        return areas.put_held(arena, address)
    if in_fixed(areas, address):
        arena = arena.fixed
    seat = bias_enter(&arena.lock)
    found = put_any(arena, address)
    bias_leave(&arena.lock, seat)
    if unlikely(not found) and areas.put_suspended(address):
        found = True
    if unlikely(lone_read(areas.state.word) != 0):
        areas.after_free()
    return found

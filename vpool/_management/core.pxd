"""The core of a pool: its arenas and segments, what it may take, and the ladder that a miss climbs."""
from libc.stdint cimport uint16_t, uint32_t, uint64_t

from vpool._base.bias cimport Seat, bias_enter, bias_leave
from vpool._base.types cimport BlockId
from vpool._management.arena cimport Arena
from vpool._management.hit cimport hit_put
from vpool._management.index cimport live_remove
from vpool._management.state cimport CoreState, Request, Segment
from vpool._storage.driver cimport STATUS_OK, STATUS_OUT_OF_MEMORY
from vpool._storage.fork cimport Watched
from vpool._storage.heaps cimport Heaps
from vpool._storage.source cimport Range, Source

cdef enum:
    STATUS_MISALIGNED = -1        # of `add_segment`: the base is no multiple of the granule; ask for one more
    STATUS_OVERLAP = -2           # and: the source gave what the pool has already


cdef struct PeakFigures:
    uint64_t allocated
    uint64_t requested
    uint64_t reserved


cdef class Core:
    cdef CoreState state
    cdef Watched watched          # its state word
    cdef readonly Source source
    cdef Heaps heaps              # for tools that look at memory; usually None
    cdef Source host              # of the host's memory, for what is offloaded; None before that
    cdef bint may_wait            # for work on the device, before a request fails
    cdef Core partner             # the pool's other area, if this is its fixed core
    cdef Range kept               # the fixed core's segment, in the area that grows
    cdef uint64_t minimum_remainder
    cdef uint64_t rounding

    cdef bint _open_default(self) noexcept nogil
    cdef void tell_of_heaps(self, Heaps heaps) noexcept
    cdef Arena* prepare_slot(self, uint64_t** waited) noexcept nogil
    cdef int enter_slot(self, Arena* arena, uint64_t* waited, uint64_t stream, uint64_t unique_id,
                        uint64_t thread, uint64_t capture) noexcept nogil
    cdef int take_all(self, uint64_t nbytes, uint64_t spare) noexcept nogil
    cdef bint cut(self, uint64_t nbytes, uint64_t count) noexcept nogil
    cdef void index_blocks(self, uint64_t nbytes, uint64_t count) noexcept nogil
    cdef bint set_limit(self, uint64_t nbytes) noexcept nogil
    cdef void discard_slot(self, Arena* arena, uint64_t* waited) noexcept nogil
    cdef void make_restful(self, bint may_drain) noexcept nogil
    cdef bint slot_at_rest(self, int slot) noexcept nogil
    cdef void give_slot(self, int slot, uint64_t stream, uint64_t unique_id, uint64_t thread,
                        uint64_t capture) noexcept nogil
    cdef void retire_slot(self, int slot) noexcept nogil
    cdef void settle(self) noexcept nogil
    cdef uint64_t may_take(self, uint64_t least, uint64_t most, uint16_t tag) noexcept nogil
    cdef void not_taken(self, uint64_t nbytes) noexcept nogil
    cdef void count_failure(self, int status) noexcept nogil
    cdef bint put(self, uint64_t address, uint16_t hint) noexcept nogil
    cdef int add_segment(self, uint64_t nbytes, Request* request) noexcept nogil
    cdef int give_back(self, Segment* segment) noexcept nogil
    cdef void settle_refused(self, Segment* segment) noexcept nogil
    cdef void note_segment(self, int kind, Segment* segment) noexcept nogil
    cdef bint next_idle(self, uint64_t keep, uint32_t* cursor, Segment* idle) noexcept nogil
    cdef void enlist(self, Segment* segment) noexcept nogil
    cdef int release_idle(self, uint64_t keep, uint64_t* released) noexcept nogil
    cdef void prove_idle(self) noexcept nogil
    cdef bint give_idle(self, uint64_t keep, uint64_t enough) noexcept nogil
    cdef void coalesce(self) noexcept nogil
    cdef int drain(self) noexcept nogil
    cdef bint find_segment(self, uint64_t address, Segment* segment) noexcept nogil
    cdef void keep_segment(self, uint64_t address) noexcept nogil
    cdef void begin_peaks(self, PeakFigures* floor, PeakFigures* before) noexcept nogil
    cdef bint overlaps(self, Segment* segment, Request* request) noexcept nogil
    cdef Segment* segment_of(self, uint64_t address) noexcept nogil


cdef uint64_t core_live_bytes(CoreState* state) noexcept nogil


cdef inline bint request_broken(Request* request) noexcept nogil:
    """Whether the source failed for another reason than want of memory: no rung helps then."""
    return request.status != STATUS_OK and request.status != STATUS_OUT_OF_MEMORY


cdef inline bint core_deallocate(Arena* arena, uint64_t address) noexcept nogil:
    """Take back a block of this arena; False where it is none.  Waits for the lock."""
    cdef BlockId block_id
    cdef Seat* seat = bias_enter(&arena.lock)
    block_id = live_remove(arena, address)
    if block_id:
        hit_put(arena, block_id)
    bias_leave(&arena.lock, seat)
    return block_id != 0

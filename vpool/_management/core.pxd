"""The core of a pool: its arenas and segments, what it may take, and the ladder that a miss climbs."""
from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.string cimport memset

from vpool._base.bias cimport Seat, bias_enter, bias_leave
from vpool._base.lock cimport lone_read
from vpool._base.types cimport GRANULE, BlockId, round_up, unlikely
from vpool._management.arena cimport Arena
from vpool._management.hit cimport hit_put, hit_take
from vpool._management.index cimport index_remove
from vpool._management.state cimport CoreState, Request, Segment
from vpool._storage.driver cimport STATUS_OK, STATUS_OUT_OF_MEMORY
from vpool._storage.source cimport Source


cdef class Core:
    cdef CoreState state
    cdef readonly Source source
    cdef bint may_wait            # for work on the device, before a request fails

    cdef int open_slot(self, uint64_t stream, uint64_t unique_id, uint64_t thread) noexcept nogil
    cdef void retire_slot(self, int slot) noexcept nogil
    cdef int reopen_slot(self, uint64_t stream, uint64_t unique_id, uint64_t thread, bint may_drain) noexcept nogil
    cdef void settle(self) noexcept nogil
    cdef uint64_t may_take(self, uint64_t least, uint64_t most, uint16_t tag) noexcept nogil
    cdef void not_taken(self, uint64_t nbytes) noexcept nogil
    cdef BlockId take(self, Request* request) noexcept nogil
    cdef BlockId climb(self, Request* request, int first, int last) noexcept nogil
    cdef void count_failure(self, int status) noexcept nogil
    cdef bint put(self, uint64_t address, uint16_t hint) noexcept nogil
    cdef int add_segment(self, uint64_t nbytes, Request* request) noexcept nogil
    cdef int give_back(self, Segment* segment) noexcept nogil
    cdef bint may_have_idle(self) noexcept nogil
    cdef bint next_idle(self, uint64_t keep, uint32_t* cursor, Segment* idle) noexcept nogil
    cdef void enlist(self, Segment* segment) noexcept nogil
    cdef int release_idle(self, uint64_t keep, uint64_t* released) noexcept nogil
    cdef void coalesce(self) noexcept nogil
    cdef int drain(self) noexcept nogil
    cdef void reset_peaks(self) noexcept nogil
    cdef Segment* segment_of(self, uint64_t address) noexcept nogil


cdef inline bint request_broken(Request* request) noexcept nogil:
    """Whether the source failed for another reason than want of memory: no rung helps then."""
    return request.status != STATUS_OK and request.status != STATUS_OUT_OF_MEMORY


cdef inline BlockId core_allocate(Core core, Arena* arena, uint64_t requested, uint64_t* address) noexcept nogil:
    """Lend a block of at least `requested` > 0 bytes; its number and address, or 0.

    For callers without the GIL: waits for the lock.
    """
    cdef Request request
    cdef BlockId block_id
    cdef Seat* seat
    if unlikely(lone_read(core.state.word) != 0):
        return 0
    seat = bias_enter(&arena.lock)
    block_id = hit_take(arena, round_up(requested, GRANULE), requested, 0)
    address[0] = arena.blocks[block_id].address
    bias_leave(&arena.lock, seat)
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
    cdef Seat* seat = bias_enter(&arena.lock)
    block_id = index_remove(arena, address)
    if block_id:
        hit_put(arena, block_id)
    bias_leave(&arena.lock, seat)
    return block_id != 0

"""The core of a pool: slots, segments, limits, growth, and the ladder of a miss."""
cimport cython
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from vpool._base.bias cimport bias_drop, bias_take
from vpool._base.lock cimport (
    atomic_add,
    atomic_read,
    atomic_release,
    atomic_write,
    lone_count,
    spin_lock,
    spin_unlock,
)
from vpool._base.memory cimport lazy_release, lazy_reserve
from vpool._base.turn cimport turn_destroy, turn_give, turn_init, turn_take
from vpool._base.types cimport (
    FLAG_SOLID,
    GRANULE,
    MAX_SLOTS,
    Block,
    round_down,
    round_up,
)
from vpool._management.arena cimport (
    Arena,
    Peaks,
    arena_add_segment,
    arena_allocated,
    arena_cut_solid,
    arena_index_solid,
    arena_delete,
    arena_new,
    arena_remove_segment,
    arena_remove_solid,
    arena_take_aligned,
    peaks_begin,
)
from vpool._management.core cimport core_deallocate
from vpool._management.cross cimport cross_prove, cross_recall
from vpool._management.journal cimport EVENT_RELEASE, EVENT_RESERVE, journal_note
from vpool._management.mapped cimport MOST_HANDLES, mapped_close
from vpool._management.order cimport (
    order_at_rest,
    order_drain,
    order_forget,
    order_mark,
    order_poll,
    order_reachable,
    order_waited,
)
from vpool._management.state cimport (
    STATE_CLOSED,
    STATE_FORKED,
    Absence,
    CoreState,
    Request,
    Segment,
    Slot,
    slot_count,
)
from vpool._storage.driver cimport STATUS_OK, STATUS_OUT_OF_MEMORY
from vpool._storage.fork cimport fork_forget, fork_watch
from vpool._storage.heaps cimport Heaps
from vpool._storage.mapped_source cimport MappedSource
from vpool._storage.source cimport Range, Source

cdef enum:
    MOST_SEGMENTS = 1 << 20


cdef uint64_t core_live_bytes(CoreState* state) noexcept nogil:
    """Bytes of live and pending blocks.  O(slots)."""
    cdef uint64_t total = 0
    cdef uint32_t slot
    for slot in range(slot_count(state)):
        total += arena_allocated(state.arenas[slot]) + atomic_read(state.arenas[slot].pending_bytes)
    return total


cdef void _prove_all(Core core) noexcept nogil:
    cdef uint32_t slot
    for slot in range(slot_count(&core.state)):
        cross_prove(&core.state, core.source, slot)


@cython.no_gc   # its source refers to nothing of Python's, so no cycle; and `__dealloc__` needs the source
cdef class Core:
    """Slots, arenas and segments of one pool.  Knows no Python object but its source.

    Thread safety: every method may be called from any thread without the GIL.
    """

    def __cinit__(self, Source source not None, uint64_t limit, *, uint64_t minimum_remainder=GRANULE,
                  uint64_t rounding=GRANULE, Core partner=None):
        self.source = source
        self.may_wait = True
        self.minimum_remainder = minimum_remainder
        self.rounding = rounding
        self.state.limit = limit
        self.partner = partner
        # The highest sums are of the whole pool.
        self.state.peaks = <Peaks*> calloc(1, sizeof(Peaks)) if partner is None else partner.state.peaks
        turn_init(&self.state.growth_turn)
        turn_init(&self.state.crossing_turn)
        self.state.segments = <Segment*> lazy_reserve(MOST_SEGMENTS * sizeof(Segment))
        self.state.table = <Slot*> lazy_reserve(MAX_SLOTS * sizeof(Slot))
        if self.state.segments == NULL or self.state.table == NULL or self.state.peaks == NULL or (
                not self._open_default()):
            raise MemoryError("no address space for the pool's own records")
        fork_watch(&self.watched, &self.state.word, STATE_FORKED)

    cdef bint _open_default(self) noexcept nogil:
        cdef uint64_t* waited
        cdef Arena* arena = self.prepare_slot(&waited)
        return arena != NULL and self.enter_slot(arena, waited, 0, 0, 0, 0) == 0

    def __dealloc__(self):
        cdef CoreState* state = &self.state
        cdef uint32_t i
        cdef int first = STATUS_OK
        cdef int status
        fork_forget(&self.watched)
        if state.word & STATE_FORKED:
            return                                # all of it is the parent's, and goes with the child
        if state.segments != NULL:
            for i in range(state.suspended.count):
                if state.suspended.absences[i].copy.token:
                    self.host.surrender(&state.suspended.absences[i].place, &state.suspended.absences[i].copy)
            if state.suspended.absences != NULL:
                lazy_release(state.suspended.absences, MOST_HANDLES * sizeof(Absence))
            if state.mapped.handles != NULL:
                state.mapped.journal = NULL       # it went with the areas
                first = mapped_close(&state.mapped, <MappedSource> self.source)
            for i in range(state.segment_count):
                if state.segments[i].mapped:
                    continue
                if self.heaps is not None:
                    self.heaps.drop(state.segments[i].address)
                status = self.source.surrender(&state.segments[i].span, &state.segments[i].handle)
                first = status if first == STATUS_OK else first
            lazy_release(state.segments, MOST_SEGMENTS * sizeof(Segment))
        if state.table != NULL:
            # A device that was reset, or answers nothing any more, took the events with it: CUDA's driver may
            # crash on what is gone.
            if first == STATUS_OK:
                order_forget(state, self.source)
            for i in range(slot_count(state)):
                lazy_release(state.table[i].waited, MAX_SLOTS * sizeof(uint64_t))
                arena_delete(state.arenas[i])
            lazy_release(state.table, MAX_SLOTS * sizeof(Slot))
        if self.partner is None:
            free(state.peaks)
        turn_destroy(&state.growth_turn)
        turn_destroy(&state.crossing_turn)

    cdef Arena* prepare_slot(self, uint64_t** waited) noexcept nogil:
        """What a slot needs, before it is one; NULL where there is no address space for it."""
        cdef Arena* arena
        waited[0] = <uint64_t*> lazy_reserve(MAX_SLOTS * sizeof(uint64_t))
        if waited[0] == NULL:
            return NULL
        arena = arena_new(0, self.minimum_remainder, self.rounding)
        if arena == NULL:
            lazy_release(waited[0], MAX_SLOTS * sizeof(uint64_t))
        return arena

    cdef int enter_slot(self, Arena* arena, uint64_t* waited, uint64_t stream, uint64_t unique_id,
                        uint64_t thread, uint64_t capture) noexcept nogil:
        """Make what was prepared a slot; its number, or -1 and nothing is left of it where all are taken."""
        cdef CoreState* state = &self.state
        cdef int slot = -1
        spin_lock(&state.lock)
        if state.slots < MAX_SLOTS:
            slot = state.slots
            arena.slot = slot
            arena.peaks = state.peaks
            spin_lock(&state.peaks.lock)
            arena.next_arena = state.peaks.first
            state.peaks.first = arena
            state.peaks.count += 1
            spin_unlock(&state.peaks.lock)
            state.arenas[slot] = arena
            state.table[slot].stream = stream
            state.table[slot].unique_id = unique_id
            state.table[slot].thread = thread
            state.table[slot].waited = waited
            state.table[slot].gone = capture != 0
            arena.captured = capture
            atomic_release(state.slots, state.slots + 1)
        spin_unlock(&state.lock)
        if slot < 0:
            self.discard_slot(arena, waited)
        return slot

    cdef void discard_slot(self, Arena* arena, uint64_t* waited) noexcept nogil:
        arena_delete(arena)
        lazy_release(waited, MAX_SLOTS * sizeof(uint64_t))

    cdef void retire_slot(self, int slot) noexcept nogil:
        """Never use a slot's handle again; what it freed so far is marked first, if that can be."""
        cdef int status
        turn_take(&self.state.crossing_turn)
        self.state.table[slot].asking = True      # the caller names the stream
        status = order_mark(&self.state, self.source, slot, atomic_read(self.state.arenas[slot].sequence))
        atomic_write(self.state.table[slot].gone, True)
        self.state.table[slot].asking = False
        if status == STATUS_OK:
            # Where that is complete already, nothing needs to be waited for before another stream gets the slot.
            order_poll(&self.state, self.source, slot)
            self.state.table[slot].quiet = self.state.table[slot].marker_count == 0
        turn_give(&self.state.crossing_turn)

    cdef void make_restful(self, bint may_drain) noexcept nogil:
        """Find slots whose streams are gone, and let what is left of them end.  The crossing turn is the caller's."""
        cdef uint32_t slot
        for slot in range(1, slot_count(&self.state)):
            if self.source.checks_handles and not self.state.table[slot].thread:
                order_reachable(self.source, &self.state.table[slot])
        if not may_drain or order_drain(&self.state, self.source) == STATUS_OK:
            cross_recall(&self.state, self.source)

    cdef bint slot_at_rest(self, int slot) noexcept nogil:
        """Whether nothing of a slot's stream, which is gone, is left.  The crossing turn is the caller's.

        No live, pending or lent block, no free that is not complete, and no work, since blocks of other
        slots may have been recorded for it.
        """
        cdef CoreState* state = &self.state
        return state.table[slot].quiet and not state.arenas[slot].captured and order_at_rest(
            state.arenas[slot], atomic_read(state.table[slot].done))

    cdef void give_slot(self, int slot, uint64_t stream, uint64_t unique_id, uint64_t thread,
                        uint64_t capture) noexcept nogil:
        """Make a slot at rest another stream's.  The crossing turn is the caller's."""
        cdef CoreState* state = &self.state
        cdef uint32_t freer
        # What the old stream waited for, the new one does not.
        for freer in range(slot_count(state)):
            atomic_write(state.table[slot].waited[freer], 0)
        atomic_write(state.table[slot].stream, stream)
        atomic_write(state.table[slot].unique_id, unique_id)
        state.table[slot].thread = thread
        atomic_write(state.arenas[slot].captured, capture)
        atomic_write(state.table[slot].gone, capture != 0)
        state.table[slot].quiet = False

    cdef void settle(self) noexcept nogil:
        """Bring every free block into the arenas' lists.

        Called before anything counts, checks, trims or grows.  The arenas' lists are the only place
        of free blocks so far; a front that a thread owns would be emptied here.
        """

    cdef uint64_t may_take(self, uint64_t least, uint64_t most, uint16_t tag) noexcept nogil:
        """How many bytes the pool may now take for a tag: at most `most`, and 0 instead of less than `least`.

        The answer is committed at once, so that threads together never pass the limit; `not_taken`
        gives it back.
        """
        cdef CoreState* state = &self.state
        cdef uint64_t left
        spin_lock(&state.lock)
        left = round_down(state.limit - state.committed, GRANULE) if state.limit > state.committed else 0
        left = most if most < left else left
        if left < least:
            left = 0
        state.committed += left
        spin_unlock(&state.lock)
        return left

    cdef void not_taken(self, uint64_t nbytes) noexcept nogil:
        spin_lock(&self.state.lock)
        self.state.committed -= nbytes
        spin_unlock(&self.state.lock)

    cdef int give_back(self, Segment* segment) noexcept nogil:
        """Give a segment that is no longer enlisted back to the source.

        Where the source refuses, it becomes the pool's again, to be given back later.  It is not lent
        from meanwhile: nobody can tell what state it is in.
        """
        cdef int status
        if self.heaps is not None:
            self.heaps.drop(segment.address)
        atomic_add(self.state.source_calls, 1)
        status = self.source.surrender(&segment.span, &segment.handle)
        if segment.handle.token == 0:
            self.note_segment(EVENT_RELEASE, segment)
        self.settle_refused(segment)
        return status

    cdef void tell_of_heaps(self, Heaps heaps) noexcept:
        """Have each segment be a heap, from those that are there on.  Nobody uses the pool yet."""
        cdef uint32_t i
        self.heaps = heaps
        for i in range(self.state.segment_count):
            heaps.add(self.state.segments[i].address, self.state.segments[i].nbytes)

    cdef void note_segment(self, int kind, Segment* segment) noexcept nogil:
        if self.state.journal != NULL:
            journal_note(self.state.journal, kind, segment.address, segment.nbytes, segment.handle.nbytes,
                         segment.arena.slot, 0, 0)

    cdef void settle_refused(self, Segment* segment) noexcept nogil:
        """Uncommit a segment that went back, or keep it to be given back later."""
        if segment.handle.token == 0:
            self.not_taken(segment.handle.nbytes)
        else:
            spin_lock(&self.state.lock)
            segment.edge = 0
            self.enlist(segment)
            spin_unlock(&self.state.lock)

    cdef void enlist(self, Segment* segment) noexcept nogil:
        """Make a segment part of the pool.  `state.lock` is held."""
        cdef CoreState* state = &self.state
        state.segments[state.segment_count] = segment[0]
        state.segment_count += 1
        lone_count(state.reserved, segment.handle.nbytes)
        if state.reserved > state.peak_reserved:
            atomic_write(state.peak_reserved, state.reserved)

    cdef int add_segment(self, uint64_t nbytes, Request* request) noexcept nogil:
        """Take a committed segment of `nbytes` from the source, and the request's block out of it.

        Where this fails nothing has changed, the commitment included, unless the source did not take back
        what it gave.
        """
        cdef CoreState* state = &self.state
        cdef Arena* arena = request.arena
        cdef Segment segment
        cdef bint overlaps
        cdef int status
        atomic_add(state.source_calls, 1)
        status = self.source.acquire(nbytes, &segment.span, &segment.handle)
        if status != STATUS_OK:
            segment.address = segment.nbytes = 0
            segment.arena = arena
            segment.exported = segment.mapped = False
            segment.handle.nbytes = nbytes
            self.settle_refused(&segment)
            return status
        spin_lock(&state.lock)
        overlaps = self.overlaps(&segment, request)
        spin_unlock(&state.lock)
        if overlaps:
            self.not_taken(nbytes)                # and not given back: what would be freed is somebody's
            return STATUS_OVERLAP
        segment.address = round_up(segment.span.address, GRANULE)
        segment.nbytes = round_down(
            segment.span.address + (request.usable if request.usable else nbytes), GRANULE) - segment.address
        segment.arena = arena
        segment.edge = 0
        segment.exported = False
        segment.mapped = False
        if segment.address != segment.span.address and state.base_slack == 0:
            atomic_write(state.base_slack, GRANULE)            # read and written in turns only
            self.give_back(&segment)
            return STATUS_MISALIGNED
        if self.heaps is not None:
            self.heaps.add(segment.address, segment.nbytes)
        spin_lock(&state.lock)
        bias_take(&arena.lock)
        if state.segment_count < MOST_SEGMENTS:
            segment.edge = arena_add_segment(arena, segment.address, segment.nbytes)
        if segment.edge:
            self.enlist(&segment)
            self.note_segment(EVENT_RESERVE, &segment)
            # In the same breath, or another thread could take it and this one would grow once more.
            if request.requested:                 # 0: nobody waits for it
                request.block_id = arena_take_aligned(
                    arena, request.nbytes, request.requested, request.alignment, request.tag, request.looks)
            if request.block_id:
                request.address = arena.blocks[request.block_id].address
        bias_drop(&arena.lock)
        spin_unlock(&state.lock)
        if segment.edge == 0:
            request.no_record = True
            self.give_back(&segment)
            return STATUS_OUT_OF_MEMORY
        request.grown += nbytes
        return STATUS_OK

    cdef int take_all(self, uint64_t nbytes, uint64_t spare) noexcept nogil:
        """Take one segment of `nbytes`, with `spare` more on a misaligned base; the source's status."""
        cdef Request request
        cdef uint64_t granted
        cdef int status
        memset(&request, 0, sizeof(Request))
        request.arena = self.state.arenas[0]
        if self.source.granularity:
            # What whole handles have beyond it would be no block of any size.
            request.usable = nbytes
            nbytes = round_up(nbytes, self.source.granularity)
        granted = self.may_take(nbytes, nbytes, 0)
        status = self.add_segment(granted, &request) if granted else STATUS_OUT_OF_MEMORY
        if status == STATUS_MISALIGNED:
            granted = self.may_take(nbytes + spare, nbytes + spare, 0)
            status = self.add_segment(granted, &request) if granted else STATUS_OUT_OF_MEMORY
        return status

    cdef bint cut(self, uint64_t nbytes, uint64_t count) noexcept nogil:
        """Cut solid blocks off the only segment, which nobody has used yet; False where no record is left."""
        cdef Segment* segment = &self.state.segments[0]
        cdef bint done
        bias_take(&segment.arena.lock)
        done = arena_cut_solid(segment.arena, segment.edge, nbytes, count)
        bias_drop(&segment.arena.lock)
        return done

    cdef void index_blocks(self, uint64_t nbytes, uint64_t count) noexcept nogil:
        """Find the solid blocks that were cut by their place; there are none of another size."""
        arena_index_solid(self.state.segments[0].arena, self.state.segments[0].edge, nbytes, count)

    cdef bint set_limit(self, uint64_t nbytes) noexcept nogil:
        """Change the limit; False, and nothing is changed, where more is reserved or being asked for."""
        cdef bint possible
        spin_lock(&self.state.lock)
        possible = self.state.committed <= nbytes
        if possible:
            self.state.limit = nbytes
        spin_unlock(&self.state.lock)
        return possible

    cdef void count_failure(self, int status) noexcept nogil:
        """A request has failed, for want of memory or because the source did with `status`."""
        if status == STATUS_OK or status == STATUS_OUT_OF_MEMORY:
            atomic_add(self.state.ooms, 1)
        atomic_write(self.state.last_failure, status)

    cdef bint put(self, uint64_t address, uint16_t hint) noexcept nogil:
        """Take back the live block at `address`, looking in the hinted slot's arena first."""
        cdef uint32_t slot
        if core_deallocate(self.state.arenas[hint], address):
            return True
        for slot in range(slot_count(&self.state)):
            if slot != hint and core_deallocate(self.state.arenas[slot], address):
                return True
        return False

    cdef bint give_idle(self, uint64_t keep, uint64_t enough) noexcept nogil:
        """Give idle segments back while more than `enough` bytes are reserved and at least `keep` will be."""
        cdef Segment idle
        cdef uint32_t cursor = MOST_SEGMENTS
        cdef bint any = False
        while atomic_read(self.state.reserved) > enough and self.next_idle(keep, &cursor, &idle):
            self.give_back(&idle)
            any = True
        return any

    cdef void prove_idle(self) noexcept nogil:
        """Bring home what streams lent one another, and learn what is complete, without waiting."""
        turn_take(&self.state.crossing_turn)
        _prove_all(self)
        cross_recall(&self.state, self.source)
        _prove_all(self)          # what came home and merged has new stamps
        turn_give(&self.state.crossing_turn)

    cdef void coalesce(self) noexcept nogil:
        """Merge what streams lent one another, and what has become ready, without waiting."""
        turn_take(&self.state.crossing_turn)
        cross_recall(&self.state, self.source)
        turn_give(&self.state.crossing_turn)

    cdef int drain(self) noexcept nogil:
        """Wait for all work of the pool's streams; then whatever was freed before is complete.

        STATUS_NOT_READY where that may not be waited for, since something captures; the rest was.
        """
        cdef int status
        turn_take(&self.state.crossing_turn)
        status = order_drain(&self.state, self.source)
        # What came home and merged has new stamps, and may have a second way home before it, past a stream
        # that is gone and cannot be asked; the device is idle, so this costs little.
        while order_waited(status) and cross_recall(&self.state, self.source):
            status = order_drain(&self.state, self.source)
        turn_give(&self.state.crossing_turn)
        return status

    cdef bint next_idle(self, uint64_t keep, uint32_t* cursor, Segment* idle) noexcept nogil:
        """Take one wholly free segment out of the pool, if `keep` bytes stay reserved without it.

        Only what no work can touch.  The cursor goes down from the number of segments; what it has
        passed is not looked at again.
        """
        cdef CoreState* state = &self.state
        cdef Block* block
        cdef bint found = False
        if state.keeps:
            return False
        spin_lock(&state.lock)
        if cursor[0] > state.segment_count:
            cursor[0] = state.segment_count
        while cursor[0] and not found:
            cursor[0] -= 1
            idle[0] = state.segments[cursor[0]]
            if idle.mapped or state.reserved < keep + idle.handle.nbytes or idle.arena.captured or (
                    idle.exported and not atomic_read(state.word) & STATE_CLOSED):
                continue
            if idle.edge == 0:                    # refused before
                found = True
            else:
                bias_take(&idle.arena.lock)
                block = &idle.arena.blocks[idle.arena.blocks[idle.edge].next]
                if block.flags & FLAG_SOLID:
                    found = arena_remove_solid(
                        idle.arena, idle.edge, atomic_read(state.table[idle.arena.slot].done))
                elif block.stamp <= atomic_read(state.table[idle.arena.slot].done):
                    found = arena_remove_segment(idle.arena, idle.edge, idle.nbytes)
                bias_drop(&idle.arena.lock)
            if found:
                state.segment_count -= 1
                state.segments[cursor[0]] = state.segments[state.segment_count]
                lone_count(state.reserved, -<int64_t> idle.handle.nbytes)
        spin_unlock(&state.lock)
        return found

    cdef bint find_segment(self, uint64_t address, Segment* segment) noexcept nogil:
        """A copy of the segment of an address; False where there is none."""
        cdef Segment* found
        spin_lock(&self.state.lock)
        found = self.segment_of(address)
        if found != NULL:
            segment[0] = found[0]
        spin_unlock(&self.state.lock)
        return found != NULL

    cdef void keep_segment(self, uint64_t address) noexcept nogil:
        """Have the segment of an address, which was exported, stay with the pool until that is closed."""
        cdef Segment* found
        spin_lock(&self.state.lock)
        found = self.segment_of(address)
        if found != NULL:
            found.exported = not self.state.keeps     # a fixed core stays anyway
        spin_unlock(&self.state.lock)

    cdef int release_idle(self, uint64_t keep, uint64_t* released) noexcept nogil:
        """Give wholly free segments back as far as `keep` bytes stay reserved.

        Goes on where the source refuses one, and returns the first status that was none of success.
        """
        cdef Segment idle
        cdef uint32_t cursor = MOST_SEGMENTS
        cdef int first = STATUS_OK
        cdef int status
        released[0] = 0
        self.settle()
        while self.next_idle(keep, &cursor, &idle):
            status = self.give_back(&idle)
            if idle.handle.token == 0:
                released[0] += idle.handle.nbytes
            if first == STATUS_OK:
                first = status
        return first

    cdef void begin_peaks(self, PeakFigures* floor, PeakFigures* before) noexcept nogil:
        """Begin anew with the highest values: what is given, or what is there now if that is more."""
        spin_lock(&self.state.lock)
        before.reserved = self.state.peak_reserved
        atomic_write(self.state.peak_reserved, max(self.state.reserved, floor.reserved))
        spin_unlock(&self.state.lock)
        before.allocated = floor.allocated
        before.requested = floor.requested
        peaks_begin(self.state.peaks, &before.allocated, &before.requested)

    cdef bint overlaps(self, Segment* segment, Request* request) noexcept nogil:
        """Whether the pool has a part of a segment that the source gave; the request tells which.  O(segments).

        `state.lock` is held.
        """
        cdef Range* mine
        cdef uint32_t i
        for i in range(self.state.segment_count + 1):
            mine = &self.kept if i == self.state.segment_count else &self.state.segments[i].span
            if segment.span.address < mine.address + mine.nbytes and mine.address < (
                    segment.span.address + segment.span.nbytes):
                request.overlaps = segment.span
                request.before = mine[0]
                return True
        return False

    cdef Segment* segment_of(self, uint64_t address) noexcept nogil:
        """The segment that `address` lies in, or NULL.  `state.lock` is held.  O(segments)."""
        cdef uint32_t i
        for i in range(self.state.segment_count):
            if address - self.state.segments[i].address < self.state.segments[i].nbytes:
                return &self.state.segments[i]
        return NULL

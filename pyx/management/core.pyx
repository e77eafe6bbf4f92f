"""The core of a pool: arenas, segments, limits, growth, and the ladder of a miss."""
from libc.stdint cimport uint16_t, uint32_t, uint64_t

from vpool._base.lock cimport atomic_add, spin_lock, spin_unlock
from vpool._base.memory cimport lazy_release, lazy_reserve
from vpool._base.turn cimport turn_destroy, turn_give, turn_init, turn_take
from vpool._base.types cimport (
    GRANULE,
    MAX_SLOTS,
    SEGMENT_ROUNDING,
    BlockId,
    round_down,
    round_up,
)
from vpool._management.arena cimport (
    Arena,
    arena_add_segment,
    arena_delete,
    arena_new,
    arena_remove_segment,
    arena_take_aligned,
)
from vpool._management.core cimport core_deallocate
from vpool._storage.driver cimport STATUS_OK, STATUS_OUT_OF_MEMORY
from vpool._storage.source cimport Source

cdef enum:
    MOST_SEGMENTS = 1 << 20
    STATUS_MISALIGNED = -1        # of `add_segment`: the base is no multiple of the granule; ask for one more

RUNG_NAMES = ("search the whole size class", "grow")

ctypedef BlockId (*rung_t)(Core core, Request* request) noexcept nogil


cdef BlockId _search(Core core, Request* request) noexcept nogil:
    """Look through the request's own arena, harder than a hit does."""
    cdef Arena* arena = request.arena
    spin_lock(&arena.lock)
    request.block_id = arena_take_aligned(arena, request.nbytes, request.requested, request.alignment, request.tag)
    if request.block_id:
        request.address = arena.blocks[request.block_id].address
    spin_unlock(&arena.lock)
    return request.block_id


cdef BlockId _grow(Core core, Request* request) noexcept nogil:
    """Ask the source for a segment by the growth rule, for less near a limit, at last for the need."""
    cdef CoreState* state = &core.state
    cdef GrowthRule* rule = &state.rule
    # A segment may begin at any multiple of the granule, so an alignment can cost that much more.
    cdef uint64_t need = request.nbytes + request.alignment - GRANULE + state.base_slack
    cdef uint64_t want, granted
    cdef int status
    if turn_take(&state.growth_turn) and _search(core, request):
        turn_give(&state.growth_turn)
        return request.block_id
    if state.reserved == 0:
        want = rule.initial
    elif rule.step:
        want = rule.step
    else:
        want = <uint64_t> (<double> state.reserved * (rule.factor - 1))
    want = want if want > need else need
    if want >= SEGMENT_ROUNDING:
        want = round_up(want, SEGMENT_ROUNDING)
    while True:
        granted = core.may_take(need, want, request.tag)
        if granted == 0:
            break
        status = core.add_segment(granted, request)
        if status == STATUS_OK:
            break
        core.not_taken(granted)
        if status == STATUS_MISALIGNED:
            need += GRANULE
            want = need if need > want else want
            continue
        request.status = status
        request.refused = granted
        if granted == need or status != STATUS_OUT_OF_MEMORY or request.no_record:
            break
        want = need + round_down((granted - need) >> 1, SEGMENT_ROUNDING)
    turn_give(&state.growth_turn)
    return request.block_id


cdef rung_t[<int> RUNGS] LADDER = [_search, _grow]


cdef class Core:
    """Arenas and segments of one pool.  Knows no Python object but its source.

    Thread safety: every method may be called from any thread without the GIL.
    """

    def __cinit__(self, Source source not None, uint64_t limit, uint64_t initial, double factor, uint64_t step):
        self.source = source
        self.state.limit = limit
        self.state.rule.initial = initial
        self.state.rule.factor = factor
        self.state.rule.step = step
        turn_init(&self.state.growth_turn)
        self.state.segments = <Segment*> lazy_reserve(MOST_SEGMENTS * sizeof(Segment))
        if self.state.segments == NULL or self.arena_of(0) == NULL:
            raise MemoryError("no address space for the pool's own records")

    def __dealloc__(self):
        cdef uint32_t i
        if self.state.segments != NULL:
            for i in range(self.state.segment_count):
                self.source.surrender(&self.state.segments[i].span, &self.state.segments[i].handle)
            lazy_release(self.state.segments, MOST_SEGMENTS * sizeof(Segment))
        for i in range(MAX_SLOTS):
            if self.arenas[i] != NULL:
                arena_delete(self.arenas[i])
        turn_destroy(&self.state.growth_turn)

    cdef Arena* arena_of(self, uint16_t slot) noexcept nogil:
        """The arena of a slot, made on first use; NULL where there is no address space for it."""
        cdef Arena* made
        if self.arenas[slot] == NULL:
            made = arena_new(slot, GRANULE)
            spin_lock(&self.state.lock)
            if self.arenas[slot] == NULL and made != NULL:
                self.arenas[slot] = made
                made = NULL
                if slot >= self.state.slots:
                    self.state.slots = slot + 1
            spin_unlock(&self.state.lock)
            if made != NULL:
                arena_delete(made)
        return self.arenas[slot]

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

    cdef int _give_back(self, Segment* segment) noexcept nogil:
        atomic_add(self.state.source_calls, 1)
        return self.source.surrender(&segment.span, &segment.handle)

    cdef int add_segment(self, uint64_t nbytes, Request* request) noexcept nogil:
        """Take a committed segment of `nbytes` from the source, and the request's block out of it.

        Where this fails nothing has changed; the caller takes the commitment back.
        """
        cdef CoreState* state = &self.state
        cdef Arena* arena = request.arena
        cdef Segment segment
        cdef int status
        atomic_add(state.source_calls, 1)
        status = self.source.acquire(nbytes, &segment.span, &segment.handle)
        if status != STATUS_OK:
            return status
        segment.address = round_up(segment.span.address, GRANULE)
        segment.nbytes = round_down(segment.span.address + nbytes, GRANULE) - segment.address
        segment.arena = arena
        if segment.address != segment.span.address and state.base_slack == 0:
            state.base_slack = GRANULE            # read and written in turns only
            self._give_back(&segment)
            return STATUS_MISALIGNED
        spin_lock(&state.lock)
        spin_lock(&arena.lock)
        if self._enlist(&segment):
            # In the same breath, or another thread could take it and this one would grow once more.
            request.block_id = arena_take_aligned(
                arena, request.nbytes, request.requested, request.alignment, request.tag)
            if request.block_id:
                request.address = arena.blocks[request.block_id].address
        spin_unlock(&arena.lock)
        spin_unlock(&state.lock)
        if segment.edge == 0:
            request.no_record = True
            self._give_back(&segment)
            return STATUS_OUT_OF_MEMORY
        request.grown += nbytes
        return STATUS_OK

    cdef BlockId take(self, Request* request) noexcept nogil:
        """A block, by a hit or by the ladder; its number, or 0 with the reasons in the request."""
        return request.block_id if _search(self, request) else self.miss(request)

    cdef BlockId miss(self, Request* request) noexcept nogil:
        """Climb the ladder after the lists had nothing.  Takes no lock but for moments."""
        cdef CoreState* state = &self.state
        cdef int rung
        self.settle()
        for rung in range(RUNGS):
            atomic_add(state.rung_tries[rung], 1)
            request.tried |= <uint32_t> 1 << rung
            if LADDER[rung](self, request) or (rung > RUNG_SEARCH and _search(self, request)):
                atomic_add(state.rung_hits[rung], 1)
                break
        if request.grown:
            atomic_add(state.misses, 1)
            atomic_add(state.missed_bytes, request.arena.blocks[request.block_id].nbytes)
        if request.block_id == 0:
            atomic_add(state.ooms, 1)
        return request.block_id

    cdef bint put(self, uint64_t address, uint16_t hint) noexcept nogil:
        """Take back the live block at `address`, looking in the hinted slot's arena first."""
        cdef uint32_t slot
        if self.arenas[hint] != NULL and core_deallocate(self, self.arenas[hint], address):
            return True
        for slot in range(self.state.slots):
            if slot != hint and self.arenas[slot] != NULL and core_deallocate(self, self.arenas[slot], address):
                return True
        return False

    cdef bint _next_idle(self, uint64_t keep, Segment* idle) noexcept nogil:
        """Take one wholly free segment out of the pool, if more than `keep` bytes are reserved."""
        cdef CoreState* state = &self.state
        cdef uint32_t i
        cdef bint found = False
        spin_lock(&state.lock)
        for i in range(state.segment_count):
            if state.reserved <= keep or found:
                break
            idle[0] = state.segments[i]
            spin_lock(&idle.arena.lock)
            found = arena_remove_segment(idle.arena, idle.edge, idle.nbytes)
            if found:
                state.segment_count -= 1
                state.segments[i] = state.segments[state.segment_count]
                state.reserved -= idle.span.nbytes
            spin_unlock(&idle.arena.lock)
        spin_unlock(&state.lock)
        return found

    cdef bint _enlist(self, Segment* segment) noexcept nogil:
        """Make a segment part of the pool; False where no record is left.  `state.lock` is held."""
        cdef CoreState* state = &self.state
        segment.edge = 0
        if state.segment_count < MOST_SEGMENTS:
            segment.edge = arena_add_segment(segment.arena, segment.address, segment.nbytes)
        if segment.edge == 0:
            return False
        state.segments[state.segment_count] = segment[0]
        state.segment_count += 1
        state.reserved += segment.span.nbytes
        if state.reserved > state.peak_reserved:
            state.peak_reserved = state.reserved
        return True

    cdef int release_idle(self, uint64_t keep, uint64_t* released) noexcept nogil:
        """Give wholly free segments back while more than `keep` bytes are reserved.

        A segment that the source refuses to take stays in the pool; the status is returned.
        """
        cdef Segment idle
        cdef int status
        released[0] = 0
        self.settle()
        while self._next_idle(keep, &idle):
            status = self._give_back(&idle)
            if status != STATUS_OK:
                spin_lock(&self.state.lock)
                spin_lock(&idle.arena.lock)
                self._enlist(&idle)
                spin_unlock(&idle.arena.lock)
                spin_unlock(&self.state.lock)
                return status
            released[0] += idle.span.nbytes
            self.not_taken(idle.span.nbytes)
        return STATUS_OK

    cdef Segment* segment_of(self, uint64_t address) noexcept nogil:
        """The segment that `address` lies in, or NULL.  `state.lock` is held.  O(segments)."""
        cdef uint32_t i
        for i in range(self.state.segment_count):
            if address - self.state.segments[i].address < self.state.segments[i].nbytes:
                return &self.state.segments[i]
        return NULL

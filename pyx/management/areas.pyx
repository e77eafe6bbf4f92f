"""The areas of a pool, together: which one serves a request, and what is done to both."""
cimport cython
from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.string cimport memset

from vpool._base.lock cimport atomic_add, atomic_read, atomic_write, spin_lock, spin_unlock
from vpool._base.turn cimport turn_give, turn_is_mine, turn_is_taken, turn_take
from vpool._base.memory cimport lazy_release
from vpool._base.types cimport GRANULE, BlockId, round_up
from vpool._management.adapt cimport adapt_look
from vpool._management.arena cimport NEVER_CUT, Arena, arena_free_bytes
from vpool._management.core cimport Core, PeakFigures, core_deallocate, core_live_bytes, request_broken
from vpool._management.cross cimport cross_free, cross_use
from vpool._management.idle cimport idle_look, idle_trim
from vpool._management.journal cimport MOST_TAGS, TagCount, journal_close
from vpool._management.ladder cimport ladder_climb, ladder_ensure, ladder_reserve, ladder_search_all
from vpool._management.noted cimport noted_free, noted_lend
from vpool._management.order cimport order_drain_device, order_waited
from vpool._management.planned cimport Planned
from vpool._management.state cimport (
    RUNG_MERGE,
    RUNG_SEARCH,
    RUNG_TRIM,
    RUNG_WAIT,
    STATE_ADAPTIVE,
    STATE_CLOSED,
    STATE_FORKED,
    STATE_MAPPED,
    STATE_NOTED,
    STATE_PLANNED,
    Request,
    slot_count,
)
from vpool._management.suspended cimport suspended_free, suspended_settle
from vpool._management.walk cimport Broken, walk_check
from vpool._storage.driver cimport STATUS_OK, STATUS_OUT_OF_MEMORY
from vpool._storage.source cimport Source

cdef enum:
    NEVER = 0xFFFFFFFFFFFFFFFF
    MOST_LOOKS = 4096             # of one search before the last one
    ALWAYS = 0x8000000000000000   # a stamp that no free reaches


@cython.no_gc   # refers to its areas alone, so no cycle; the collector must not take them while a buffer lives
cdef class Areas:
    """The one or two areas of a pool.

    Thread safety: every method may be called from any thread without the GIL.
    """

    def __cinit__(self, Source source not None, numbers, *, uint64_t minimum_remainder=GRANULE,
                  uint64_t rounding=GRANULE):
        cdef Core core = Core(
            source, numbers.limit - numbers.core if numbers.grows else 0, minimum_remainder=minimum_remainder,
            rounding=rounding)
        core.state.rule.initial = numbers.initial
        core.state.rule.factor = numbers.factor
        core.state.rule.step = numbers.step
        core.state.ease = numbers.ease
        core.state.rule.trims = numbers.trims
        if numbers.adaptive:
            core.state.word |= STATE_ADAPTIVE
        if source.granularity and numbers.grows:
            core.state.word |= STATE_MAPPED
        self.core = core
        self.state = &core.state
        self.state.journal = &self.journal
        self.state.mapped.journal = &self.journal
        self.fixed_state = self.state             # so that no path needs to ask whether there is one
        self.smallest = NEVER
        self.watermark = NEVER
        self.grows = numbers.grows
        self.core_only = numbers.exact
        self.only_blocks = not numbers.grows and len(numbers.blocks) > 0
        self.block_sizes = tuple(numbers.blocks)
        self.largest_block = numbers.blocks[len(numbers.blocks) - 1][0] if numbers.blocks else 0
        if numbers.core:
            self._make_fixed(source, numbers, minimum_remainder, rounding)

    def _make_fixed(self, source, numbers, uint64_t minimum_remainder, uint64_t rounding):
        """Take the fixed core's memory, all of it or none."""
        cdef uint64_t nbytes = numbers.core
        cdef Core fixed
        cdef int status
        cdef uint64_t size, count, spare
        if numbers.blocks:
            # What no block covers would only be held.
            nbytes = sum(size * count for size, count in numbers.blocks)
            minimum_remainder = NEVER_CUT
            rounding = GRANULE
        if numbers.planned:
            minimum_remainder = GRANULE           # places lie side by side
        # What a base that is no multiple of a granule costs; where the limit leaves no room, a slab is smaller.
        spare = min(GRANULE, numbers.limit - nbytes)
        fixed = Core(
            source, round_up(nbytes, max(source.granularity, <uint64_t> GRANULE)) + 2 * GRANULE,
            minimum_remainder=minimum_remainder, rounding=rounding, partner=self.core)
        with nogil:
            status = fixed.take_all(nbytes, spare)
        fixed.state.limit = fixed.state.committed
        if numbers.grows:
            self.state.limit = numbers.limit - min(numbers.limit, max(numbers.core, fixed.state.committed))
        if status != STATUS_OK:
            raise CoreNotTaken(status)
        fixed.state.keeps = True
        self.fixed_address = fixed.state.segments[0].address
        self.fixed_bytes = fixed.state.segments[0].nbytes
        self.core.kept = fixed.state.segments[0].span
        # The largest first, so that addresses are multiples of what sizes are.
        for size, count in reversed(numbers.blocks):
            if not fixed.cut(size, count):
                raise MemoryError("no record left for the blocks of the pool's core")
        if len(numbers.blocks) == 1:
            fixed.index_blocks(numbers.blocks[0][0], numbers.blocks[0][1])
        self.fixed = fixed
        fixed.state.journal = &self.journal
        self.state.arenas[0].fixed = fixed.state.arenas[0]
        self.fixed_state = &fixed.state
        self.smallest = numbers.smallest
        self.band = numbers.largest - numbers.smallest
        self.watermark = <uint64_t> (self.fixed_bytes * <double> numbers.watermark)
        self.headroom = NEVER if numbers.headroom is None else numbers.headroom

    def __dealloc__(self):
        journal_close(&self.journal)
        if self.journal.tags != NULL:
            lazy_release(self.journal.tags, MOST_TAGS * sizeof(TagCount))

    def follow_plan(self, nbytes, offset, below):
        """Serve requests from a plan (see `Planned`), whose memory is the fixed core."""
        self.planned = Planned(self.fixed, nbytes, offset, below)
        self.state.word |= STATE_PLANNED

    def wait(self, bint may):
        """Whether requests may wait for work on the device."""
        self.core.may_wait = may
        self.state.never_waits = not may
        if self.fixed is not None:
            self.fixed.may_wait = may
            self.fixed_state.never_waits = not may

    cdef Core area_at(self, uint64_t address):
        """The area that an address is in."""
        return self.fixed if address - self.fixed_address < self.fixed_bytes else self.core

    cdef CoreState* state_of(self, Arena* arena) noexcept nogil:
        """Of the area that an arena is of."""
        return self.fixed_state if self.fixed_state.arenas[arena.slot] == arena else self.state

    cdef BlockId climb(self, Request* request, int first, int last) noexcept nogil:
        """Try some rungs of the ladder, of a common request in the fixed core first."""
        if self.hopeless(request):
            return 0
        if self.planned is not None and request.tried == 0:
            # At its first try; a plan is followed request by request.
            request.block_id = self.planned.take(
                request.arena, request.requested, request.alignment, &request.address)
            if request.block_id:
                request.arena = request.arena.fixed
                return request.block_id
        if request.common:
            self.turn_to(self.fixed, request)
            # It never grows, and has nothing to give back.
            ladder_climb(self.fixed, request, first, last if first != RUNG_SEARCH else RUNG_MERGE)
            # Blocks cannot be cut to an alignment: what none of them has may come from elsewhere.
            if request.block_id or self.core_only and request.alignment == GRANULE:
                return request.block_id if request.block_id else ladder_search_all(self.fixed, request)
        self.turn_to(self.core, request)
        if ladder_climb(self.core, request, first, last) or request_broken(request) or (
                ladder_search_all(self.core, request)):
            return request.block_id
        if request.common:
            self.turn_to(self.fixed, request)
            if ladder_search_all(self.fixed, request):
                return request.block_id
            self.turn_to(self.core, request)
        return 0

    cdef void turn_to(self, Core core, Request* request) noexcept nogil:
        """Have a request served from an area."""
        request.arena = core.state.arenas[request.arena.slot]
        request.nbytes = round_up(request.requested + request.guards, request.arena.rounding)

    cdef bint hopeless(self, Request* request) noexcept nogil:
        """Whether a request can never be served; notes what is larger than every block of the core."""
        if self.largest_block == 0 or request.requested + request.guards <= self.largest_block:
            return False
        if request.requested > self.largest_oversize:
            atomic_write(self.largest_oversize, request.requested)
        if request.tried == 0:
            atomic_add(self.oversize, 1)
        return self.only_blocks

    cdef BlockId take(self, Request* request) noexcept nogil:
        """A block, by the whole ladder of who has no Python; its number, or 0 with the reasons in the request."""
        if not self.climb(request, RUNG_SEARCH, RUNG_TRIM) and self.core.may_wait and not (
                request_broken(request) or request.tried == 0):
            self.climb(request, RUNG_WAIT, RUNG_WAIT)
        if request.block_id == 0:
            self.core.count_failure(request.status)
        return request.block_id

    cdef BlockId slow(self, Arena* arena, uint64_t requested, uint64_t* address) noexcept nogil:
        """Of `areas_allocate`: what no list had at hand, and all where the state word stops what is quick."""
        cdef Request request
        if atomic_read(self.state.word) & (STATE_CLOSED | STATE_FORKED):
            return 0
        if self.watcher != NULL:
            return self.watcher_lends(self.watcher, arena, requested, address)
        if atomic_read(self.state.word) & STATE_NOTED:
            return noted_lend(self, arena, requested, address)
        request_init(self, &request, arena, requested, GRANULE)
        self.take(&request)
        address[0] = request.address
        return request.block_id

    cdef bint put_held(self, Arena* arena, uint64_t address) noexcept nogil:
        """Of `areas_deallocate`: a free where the state word has something to say before it."""
        cdef bint found
        if atomic_read(self.state.word) & STATE_FORKED:
            return True                           # the block is the parent's
        if self.watcher != NULL:
            return self.watcher_takes(self.watcher, address)
        found = noted_free(self, address, arena.slot, -1)
        self.after_free()
        return found

    cdef bint take_back(self, uint64_t address, int freer) noexcept nogil:
        """Free a block on the stream of a slot, or on its own for -1; noted if calls are."""
        if atomic_read(self.state.word) & STATE_NOTED:
            return noted_free(self, address, 0, freer)
        return self.put(address, 0) if freer < 0 else self.free_on(address, freer)

    cdef bint put_suspended(self, uint64_t address) noexcept nogil:
        """Of `areas_deallocate`: a block that is not live, but suspended."""
        return suspended_free(self.core, address, -1)

    cdef int open_slot(self, uint64_t stream, uint64_t unique_id, uint64_t thread, uint64_t capture) noexcept nogil:
        """Make a slot, the same in each area; its number, or -1 where there is no room for it.

        For a capture, its memory is kept for the graph, and its handle is never touched: whether the stream
        exists any more is the program's affair.
        """
        cdef uint64_t* waited
        cdef uint64_t* fixed_waited
        cdef Arena* arena = self.core.prepare_slot(&waited)
        cdef Arena* fixed_arena
        if arena != NULL and self.fixed is not None:
            fixed_arena = self.fixed.prepare_slot(&fixed_waited)
            if fixed_arena == NULL:
                self.core.discard_slot(arena, waited)
                return -1
            arena.fixed = fixed_arena
            # Before the other, where callers look.
            self.fixed.enter_slot(fixed_arena, fixed_waited, stream, unique_id, thread, capture)
        return self.core.enter_slot(arena, waited, stream, unique_id, thread, capture) if arena != NULL else -1

    cdef int reopen_slot(self, uint64_t stream, uint64_t unique_id, uint64_t thread, uint64_t capture,
                         bint may_drain) noexcept nogil:
        """Give a slot whose stream is gone to another stream; its number, or -1 where there is none."""
        cdef uint32_t slot
        cdef int found = -1
        if self.fixed is not None:
            turn_take(&self.fixed_state.crossing_turn)
            self.fixed.make_restful(may_drain)
        turn_take(&self.state.crossing_turn)
        self.core.make_restful(may_drain)
        for slot in range(1, slot_count(self.state)):
            # A capture would keep the free memory that a slot at rest may have.
            if capture and (self.state.arenas[slot].rows or self.fixed_state.arenas[slot].rows):
                continue
            if self.core.slot_at_rest(slot) and (self.fixed is None or self.fixed.slot_at_rest(slot)):
                self.core.give_slot(slot, stream, unique_id, thread, capture)
                if self.fixed is not None:
                    self.fixed.give_slot(slot, stream, unique_id, thread, capture)
                found = slot
                break
        turn_give(&self.state.crossing_turn)
        if self.fixed is not None:
            turn_give(&self.fixed_state.crossing_turn)
        return found

    cdef void retire_slot(self, int slot) noexcept nogil:
        """Never use a slot's handle again; what it freed so far is marked first, if that can be."""
        self.core.retire_slot(slot)
        if self.fixed is not None:
            self.fixed.retire_slot(slot)

    cdef void slot_is_gone(self, int slot) noexcept nogil:
        """The stream of a slot was destroyed."""
        atomic_write(self.state.table[slot].gone, True)
        atomic_write(self.fixed_state.table[slot].gone, True)

    cdef void hold_slot(self, int slot, int by) noexcept nogil:
        """So many more objects hold the stream of a slot."""
        atomic_add(self.state.table[slot].held, by)
        if self.fixed is not None:
            atomic_add(self.fixed_state.table[slot].held, by)

    cdef void finish_crossings(self) noexcept nogil:
        """Wait until whatever may have looked at a slot before this call has finished naming its stream.

        Where the slot was not held any more by then, its stream may be destroyed after it.
        """
        if atomic_read(self.state.word) & STATE_FORKED:
            return                                # who had the turn is not in this process
        turn_take(&self.state.crossing_turn)
        turn_give(&self.state.crossing_turn)
        if self.fixed is not None:
            turn_take(&self.fixed_state.crossing_turn)
            turn_give(&self.fixed_state.crossing_turn)

    cdef bint crossing_now(self) noexcept nogil:
        """Whether `finish_crossings` may have to wait."""
        return not self.state.word & STATE_FORKED and (turn_is_taken(&self.state.crossing_turn) or (
            self.fixed is not None and turn_is_taken(&self.fixed_state.crossing_turn)))

    cdef bint is_empty(self) noexcept nogil:
        """Whether the pool has nothing of its source."""
        return atomic_read(self.state.reserved) == 0 and (
            self.fixed is None or atomic_read(self.fixed_state.reserved) == 0)

    cdef void end_capture(self, int slot) noexcept nogil:
        """Let everybody have a slot's memory again, as that of a stream that is gone: its graph is.

        Nothing it freed counts as complete before the device was waited for.
        """
        atomic_write(self.state.arenas[slot].captured, 0)
        atomic_write(self.fixed_state.arenas[slot].captured, 0)

    cdef void give_to_host(self, int slot) noexcept nogil:
        """Make a slot that was opened with the host's thread number complete for good: no stream waits for it."""
        atomic_write(self.state.table[slot].done, ALWAYS)
        atomic_write(self.fixed_state.table[slot].done, ALWAYS)

    cdef int drain(self) noexcept nogil:
        """Wait for all work of the pool's streams; then whatever was freed before is complete.

        STATUS_NOT_READY where that may not be waited for, since something captures; the rest was.
        """
        cdef int status = self.core.drain()
        cdef int other = STATUS_OK
        if self.fixed is not None:
            other = self.fixed.drain()
        return status if not order_waited(status) or other == STATUS_OK else other

    cdef int drain_device(self) noexcept nogil:
        """Wait for all work of the device, also of graphs and of streams that the pool never met.

        STATUS_NOT_READY, and nothing is waited for, while something captures.
        """
        cdef int status
        turn_take(&self.state.crossing_turn)
        status = order_drain_device(self.state, self.core.source)
        turn_give(&self.state.crossing_turn)
        if status == STATUS_OK and self.fixed is not None:
            # The device is idle: this is for what is pending there to be known as complete.
            turn_take(&self.fixed_state.crossing_turn)
            order_drain_device(self.fixed_state, self.fixed.source)
            turn_give(&self.fixed_state.crossing_turn)
        return status

    cdef bint put(self, uint64_t address, uint16_t hint) noexcept nogil:
        """Take back the live block at `address`, looking in the hinted slot's arena first."""
        if address - self.fixed_address < self.fixed_bytes:
            return self.fixed.put(address, hint)
        return self.core.put(address, hint) or suspended_free(self.core, address, -1)

    cdef bint free_on(self, uint64_t address, uint16_t freer) noexcept nogil:
        """Free the live block at `address` on the stream of a slot; False where there is none."""
        return core_deallocate(state_at(self, address).arenas[freer], address) or cross_free(
            state_at(self, address), address, freer) or suspended_free(self.core, address, freer)

    cdef int use_on(self, uint64_t address, uint16_t user) noexcept nogil:
        """Record that a live block is used on a stream too: 1, or 0 where there is none, -1 without memory."""
        return cross_use(state_at(self, address), address, user)

    cdef int release_idle(self, uint64_t keep, uint64_t* released) noexcept nogil:
        """Give wholly free segments back as far as `keep` bytes stay reserved; the fixed core only once closed."""
        cdef uint64_t fixed = 0
        cdef uint64_t more = 0
        cdef int status, other
        released[0] = 0
        if self.fixed is not None:
            fixed = atomic_read(self.fixed_state.reserved)
        status = self.core.release_idle(keep - fixed if keep > fixed else 0, released)
        if self.state.word & STATE_MAPPED:
            suspended_settle(self.core)
            other = idle_trim(self.core, keep - fixed if keep > fixed else 0, released)
            status = other if status == STATUS_OK else status
        if released[0]:
            atomic_write(self.peak_seen, 0)       # what was taken ahead is gone, and may be needed again
        if atomic_read(self.state.word) & STATE_CLOSED:
            atomic_write(self.live_when_looked, live_blocks(self.state) + (
                live_blocks(self.fixed_state) if self.fixed is not None else 0))
        if fixed and atomic_read(self.state.word) & STATE_CLOSED:
            self.fixed_state.keeps = False
            other = self.fixed.release_idle(keep, &more)
            released[0] += more
            status = other if status == STATUS_OK else status
        return status

    cdef void look_at_idle(self) noexcept nogil:
        """What a free may be the moment for: memory that moves comes to rest, an adaptive pool gives some back."""
        if self.state.word & STATE_MAPPED:
            idle_look(self.core)
        if self.state.word & STATE_ADAPTIVE:
            adapt_look(self.core, False)

    cdef void after_free(self) noexcept nogil:
        """What a set state word asks for after a free: an adaptive or a closed pool gives back what is idle."""
        cdef uint64_t released
        self.look_at_idle()
        if self.state.word & STATE_CLOSED and self.may_have_idle():
            if order_waited(self.drain()):
                self.release_idle(0, &released)

    cdef bint may_have_idle(self) noexcept nogil:
        """Whether it is worth looking for wholly free segments of a closed pool: each time half as much is live."""
        cdef uint64_t live = live_blocks(self.state)
        if self.fixed is not None:
            live += live_blocks(self.fixed_state)
        if live and live > self.live_when_looked // 2:
            return False
        atomic_write(self.live_when_looked, live)
        return True

    cdef void coalesce(self) noexcept nogil:
        """Merge what streams lent one another, and what has become ready, without waiting."""
        self.core.coalesce()
        if self.fixed is not None:
            self.fixed.coalesce()

    cdef uint64_t peak_reserved(self) noexcept nogil:
        """The most that the pool ever had from its source; of a fixed core that is always all."""
        cdef uint64_t fixed = 0 if self.fixed is None else atomic_read(self.fixed_state.peak_reserved)
        return fixed + atomic_read(self.state.peak_reserved)

    cdef void begin_peaks(self, PeakFigures* floor, PeakFigures* before) noexcept nogil:
        """Begin anew with the highest values: what is given, or what is there now if that is more.

        Gives what they were before.
        """
        cdef uint64_t fixed = 0 if self.fixed is None else atomic_read(self.fixed_state.reserved)
        floor.reserved = floor.reserved - fixed if floor.reserved > fixed else 0
        self.core.begin_peaks(floor, before)
        before.reserved += fixed

    cdef void check(self, Broken* broken) noexcept nogil:
        """Look whether every invariant holds; `broken` names the first that does not."""
        # What is mapped changes in turns only.  A source may call this while its pool asks it for memory.
        cdef bint mine = turn_is_mine(&self.state.growth_turn)
        if not mine:
            turn_take(&self.state.growth_turn)
        walk_check(self.core, broken)
        if not mine:
            turn_give(&self.state.growth_turn)
        if broken.what == NULL and self.fixed is not None:
            walk_check(self.fixed, broken)

    cdef bint holds(self, uint64_t address) noexcept nogil:
        """Whether an address lies in memory of this pool."""
        cdef bint inside = address - self.fixed_address < self.fixed_bytes
        spin_lock(&self.state.lock)
        inside = inside or self.core.segment_of(address) != NULL
        spin_unlock(&self.state.lock)
        return inside

    cdef bint set_limit(self, uint64_t nbytes) noexcept nogil:
        """Change the limit of the whole pool; False, and nothing is changed, where that much is not free to give."""
        cdef uint64_t fixed = 0 if self.fixed is None else self.fixed_state.limit
        return nbytes >= fixed and (not self.grows or self.core.set_limit(nbytes - fixed))

    def apply(self, numbers):
        """Work by other numbers from now on; the caller has seen that the fixed core's stay the same."""
        self.state.rule.initial = numbers.initial
        self.state.rule.factor = numbers.factor
        self.state.rule.step = numbers.step
        self.state.ease = numbers.ease
        self.state.rule.trims = numbers.trims
        if numbers.adaptive:
            atomic_write(self.state.word, self.state.word | STATE_ADAPTIVE)
        else:
            atomic_write(self.state.word, self.state.word & ~<uint32_t> STATE_ADAPTIVE)
        if self.fixed is not None:
            self.watermark = <uint64_t> (self.fixed_bytes * <double> numbers.watermark)
            self.headroom = NEVER if numbers.headroom is None else numbers.headroom
            self.smallest = numbers.smallest
            self.band = numbers.largest - numbers.smallest

    cdef int maintain(self) noexcept nogil:
        """Make the other area grow ahead while the fixed core is fuller than its watermark; the source's status.

        It is given its first segment, and then room for the largest request that it once had to grow for
        whenever the pool has more live than ever.
        """
        cdef uint64_t live, all_live, ahead
        cdef int status = STATUS_OK
        if self.state.word & STATE_CLOSED:
            return STATUS_OK
        live = core_live_bytes(self.fixed_state)
        if self.fixed is None or live <= self.watermark:
            if self.state.word & STATE_ADAPTIVE:
                adapt_look(self.core, True)
            return STATUS_OK
        all_live = live + core_live_bytes(self.state)
        ahead = self.headroom if self.headroom != NEVER else atomic_read(self.state.largest_growth)
        if atomic_read(self.state.reserved) == 0:
            ahead = self.state.rule.initial if self.state.rule.initial > ahead else ahead
        elif all_live <= self.peak_seen:
            ahead = 0
        if all_live > self.peak_seen:
            self.peak_seen = all_live
        if ahead:
            status = ladder_ensure(self.core, ahead)
        if self.state.word & STATE_CLOSED:        # meanwhile
            self.after_free()
        return STATUS_OK if status == STATUS_OUT_OF_MEMORY else status

    cdef bint reserve(self, uint64_t nbytes, uint64_t guards, Request* request) noexcept nogil:
        """Have so much in one free block, beside a fixed core; False with the reasons in the request.

        A pool that never grows has it where so many bytes of its core are free.
        """
        cdef bint found
        cdef int status
        request_init(self, request, self.state.arenas[0], nbytes, GRANULE)
        request.guards = guards
        request.nbytes = round_up(nbytes + guards, request.arena.rounding)
        found = self.has_room(request, nbytes + guards)
        if not found and (self.core.may_wait if self.grows else self.fixed.may_wait) and not request_broken(request):
            request.tried |= <uint32_t> 1 << <int> RUNG_WAIT
            status = self.core.drain() if self.grows else self.fixed.drain()
            found = self.has_room(request, nbytes + guards)
            if not found and not order_waited(status):
                request.status = status
        if self.state.word & STATE_CLOSED:        # meanwhile
            self.after_free()
        return found

    cdef bint has_room(self, Request* request, uint64_t nbytes) noexcept nogil:
        """What `reserve` asks for, without a wait."""
        if self.grows:
            return ladder_reserve(self.core, request)
        self.fixed.coalesce()                     # what is pending and ready counts
        return self.has_free(nbytes)

    cdef bint has_free(self, uint64_t nbytes) noexcept nogil:
        """Whether so many bytes of the core are neither live, pending nor kept for a capture.  O(streams)."""
        cdef CoreState* fixed = self.fixed_state
        cdef uint64_t taken = core_live_bytes(fixed)
        cdef uint32_t slot
        for slot in range(slot_count(fixed)):
            if atomic_read(fixed.arenas[slot].captured):
                taken += arena_free_bytes(fixed.arenas[slot])
        # Not of what is reserved: handles may have more than the core.
        return nbytes <= self.fixed_bytes - min(self.fixed_bytes, taken)


cdef uint64_t live_blocks(CoreState* state) noexcept nogil:
    cdef uint64_t total = 0
    cdef uint32_t slot
    for slot in range(slot_count(state)):
        total += atomic_read(state.arenas[slot].live_blocks)
    return total


class CoreNotTaken(Exception):
    """The source did not give a fixed core its memory.  Its argument is the status; never leaves the pool."""


cdef void request_init(Areas areas, Request* request, Arena* arena, uint64_t requested,
                       uint64_t alignment) noexcept nogil:
    """A request as it begins its way."""
    memset(request, 0, sizeof(Request))
    request.arena = arena
    request.requested = requested
    request.nbytes = round_up(requested, arena.rounding)
    request.alignment = alignment
    request.common = is_common(areas, requested)
    request.looks = MOST_LOOKS

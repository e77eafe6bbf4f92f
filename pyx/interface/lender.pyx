"""The way of a block out of a pool and back, as pools and buffers share it."""
import itertools
import logging
import weakref

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from vpool._base.bias cimport Seat, bias_leave, bias_try_enter
from vpool._base.clock cimport now_ns
from vpool._base.lock cimport atomic_read
from vpool._base.types cimport GRANULE, BlockId, likely, round_up
from vpool._interface.diagnosis cimport forked, over_limit, source_error, stray
from vpool._interface.events cimport read_origins
from vpool._interface.snapshot cimport told_records
from vpool._management.arena cimport Arena
from vpool._management.areas cimport Areas, is_common, request_init
from vpool._management.hit cimport hit_any
from vpool._management.idle cimport idle_wanted
from vpool._management.journal cimport journal_tags_in_use
from vpool._management.noted cimport (
    noted_begin,
    noted_end,
    noted_failure,
    noted_switch,
    noted_try_free,
    noted_try_lend,
)
from vpool._management.order cimport order_waited
from vpool._management.state cimport (
    STATE_ADAPTIVE,
    STATE_CLOSED,
    STATE_DEBUG,
    STATE_FORKED,
    STATE_MAPPED,
    STATE_NOTED,
    STATE_STOPS,
    Request,
)
from vpool._management.walk cimport walk_covers
from vpool._storage.driver cimport STATUS_NOT_READY, STATUS_OK

from vpool._interface import tags
from vpool._storage.fork import PerProcess
from vpool.debugging import NotLive
from vpool.errors import ClosedPoolError, ForkedProcessError, OutOfMemoryError, SourceError
from vpool.leaks import UNKNOWN_SITE, Leaks

cdef enum:
    NO_SLOT = 0xFFFF
    SLICE_BYTES = 64 << 20        # that a trim with a budget gives back at once, at first

logger = logging.getLogger("vpool")
# By number.  No lock: in a collection while it is held a finaliser may wait for who waits for it.
_lenders = PerProcess(weakref.WeakValueDictionary)
_numbers = itertools.count()


def pools():
    """Every pool that is open in this process, in no order."""
    return [pool for pool in pools_and_closed() if not pool.closed]


def pools_and_closed():
    """The same with those that were closed and have blocks that somebody still uses."""
    known = [reference() for reference in _lenders.here.valuerefs()]
    return [pool for pool in known if pool is not None]


def may_have(Lender pool not None, uint64_t address):
    """Whether a pool may have an address: only where not, its snapshot says nothing of it.  O(segments).

    Where memory moves that is not known, and so may be.
    """
    cdef Areas areas = pool.areas
    cdef bint inside
    if pool.core.source.granularity:
        return True
    with nogil:
        inside = walk_covers(pool.core, address)
        if not inside and areas.fixed is not None:
            inside = walk_covers(areas.fixed, address)
    return inside


cdef int register(Lender lender) except -1:
    """Make a pool one of `pools`."""
    _lenders.here[next(_numbers)] = lender
    if journal_tags_in_use():
        noted_switch(lender.areas, False)
    return 0


def _count_tags():
    """Have every pool count by tag: this process has one."""
    for pool in pools_and_closed():
        noted_switch((<Lender> pool).areas, False)


tags.first_use.append(_count_tags)


cdef inline BlockId hit(Arena* arena, uint64_t requested, uint64_t* address) noexcept nogil:
    """A block from the arena's lists, if its lock is free; 0 for whatever takes longer."""
    cdef BlockId block_id
    cdef Seat* seat
    if not bias_try_enter(&arena.lock, &seat):
        return 0
    block_id = hit_any(arena, requested)
    address[0] = arena.blocks[block_id].address
    bias_leave(&arena.lock, seat)
    return block_id


@cython.no_gc_clear   # the collector must not drop `core` while `__dealloc__` of a buffer may need it
cdef class Lender:
    """What is compiled of a pool.  Made as `Pool`, which fills it."""

    @property
    def closed(self):
        """Whether `close` was called."""
        return self.core.state.word & STATE_CLOSED != 0

    @property
    def forked(self):
        """Whether the pool belongs to a parent of this process, where no call but a free or `close` works."""
        return self.core.state.word & STATE_FORKED != 0

    cdef Arena* arena_for(self, stream) except NULL:
        """The arena of a stream's slot."""
        self.must_be_mine()
        return self.core.state.arenas[self.streams.slot_of(stream)]

    cdef BlockId lend(self, Arena** arena, uint64_t requested, uint64_t alignment, uint64_t* address) except? 0:
        """Number and address of a block, and the arena it is in; 0 for no bytes.

        The caller gives the arena of the stream's slot in the area that grows.
        """
        cdef Request request
        cdef BlockId block_id
        cdef Arena* first = arena[0]
        if likely(self.core.state.word & STATE_STOPS == 0 and alignment == GRANULE and requested != 0):
            if is_common(self.areas, requested):
                first = first.fixed
            block_id = hit(first, requested, address)
            if likely(block_id != 0):
                arena[0] = first
                return block_id
        elif self.core.state.word & (STATE_CLOSED | STATE_FORKED):
            self.must_be_open()
        if requested == 0:
            return 0
        if self.core.state.word & STATE_STOPS == STATE_NOTED and alignment == GRANULE and self.sites is None:
            block_id = noted_try_lend(self.areas, arena, requested, address)
            if block_id:
                return block_id
        self.streams.settle()
        if self.core.state.word & (STATE_DEBUG | STATE_NOTED):
            return self.lend_watched(arena, requested, alignment, address, True)
        request_init(self.areas, &request, arena[0], requested, alignment)
        self.pressure.climb(&request, self.name, self.measures, self.debugger)
        address[0] = request.address
        arena[0] = request.arena
        return request.block_id

    cdef BlockId lend_watched(self, Arena** arena, uint64_t requested, uint64_t alignment, uint64_t* address,
                              bint named) except? 0:
        """Of `lend`: a block that is noted, and has guards around it where there is a debugger.

        The address is the caller's.  `named` says that the stream was just named, so that it exists.
        """
        cdef Request request
        cdef uint64_t front = 0 if self.debugger is None else self.debugger.front(alignment)
        cdef bint noted = self.core.state.word & STATE_NOTED != 0
        request_init(self.areas, &request, arena[0], requested, alignment)
        request.guards = front + self.front
        request.nbytes = round_up(requested + request.guards, request.arena.rounding)
        if noted:
            self.tag(&request)
        try:
            self.pressure.climb(&request, self.name, self.measures, self.debugger)
            if self.debugger is not None:
                self.show(&request, front, named)
        except BaseException as error:
            if isinstance(error, OutOfMemoryError) and error.shortage is not None:
                error.shortage.name_sites(
                    read_origins(self.areas, self.sites, self.debugger, error.report.blocks))
            request.block_id = 0
            if noted:
                with nogil:
                    noted_end(self.areas, &request)
            raise
        if noted:
            with nogil:
                noted_end(self.areas, &request)
        address[0] = request.address + front
        arena[0] = request.arena
        return request.block_id

    cdef int show(self, Request* request, uint64_t front, bint named) except -1:
        """Show the debugger a block that was just lent; where that fails it is nobody's."""
        try:
            # The block is ours: nobody else writes its record now.
            self.debugger.lent(request.address, front, request.arena.blocks[request.block_id].nbytes,
                               request.requested, request.arena.slot, named)
        except BaseException:
            self.debugger.forget(request.address + front, request.address)
            raise
        return 0

    cdef int tag(self, Request* request) except -1:
        """Count a request as its tag's; OutOfMemoryError where that would pass its limit."""
        cdef bint fits
        cause = None
        if self.sites is not None:
            request.site = self.sites.number()
        with nogil:
            fits = noted_begin(self.areas, request)
        if not fits:
            cause = self.pressure.ask_python(request, self.name, &fits)
        if not fits:
            self.must_be_open()
            with nogil:
                noted_failure(self.areas, request)
            self.core.count_failure(STATUS_OK)
            raise over_limit(self.areas, self.name, request, self.measures, self.debugger) from cause
        return 0

    cdef int watch(self, debugger) except -1:
        """Have a debugger see every block from the first on."""
        self.debugger = debugger
        self.front = debugger.front(GRANULE)
        self.areas.watcher = <void*> self
        self.areas.watcher_lends = _lend_to_compiled
        self.areas.watcher_takes = _take_from_compiled
        self.core.state.word |= STATE_DEBUG
        self.pressure.quarantine = debugger.release_all
        return 0

    def __dealloc__(self):
        if self.areas is not None:
            self.areas.watcher = NULL

    cdef int must_be_mine(self) except -1:
        """ForkedProcessError in a child of the pool's process."""
        if self.core.state.word & STATE_FORKED:
            raise forked(self.name)
        return 0

    cdef int must_be_open(self) except -1:
        self.must_be_mine()
        if self.core.state.word & STATE_CLOSED:
            raise ClosedPoolError(f"pool {self.name!r} is closed")
        return 0

    cdef int freeing_slot(self, stream, int gone) except -1:
        """The slot of a stream that a block is freed on; `gone` if it was destroyed, after waiting for it."""
        cdef int status
        try:
            return self.streams.slot_of(stream)
        except ForkedProcessError:                # the stream's own code forked: the caller looks, and frees nothing
            return gone
        except SourceError:
            # Its work is perhaps not complete, and the pool may never have met it: wait for the device.
            self.streams.settle()
            with nogil:
                status = self.areas.drain_device()
            if status != STATUS_OK:
                why = " while a capture goes on" if status == STATUS_NOT_READY else ""
                raise source_error(self.core, status, f"the stream is gone, and the device cannot be waited for{why}")
            return gone

    cdef bint held(self, uint64_t address, stream) except -1:
        """What the state word asks for before a free; True where that was all.

        The caller has seen that one of `STATE_HOLDS` is set, and has touched nothing of the pool yet.
        """
        cdef int slot
        if self.core.state.word & STATE_FORKED:
            return True
        if address and self.debugger is None and stream is None and noted_try_free(
                self.areas, self.default_arena, address):
            self.after_free()
            return True
        if address:
            slot = NO_SLOT if stream is None else self.freeing_slot(stream, NO_SLOT)
            if self.core.state.word & STATE_FORKED:
                return True
            if self.debugger is None:
                self.take_back_on(address, slot)
                self.after_free()
                return True
            self.streams.settle()
            if self.core.state.word & STATE_FORKED:
                return True
            try:
                error = self.debugger.free(address, None if slot == NO_SLOT else slot)
            except NotLive:
                raise self.stray_error(address) from None
            if error is not None:
                raise error
        self.after_free()
        return True

    cdef int take_back(self, uint64_t address, stream) except -1:
        """Free a block that is not at hand in the default stream's arena."""
        cdef int slot = NO_SLOT if stream is None else self.freeing_slot(stream, NO_SLOT)
        return self.take_back_on(address, slot)

    cdef int take_back_on(self, uint64_t address, int slot) except -1:
        """Free a block on the stream of a slot, or on its own."""
        cdef bint found
        cdef int freer = -1 if slot == NO_SLOT else slot
        if self.core.state.word & STATE_FORKED:
            return 0
        with nogil:
            found = self.areas.take_back(address, freer)
        if not found:
            raise self.stray_error(address)
        return 0

    cdef records(self):
        """Figures, blocks and segments of this moment."""
        return told_records(self.areas, self.name, self.measures, self.debugger)

    def leaks(self):
        """What is lent and not given back, by the place that asked for it.

        Returns
        -------
        Leaks
            The places are known in a pool with ``debug="sites"``, the ages in any pool with a debug mode.

        Notes
        -----
        Runtime complexity: O(blocks).
        """
        self.must_be_mine()
        if self.debugger is not None:
            return self.debugger.leaks()
        blocks = self.records()[1]
        lent = (blocks["state"] == "live") | (blocks["state"] == "suspended")
        rows = blocks[lent][["requested", "nbytes", "stream"]].tolist()
        return Leaks(self.name, [(UNKNOWN_SITE, requested, nbytes, None, stream) for requested, nbytes, stream in rows])

    cdef stray_error(self, uint64_t address):
        """The exception for an address that is no live block."""
        if self.debugger is not None:
            error = self.debugger.stray(address)
            if error is not None:
                return error
        owners = [pool.name for pool in pools() if pool is not self and (<Lender> pool).holds(address)]
        return stray(self.areas, self.name, address, owners[0] if owners else None)

    cdef uint64_t base_of(self, uint64_t address) except? 0:
        """Where a block begins that a caller calls by an address: before it, where it has a guard."""
        if self.debugger is None:
            return address
        try:
            return self.debugger.base_of(address)
        except NotLive:
            raise self.stray_error(address) from None

    cdef bint holds(self, uint64_t address) noexcept:
        cdef bint inside
        with nogil:
            inside = self.areas.holds(address)
        return inside

    cdef release_idle(self, uint64_t keep, uint64_t* released):
        """Give what is idle back to the source, but for `keep` bytes; the exception for what it refused, or None."""
        cdef int status = STATUS_OK
        self.streams.settle()
        if self.debugger is not None:
            self.debugger.release_all()
        with nogil:
            if atomic_read(self.core.state.reserved) or atomic_read(self.areas.fixed_state.reserved):
                status = self.areas.drain()
            if order_waited(status):
                status = self.areas.release_idle(keep, released)
        if self.closed:
            self.streams.settle()                 # nothing may be left that needs a stream
        return None if status == STATUS_OK else source_error(self.core, status, "the source did not take memory back")

    cdef release_slices(self, uint64_t keep, uint64_t deadline, uint64_t* released, bint* late):
        """Give back what is idle now, in slices, until a moment; the exception for what was refused, or None.

        Nothing is waited for.  `late` becomes True where the time was up before all was looked through.
        """
        cdef uint64_t slice_bytes = SLICE_BYTES
        cdef uint64_t reserved, floor, more
        cdef int status = STATUS_OK
        self.streams.settle()
        if self.debugger is not None:
            self.debugger.release_all()
        with nogil:
            self.core.prove_idle()
        while True:
            reserved = atomic_read(self.core.state.reserved)
            if self.areas.fixed is not None:
                reserved += atomic_read(self.areas.fixed_state.reserved)
            if reserved <= keep:
                return None
            if now_ns() >= deadline:
                late[0] = True
                return None
            floor = max(keep, reserved - slice_bytes if reserved > slice_bytes else <uint64_t> 0)
            more = 0
            with nogil:
                status = self.areas.release_idle(floor, &more)
            released[0] += more
            if status != STATUS_OK:
                return source_error(self.core, status, "the source did not take memory back")
            if more == 0:                         # no segment that is idle is as small
                if floor == keep:
                    return None
                slice_bytes *= 2

    cdef void after_free(self) noexcept:
        """What a set state word asks for after a free: a closed pool gives back what has become idle.

        The free itself is done, so what fails here is logged and not raised.
        """
        cdef uint64_t released = 0
        cdef uint32_t word = self.core.state.word
        if word & STATE_ADAPTIVE or word & STATE_MAPPED and idle_wanted(self.core):
            with nogil:
                self.areas.look_at_idle()
        if self.core.state.word & STATE_CLOSED and self.areas.may_have_idle():
            error = self.release_idle(0, &released)
            if error is not None and not self.complained:
                self.complained = True            # once is enough: it would be met at every free
                logger.warning("pool %r, closed: %s", self.name, error)


# For compiled callers, to whom nothing can be raised.

cdef BlockId _lend_to_compiled(void* watcher, Arena* arena, uint64_t requested, uint64_t* address) noexcept with gil:
    try:
        return (<Lender> watcher).lend_watched(&arena, requested, GRANULE, address, True)
    except Exception:
        return 0


cdef bint _take_from_compiled(void* watcher, uint64_t address) noexcept with gil:
    cdef Lender lender = <Lender> watcher
    cdef bint mine = lender.debugger.is_live(address)
    if mine:
        lender.debugger.drop(address)
        lender.after_free()
    return mine

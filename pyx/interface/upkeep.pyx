"""What a pool tells about itself, and what it does to stay in shape."""
import logging

cimport cython
from libc.stdint cimport uint64_t

from vpool._base.clock cimport now_ns
from vpool._base.ending cimport is_finalizing
from vpool._interface.diagnosis cimport failure, source_error
from vpool._interface.events cimport read_origins
from vpool._interface.gauge cimport Gauge
from vpool._interface.lender cimport Lender
from vpool._interface.recorder cimport Recorder
from vpool._interface.snapshot cimport read_core_share, read_crossings, read_ladder, read_limit, read_stats
from vpool._management.core cimport request_broken
from vpool._management.journal cimport journal_limit, journal_reset_peaks
from vpool._management.state cimport Request
from vpool._management.walk cimport Broken
from vpool._storage.driver cimport STATUS_OK

from vpool._interface.tags import checked_tag, number_of
from vpool.measure import Measure, Measures
from vpool.recording import Recording
from vpool.report import Report
from vpool.sizes import parse_size
from vpool.snapshot import Snapshot
from vpool.stats import MemoryInfo
from vpool.trimming import Trimmed, checked_budget, why_kept

logger = logging.getLogger("vpool")


@cython.no_gc_clear   # the collector must not drop `core` while `__dealloc__` of a buffer may need it
@cython.binding(False)
cdef class Upkeep(Lender):
    """Figures, checks and maintenance.  Made as `Pool`."""

    @property
    def ladder(self):
        """What misses tried, as a dict of ``(tries, successes)`` by rung, in the order of the ladder."""
        self.must_be_mine()
        return read_ladder(self.areas)

    @property
    def crossings(self):
        """What memory that crossed streams cost, as a dict of counts.

        ``crossings`` blocks went from one stream to another, for which streams were made to wait
        ``waits`` times, of these ``overwaits`` for more than needed, and the device ``drains`` times.
        """
        self.must_be_mine()
        return read_crossings(self.areas)

    @property
    def stats(self):
        """The counters of this moment, a `PoolStats`, read in O(1) without any lock."""
        self.must_be_mine()
        stats = read_stats(self.areas)
        if self.measures is not None:
            stats = self.measures.stats(stats)
        return stats if self.debugger is None else self.debugger.stats(stats)

    def memory_info(self):
        """What an allocation could still get, and where the rest of the device is.

        Returns
        -------
        vpool.stats.MemoryInfo

        Raises
        ------
        SourceError
            Where the device does not answer.

        Notes
        -----
        Runtime complexity: O(streams), without any lock; the source is asked for the device's memory.
        """
        self.must_be_mine()
        stats = self.stats
        free, total = self.core.source.memory()
        return MemoryInfo(
            device_free_bytes=free,
            device_total_bytes=total,
            reserved_bytes=stats.reserved_bytes,
            reusable_bytes=max(0, stats.reserved_bytes - stats.allocated_bytes - stats.pending_bytes),
            pending_bytes=stats.pending_bytes,
            limit_bytes=read_limit(self.areas),
            grows=self.areas.grows,
        )

    def measure(self):
        """Measure the highest figures of a phase.

        Returns
        -------
        vpool.measure.Measure
            A context manager, which tells them within its block and after it.

        Notes
        -----
        Nothing that allocates is slower for it.  `stats` and `inspect` go on to tell the pool's own peaks.

        Examples
        --------
        >>> import vpool
        >>> pool = vpool.Pool(source="host")
        >>> with pool.measure() as phase:
        ...     pool.deallocate(pool.allocate(1 << 20))
        >>> phase.peak_allocated_bytes, phase.allocations, pool.stats.allocated_bytes
        (1048576, 1, 0)
        """
        self.must_be_mine()
        if self.measures is None:
            self.measures = Measures(Gauge(self.areas, self.name))
        return Measure(self.measures)

    def limit(self, tag, nbytes):
        """Set the most that blocks of a tag may have together.

        A request beyond it raises `OutOfMemoryError`, after pressure callbacks and a garbage collection had their
        try; compiled callers get no block.

        Parameters
        ----------
        tag : str
        nbytes : int, str or None
            Bytes as callers ask for them, without rounding; None takes the limit away.

        Raises
        ------
        ValueError
            Where more than that is live; nothing is changed.
        """
        cdef bint limited = nbytes is not None
        cdef uint64_t most = parse_size(nbytes, "limit") if limited else 0
        cdef uint64_t number
        cdef bint possible
        self.must_be_open()
        if checked_tag(tag) is None:
            raise ValueError("what has no tag has no limit of its own: use set_limit")
        number = number_of(tag)
        if self.areas.journal.tags == NULL:
            raise MemoryError("no address space to count by tag")
        with nogil:
            possible = journal_limit(&self.areas.journal, number, most, limited)
        if not possible:
            raise ValueError(
                f"pool {self.name!r} has {self.areas.journal.tags[number].requested_bytes:,} bytes live for tag"
                f" {tag!r}, more than a limit of {most:,} bytes allows"
            )

    def inspect(self):
        """The report of this moment.

        Returns
        -------
        Report

        Notes
        -----
        Runtime complexity: O(blocks); about 10 ns a block of it under the pool's locks.
        """
        self.must_be_mine()
        return Report(*self.records())

    def snapshot(self):
        """Every segment and block of this moment, to be kept and compared.

        Returns
        -------
        Snapshot

        Notes
        -----
        Runtime complexity: O(blocks), with the pause of `inspect`; while the pool is recorded also O(events).
        """
        self.must_be_mine()
        records = self.records()
        return Snapshot.of_records(*records, read_origins(self.areas, self.sites, self.debugger, records[1]))

    def record(self, sites=False, depth=1, capacity=1 << 20):
        """Record what happens within a ``with`` block, as a trace.

        Parameters
        ----------
        sites : bool or int
            Whether to keep the line of Python that asked for each block, or for one in so many.
        depth : int
            How many callers a site names.
        capacity : int
            Events that the ring holds, up to a power of two; 48 bytes each, taken as they are written.  Beyond
            them the oldest are lost.

        Returns
        -------
        vpool.recording.Recording
            A context manager, and after its block a `Trace`.

        Raises
        ------
        ValueError, TypeError
            For numbers that make no sense.
        Error
            On entry, where the pool is being recorded already.

        Notes
        -----
        An event costs some 40 ns more than the call that it is of, and about a microsecond more with sites.
        Python's calls go a slower way meanwhile, since they release the GIL.  A pool that is not recorded pays nothing.

        Examples
        --------
        >>> import vpool
        >>> pool = vpool.Pool(source="host")
        >>> with pool.record() as recording:
        ...     pool.deallocate(pool.allocate(1000))
        >>> recording
        <vpool.Recording of 2 events, 1 allocation>
        """
        self.must_be_open()
        return Recording(Recorder(self), capacity, (int(sites), depth) if sites else None)

    @property
    def core_share(self):
        """Share of all requests that the strategy's fixed core served; None without a core."""
        self.must_be_mine()
        return read_core_share(self.areas)

    @property
    def planned(self):
        """What became of the requests of the default stream in a pool with a plan, as a dict; None without one.

        ``served`` requests got the place that was planned for them; ``taken`` would have, but another block was
        there; ``strange`` ones did not come in the plan's order.  All others were not planned.
        """
        self.must_be_mine()
        if self.areas.planned is None:
            return None
        return dict(zip(("served", "taken", "strange"), self.areas.planned.figures(), strict=True))

    @property
    def captures(self):
        """Ids of the captures that memory of this pool is kept for."""
        self.must_be_mine()
        return self.streams.capture_ids()

    def maintain(self):
        """Do ahead of need what requests would wait for.

        Where more of a hybrid's core is live than its watermark, the dynamic area grows: by its first
        segment, and later, while the pool has more live than ever, until it has room for the largest
        request that it once had to grow for.  Call it between steps, or wherever a wait for the source
        does no harm.

        Raises
        ------
        ClosedPoolError
            After `close`.
        SourceError
            Where the source fails for another reason than want of memory.
        """
        cdef int status
        self.must_be_open()
        self.streams.settle()
        with nogil:
            status = self.areas.maintain()
        if status != STATUS_OK:
            raise source_error(self.core, status, "the source failed when the pool grew ahead of need")

    def reserve(self, nbytes):
        """Take memory ahead of need: until others take it, requests of so many bytes together wait for no source.

        They find it in one piece.  What the pool has free counts, merged across streams as by `coalesce`; the rest
        comes by the growth rule, and in want of room for it idle memory goes back first.

        Parameters
        ----------
        nbytes : int or str
            Bytes beyond what is live, and beside a fixed core.  A pool that never grows has taken all that it will:
            there so much of it has to be free.

        Raises
        ------
        OutOfMemoryError
            Where the limit or the device leaves no room, also after a wait for pending work, unless the pool never
            waits.  No pressure callback is asked.
        SourceError
            Where the source fails for another reason.
        ClosedPoolError
            After `close`.
        TypeError, ValueError, OverflowError
            For what is no size.

        Notes
        -----
        An adaptive pool gives memory that stays unused back, and so does `trim`.
        Runtime complexity: O(streams + free blocks of about that size); where the pool grows O(blocks), and a source
        call or, on virtual memory, some for each handle.

        Examples
        --------
        >>> import vpool
        >>> pool = vpool.Pool(vpool.Dynamic(initial=0), source="host")
        >>> pool.reserve("64MiB")
        >>> calls = pool.stats.source_calls
        >>> ptr = pool.allocate(64 << 20)
        >>> pool.stats.source_calls == calls
        True
        >>> pool.deallocate(ptr)
        """
        cdef Request request
        cdef bint found
        cdef uint64_t wanted = parse_size(nbytes, "nbytes")
        cdef uint64_t guards = 2 * self.front     # of one block of so many bytes
        self.must_be_open()
        self.streams.settle()
        if wanted == 0:
            return
        with nogil:
            found = self.areas.reserve(wanted, guards, &request)
        if not found and self.debugger is not None and not request_broken(&request):
            self.debugger.release_all()           # what waits in quarantine serves before anything fails
            self.must_be_open()
            with nogil:
                found = self.areas.reserve(wanted, guards, &request)
        if not found:
            self.core.count_failure(request.status)
            error = failure(self.areas, self.name, &request, self.measures, self.debugger, "reserve")
            logger.info("%s", error.args[0])
            raise error

    def trim(self, keep=0, budget=None):
        """Give memory that is wholly free, and that no work can touch any more, back to the source.

        Parameters
        ----------
        keep : int or str
            Bytes that stay reserved, if that many are.
        budget : float, optional
            Seconds after which no further slice begins.  Then the device is not waited for: what queued work may use
            stays.  Without one the device is waited for, and everything goes that can.

        Returns
        -------
        vpool.trimming.Trimmed
            An int, the bytes that went back, whose ``kept`` has pairs of the bytes that stayed and the reason; none
            at the very end of the interpreter, in a finaliser.

        Raises
        ------
        SourceError
            Where the source refuses to take memory; it stays with the pool.
        TypeError, ValueError
            For what is no size, or no time.

        Notes
        -----
        No lock is held while the source takes memory, so other threads of the pool go on; what a driver makes others
        wait for is its own, as cudaFree does for all work of the device.  With a budget memory goes back in slices of
        64 MiB, and in larger ones where no segment is that small.  Between two slices the GIL is free.
        Runtime complexity: O(blocks), and a source call for each segment.
        """
        cdef uint64_t least = parse_size(keep, "keep")
        cdef uint64_t released = 0
        cdef bint late = False
        limit = checked_budget(budget)
        self.must_be_mine()
        if limit is None:
            error = self.release_idle(least, &released)
        else:
            error = self.release_slices(least, now_ns() + <uint64_t> limit, &released, &late)
        if error is not None:
            raise error
        if is_finalizing():                       # NumPy, which a report is made with, may be half gone
            return Trimmed(released, ())
        return Trimmed(released, why_kept(self.inspect(), least, late))

    def reset_peaks(self):
        """Make what is live and reserved now the highest values so far.  Nothing else changes."""
        self.must_be_mine()
        if self.measures is None:
            self.measures = Measures(Gauge(self.areas, self.name))
        self.measures.reset()
        with nogil:
            journal_reset_peaks(&self.areas.journal)

    def check(self):
        """Assert every invariant.

        Raises
        ------
        AssertionError
            Where one does not hold; the message names it, the place and the two values.
        GuardError
            Where bytes were written beside a live block, or in a freed one, in a pool that has them checked.
        SourceError
            Where it has, and the driver does not read them.

        Notes
        -----
        Runtime complexity: O(blocks), under the pool's locks.
        """
        cdef Broken broken
        self.must_be_mine()
        with nogil:
            self.areas.check(&broken)
        if broken.what != NULL:
            raise AssertionError(
                f"{broken.what.decode()}: found {broken.found}, expected {broken.expected}, at {broken.address:#x}"
            )
        if self.debugger is None:
            return
        self.streams.settle()
        try:
            error = self.debugger.check()
        finally:
            self.after_free()                     # of what was freed while it was looked at
        if error is not None:
            raise error

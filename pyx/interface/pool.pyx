"""Pools: arguments are checked and streams become slots here, then it is C all the way down."""
import itertools

cimport cython
from cpython.long cimport PyLong_FromUnsignedLongLong
from libc.stdint cimport uint64_t

from vpool._base.bias cimport Seat, bias_leave, bias_try_enter
from vpool._base.lock cimport atomic_write
from vpool._base.types cimport GRANULE, unlikely
from vpool._interface.access cimport Access
from vpool._interface.arguments cimport address_of, checked_alignment, checked_remainder, checked_rounding, size_of
from vpool._interface.buffer cimport Buffer
from vpool._interface.diagnosis cimport not_taken
from vpool._interface.lender cimport register
from vpool._interface.mover cimport Mover
from vpool._interface.pressure cimport Pressure
from vpool._interface.sharing cimport handle_of
from vpool._interface.streams cimport StreamTable, defaults_in_use
from vpool._management.arena cimport Arena
from vpool._management.areas cimport Areas, in_fixed
from vpool._management.hit cimport put_any
from vpool._management.state cimport STATE_CLOSED, STATE_FORKED, STATE_HOLDS

from vpool._management.areas import CoreNotTaken
from vpool.annotation import debugger_of
from vpool.maintenance import Maintainer, checked_interval
from vpool.modes import Modes, modes_of, with_guards
from vpool.placement import checked_plan, with_plan
from vpool.policy import Policy
from vpool.sizes import parse_size
from vpool.sources import resolve
from vpool.strategies import EASE_OF_BYTES, Dynamic, Fixed, Hybrid, Strategy
from vpool.trimming import checked_marks

_numbers = itertools.count(1)

# The interpreter keeps one object for each small integer, so identity tells the default from the rest.
cdef object DEFAULT_ALIGNMENT = 256


cdef inline bint put(Arena* arena, uint64_t address) noexcept nogil:
    """Take a block back, if the arena's lock is free and the block is this arena's."""
    cdef bint found
    cdef Seat* seat
    if not bias_try_enter(&arena.lock, &seat):
        return False
    found = put_any(arena, address)
    bias_leave(&arena.lock, seat)
    return found


def _of_pool(message, given):
    """What is said of the arguments of `Pool._make`, as of `Pool`'s; and where a number of a strategy belongs."""
    message = message.replace("_make", "Pool", 1)
    for strategy in (Dynamic, Fixed, Hybrid):
        for name in given:
            if name in strategy.__dataclass_fields__ and repr(name) in message:
                return f"{message}: it is a strategy's, as in Pool({strategy.__name__}({name}=...))"
    return message


@cython.no_gc_clear   # the collector must not drop `core` while `__dealloc__` of a buffer may need it
@cython.binding(False)
cdef class Pool(Mover):
    """A pool of device memory.

    Parameters
    ----------
    strategy : Fixed, Dynamic or Hybrid, optional
        When and how much to ask of the source; ``Dynamic()`` if not given.
    source : str or vpool.sources.Source, optional
        Where memory comes from; the best that works on this machine if not given.
    device : int, optional
        Ordinal of the device; the thread's current one if not given.
    name : str, optional
        For reports and logs.
    on_pressure : {"wait", "raise"}
        Whether a request that finds no memory may wait for work on the device before it fails.
    rounding : int
        Bytes, a power of two from 256 to 2 MiB: requests are rounded up to a multiple of it.
    minimum_remainder : int
        Bytes, at least 256: what would be left of a block stays with it if that is less.
    maintain_every : float, optional
        Seconds between two calls of `maintain` by a thread of the pool's own; none if not given.
    trim_marks : tuple of (int or str, int or str), optional
        A low and a high mark for that thread: where more than the high one is reserved and neither live nor pending, it
        trims in short slices until it is the low one, or nothing more can go.
    captures : bool
        Whether a stream that is passed may be capturing a graph.  On CUDA nothing but asking the driver
        tells, once for each call that names another stream than the legacy default one; a program that
        never allocates in a capture saves that with False.
    debug : str or iterable of str, optional
        What is to be checked: any of ``"guard"``, ``"poison"``, ``"quarantine"``, ``"sites"`` and
        ``"leaks"``; see the page on debugging.  What the environment variable ``VPOOL_DEBUG`` says if
        not given; ``()`` is nothing.
    plan : vpool.Plan or path, optional
        Where the requests of the default stream shall lie that come as in a recorded step; everything else is
        served as usual.  Its memory is taken at construction.  A pool with debug modes does without.

    Raises
    ------
    ValueError
        For a device or a source that is not there, or numbers that do not fit the device.
    SourceError
        Where the source does not answer.
    OutOfMemoryError
        Where the source does not have what the strategy takes at construction.

    Notes
    -----
    Thread safety: every method may be called from any thread.

    Stream order: a block that was freed on a stream is reused there at once, with no driver call.  On
    another stream it is reused when its work is proved complete, or behind an event.

    Examples
    --------
    >>> import vpool
    >>> pool = vpool.Pool(vpool.Dynamic(initial="1MiB"), source="host")
    >>> ptr = pool.allocate(1000)
    >>> pool.stats.allocated_bytes
    1024
    >>> pool.deallocate(ptr)
    >>> pool.close()
    """

    def __cinit__(self, *args, **kwargs):
        # Any arguments: what cannot be taken apart must not leave a pool without parts either.
        try:
            self._make(*args, **kwargs)
        except BaseException as error:
            self._stay_closed()
            if isinstance(error, TypeError) and str(error).startswith("_make() "):
                raise TypeError(_of_pool(str(error), kwargs)) from None
            raise

    def _make(self, strategy=None, source=None, device=None, name=None, *, on_pressure="wait", rounding=256,
              minimum_remainder=256, maintain_every=None, trim_marks=None, captures=True, debug=None, plan=None):
        if strategy is None:
            strategy = Dynamic()
        if not isinstance(strategy, Strategy):
            raise TypeError(f"strategy must be a vpool.Dynamic, Fixed or Hybrid, not {type(strategy).__name__}")
        if on_pressure not in ("wait", "raise"):
            raise ValueError(f'on_pressure must be "wait" or "raise", not {on_pressure!r}')
        rounding, minimum_remainder = checked_rounding(rounding), checked_remainder(minimum_remainder)
        if maintain_every is not None:
            checked_interval(maintain_every)
        if trim_marks is not None:
            trim_marks = checked_marks(trim_marks)
            if maintain_every is None:
                raise ValueError("trim_marks are for the thread that maintain_every starts")
        self.name = f"pool-{next(_numbers)}" if name is None else str(name)
        source = resolve(source, device)
        self.debug = modes_of(debug, source.has_memory, source.granularity > 0)
        if plan is not None:
            plan = checked_plan(plan, rounding)
            self.plan = plan if self.debug == Modes() else None
        numbers = with_plan(strategy.rule(source.memory()[1]), self.plan)
        try:
            self.areas = Areas(
                source, with_guards(numbers, self.debug), minimum_remainder=minimum_remainder, rounding=rounding)
        except CoreNotTaken as refused:
            raise not_taken(source, self.name, numbers, refused.args[0]) from None
        self.areas.wait(on_pressure == "wait")
        self._complete(strategy, numbers, bool(captures))
        if numbers.planned:
            self.areas.follow_plan(*self.plan.sequence())
        if self.debug != Modes():
            self.watch(debugger_of(self.name, self.debug, Access(self.areas), numbers.limit))
        register(self)
        if maintain_every is not None:
            self.maintainer = Maintainer(self, maintain_every, trim_marks)

    def _complete(self, strategy, numbers, captures):
        self.core = self.areas.core
        self.default_arena = self.core.state.arenas[0]
        self.streams = StreamTable(self.areas, captures, self.name)
        self.pressure = Pressure(self.areas)
        self.strategy = strategy
        self.numbers = numbers

    def _stay_closed(self):
        """What a subclass's `__del__` finds of a pool that could not be made: a closed one without memory."""
        if self.areas is None:
            strategy = Dynamic(initial=0)
            self.areas = Areas(resolve("simulated"), strategy.rule(0))
            self._complete(strategy, strategy.rule(0), False)
        self.core.state.word |= STATE_CLOSED

    @classmethod
    def from_policy(cls, policy, source=None, device=None, name=None, debug=None):
        """A pool that works by a policy.

        Parameters
        ----------
        policy : path, Policy or strategy
        source : str or vpool.sources.Source, optional
            Instead of the policy's own.
        device, name, debug
            As for `Pool`.

        Raises
        ------
        FormatError, OSError
            For a file that is no policy, or cannot be read.
        ValueError, TypeError, SourceError, OutOfMemoryError
            As for `Pool`.
        """
        return cls(**Policy.of(policy).pool_arguments(device, source), name=name, debug=debug)

    def __init__(self, *args, **kwargs):
        """Done in `__cinit__`; here so that a subclass can pass on what it was given."""

    def __reduce__(self):
        raise TypeError("a pool cannot be copied or pickled: it owns memory of this process")

    def __repr__(self):
        state = ", of the parent of this process" if self.forked else ", closed" if self.closed else ""
        return f"<vpool.Pool {self.name!r} on {self.core.source.name!r}{state}>"

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    @property
    def source(self):
        """The source that the pool's memory comes from."""
        return self.core.source

    @property
    def device(self):
        """Ordinal of the pool's device."""
        return self.core.source.device

    def allocate(self, nbytes, stream=None, alignment=256):
        """Lend a block.

        Parameters
        ----------
        nbytes : int-like
            Bytes wanted.  0 gives address 0.
        stream : optional
            The stream whose work will use the block first: an int handle, ``"current"``, or an object
            that has a handle.  None is the thread's default stream, which is the legacy default
            stream unless `vpool.stream` set another.
        alignment : int
            What the address shall be a multiple of: a power of two of at most 2 MiB.  Every block
            is aligned to 256.

        Returns
        -------
        int
            Address of at least `nbytes` bytes that overlap no other live block.

        Raises
        ------
        OutOfMemoryError
            Where neither the pool nor its source has a block of that size; nothing live has changed.
        ClosedPoolError
            After `close`.
        ForkedProcessError
            In a child of the process that made the pool.
        SourceError
            Where the driver fails for another reason than want of memory.
        TypeError, ValueError, OverflowError
            For arguments that make no sense.

        Notes
        -----
        Runtime complexity: O(1).  Where the pool has to grow, the source is called once or a few
        times, without the GIL and under no lock.
        """
        cdef uint64_t requested = size_of(nbytes)
        cdef uint64_t aligned_to = GRANULE
        cdef uint64_t address = 0
        cdef Arena* arena = self.default_arena
        if alignment is not DEFAULT_ALIGNMENT:
            aligned_to = checked_alignment(alignment)
        if stream is not None or defaults_in_use:
            arena = self.arena_for(stream)
        self.lend(&arena, requested, aligned_to, &address)
        return PyLong_FromUnsignedLongLong(address)

    def deallocate(self, ptr, stream=None):
        """Take a block back.

        Parameters
        ----------
        ptr : int-like or Buffer
            Address of a live block of this pool.  0 does nothing.
        stream : optional
            The stream whose work used the block last, and which has it from then on, once that comes
            after the work of the block's own stream; None is that one.

        Raises
        ------
        DoubleFreeError
            Where the block is free already.
        ForeignPointerError
            Where the address is not of this pool, or inside a block.
        GuardError
            Where bytes beside the block were written; it stays live, with a new guard.  Only in a pool with
            guards.

        Notes
        -----
        Runtime complexity: O(1), and O(streams) for a block of another stream than the default one
        if `stream` is not given.
        """
        cdef uint64_t address
        cdef Arena* arena
        if isinstance(ptr, Buffer):
            self.must_own(ptr)
            (<Buffer> ptr).close(stream)
            return
        address = address_of(ptr)
        if unlikely(self.core.state.word & STATE_HOLDS) and self.held(address, stream):
            return
        arena = self.default_arena.fixed if in_fixed(self.areas, address) else self.default_arena
        if address and not (stream is None and put(arena, address)):
            self.take_back(address, stream)
        if self.core.state.word:
            self.after_free()

    def empty(self, nbytes, stream=None):
        """Lend a block as a `Buffer`, which gives it back when it is dropped.

        Parameters
        ----------
        nbytes, stream
            As for `allocate`.

        Returns
        -------
        Buffer
            Its content is not set.
        """
        cdef uint64_t requested = size_of(nbytes)
        cdef Buffer buffer = Buffer.__new__(Buffer)
        buffer.pool = self
        buffer.arena = self.arena_for(stream) if stream is not None or defaults_in_use else self.default_arena
        buffer.block_id = self.lend(&buffer.arena, requested, GRANULE, &buffer.address)
        # The block is ours: nobody else writes its generation now.
        buffer.generation = buffer.arena.blocks[buffer.block_id].generation
        return buffer

    def record_stream(self, ptr, stream):
        """Tell that a stream uses a block too: after its free it stays pending until that work is complete.

        Parameters
        ----------
        ptr : int-like or Buffer
            A live block.
        stream
            As for `allocate`.

        Raises
        ------
        InvalidPointerError
            Where the block is not live.

        Notes
        -----
        Runtime complexity: O(streams).  No driver call here, nor when the block is freed.
        """
        cdef uint64_t address, base
        cdef int slot, found
        self.must_be_mine()
        slot = self.streams.slot_of(stream)
        address = self.lent_address(ptr)
        self.must_be_mine()                       # to look at the arguments ran code
        if address == 0:
            return
        base = self.base_of(address)
        with nogil:
            found = self.areas.use_on(base, slot)
        if found < 0:
            raise MemoryError("no record left for another stream's use of a block")
        if not found:
            raise self.stray_error(address)
        if self.debugger is not None:
            self.debugger.use(address, slot)

    def ipc_handle(self, ptr):
        """What another process on the same device opens a live block by: an `vpool.ipc.IpcHandle`.

        The block's segment then stays with the pool until `close`, also through `trim`: another process
        may still use it.  The pool must not be closed, nor the block freed, before it has closed it.

        Raises
        ------
        InvalidPointerError
            Where the block is not live.
        SourceError
            Where the source's memory cannot be opened elsewhere; that of ``"cuda"`` can.
        """
        cdef uint64_t address
        self.must_be_mine()
        address = self.lent_address(ptr)
        self.must_be_open()
        return handle_of(self, address)

    def forget_stream(self, stream):
        """Let go of a stream, best right before it is destroyed.

        Its free memory serves the other streams without a wait for the device, and a stream that gets
        its handle inherits nothing.  Its live blocks stay.  One that goes on is met anew: tell by `record_stream`
        again which blocks of other streams it still uses.
        """
        self.must_be_mine()
        self.streams.forget(stream)

    def release_capture(self, id):
        """Let everybody have the memory of a capture again: its graph will not be launched any more.

        Without this call it happens when the driver has destroyed the graph and all that was instantiated
        from it, which is also what becomes of a capture that is aborted.

        Parameters
        ----------
        id : int
            Of the capture, as ``cudaStreamGetCaptureInfo`` gives it.  One that has no memory of this pool
            does nothing.

        Notes
        -----
        Launches that still run are waited for before the memory is used again.  What is still live stays so.
        """
        self.must_be_mine()
        self.streams.release_capture(id)

    def share_capture(self, id, other):
        """Have a capture use the memory of another one, which is right for graphs that never run at once.

        Call it when the capture has begun and not allocated yet.

        Parameters
        ----------
        id : int
            Of the capture that has begun.
        other : int
            Of the capture whose memory it shall use; that stays reserved until both are released, once the first
            one has allocated.

        Raises
        ------
        ValueError
            Where the other one has no memory of this pool, or the first has some of its own already.
        TypeError
            For an id that is no int.
        """
        self.must_be_mine()
        self.streams.share_capture(id, other)

    def on_pressure(self, fn, priority=0):
        """Have a function called when a request would fail, to make it free memory.

        Parameters
        ----------
        fn : callable
            Called with the bytes that are needed, without any lock, at most once for each request; it
            may free and allocate in this pool.  What it raises becomes the cause of the
            `OutOfMemoryError`.
        priority : int
            Higher ones are called first.
        """
        self.must_be_mine()
        self.pressure.add(fn, priority)

    def apply(self, policy):
        """Work by another policy from now on.  What is lent and reserved stays as it is.

        Parameters
        ----------
        policy : path, Policy or strategy

        Raises
        ------
        ValueError
            Where a running pool cannot change so: another fixed core, another rounding or minimum
            remainder, or a limit below what is reserved.  Nothing is changed then.
        FormatError, OSError
            For a file that is no policy, or cannot be read.

        Notes
        -----
        The policy's source is not looked at: a pool's memory stays where it came from.
        """
        self.must_be_open()
        policy = Policy.of(policy)
        self.must_be_open()                       # to look at it may have run code
        numbers = with_plan(policy.strategy.rule(self.source.memory()[1]), self.plan)
        before = self.numbers
        for what, key in (("the fixed core", "core"), ("the core's blocks", "blocks"), ("oversize", "grows")):
            if getattr(numbers, key) != getattr(before, key):
                raise ValueError(
                    f"pool {self.name!r} cannot change {what} while it runs, from {getattr(before, key)} to"
                    f" {getattr(numbers, key)}: make another pool"
                )
        arguments = policy.pool_arguments(source=self.source)
        for key, mine in (("rounding", self.core.rounding), ("minimum_remainder", self.core.minimum_remainder)):
            if arguments.get(key, GRANULE) != mine:
                raise ValueError(
                    f"pool {self.name!r} cannot change {key} while it runs, from {mine} to"
                    f" {arguments.get(key, GRANULE)}: make another pool"
                )
        self._set_limit(numbers.limit)
        self.areas.apply(numbers)
        self.strategy = policy.strategy
        self.numbers = numbers

    def set_limit(self, nbytes):
        """Change the most that the pool ever reserves.

        Parameters
        ----------
        nbytes : int or str
            Bytes, a strategy's fixed core counted in.

        Raises
        ------
        ValueError
            Where more than that is reserved, also after `trim`; nothing is changed then.
        """
        self.must_be_mine()
        limit = parse_size(nbytes, "limit")
        self.must_be_open()
        strategy = self.strategy.with_limit(limit)
        self._set_limit(limit)
        self.strategy = strategy
        self.numbers = self.numbers._replace(limit=limit, ease=EASE_OF_BYTES)
        self.areas.apply(self.numbers)

    def _set_limit(self, uint64_t limit):
        cdef bint possible
        if limit < self.numbers.core:
            raise ValueError(
                f"pool {self.name!r} has a fixed core of {self.numbers.core:,} bytes, which stays reserved: more than"
                f" a limit of {limit:,} bytes allows"
            )
        with nogil:
            possible = self.areas.set_limit(limit)
        if not possible:
            raise ValueError(
                f"pool {self.name!r} has {self.stats.reserved_bytes:,} bytes reserved, more than a limit of"
                f" {limit:,} bytes allows: trim it first"
            )
        if self.debugger is not None:
            self.debugger.set_limit(limit)

    def close(self):
        """Give memory back to the source.  What is live stays usable, and is given back when freed.

        Raises
        ------
        SourceError
            Where the source refuses to take memory; it stays with the pool.

        Notes
        -----
        A signal's exception can come out of it before all is given back: another call does the rest.
        """
        if self.maintainer is not None:
            self.maintainer.stop()
        atomic_write(self.core.state.word, self.core.state.word | STATE_CLOSED)
        cdef uint64_t released = 0
        if self.core.state.word & STATE_FORKED:
            return
        try:
            if self.debugger is not None:
                self.debugger.set_limit(0)
        finally:                                  # where a signal ended that, the rest of quarantine is let go here
            error = self.release_idle(0, &released)
        if error is not None:
            self.complained = True
            raise error

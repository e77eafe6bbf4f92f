"""The blocks that a debugger watches: which are live, which wait in quarantine, and which were freed lately.

Compiled, since a signal is handled between two steps of Python code, and its exception would lose the block that
is on its way between them.  Here it can only come out of what is called.

No lock: each step is one operation of a dict, and the GIL makes it whole.  Who waited for a lock could be interrupted,
or be a finaliser that the holder's own collection runs, and that another thread waits for.
"""
import collections

cimport cython
from libc.stdint cimport int64_t, uint64_t

from vpool._interface.access cimport Access


class NotLive(LookupError):
    """There is no live block at an address.  Never leaves the pool, which knows better what there is."""


@cython.final
@cython.no_gc_clear   # as below
cdef class Ranges:
    """A profiler's range for each live block of a pool, and a counter of what is requested.

    Parameters
    ----------
    pool : str
        Name of the pool, which is the category of its ranges.
    domain, counter
        Of NVTX; where no tool listens they do nothing.
    """

    cdef str pool
    cdef object start
    cdef object stop
    cdef object sample
    cdef int64_t live

    def __init__(self, str pool not None, domain, counter):
        self.pool = pool
        self.start, self.stop, self.sample = domain.start_range, domain.end_range, counter.sample

    cdef begin(self, block):
        block.range = self.start(message=block.label, category=self.pool, payload=block.requested)
        self.count(block.requested)

    cdef end(self, block):
        begun, block.range = block.range, None    # by whoever frees it first
        if begun is not None:
            self.stop(begun)
            self.count(-block.requested)

    cdef count(self, int64_t change):
        self.live += change
        self.sample(self.live)


@cython.no_gc_clear   # a collection that takes the pool apart may drop buffers after this
cdef class Ledger:
    """Base of `vpool.debugging.Debugger`, which looks at memory; this class moves its blocks.

    A subclass has `leave`, which looks at a block that is being freed, `written_late`, which looks at one that
    leaves quarantine, and `report`.  A block is an object with `address`, `base`, `nbytes`, `requested`, `label`,
    `range`, `freer`, `freed_at`, `guarded`, `poisoned`, `users`, `lookers`, `left` and `lent`.

    Parameters
    ----------
    access : Access
    poison : int or None
        Byte that freed blocks are filled with.
    most_waiting : int
        Blocks that quarantine holds.
    most_freed : int
        Addresses whose last free is remembered.
    ranges : Ranges, optional
        What tells a profiler of live blocks.

    Notes
    -----
    Thread safety: every method may be called from any thread, and in the middle of another one: a buffer
    may be dropped by a garbage collection at any moment.
    """

    cdef readonly Access access
    cdef Ranges ranges
    cdef readonly dict live                   # by the address that the caller has
    cdef readonly object freed                # lately, the same; the oldest first
    cdef readonly object waiting              # in quarantine, the same
    cdef readonly int64_t waiting_bytes       # never less than what waits
    cdef readonly int64_t never_lent          # blocks that their callers never got
    cdef public int64_t bound                 # bytes that may wait
    cdef object poison
    cdef Py_ssize_t most_waiting
    cdef Py_ssize_t most_freed

    def __init__(self, Access access not None, poison, *, Py_ssize_t most_waiting, Py_ssize_t most_freed,
                 Ranges ranges=None):
        self.access = access
        self.ranges = ranges
        self.poison = poison
        self.most_waiting = most_waiting
        self.most_freed = most_freed
        self.live = {}
        self.freed = collections.OrderedDict()
        self.waiting = collections.OrderedDict()
        self.waiting_bytes = self.never_lent = self.bound = 0

    def enter(self, block):
        """Watch a block from now on."""
        self.freed.pop(block.address, None)
        self.live[block.address] = block
        self.access.cover(block)
        if self.ranges is not None:
            self.ranges.begin(block)

    def free(self, uint64_t address, slot=None, *, bint surely=False):
        """Take a block back.

        Parameters
        ----------
        address : int
            As its caller knows it.
        slot : int, optional
            Of the stream it is freed on, which was just named; its own if not given.
        surely : bool
            Free it also where bytes beside it were written, and report that.

        Returns
        -------
        GuardError or None
            Otherwise the error to raise: the block has a new guard, and stays live.

        Raises
        ------
        NotLive
            Where there is no live block.
        SourceError
            Where memory cannot be read or filled; the block stays live.
        """
        block = self.take(address)
        try:
            damage, last = self.leave(block, slot, surely)
            if damage is not None and not surely:
                self.take_back(block)
                return damage
            # The last that can fail, and not in `leave`: a block that is live again has what it had.
            if self.poison is not None and last is not None:
                block.guarded = False             # where this fails, it may have been written all the same
                self.access.fill(last, slot is not None, block.base, self.poison, block.nbytes)
                block.poisoned = True
        except BaseException:
            self.take_back(block)
            raise
        try:
            if damage is not None:
                self.report(damage)
        finally:
            self.put_away(block)
        return None

    def drop(self, uint64_t address):
        """Take the block of a dropped buffer back; what is wrong is reported, since nobody can catch it."""
        cdef object wrong = None
        try:
            self.free(address, surely=True)
            return
        except NotLive:
            return                                # another thread was faster
        except AttributeError:
            pass                                  # a collection that takes the pool apart has been here
        except BaseException as error:            # of a signal too, which would pass a buffer that nobody has any more
            wrong = error
        block = self.live.pop(address, None)
        try:
            if block is not None:
                self.end(block)
                self.access.uncover(block)
            if wrong is not None:
                self.report(wrong)
        finally:
            if block is not None:
                block.freer = None
                self.put(block)

    def use(self, uint64_t address, int slot):
        """Note that a further stream uses a block."""
        block = self.live.get(address)
        while block is not None:
            users = block.users
            more = (*users, slot)
            if block.users is users:              # a finaliser in between may have noted another
                block.users = more
                break

    def base_of(self, uint64_t address):
        """Address of a live block as the pool knows it."""
        block = self.live.get(address)
        if block is None:
            raise NotLive(address)
        return block.base

    def forget(self, uint64_t address, uint64_t base):
        """Take a block back that its caller never got, watched or not yet."""
        block = self.live.pop(address, None)
        if block is None:
            self.withdraw(base)
            return
        block.lent = False
        try:
            self.end(block)
            self.access.uncover(block)
        finally:
            self.put(block)

    def is_live(self, uint64_t address):
        """Whether a block is with its caller."""
        return address in self.live

    def release_all(self, nbytes=0):
        """Give back all that waits in quarantine: the pool is trimmed, or cannot serve a request."""
        self.release(0)

    def release(self, int64_t bound):
        """Let the oldest blocks out of quarantine until at most `bound` bytes are left there."""
        while self.waiting_bytes > bound or len(self.waiting) > (self.most_waiting if bound else 0):
            try:
                _, block = self.waiting.popitem(last=False)
            except KeyError:                      # a finaliser, or another thread, was faster
                return
            self.waiting_bytes -= block.nbytes
            try:
                self.look_at_last(block)
            finally:
                self.put(block)

    def look_at(self, block, look):
        """What `look(block)` says; None where the block is neither live nor waiting any more.

        Its memory stays meanwhile: whoever frees it leaves that to the last one who looks at it.
        """
        if self.live.get(block.address) is not block and self.waiting.get(block.address) is not block:
            return None
        block.lookers += 1
        try:
            return look(block)
        finally:
            block.lookers -= 1
            if block.left and block.lookers == 0:
                block.left = False
                self.put(block)

    cdef put(self, block):
        """Give a block's memory back to the pool, or leave that to who looks at it just now."""
        if block.lookers:
            block.left = True
        elif block.lent:
            self.access.put(block.base, block.freer)
        else:
            self.withdraw(block.base)

    cdef withdraw(self, uint64_t base):
        """Give memory back that nobody got; the pool counts it as lent and freed."""
        self.access.withdraw(base)
        self.never_lent += 1

    cdef look_at_last(self, block):
        try:
            error = self.written_late(block)
        except Exception as failed:
            error = failed
        if error is not None:
            self.report(error)

    cdef take(self, address):
        """The live block at an address, which from now on is one that was freed."""
        block = self.live.pop(address, None)
        if block is None:
            raise NotLive(address)
        self.freed[address] = block
        while len(self.freed) > self.most_freed:
            self.freed.popitem(last=False)
        self.access.uncover(block)
        return block

    cdef take_back(self, block):
        """Make a block live again whose free has failed."""
        block.freer = block.freed_at = None
        self.freed.pop(block.address, None)
        self.live[block.address] = block
        self.access.cover(block)

    cdef put_away(self, block):
        """Free a block, or have it wait."""
        cdef bint waits = block.nbytes <= self.bound
        try:
            self.end(block)
        finally:
            if waits:
                self.waiting_bytes += block.nbytes
                self.waiting[block.address] = block
            else:
                self.put(block)
        if waits:
            self.release(self.bound)

    cdef end(self, block):
        """Tell a profiler that a block is free."""
        if self.ranges is not None:
            self.ranges.end(block)

"""The compiled loops of `vpool bench`.  Each returns nanoseconds for all its operations together.

What others run of the same workloads is ``vpool/bench/peer.cpp``.
"""
import numpy as np

cimport cython
from cpython.long cimport PyLong_FromUnsignedLongLong
from libc.stdint cimport uint64_t

from vpool._base.clock cimport now_ns
from vpool._base.lock cimport SpinLock, atomic_acquire, atomic_add, atomic_read, atomic_release, spin_lock, spin_unlock
from vpool._interface.compiled cimport stream_of
from vpool._interface.pool cimport Pool
from vpool._management.arena cimport Arena
from vpool._management.areas cimport Areas, areas_allocate, areas_deallocate

from vpool.errors import OutOfMemoryError

cdef extern from "sched.h" nogil:
    int sched_yield()

cdef enum:
    PLACES = 1024                 # blocks that are on their way through a channel at once
    WARMING = 20000               # the most operations before the clock starts

cdef uint64_t SOME_ADDRESS = 0x7F5A3C2B1A00


cdef class Start:
    """Threads that begin their loops at once, each in a thread of its own.

    Parameters
    ----------
    threads : int

    Attributes
    ----------
    spans : list of tuple of int
        When each loop that has ended began and ended, in nanoseconds.
    """

    cdef unsigned long long wanted
    cdef unsigned long long arrived
    cdef readonly list spans

    def __init__(self, unsigned long long threads):
        self.wanted = threads
        self.spans = []

    def give_up(self):
        """Let nobody wait for the thread that calls this."""
        atomic_add(self.arrived, self.wanted)

    cdef void wait(self) noexcept nogil:
        atomic_add(self.arrived, 1)
        while atomic_acquire(self.arrived) < self.wanted:
            sched_yield()


cdef uint64_t _begin(Start start) noexcept nogil:
    if start is not None:
        start.wait()
    return now_ns()


cdef _ended(Start start, uint64_t begin, uint64_t end, uint64_t failed):
    """Nanoseconds of a loop; an error if some of its requests were not served."""
    if start is not None:
        start.spans.append((begin, end))
    if failed:
        raise OutOfMemoryError(f"{failed:,} requests of a measurement were not served: its figures mean nothing")
    return end - begin


cdef uint64_t _warming(uint64_t operations) noexcept nogil:
    return min(<uint64_t> WARMING, operations // 2)


def lock_and_unlock(Py_ssize_t repeats):
    """The machine's own floor: the pool's lock taken and released, with nothing between."""
    cdef SpinLock lock
    cdef Py_ssize_t _i
    cdef uint64_t started
    lock.held = 0
    with nogil:
        started = now_ns()
        for _i in range(repeats):
            spin_lock(&lock)
            spin_unlock(&lock)
        started = now_ns() - started
    return started


def clock_reads(Py_ssize_t repeats):
    """What a look at the clock costs, which each single operation that is timed has in it."""
    cdef Py_ssize_t _i
    cdef uint64_t started
    cdef uint64_t last = 0
    with nogil:
        started = now_ns()
        for _i in range(repeats):
            last = now_ns()
    return max(last, started) - started


cdef uint64_t _pairs(Areas areas, Arena* arena, uint64_t nbytes, Py_ssize_t repeats) noexcept nogil:
    """How many of so many allocations, each with its free, were not served."""
    cdef Py_ssize_t _i
    cdef uint64_t failed = 0
    cdef uint64_t address = 0
    for _i in range(repeats):
        if areas_allocate(areas, arena, nbytes, &address):
            areas_deallocate(areas, arena, address)
        else:
            failed += 1
    return failed


def pair(Pool pool not None, uint64_t nbytes, Py_ssize_t repeats, stream=None, Start start=None):
    """An allocation and its free, `repeats` times.

    Parameters
    ----------
    pool : Pool
    nbytes : int
    repeats : int
    stream : optional
        As for `Pool.allocate`.
    start : Start, optional
        Warm up, and begin with other threads.

    Raises
    ------
    OutOfMemoryError
        Where a request was not served.
    """
    cdef Areas areas = pool.areas
    cdef Arena* arena = stream_of(pool, stream)
    cdef uint64_t begin, end, failed
    with nogil:
        if start is not None:
            _pairs(areas, arena, nbytes, _warming(repeats))
        begin = _begin(start)
        failed = _pairs(areas, arena, nbytes, repeats)
        end = now_ns()
    return _ended(start, begin, end, failed)


def pair_latencies(Pool pool not None, uint64_t nbytes, uint64_t[::1] each not None):
    """Each of as many pairs as `each` has places for, timed by itself, one look at the clock included."""
    cdef Areas areas = pool.areas
    cdef Arena* arena = pool.default_arena
    cdef Py_ssize_t i
    cdef uint64_t begin, before, now, failed
    with nogil:
        _pairs(areas, arena, nbytes, _warming(each.shape[0]))
        failed = 0
        begin = before = now_ns()
        for i in range(each.shape[0]):
            failed += _pairs(areas, arena, nbytes, 1)
            now = now_ns()
            each[i] = now - before
            before = now
    return _ended(None, begin, before, failed)


cdef class Replacements:
    """Blocks of random sizes, of which a random one is freed and another one allocated, again and again.

    Parameters
    ----------
    pool : Pool
    sizes : numpy.ndarray of uint64
        Sizes to draw from, in bytes; a power of two of them.
    live : int
        Blocks that are live at each moment.
    seed : int
    stream : optional
        As for `Pool.allocate`.
    """

    cdef Pool pool
    cdef Arena* arena
    cdef const uint64_t[::1] sizes
    cdef uint64_t[::1] slots
    cdef uint64_t state
    cdef uint64_t failed

    def __init__(self, Pool pool not None, const uint64_t[::1] sizes not None, Py_ssize_t live, uint64_t seed,
                 stream=None):
        if sizes.shape[0] == 0 or sizes.shape[0] & (sizes.shape[0] - 1):
            raise ValueError("the number of sizes must be a power of two")
        if live < 1:
            raise ValueError(f"at least one block must be live, not {live}")
        self.pool = pool
        self.arena = stream_of(pool, stream)
        self.sizes = sizes
        self.slots = np.zeros(live, np.uint64)
        self.state = seed * 2 + 1
        for slot in range(live):
            self.fill(slot, slot)

    cdef inline void fill(self, uint64_t slot, uint64_t draw) noexcept nogil:
        if not areas_allocate(self.pool.areas, self.arena, self.sizes[draw & (self.sizes.shape[0] - 1)],
                              &self.slots[slot]):
            self.slots[slot] = 0
            self.failed += 1

    cdef inline void replace(self) noexcept nogil:
        # Knuth's MMIX generator; its upper half picks the slot (Lemire's multiplication) and the size.
        cdef uint64_t slot
        self.state = self.state * <uint64_t> 6364136223846793005 + <uint64_t> 1442695040888963407
        slot = ((self.state >> 32) * <uint64_t> self.slots.shape[0]) >> 32
        if self.slots[slot]:
            areas_deallocate(self.pool.areas, self.arena, self.slots[slot])
        self.fill(slot, self.state >> 11)

    def run(self, Py_ssize_t operations, Start start=None):
        """Operations of a free and an allocation each; before the clock starts, some that warm up."""
        cdef Py_ssize_t _i
        cdef uint64_t begin, end
        with nogil:
            for _i in range(_warming(operations)):
                self.replace()
            begin = _begin(start)
            for _i in range(operations):
                self.replace()
            end = now_ns()
        return _ended(start, begin, end, self.failed)

    def latencies(self, uint64_t[::1] each not None):
        """The same, each timed by itself, one look at the clock included."""
        cdef Py_ssize_t i, _i
        cdef uint64_t begin, before, now
        with nogil:
            for _i in range(_warming(each.shape[0])):
                self.replace()
            begin = before = now_ns()
            for i in range(each.shape[0]):
                self.replace()
                now = now_ns()
                each[i] = now - before
                before = now
        return _ended(None, begin, before, self.failed)

    def free(self):
        """Free what is live."""
        for slot in range(self.slots.shape[0]):
            if self.slots[slot]:
                areas_deallocate(self.pool.areas, self.arena, self.slots[slot])
                self.slots[slot] = 0


def random_toggles(Pool pool not None, const uint64_t[::1] sizes not None, Py_ssize_t live, Py_ssize_t operations,
                   uint64_t seed):
    """Operations that each free a random one of 2 x `live` slots if it is full, and fill it otherwise.

    Parameters
    ----------
    sizes : numpy.ndarray of uint64
        Sizes to draw from, in bytes; a power of two of them.
    live : int
        Blocks that are live on average; the slots are filled to that before the clock starts.
    """
    cdef Areas areas = pool.areas
    cdef Arena* arena = pool.default_arena
    cdef uint64_t[::1] slots = np.zeros(2 * live, np.uint64)
    cdef uint64_t mask = sizes.shape[0] - 1
    cdef uint64_t state = seed * 2 + 1
    cdef uint64_t started = 0
    cdef uint64_t slot
    cdef Py_ssize_t i
    if sizes.shape[0] == 0 or mask & sizes.shape[0]:
        raise ValueError("the number of sizes must be a power of two")
    with nogil:
        for i in range(live):
            areas_allocate(areas, arena, sizes[i & mask], &slots[2 * i])
        # Half as many operations again come first, unmeasured, to reach the steady state.
        for i in range(operations + operations // 2):
            if i == operations // 2:
                started = now_ns()
            # Knuth's MMIX generator; its upper half picks the slot (Lemire's multiplication) and the size.
            state = state * <uint64_t> 6364136223846793005 + <uint64_t> 1442695040888963407
            slot = ((state >> 32) * <uint64_t> (2 * live)) >> 32
            if slots[slot]:
                areas_deallocate(areas, arena, slots[slot])
                slots[slot] = 0
            else:
                areas_allocate(areas, arena, sizes[(state >> 11) & mask], &slots[slot])
        started = now_ns() - started
        for i in range(2 * live):
            if slots[i]:
                areas_deallocate(areas, arena, slots[i])
    return started


cdef class Channel:
    """Addresses on their way from a thread that allocates to one that frees."""

    cdef uint64_t places[PLACES]
    cdef unsigned long long written
    cdef char apart[120]          # the two counters are written by different threads
    cdef unsigned long long taken

    cdef inline void put(self, uint64_t address) noexcept nogil:
        while atomic_read(self.written) - atomic_acquire(self.taken) == PLACES:
            sched_yield()
        self.places[self.written % PLACES] = address
        atomic_release(self.written, self.written + 1)

    cdef inline uint64_t take(self) noexcept nogil:
        cdef uint64_t address
        while atomic_acquire(self.written) == self.taken:
            sched_yield()
        address = self.places[self.taken % PLACES]
        atomic_release(self.taken, self.taken + 1)
        return address


def produce(Pool pool not None, Channel channel not None, uint64_t nbytes, Py_ssize_t repeats, stream=None,
            Start start=None):
    """Allocate blocks, and send each to whoever frees them."""
    cdef Areas areas = pool.areas
    cdef Arena* arena = stream_of(pool, stream)
    cdef Py_ssize_t _i
    cdef uint64_t begin, end
    cdef uint64_t failed = 0
    cdef uint64_t address = 0
    with nogil:
        begin = _begin(start)
        for _i in range(repeats):
            if not areas_allocate(areas, arena, nbytes, &address):
                address = 0                       # somebody waits for it
                failed += 1
            channel.put(address)
        end = now_ns()
    return _ended(start, begin, end, failed)


def consume(Pool pool not None, Channel channel not None, Py_ssize_t repeats, stream=None, Start start=None):
    """Free as many blocks of another thread."""
    cdef Areas areas = pool.areas
    cdef Arena* arena = stream_of(pool, stream)
    cdef Py_ssize_t _i
    cdef uint64_t begin, end, address
    with nogil:
        begin = _begin(start)
        for _i in range(repeats):
            address = channel.take()
            if address:
                areas_deallocate(areas, arena, address)
        end = now_ns()
    return _ended(start, begin, end, 0)


def fill(Pool pool not None, uint64_t nbytes, uint64_t[::1] addresses not None):
    """As many live blocks as `addresses` has places for."""
    cdef Areas areas = pool.areas
    cdef Arena* arena = pool.default_arena
    cdef Py_ssize_t i
    cdef uint64_t begin, end
    cdef uint64_t failed = 0
    with nogil:
        begin = now_ns()
        for i in range(addresses.shape[0]):
            if not areas_allocate(areas, arena, nbytes, &addresses[i]):
                addresses[i] = 0
                failed += 1
        end = now_ns()
    return _ended(None, begin, end, failed)


def drop(Pool pool not None, uint64_t[::1] addresses not None, Py_ssize_t step=1):
    """Free the first of each `step` blocks, and forget its address."""
    cdef Areas areas = pool.areas
    cdef Arena* arena = pool.default_arena
    cdef Py_ssize_t i = 0
    cdef uint64_t begin, end
    if step < 1:
        raise ValueError(f"step must be at least 1, got {step}")
    with nogil:
        begin = now_ns()
        while i < addresses.shape[0]:
            if addresses[i]:
                areas_deallocate(areas, arena, addresses[i])
                addresses[i] = 0
            i += step
        end = now_ns()
    return _ended(None, begin, end, 0)


cdef class Nothing:
    """An object that comes and goes."""

    def __dealloc__(self):
        pass


@cython.binding(False)
cdef class EmptyCalls:
    """A pool's calls with empty bodies: the floor of its calls from Python."""

    def allocate(self, nbytes, stream=None, alignment=256):
        """An address, as a fresh object."""
        return PyLong_FromUnsignedLongLong(SOME_ADDRESS)

    def deallocate(self, ptr, stream=None):
        """Nothing."""

    def empty(self, nbytes, stream=None):
        """An object with nothing in it."""
        return Nothing.__new__(Nothing)

"""The compiled loop of a replay: every event goes through the core that allocates, lock and index included."""
import numpy as np

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from vpool._base.clock cimport now_ns
from vpool._interface.pool cimport Pool
from vpool._management.arena cimport Arena
from vpool._management.core cimport Core, core_allocate, core_deallocate
from vpool._storage.driver cimport STATUS_OK
from vpool._storage.source cimport Source

cdef enum:
    STAGING_WORDS = 8 << 20       # of the host copy through which device memory is verified


cdef inline uint64_t _mark(uint32_t number, uint64_t address) noexcept nogil:
    """What the granule at `address` holds while allocation `number` is live."""
    return (address ^ (<uint64_t> number << 40)) * <uint64_t> 0x9E3779B97F4A7C15


cdef void _mark_host(uint32_t number, uint64_t address, uint64_t nbytes) noexcept nogil:
    """A word into each granule: blocks are whole granules, so any overlap destroys one."""
    cdef uint64_t at = address
    while at < address + nbytes:
        (<uint64_t*> at)[0] = _mark(number, at)
        at += 256


cdef bint _verify_host(uint32_t number, uint64_t address, uint64_t nbytes) noexcept nogil:
    cdef uint64_t at = address
    while at < address + nbytes:
        if (<uint64_t*> at)[0] != _mark(number, at):
            return False
        at += 256
    return True


cdef bint _verify_device(Source source, uint32_t* staging, uint32_t word, uint64_t address,
                         uint64_t words) noexcept nogil:
    """Copy a block back and compare every word of it."""
    cdef uint64_t part, i
    while words:
        part = words if words < STAGING_WORDS else STAGING_WORDS
        if source.read(staging, address, part * 4) != STATUS_OK:
            return False
        for i in range(part):
            if staging[i] != word:
                return False
        address += part * 4
        words -= part
    return True


cdef class Replayer:
    """One trace, one pool, one position.

    Parameters
    ----------
    pool : Pool
    op, number, nbytes : numpy.ndarray
        The trace's events: uint8, uint32 (0 to allocations - 1) and uint64.
    allocations : int
        How many allocations the trace has.
    patterns : bool
        Write a pattern into each block and verify it when it is freed.

    Attributes
    ----------
    nanoseconds : int
        Time of the events so far, driver calls and patterns included.
    mismatch : int
        Event at which a pattern was found damaged; -1 for none.
    """

    cdef Pool pool
    cdef Source source
    cdef const uint8_t[::1] op
    cdef const uint32_t[::1] number
    cdef const uint64_t[::1] nbytes
    cdef uint64_t[::1] address            # of each live allocation, 0 of the others
    cdef uint64_t[::1] size
    cdef uint32_t[::1] staging
    cdef bint patterns
    cdef readonly uint64_t nanoseconds
    cdef readonly long long mismatch

    def __init__(self, Pool pool not None, op, number, nbytes, Py_ssize_t allocations, bint patterns=False):
        self.pool = pool
        self.source = pool.core.source
        self.op = op
        self.number = number
        self.nbytes = nbytes
        # One entry more than there are, so that no view is ever empty.
        self.address = np.zeros(allocations + 1, np.uint64)
        self.size = np.zeros(allocations + 1, np.uint64)
        self.staging = np.zeros(STAGING_WORDS if patterns else 1, np.uint32)
        self.patterns = patterns
        self.mismatch = -1

    def run(self, Py_ssize_t begin, Py_ssize_t end):
        """Replay the events from `begin` to `end`.

        Returns
        -------
        int
            The event that failed for want of memory or by a damaged pattern, or `end`.
        """
        cdef Core core = self.pool.core
        cdef Arena* arena = self.pool.default_arena
        cdef Py_ssize_t i
        cdef uint32_t number
        cdef uint64_t started
        if not 0 <= begin <= end <= self.op.shape[0]:
            raise ValueError(f"no events {begin} to {end}")
        if begin == end:
            return end
        with nogil:
            started = now_ns()
            i = begin
            while i < end:
                number = self.number[i]
                if self.op[i] == 0:
                    if self.nbytes[i] and not core_allocate(core, arena, self.nbytes[i], &self.address[number]):
                        self.address[number] = 0
                        break
                    if self.patterns:
                        self.size[number] = self.nbytes[i]
                        self.mark_block(number)
                elif self.address[number]:
                    if self.patterns and not self.verify_block(number):
                        self.mismatch = i
                        break
                    core_deallocate(core, arena, self.address[number])
                    self.address[number] = 0
                i += 1
            self.nanoseconds += now_ns() - started
        return i

    def finish(self):
        """Free what is live.  False where a pattern was found damaged."""
        cdef Py_ssize_t number
        for number in range(self.address.shape[0] - 1):
            if self.address[number]:
                if self.patterns and not self.verify_block(number):
                    return False
                core_deallocate(self.pool.core, self.pool.default_arena, self.address[number])
                self.address[number] = 0
        return True

    cdef void mark_block(self, uint32_t number) noexcept nogil:
        cdef uint64_t address = self.address[number]
        if self.source.host_accessible:
            _mark_host(number, address, self.size[number])
        else:
            self.source.fill(address, <uint32_t> _mark(number, address), (self.size[number] + 3) // 4)

    cdef bint verify_block(self, uint32_t number) noexcept nogil:
        cdef uint64_t address = self.address[number]
        if self.source.host_accessible:
            return _verify_host(number, address, self.size[number])
        return _verify_device(
            self.source, &self.staging[0], <uint32_t> _mark(number, address), address, (self.size[number] + 3) // 4)

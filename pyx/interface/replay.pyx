"""The compiled loop of a replay: every event goes through the core that allocates, lock and index included."""
import numpy as np

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from vpool._base.clock cimport now_ns
from vpool._base.lock cimport atomic_read
from vpool._interface.pool cimport Pool
from vpool._management.arena cimport Arena
from vpool._management.areas cimport areas_allocate, areas_deallocate
from vpool._storage.driver cimport STATUS_OK, STATUS_OUT_OF_MEMORY
from vpool._storage.simulated_streams cimport StreamedDriver
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
                         uint64_t words, int* status) noexcept nogil:
    """Copy a block back and compare every word of it; True also where the driver fails, with its status."""
    cdef uint64_t part, i
    while words:
        part = words if words < STAGING_WORDS else STAGING_WORDS
        status[0] = source.read(staging, address, part * 4)
        if status[0] != STATUS_OK:
            return True
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
    trace : vpool.Trace
    streams : dict of int
        Handle of the stream that stands for each of the trace's, by its index.
    pessimistic : bool
        Let work on a simulated stream be complete only at the trace's next mark, not at the free.
    patterns : bool
        Write a pattern into each block and verify it when it is freed.
    maintain : bool
        Maintain the pool before each event.
    lag : int
        Let the work of each event on a simulated stream be complete so many events later, not at once.

    Attributes
    ----------
    nanoseconds : int
        Time of the events so far, driver calls and patterns included.
    worst_ns : int
        The most nanoseconds that one event spent in driver calls since this was last set to 0.
    verified : int
        Bytes of the blocks whose pattern was verified so far.
    mismatch : int
        Event at which a pattern was found damaged; -1 for none.
    """

    cdef Pool pool
    cdef Source source
    cdef StreamedDriver simulated         # None on a real device
    cdef const uint8_t[::1] op
    cdef const uint32_t[::1] number
    cdef const uint64_t[::1] nbytes
    cdef const uint16_t[::1] stream
    cdef int64_t[::1] marks               # events before which a step begins, then one that never comes
    cdef Arena** arenas                   # of the pool, by slot
    cdef uint16_t[::1] slots              # of each of the trace's streams
    cdef int32_t[::1] simulated_streams
    cdef uint64_t[::1] address            # of each live allocation, 0 of the others
    cdef uint64_t[::1] size
    cdef uint16_t[::1] slot               # that each allocation was made for
    cdef uint32_t[::1] staging
    cdef bint pessimistic
    cdef bint patterns
    cdef bint maintain
    cdef Py_ssize_t lag
    cdef int32_t[::1] late_stream         # [event modulo lag]: the work that is to be complete after so many events
    cdef uint64_t[::1] late_work
    cdef readonly uint64_t nanoseconds
    cdef public uint64_t worst_ns
    cdef readonly uint64_t verified
    cdef readonly long long mismatch
    cdef int status                       # of the driver call for a pattern that failed

    def __init__(self, Pool pool not None, trace, streams, bint pessimistic=False, bint patterns=False,
                 bint maintain=False, Py_ssize_t lag=0):
        if lag < 0:
            raise ValueError(f"lag must be at least 0 events, got {lag}")
        self.pool = pool
        self.source = pool.core.source
        self.op = trace.op
        self.number = trace.number
        self.nbytes = trace.bytes
        self.stream = trace.stream
        self.marks = np.append(trace.mark_events.astype(np.int64), np.int64(2**62))
        slots = np.zeros(max(streams, default=0) + 1, np.uint16)
        simulated = np.zeros(len(slots), np.int32)
        self.simulated = self.source.driver if isinstance(self.source.driver, StreamedDriver) else None
        self.pessimistic = pessimistic
        self.lag = lag
        self.late_stream = np.zeros(max(lag, 1), np.int32)
        self.late_work = np.zeros(max(lag, 1), np.uint64)
        if (pessimistic or lag) and self.simulated is None:
            raise ValueError(f"when work on source {self.source.name!r} is complete is the device's to say")
        for index, stream in streams.items():
            slots[index] = pool.streams.slot_of(stream)
            simulated[index] = self.simulated.index_of(stream) if self.simulated is not None else 0
        self.slots = slots
        self.arenas = pool.core.state.arenas
        self.simulated_streams = simulated
        # One entry more than there are, so that no view is ever empty.
        self.address = np.zeros(trace.allocations + 1, np.uint64)
        self.size = np.zeros(trace.allocations + 1, np.uint64)
        self.slot = np.zeros(trace.allocations + 1, np.uint16)
        self.staging = np.zeros(STAGING_WORDS if patterns else 1, np.uint32)
        self.patterns = patterns
        self.maintain = maintain
        self.mismatch = -1

    @property
    def source_failed(self):
        """CUDA's name of the source's error on the last request or pattern that failed; None for want of memory."""
        cdef int status = self.pool.core.state.last_failure
        if self.status != STATUS_OK:
            return self.source.driver.error_name(self.status)
        if status == STATUS_OK or status == STATUS_OUT_OF_MEMORY:
            return None
        return self.source.driver.error_name(status)

    def run(self, Py_ssize_t begin, Py_ssize_t end):
        """Replay the events from `begin` to `end`.

        Returns
        -------
        int
            The event that failed for want of memory or by a damaged pattern, or `end`.
        """
        cdef Py_ssize_t i = begin
        cdef uint64_t started, spent, before
        cdef int64_t mark
        cdef Py_ssize_t next_mark = np.searchsorted(self.marks, begin)
        if not 0 <= begin <= end <= self.op.shape[0]:
            raise ValueError(f"no events {begin} to {end}")
        with nogil:
            started = now_ns()
            mark = self.marks[next_mark]
            spent = atomic_read(self.source.driver.spent)
            while i < end:
                if self.pessimistic and i >= mark:
                    self.simulated.complete_all()
                    while i >= mark:
                        next_mark += 1
                        mark = self.marks[next_mark]
                if self.lag:
                    self.be_late(i)
                if self.maintain:
                    self.pool.areas.maintain()
                if not (self.lend(i) if self.op[i] == 0 else self.take_back(i)):
                    break
                i += 1
                before = spent
                spent = atomic_read(self.source.driver.spent)
                if spent - before > self.worst_ns:
                    self.worst_ns = spent - before
            self.nanoseconds += now_ns() - started
        return i

    cdef void be_late(self, Py_ssize_t event) noexcept nogil:
        """Queue an event's work, and complete what was queued `lag` events ago."""
        cdef int stream = self.simulated_streams[self.stream[event]]
        cdef Py_ssize_t at = event % self.lag
        self.simulated.complete_at(self.late_stream[at], self.late_work[at])
        self.simulated.queue_at(stream)
        self.late_stream[at] = stream
        self.late_work[at] = self.simulated.queued_at(stream)

    cdef inline bint lend(self, Py_ssize_t event) noexcept nogil:
        """An allocation; False where it fails."""
        cdef uint32_t number = self.number[event]
        cdef uint16_t slot = self.slots[self.stream[event]]
        if self.nbytes[event] == 0:
            return True
        if not areas_allocate(self.pool.areas, self.arenas[slot], self.nbytes[event], &self.address[number]):
            self.address[number] = 0
            return False
        self.slot[number] = slot
        if self.patterns:
            self.size[number] = self.nbytes[event]
            self.mark_block(number)
        return self.status == STATUS_OK

    cdef inline bint take_back(self, Py_ssize_t event) noexcept nogil:
        """A free; False where the block does not hold its pattern."""
        cdef uint32_t number = self.number[event]
        if self.address[number] == 0:
            return True
        if self.patterns and not self.verify_block(number):
            self.mismatch = event
            return False
        if self.status != STATUS_OK:
            return False
        if self.pessimistic:
            self.simulated.queue_at(self.simulated_streams[self.stream[event]])
        if not areas_deallocate(self.pool.areas, self.arenas[self.slot[number]], self.address[number]):
            self.mismatch = event                 # the pool does not know its own block
            return False
        self.address[number] = 0
        return True

    def finish(self):
        """Free what is live.  False where a pattern was found damaged, or cannot be read."""
        cdef Py_ssize_t number
        for number in range(self.address.shape[0] - 1):
            if self.address[number]:
                if self.patterns and not self.verify_block(number) or self.status != STATUS_OK:
                    return False
                areas_deallocate(self.pool.areas, self.arenas[self.slot[number]], self.address[number])
                self.address[number] = 0
        return True

    cdef void mark_block(self, uint32_t number) noexcept nogil:
        cdef uint64_t address = self.address[number]
        if self.source.host_accessible:
            _mark_host(number, address, self.size[number])
        else:
            self.status = self.source.fill(
                address, <uint32_t> _mark(number, address), (self.size[number] + 3) // 4)

    cdef bint verify_block(self, uint32_t number) noexcept nogil:
        cdef uint64_t address = self.address[number]
        self.verified += self.size[number]
        if self.source.host_accessible:
            return _verify_host(number, address, self.size[number])
        return _verify_device(
            self.source, &self.staging[0], <uint32_t> _mark(number, address), address, (self.size[number] + 3) // 4,
            &self.status)

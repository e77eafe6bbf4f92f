"""A plan at work: requests that come as recorded get the places that were planned for them.

The planned memory is the fixed core of the pool, which serves nothing else.  A planned block is cut out of the free
block that its place lies in, and is a block like any other from then on.
"""
cimport cython
import numpy as np

from libc.stdint cimport int64_t, uint64_t

from vpool._base.bias cimport Seat, bias_enter, bias_leave
from vpool._base.lock cimport spin_lock, spin_unlock
from vpool._base.types cimport BLOCK_FREE, Block, BlockId, round_up
from vpool._management.arena cimport Arena
from vpool._management.core cimport Core
from vpool._management.freelist cimport freelist_insert
from vpool._management.hit cimport hit_cut, hit_take_from
from vpool._management.index cimport index_find

cdef enum:
    NONE = -1
    RUN = 4                       # requests in a row that tell where in the sequence a program is
    WINDOW = 16                   # requests that may be left out
    MOST_STEPS = 256              # blocks that are looked at for a place
    # What is known of where the program is counts up for a request that was expected, down for a strange one.
    SURE = RUN
    MOST_SURE = 64


@cython.no_gc   # refers to an area alone: no cycle
cdef class Planned:
    """The sequence of a plan, and where in it the program is.

    Parameters
    ----------
    fixed : Core
        With one segment, all of it free.
    nbytes : array of uint64
        Of each request, in order; at least one.
    offset : array of int64
        From the start of the segment; -1 for a request that is not planned.
    below : array of int64
        For each planned request the one that lies next below it while both live, or -1.
    """

    def __cinit__(self, Core fixed not None, nbytes, offset, below):
        self.fixed = fixed
        self.nbytes = np.ascontiguousarray(nbytes, np.uint64)
        self.offset = np.ascontiguousarray(offset, np.int64)
        self.below = np.ascontiguousarray(below, np.int64)
        self.count = len(nbytes)
        self.trust = SURE
        self.base = fixed.state.segments[0].address
        self.edge = fixed.state.segments[0].edge
        self.run_mask = (1 << int(2 * self.count).bit_length()) - 1
        self.runs = np.full(self.run_mask + 1, NONE, np.int64)
        self.is_ambiguous = np.zeros(self.count, np.uint8)
        self._index_runs()

    def _index_runs(self):
        """Find each run of sizes by its hash; the sequence is a circle, since the step repeats."""
        cdef Py_ssize_t last, at
        cdef int i
        for last in range(self.count):
            for i in range(RUN):
                self.recent[i] = self.nbytes[(last + self.count * RUN - i) % self.count]
            at = self.find_run()
            if self.runs[at] == NONE:
                self.runs[at] = last
            else:
                self.is_ambiguous[self.runs[at]] = True
        for i in range(RUN):
            self.recent[i] = 0

    cdef Py_ssize_t find_run(self) noexcept nogil:
        """The entry of the run that was requested last, or the empty one where it would stand."""
        cdef uint64_t hash = 0
        cdef Py_ssize_t at
        cdef int64_t last
        cdef int i
        for i in range(RUN):
            hash = (hash ^ self.recent[i]) * <uint64_t> 0x9E3779B97F4A7C15
        at = <Py_ssize_t> ((hash >> 24) & self.run_mask)
        while self.runs[at] != NONE:
            last = self.runs[at]
            i = 0
            while i < RUN and self.nbytes[(last + self.count * RUN - i) % self.count] == self.recent[i]:
                i += 1
            if i == RUN:
                break
            at = (at + 1) & self.run_mask
        return at

    cdef int64_t follow(self, uint64_t requested) noexcept nogil:
        """Which request of the sequence this one is; NONE where that is not known.

        A block that is taken for another would be in the way of those that are planned, perhaps for good: weights
        have the sizes of gradients.  So a program is followed from the beginning of a step on, and is believed to do
        it after a few requests.
        """
        cdef int64_t found = NONE
        cdef Py_ssize_t at
        cdef int i
        for i in range(RUN - 1, 0, -1):
            self.recent[i] = self.recent[i - 1]
        self.recent[0] = requested
        if self.nbytes[self.next] == requested:
            found = self.next
            self.trust += self.trust < MOST_SURE
        else:
            if self.trust >= SURE:
                # Something was left out, or the step began anew: a whole run says where.
                at = self.find_run()
                if self.runs[at] != NONE and not self.is_ambiguous[self.runs[at]]:
                    found = self.runs[at]
            if found == NONE:
                found = self.look_ahead(requested)
        if found != NONE:
            self.next = (found + 1) % self.count
        return found if self.trust >= SURE else NONE

    cdef int64_t look_ahead(self, uint64_t requested) noexcept nogil:
        """Which of the next requests this one is, where a program is on its way; the first where a step begins."""
        cdef int i
        self.trust -= self.trust > 0
        if self.trust == 0:
            self.next = 0
            self.trust = self.nbytes[0] == requested
            return 0 if self.trust else NONE
        for i in range(1, min(<int> WINDOW, <int> self.count)):
            if self.nbytes[(self.next + i) % self.count] == requested:
                return (self.next + i) % self.count
        return NONE

    cdef BlockId find_free(self, Arena* arena, int64_t entry, uint64_t nbytes) noexcept nogil:
        """The free block that a request's place lies in, or 0.  The arena's lock is held."""
        cdef uint64_t address = self.base + <uint64_t> self.offset[entry]
        cdef int64_t below = self.below[entry]
        cdef BlockId block_id = 0
        cdef Block* block
        cdef int _
        if below != NONE:
            block_id = index_find(arena, self.base + <uint64_t> self.offset[below])
        block_id = arena.blocks[block_id if block_id else self.edge].next
        for _ in range(MOST_STEPS):
            block = &arena.blocks[block_id]
            if block_id == 0 or block.address > address:
                return 0
            if block.address + block.nbytes > address:
                return block_id if block.state == BLOCK_FREE and (
                    address + nbytes <= block.address + block.nbytes) else 0
            block_id = block.next
        return 0

    cdef BlockId cut_out(self, Arena* arena, int64_t entry, uint64_t requested) noexcept nogil:
        """Lend a request's place, or 0 where it is not free.  The arena's lock is held."""
        cdef uint64_t address = self.base + <uint64_t> self.offset[entry]
        cdef uint64_t nbytes = round_up(requested, arena.rounding)
        cdef BlockId block_id, front_id
        if not self.fixed.state.keeps:            # the pool was closed
            return 0
        block_id = self.find_free(arena, entry, nbytes)
        if block_id and arena.blocks[block_id].address < address:
            front_id = hit_cut(arena, block_id, address - arena.blocks[block_id].address)
            if front_id == 0:
                return 0
            arena.blocks[front_id].state = BLOCK_FREE
            freelist_insert(arena, front_id, &arena.blocks[front_id])
        return hit_take_from(arena, block_id, nbytes, requested, 0) if block_id else 0

    cdef BlockId take(self, Arena* arena, uint64_t requested, uint64_t alignment, uint64_t* address) noexcept nogil:
        """Lend the place that is planned for a request; the block's number, or 0 where the pool has to find one.

        The arena is the one of the stream's slot in the area that grows; only the default stream has a plan.
        Called once for each request, without the GIL.
        """
        cdef Arena* fixed = arena.fixed
        cdef BlockId block_id = 0
        cdef int64_t entry
        cdef Seat* seat
        if arena.slot != 0:
            return 0
        spin_lock(&self.lock)
        entry = self.follow(requested)
        if entry == NONE:
            self.strange += 1
        elif self.offset[entry] != NONE and (self.base + <uint64_t> self.offset[entry]) & (alignment - 1) == 0:
            seat = bias_enter(&fixed.lock)
            block_id = self.cut_out(fixed, entry, requested)
            address[0] = fixed.blocks[block_id].address
            bias_leave(&fixed.lock, seat)
            if block_id:
                self.served += 1
            else:
                self.refused += 1
        spin_unlock(&self.lock)
        return block_id

    def figures(self):
        """How many requests were served from the plan, found their place taken, and were none of the sequence."""
        return self.served, self.refused, self.strange

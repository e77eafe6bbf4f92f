"""Blocks with known lifetimes under a given height: branch and bound, the thorough half of a planner.

The search goes through *canonical* placements only: every block rests on the ground or on another one, and
blocks are placed by rising offset, of equal offsets by rising rank.  Every placement can be pushed down into one
of these, so where none is left, none fits.  After M. D. Moffitt, MiniMalloc: A Lightweight Memory Allocator for
Hardware-Accelerated Machine Learning, ASPLOS 2023.

It prunes by three rules.  A block is not placed where another one would fit wholly below it: that one goes first.
A block that was passed over has to rest on one that is still to come.  In each section what is to come, stacked on the
lowest of their offsets, must fit.  Blocks that fall into groups that share no section are placed group by group.
"""
import numpy as np

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from vpool._base.clock cimport now_ns

cdef int64_t NEVER = 0x3FFFFFFFFFFFFFFF
cdef double MOST_SECONDS = 1e9

cdef enum:
    NONE = -1

cdef enum Outcome:
    INFEASIBLE
    PLACED
    GIVEN_UP
    DEEPER       # not known yet


cdef struct Frame:
    # A group of blocks to be placed: of the list of blocks from `first` to `last`.
    int32_t first
    int32_t last
    # What was placed last: this group's blocks follow it in the order of offset and rank.
    int64_t offset
    int32_t rank
    int32_t block       # of the group, placed now; or NONE
    int32_t rest        # first of the groups that are left of it to be placed; or NONE
    int64_t undo        # where the offsets stand that placing it has raised


cdef class Search:
    """Blocks, and a search for a placement of them.

    Parameters
    ----------
    first, end : array of int32
        The sections in which each block lives, from `first` to before `end`; `first` never falls.
    size : array of int64
        Height of each block, more than 0; together less than 2**61.

    Attributes
    ----------
    offset : array of int64
        Of each block, in the placement that was found last.
    conflicts : array of int64
        For each block, how many branches the last run pruned where it lives.

    Notes
    -----
    Memory: O(pairs of blocks that live together).  Thread safety: one run at a time; several objects may run at
    once, a run holds no GIL.
    """

    cdef readonly object offset
    cdef readonly object conflicts
    cdef const int32_t[::1] first
    cdef const int32_t[::1] end
    cdef const int64_t[::1] size
    cdef const int32_t[::1] rank
    cdef const int64_t[::1] others_from   # where the blocks that live beside each begin in `others`
    cdef const int32_t[::1] others
    cdef int64_t[::1] found
    cdef int64_t[::1] weight
    cdef int64_t[::1] least_offset        # where each block would rest on what is placed
    cdef int64_t[::1] height              # of what is to come, by section
    cdef int64_t[::1] lowest              # scratch, by section
    cdef int64_t[::1] undo
    cdef uint8_t[::1] placed
    # The blocks that are to come, in the order of their birth; one more as the end of the list.
    cdef int32_t[::1] after
    cdef int32_t[::1] before
    cdef Frame[::1] frames
    cdef int64_t capacity
    cdef int64_t undo_top
    cdef int64_t work
    cdef uint64_t deadline
    cdef bint stopped

    def __init__(self, first, end, size):
        count = len(first)
        self.first = np.ascontiguousarray(first, np.int32)
        self.end = np.ascontiguousarray(end, np.int32)
        self.size = np.ascontiguousarray(size, np.int64)
        self._find_others(count)
        sections = int(np.max(end, initial=0))
        self.offset = np.zeros(count, np.int64)
        self.conflicts = np.zeros(count, np.int64)
        self.found = self.offset
        self.weight = self.conflicts
        self.least_offset = np.zeros(count + 1, np.int64)
        self.height = np.zeros(sections + 1, np.int64)
        self.lowest = np.zeros(sections + 1, np.int64)
        self.placed = np.zeros(count + 1, np.uint8)
        self.after = np.zeros(count + 1, np.int32)
        self.before = np.zeros(count + 1, np.int32)
        # A block raises each one beside it at most once while it is placed.
        self.undo = np.zeros(len(self.others) + 1, np.int64)
        self.frames = np.zeros(count + 2, np.dtype([
            ("first", "i4"), ("last", "i4"), ("offset", "i8"), ("rank", "i4"), ("block", "i4"), ("rest", "i4"),
            ("undo", "i8")], align=True))

    def _find_others(self, count):
        """For each block the others that live in one of its sections."""
        first, end = np.asarray(self.first), np.asarray(self.end)
        # Those that are born after it, and before its end.
        later_ones = np.searchsorted(first, end, side="left") - np.arange(count) - 1
        earlier = np.repeat(np.arange(count, dtype=np.int32), later_ones)
        begins = np.cumsum(later_ones) - later_ones
        later = (np.arange(len(earlier)) - np.repeat(begins, later_ones)).astype(np.int32) + earlier + np.int32(1)
        order = np.argsort(np.concatenate((earlier, later)), kind="stable")
        begins = np.zeros(count + 1, np.int64)
        np.cumsum(np.bincount(np.concatenate((earlier, later)), minlength=count), out=begins[1:])
        self.others_from = begins
        self.others = np.append(np.concatenate((later, earlier))[order], np.int32(0))

    def stop(self):
        """Make the run that goes on in another thread, and every later one, give up."""
        self.stopped = True

    def run(self, int64_t capacity, rank, int64_t most_work, double seconds):
        """Search for a placement of all blocks below `capacity`.

        Parameters
        ----------
        capacity : int
            In the units of the sizes.
        rank : array of int32
            A different number for each block: of blocks with equal offsets the lower is tried first.
        most_work : int
            Blocks to look at before giving up.
        seconds : float
            After which it gives up too.

        Returns
        -------
        bool or None
            True with the placement in `offset`, False where there is none, None where that is not known.
        """
        cdef Py_ssize_t count = self.first.shape[0]
        cdef Py_ssize_t block, section
        cdef int outcome
        self.rank = np.ascontiguousarray(rank, np.int32)
        if self.rank.shape[0] != count:
            raise ValueError(f"{self.rank.shape[0]} ranks for {count} blocks")
        if count == 0:
            return True
        self.capacity = capacity
        self.undo_top = 0
        self.work = most_work
        self.deadline = now_ns() + <uint64_t> (max(0.0, min(seconds, MOST_SECONDS)) * 1e9)
        with nogil:
            self.height[:] = 0
            self.weight[:] = 0
            for block in range(count):
                self.least_offset[block] = 0
                self.placed[block] = 0
                self.after[block] = <int32_t> (block + 1)
                self.before[block + 1] = <int32_t> block
                for section in range(self.first[block], self.end[block]):
                    self.height[section] += self.size[block]
            self.after[count] = 0
            self.before[0] = <int32_t> count
            outcome = self.search(<int32_t> (count - 1))
        return None if outcome == GIVEN_UP else outcome == PLACED

    cdef Outcome search(self, int32_t last) noexcept nogil:
        """Place the blocks from the first to the last one."""
        cdef Py_ssize_t depth = 0
        cdef Frame* frame = &self.frames[0]
        cdef Outcome outcome = DEEPER
        self.open_frame(frame, 0, last, NONE, NONE)
        while True:
            if outcome == DEEPER:
                # A new group, or another try of one.
                outcome = self.place_one(frame)
                if outcome == DEEPER and frame.rest == NONE:
                    outcome = PLACED
            elif depth == 0:
                return outcome
            else:
                # A group is done: its frame is left for the one around it.
                depth -= 1
                frame = &self.frames[depth]
                if outcome == PLACED and frame.rest != NONE:
                    outcome = DEEPER
            if outcome == DEEPER:
                self.open_group(frame, &self.frames[depth + 1])
                depth += 1
                frame = &self.frames[depth]
            elif frame.block != NONE:
                # The places that were found stand in `found`.
                self.take_out(frame)
                if outcome == INFEASIBLE:
                    outcome = DEEPER
            # Otherwise nothing of the group can be placed, which the one around it has to learn.

    cdef void open_frame(self, Frame* frame, int32_t first, int32_t last, int64_t offset, int32_t rank) noexcept nogil:
        frame.first = first
        frame.last = last
        frame.offset = offset
        frame.rank = rank
        frame.block = NONE
        frame.rest = NONE

    cdef void open_group(self, Frame* frame, Frame* inner) noexcept nogil:
        """Begin with the next of the groups that the placed block has left."""
        cdef int32_t first = frame.rest
        cdef int32_t last = first
        cdef int32_t block = first
        cdef int32_t dead = self.end[first]
        cdef int32_t final = frame.last if frame.last != frame.block else self.before[frame.last]
        frame.rest = NONE
        while block != final:
            block = self.after[block]
            if self.first[block] >= dead:
                frame.rest = block
                break
            last = block
            if self.end[block] > dead:
                dead = self.end[block]
        self.open_frame(inner, first, last, frame.offset, frame.rank)

    cdef inline bint is_passed(self, Frame* frame, int32_t block) noexcept nogil:
        """Whether a block, where it rests now, would come before what was placed last."""
        return self.least_offset[block] < frame.offset or (
            self.least_offset[block] == frame.offset and self.rank[block] <= frame.rank)

    cdef int64_t on_what_comes(self, int32_t block, int64_t floor) noexcept nogil:
        """The least offset of a block that rests on one which is not placed yet."""
        cdef int64_t least = NEVER
        cdef int64_t top, at
        cdef int32_t other
        for at in range(self.others_from[block], self.others_from[block + 1]):
            other = self.others[at]
            if self.placed[other]:
                continue
            top = (self.least_offset[other] if self.least_offset[other] > floor else floor) + self.size[other]
            if top < least:
                least = top
        return least

    cdef Outcome place_one(self, Frame* frame) noexcept nogil:
        """Place the next block of a group; INFEASIBLE where that is proved to lead nowhere."""
        cdef int64_t lowest_top = NEVER
        cdef int64_t offset
        cdef int32_t block = frame.first
        cdef int32_t best = NONE
        cdef int32_t final = self.after[frame.last]
        cdef int32_t section
        cdef int32_t dead = self.end[block]
        frame.block = NONE
        while block != final:
            self.work -= 1
            if self.end[block] > dead:
                dead = self.end[block]
            if self.least_offset[block] + self.size[block] < lowest_top:
                lowest_top = self.least_offset[block] + self.size[block]
            block = self.after[block]
        if self.work < 0 or self.stopped or now_ns() > self.deadline:
            return GIVEN_UP
        for section in range(self.first[frame.first], dead):
            self.lowest[section] = NEVER
        block = frame.first
        while block != final:
            offset = self.least_offset[block]
            if self.is_passed(frame, block):
                offset = max(offset, self.on_what_comes(block, frame.offset))
            elif best == NONE or offset < self.least_offset[best] or (
                    offset == self.least_offset[best] and self.rank[block] < self.rank[best]):
                best = block
            if offset + self.size[block] > self.capacity:
                self.weight[block] += 1
                return INFEASIBLE
            for section in range(self.first[block], self.end[block]):
                if offset < self.lowest[section]:
                    self.lowest[section] = offset
            block = self.after[block]
        for section in range(self.first[frame.first], dead):
            if self.lowest[section] + self.height[section] > self.capacity and self.lowest[section] != NEVER:
                self.blame(frame, section)
                return INFEASIBLE
        if best == NONE or self.least_offset[best] >= lowest_top:
            return INFEASIBLE
        self.put_in(frame, best)
        return DEEPER

    cdef void blame(self, Frame* frame, int32_t section) noexcept nogil:
        """Count a conflict for the blocks of a group that live in a section."""
        cdef int32_t block = frame.first
        cdef int32_t final = self.after[frame.last]
        while block != final and self.first[block] <= section:
            if section < self.end[block]:
                self.weight[block] += 1
            block = self.after[block]

    cdef void put_in(self, Frame* frame, int32_t block) noexcept nogil:
        """Place a block of a group, and list what it leaves."""
        cdef int64_t top = self.least_offset[block] + self.size[block]
        cdef int64_t at
        cdef int32_t section, other
        frame.block = block
        frame.offset = self.least_offset[block]
        frame.rank = self.rank[block]
        frame.undo = self.undo_top
        frame.rest = frame.first if frame.first != block else self.after[block]
        if frame.first == frame.last:
            frame.rest = NONE
        self.found[block] = frame.offset
        self.placed[block] = 1
        self.after[self.before[block]] = self.after[block]
        self.before[self.after[block]] = self.before[block]
        for section in range(self.first[block], self.end[block]):
            self.height[section] -= self.size[block]
        for at in range(self.others_from[block], self.others_from[block + 1]):
            other = self.others[at]
            if not self.placed[other]:
                self.undo[self.undo_top] = self.least_offset[other]
                self.undo_top += 1
                if self.least_offset[other] < top:
                    self.least_offset[other] = top

    cdef void take_out(self, Frame* frame) noexcept nogil:
        """Undo the last placing of a group, whose next block has to follow it in the order."""
        cdef int32_t block = frame.block
        cdef int64_t back = frame.undo
        cdef int64_t at
        cdef int32_t section, other
        self.undo_top = back
        for at in range(self.others_from[block], self.others_from[block + 1]):
            other = self.others[at]
            if not self.placed[other]:
                self.least_offset[other] = self.undo[back]
                back += 1
        for section in range(self.first[block], self.end[block]):
            self.height[section] += self.size[block]
        self.before[self.after[block]] = block
        self.after[self.before[block]] = block
        self.placed[block] = 0
        frame.block = NONE

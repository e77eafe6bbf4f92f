"""Compaction on paper: the ranges of a block map, and the moves of live blocks that make free memory whole.

A move goes to memory that is free when its turn comes and never onto its own block, so each is one plain copy.
"""

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from vpool.arrays import among

__all__ = ["FIXED", "FREE", "LIVE", "BlockMap", "Move", "areas_of", "moves_of"]

# What a range is: free; a live block, which its owner may move; what stays where it is.
FREE, LIVE, FIXED = range(3)
_MOST_WINDOWS = 24  # that are tried for one goal


class Move(NamedTuple):
    """One live block's way to free memory."""

    source: int  # address
    target: int  # address
    nbytes: int


class BlockMap:
    """Ranges of some segments in the order of addresses: each live block, and whole free ranges.

    What is free in two segments is two ranges, also where they lie side by side.

    Attributes
    ----------
    address, nbytes, kind, segment : numpy.ndarray
        Of each range; a kind is ``FREE``, ``LIVE`` or ``FIXED``.
    row : numpy.ndarray
        Of each range, the number of its first block in the blocks that the map was made of.
    """

    def __init__(self, address, nbytes, kind, segment, row):
        self.address, self.nbytes, self.kind, self.segment, self.row = address, nbytes, kind, segment, row
        self.begins = np.flatnonzero(np.diff(segment, prepend=-1))  # where a segment begins

    def __len__(self):
        return len(self.address)

    @property
    def largest_free(self):
        """Bytes of the largest free range."""
        return int(self.nbytes[self.kind == FREE].max(initial=0))

    @property
    def free_bytes(self):
        return int(self.nbytes[self.kind == FREE].sum())

    @property
    def empty(self):
        """Numbers of the segments that are one free range."""
        alone = np.diff(np.append(self.begins, len(self))) == 1
        return self.segment[self.begins[alone & (self.kind[self.begins] == FREE)]]

    def bytes_of(self, segments):
        """Bytes of some segments together."""
        return int(self.nbytes[among(self.segment, segments)].sum())

    def after(self, moves):
        """The map when moves are done."""
        address = self.address.copy()
        for move in moves:
            # No block moves twice, so each is looked for where it was at first.
            address[np.searchsorted(self.address, move.source)] = move.target
        first = self.begins
        last = np.append(first[1:], len(self))[: len(first)] - 1
        low, high = self.address[first], self.address[last] + self.nbytes[last]
        taken = self.kind != FREE
        number = np.searchsorted(low, address[taken], side="right") - 1
        # With an empty range at each end of a segment, what is free is a gap between two of one segment.
        at = np.concatenate((low, address[taken], high))
        end = np.concatenate((low, address[taken] + self.nbytes[taken], high))
        number = np.concatenate((np.arange(len(low)), number, np.arange(len(low))))
        kind, row = (np.concatenate((0 * low, one[taken], 0 * low)) for one in (self.kind, self.row))
        order = np.lexsort((end, at, number))
        at, end, number, kind, row = (one[order] for one in (at, end, number, kind, row))
        there = np.flatnonzero(end > at)
        gaps = np.flatnonzero((number[1:] == number[:-1]) & (at[1:] > end[:-1]))
        begin = np.concatenate((at[there], end[gaps]))
        order = np.argsort(begin)
        return BlockMap(
            begin[order],
            np.concatenate((end[there] - at[there], at[gaps + 1] - end[gaps]))[order],
            np.concatenate((kind[there], np.full(len(gaps), FREE)))[order],
            self.segment[first][np.concatenate((number[there], number[gaps]))][order],
            np.concatenate((row[there], np.full(len(gaps), -1)))[order],
        )

    def join(self, goal):
        """Moves that make one free range of at least `goal` bytes, with the fewest live bytes in its place.

        Returns
        -------
        list of Move or None
            None where none of the cheapest windows can be emptied into the free memory around it.

        Notes
        -----
        O(n log n) for n ranges.  A window ends with whole ranges.  Which one is the cheapest is exact; whether its
        blocks fit elsewhere is decided by best fit, the largest first.
        """
        if not len(self):
            return None
        ends = np.concatenate(([0], np.cumsum(self.nbytes)))
        live = np.concatenate(([0], np.cumsum(np.where(self.kind == LIVE, self.nbytes, 0))))
        fixed = np.concatenate(([0], np.cumsum(self.kind == FIXED)))
        last = np.searchsorted(ends, ends[:-1] + goal)  # a window from range i ends before range last[i]
        start = np.flatnonzero(last <= len(self))
        stop = last[start]
        good = (self.segment[stop - 1] == self.segment[start]) & (fixed[stop] == fixed[start])
        start, stop = start[good], stop[good]
        cost = live[stop] - live[start]
        order = np.argsort(cost, kind="stable")[:_MOST_WINDOWS]
        room = _Room(self, self.kind == FREE)
        for begin, end in zip(start[order].tolist(), stop[order].tolist(), strict=True):
            window = np.arange(begin, end)
            free = window[self.kind[window] == FREE]
            moves = room.without(self.address[free].tolist(), self._blocks(window[self.kind[window] == LIVE]))
            if moves is not None:
                return moves
        return None

    def most_joined(self, least):
        """The most bytes of one free range that moves can make, and these moves; None where no `least` can be made.

        O(n log n log bytes): doubled as long as it goes, then halved in between, to an eighth of the step.
        """
        goal, moves = least, self.join(least)
        if moves is None:
            return None
        step = least
        while (more := self.join(goal + step)) is not None:
            goal, moves, step = goal + step, more, step * 2
        for _ in range(3):
            step //= 2
            if step and (more := self.join(goal + step)) is not None:
                goal, moves = goal + step, more
        return goal, moves

    def empty_segments(self):
        """Moves that empty segments into the others, the cheapest first.

        Yields
        ------
        tuple
            Number of a segment, and the moves that empty it behind those of the ones before.  No block moves twice.

        Notes
        -----
        Blocks go into the segments with the most live bytes.  O(n log n + blocks moved times segments).
        """
        stop = np.append(self.begins[1:], len(self))
        live, fixed = (
            np.add.reduceat(np.where(self.kind == kind, self.nbytes, 0), self.begins) if len(self) else np.zeros(0, int)
            for kind in (LIVE, FIXED)
        )
        movable = np.flatnonzero(fixed == 0)
        rank = movable[np.argsort(live[movable], kind="stable")]
        rank = np.concatenate((rank, np.flatnonzero(fixed)))
        rows = [np.arange(self.begins[one], stop[one]) for one in rank]
        rooms = [_Room(self, self.kind == FREE, one) for one in rows]
        largest = np.array([room.largest for room in rooms])
        received = np.zeros(len(rank), bool)
        for at in range(len(movable)):
            mine = rows[at][self.kind[rows[at]] == LIVE]
            if received[at] or not len(mine):
                continue
            done = []
            for address, nbytes in self._blocks(mine):
                fits = np.flatnonzero(largest[at + 1 :] >= nbytes)
                if not len(fits):
                    break
                into = at + 1 + int(fits[-1])
                done.append((into, rooms[into].take(nbytes), Move(address, 0, nbytes)))
                largest[into] = rooms[into].largest
            if len(done) < len(mine):
                for into, taken, _ in reversed(done):
                    rooms[into].undo(*taken)
                    largest[into] = rooms[into].largest
                continue
            received[[into for into, _, _ in done]] = True
            yield (
                int(self.segment[self.begins[rank[at]]]),
                [Move(move.source, taken[0], move.nbytes) for _, taken, move in done],
            )

    def _blocks(self, rows):
        """Addresses and bytes of ranges, the largest first."""
        rows = rows[np.argsort(-self.nbytes[rows], kind="stable")]
        return list(zip(self.address[rows].tolist(), self.nbytes[rows].tolist(), strict=True))


class _Room:
    """Free ranges that blocks are put into: the smallest that fits, of equal ones that at the lowest address."""

    def __init__(self, blocks, free, rows=None):
        rows = np.flatnonzero(free) if rows is None else rows[free[rows]]
        self.order = sorted(zip(blocks.nbytes[rows].tolist(), blocks.address[rows].tolist(), strict=True))
        self.sizes = {address: nbytes for nbytes, address in self.order}

    @property
    def largest(self):
        return self.order[-1][0] if self.order else 0

    def take(self, nbytes):
        """Put a block into the best range: the address, the bytes of the range, and those of the block."""
        whole, address = self.order.pop(bisect_left(self.order, (nbytes,)))
        if whole > nbytes:
            insort(self.order, (whole - nbytes, address + nbytes))
        return address, whole, nbytes

    def undo(self, address, whole, nbytes):
        """Undo the last `take` that is not undone."""
        if whole > nbytes:
            del self.order[bisect_left(self.order, (whole - nbytes, address + nbytes))]
        insort(self.order, (whole, address))

    def without(self, addresses, blocks):
        """Moves that put blocks into what is free but at some addresses, or None; the room is as before."""
        hidden = [(self.sizes[address], address) for address in addresses]
        for one in hidden:
            del self.order[bisect_left(self.order, one)]
        taken = []
        for _, nbytes in blocks:
            if self.largest < nbytes:
                break
            taken.append(self.take(nbytes))
        for one in reversed(taken):
            self.undo(*one)
        for one in hidden:
            insort(self.order, one)
        if len(taken) < len(blocks):
            return None
        return [Move(source, target, nbytes) for (source, nbytes), (target, _, _) in zip(blocks, taken, strict=True)]


def areas_of(blocks, core):
    """Block maps of what lends the same requests: of a strategy's fixed core, and of the segments beside it.

    Parameters
    ----------
    blocks : numpy.ndarray
        Rows of `BLOCK_DTYPE`, at least.
    core : dict or None
        As `Report.core`.  Equal blocks of a core are never joined, and there is no map of them.

    Returns
    -------
    list of tuple
        A map, and whether its segments go back to the source when they are free.
    """
    first = blocks["segment"] == 0
    if core is None:
        return [(_map_of(blocks, np.arange(len(blocks))), True)]
    areas = [(_map_of(blocks, np.flatnonzero(~first)), True)]
    if not core["block_sizes"]:
        areas.append((_map_of(blocks, np.flatnonzero(first)), False))
    return areas


def moves_of(blocks, movable):
    """The moves that make the longest free range of one segment, where only some live blocks may move.

    Parameters
    ----------
    blocks : numpy.ndarray
        Rows of `BLOCK_DTYPE`, at least.
    movable : collection of int
        Addresses of the blocks that may.

    Returns
    -------
    list of Move
        In their order, none where they gain nothing.
    """
    blocks = blocks.copy()
    blocks["state"][(blocks["state"] == "live") & ~among(blocks["address"], list(movable))] = "pending"
    one = _map_of(blocks, np.arange(len(blocks)))
    found = one.most_joined(one.largest_free + 1) if one.largest_free else None
    return [] if found is None else found[1]


def _map_of(blocks, rows):
    """The map of some rows; free neighbours, which only streams keep apart, are one range."""
    segment, address = blocks["segment"][rows].astype(np.int64), blocks["address"][rows].astype(np.int64)
    order = np.argsort(address)
    rows, segment, address = rows[order], segment[order], address[order]
    nbytes = blocks["nbytes"][rows].astype(np.int64)
    state = blocks["state"][rows]
    kind = np.where(state == "free", FREE, np.where(state == "live", LIVE, FIXED))
    joined = (kind[1:] == FREE) & (kind[:-1] == FREE) & (segment[1:] == segment[:-1])
    begins = np.flatnonzero(np.concatenate(([True] * min(1, len(rows)), ~joined)))
    whole = np.add.reduceat(nbytes, begins) if len(begins) else nbytes
    return BlockMap(address[begins], whole, kind[begins], segment[begins], rows[begins])

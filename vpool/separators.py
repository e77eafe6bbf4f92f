"""What lies between free ranges: walls of live blocks, and who these are."""

from typing import Any, NamedTuple

import numpy as np

from vpool.arrays import distinct
from vpool.compaction import FREE, LIVE

__all__ = ["Separator", "Wall", "separators_of", "walls_of"]


class Wall(NamedTuple):
    """What lies between two free ranges of one segment: live blocks, and perhaps pending ones."""

    address: int
    nbytes: int
    blocks: int  # live ones
    fixed_bytes: int  # that cannot be moved: pending, or address space without memory
    before: int  # bytes of the free range before it
    after: int  # and of the one behind it


class Separator(NamedTuple):
    """The live blocks of walls that have something in common.

    Attributes
    ----------
    kind : str
        ``"requested"``, ``"tag"``, ``"site"`` or ``"age"``.
    name : str, int or None
        Requested bytes, the tag, the site, or how old they are at most; None for what has none, or is not known.
    blocks, live_bytes : int
    beside_bytes : int
        Bytes of the free ranges beside their walls, each range counted once.
    largest_free_bytes : int
        The largest free range if these blocks were somewhere else.
    """

    kind: str
    name: Any
    blocks: int
    live_bytes: int
    beside_bytes: int
    largest_free_bytes: int


def walls_of(one):
    """The walls of a block map, in the order of addresses."""
    begin, end = _wall_rows(one)
    live = np.concatenate(([0], np.cumsum(one.kind == LIVE)))
    ends = np.concatenate(([0], np.cumsum(one.nbytes)))
    movable = np.concatenate(([0], np.cumsum(np.where(one.kind == LIVE, one.nbytes, 0))))
    columns = (
        one.address[begin],
        ends[end] - ends[begin],
        live[end] - live[begin],
        ends[end] - ends[begin] - movable[end] + movable[begin],
        one.nbytes[begin - 1],
        one.nbytes[end],
    )
    return [Wall(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _wall_rows(one):
    """Where walls begin and end among the ranges of a map."""
    free = np.flatnonzero(one.kind == FREE)
    begin, end = free[:-1] + 1, free[1:]
    inside = (one.segment[begin - 1] == one.segment[end]) & (end > begin)
    return begin[inside], end[inside]


def separators_of(maps, kind, keys, name_of, most=None):
    """Who the live blocks of walls are, by one of their properties.

    Parameters
    ----------
    maps : list of BlockMap
    kind : str
    keys : numpy.ndarray
        Of each row of the blocks that the maps were made of, a number.
    name_of : callable
        From such a number to its name.
    most : int, optional
        How many to tell.

    Returns
    -------
    list of Separator
        The one with the most free bytes beside it first.

    Notes
    -----
    O(n) for n ranges, and for each that is told.
    """
    sums: dict[int, np.ndarray] = {}
    for one in maps:
        begin, end = _wall_rows(one)
        rows, wall = _live_of_walls(one, begin, end)
        values, index = np.unique(keys[one.row[rows]], return_inverse=True)
        # Pairs of a value and a free range beside a wall that has it, each once.
        pairs = distinct(np.concatenate([index * len(one) + one_side for one_side in (begin[wall] - 1, end[wall])]))
        columns = (
            np.bincount(index, minlength=len(values)),
            np.bincount(index, one.nbytes[rows], len(values)),
            np.bincount(pairs // max(1, len(one)), one.nbytes[pairs % max(1, len(one))], len(values)),
        )
        for value, row in zip(values.tolist(), np.stack(columns, 1).astype(np.int64), strict=True):
            sums[value] = sums.get(value, 0) + row
    order = sorted(sums, key=lambda value: (-sums[value][2], -sums[value][1], value))
    found = []
    for value in order[:most]:
        blocks, live_bytes, beside = sums[value].tolist()
        largest = max(_largest_without(one, keys, value) for one in maps)
        found.append(Separator(kind, name_of(value), blocks, live_bytes, beside, largest))
    return found


def _live_of_walls(one, begin, end):
    """The live ranges of walls, and for each the number of its wall."""
    count = end - begin
    wall = np.repeat(np.arange(len(begin)), count)
    rows = np.arange(len(wall)) - np.repeat(np.cumsum(count) - count, count) + begin[wall]
    mine = one.kind[rows] == LIVE
    return rows[mine], wall[mine]


def _largest_without(one, keys, value):
    """The largest free range of a map if the live blocks of walls with a key were in other free memory."""
    gone = one.kind == FREE
    rows, _ = _live_of_walls(one, *_wall_rows(one))
    gone[rows[keys[one.row[rows]] == value]] = True
    begins = np.flatnonzero(np.concatenate((gone[:1] | True, ~gone[:-1] | ~gone[1:] | (np.diff(one.segment) != 0))))
    if not len(gone):
        return 0
    return min(one.free_bytes, int((np.add.reduceat(one.nbytes, begins) * gone[begins]).max()))

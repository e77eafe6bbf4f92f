"""What keeps free memory from being whole, and what moving live blocks would gain: the defragmentation report."""

from typing import Any, NamedTuple

import numpy as np

from vpool.arrays import distinct
from vpool.compaction import FREE, Move, areas_of
from vpool.separators import separators_of, walls_of
from vpool.sizes import format_bytes, parse_size, plural
from vpool.snapshot import Snapshot
from vpool.tables import shortened, table

__all__ = ["Compaction", "Defrag", "Holder", "report"]

KINDS = ("requested", "tag", "site", "age")
_AGES = ((1_000, "1 ms"), (10_000, "10 ms"), (100_000, "100 ms"), (1_000_000, "1 s"), (10_000_000, "10 s"),
         (60_000_000, "1 min"), (600_000_000, "10 min"))  # fmt: skip
_MOST_TOLD = 64  # of a kind
_MOST_ROWS = 8  # of these that a text shows
_FIRST_GOALS = (1.25, 1.5)  # times the longest free range, before 2, 4, 8 ...
_NAMES = 60  # columns


class Holder(NamedTuple):
    """The live blocks that hold segments, by one of their properties.

    Attributes
    ----------
    kind, name
        As of a `Separator`.
    blocks, live_bytes : int
    segments : int
        How many segments would be free, or nearer to it, without them.
    segment_bytes : int
        Bytes of these.
    """

    kind: str
    name: Any
    blocks: int
    live_bytes: int
    segments: int
    segment_bytes: int


class Compaction(NamedTuple):
    """Moves, and what they gain.

    Attributes
    ----------
    moves : list of Move
        In their order: ``source``, ``target`` and ``nbytes``.  Each goes to memory that is free by then.
    moved_bytes : int
    largest_free_bytes : int
        The largest free range behind them, of what stays.
    gained_bytes : int
        By which that is more than without them.
    released_bytes : int
        By which segments that are wholly free come to more behind them; negative where a block goes into one.
    segments : int
        By which these are more.
    """

    moves: list[Move]
    moved_bytes: int
    largest_free_bytes: int
    gained_bytes: int
    released_bytes: int
    segments: int


class Defrag:
    """What keeps a pool's free memory from being whole.  Made by `report`; its text is for people.

    Attributes
    ----------
    free_bytes, free_ranges, largest_free_bytes : int
        Of free memory, with neighbours that only streams keep apart as one range.
    segments : int
        How many segments have free memory: no range is longer than one.
    walls : list of Wall
        Between two free ranges each, those with the most free bytes beside them first.
    separators : list of Separator
        The live blocks of all walls by size, tag, site and age; of each kind the one with the most beside it first.
        64 of a kind at most; a kind of which nothing is known is left out.
    holders : list of Holder
        The live blocks of the segments that moves can free, in the same way; those that hold the most first.
    at_once : dict
        What no move of data is needed for: ``released_bytes`` and ``segments`` that are wholly free;
        ``coalesced_bytes``, by which the largest free block grows when streams' free neighbours merge;
        ``movable_bytes``, of free handles of a source whose memory can be moved, or None.
    joins : list of Compaction
        For one long range: of 1.25, 1.5, 2, 4 ... times what is the longest now, with the fewest bytes moved; the last
        one is the most that was found, or for `need` bytes.
    releases : list of Compaction
        For segments that can go back to the source: the cheapest one, two, four ..., and all that was found.
    """

    def __init__(self, snapshot, need=None):
        figures = snapshot.report
        blocks = snapshot.blocks
        areas = areas_of(blocks, figures.core)
        maps = [one for one, _ in areas]
        self.name = snapshot.name
        self.need = need
        self.live_bytes = figures.allocated_bytes
        self.free_bytes = sum(one.free_bytes for one in maps)
        self.free_ranges = sum(int(np.count_nonzero(one.kind == FREE)) for one in maps)
        self.largest_free_bytes = max(one.largest_free for one in maps)
        self.segments = sum(len(distinct(one.segment[one.kind == FREE])) for one in maps)
        self.walls = sorted((wall for one in maps for wall in walls_of(one)), key=lambda w: (-w.before - w.after, w))
        self.separators = []
        known = _keys(snapshot)
        for kind, (keys, name_of) in known.items():
            rows = separators_of(maps, kind, keys, name_of, _MOST_TOLD)
            if any(row.name is not None for row in rows):
                self.separators += rows
        released = [(one.bytes_of(one.empty), len(one.empty)) for one, goes_back in areas if goes_back]
        self.at_once = {
            "released_bytes": sum(nbytes for nbytes, _ in released),
            "segments": sum(count for _, count in released),
            "coalesced_bytes": max(0, self.largest_free_bytes - figures.largest_block_bytes),
            "movable_bytes": getattr(figures, "movable_bytes", None),
        }
        self.joins = self._joins(areas)
        self.releases = self._releases(maps[0])
        self.holders = []
        if self.releases:
            for kind, (keys, name_of) in known.items():
                held = _holders(maps[0], self.releases[-1].moves, kind, keys, name_of)
                if any(row.name is not None for row in held):
                    self.holders += held

    def _joins(self, areas):
        one, goes_back = max(areas, key=lambda area: area[0].largest_free)
        others = max((area.largest_free for area, _ in areas if area is not one), default=0)
        plans: list[Compaction] = []
        if self.need is not None:
            moves = one.join(self.need)
            return [] if moves is None else [self._gain(one, moves, goes_back, others)]
        goal = one.largest_free
        for factor in (*_FIRST_GOALS, *(2**power for power in range(1, 63))):
            wanted = int(goal * factor)
            if plans and plans[-1].largest_free_bytes >= wanted:
                continue
            moves = one.join(wanted) if goal else None
            if moves is None:
                break
            plans.append(self._gain(one, moves, goes_back, others))
        most = one.most_joined(one.largest_free + 256) if goal else None
        if most is not None:
            last = self._gain(one, most[1], goes_back, others)
            if not plans or last.largest_free_bytes > plans[-1].largest_free_bytes:
                plans.append(last)
        return plans

    def _releases(self, one):
        """Plans for the segments beside a fixed core, which itself never goes back."""
        plans: list[list[Move]] = []
        moves: list[Move] = []
        for count, (_, more) in enumerate(one.empty_segments(), 1):
            moves = moves + more
            if count & (count - 1) == 0:
                plans.append(list(moves))
        if moves and len(plans[-1]) < len(moves):
            plans.append(moves)
        return [self._gain(one, plan, True, 0) for plan in plans]

    def _gain(self, one, moves, goes_back, others):
        then = one.after(moves)
        now_empty, then_empty = (m.empty if goes_back else np.zeros(0, int) for m in (one, then))
        largest = max(then.largest_free, others)
        return Compaction(
            moves,
            sum(move.nbytes for move in moves),
            largest,
            largest - max(one.largest_free, others),
            then.bytes_of(then_empty) - one.bytes_of(now_empty),
            len(then_empty) - len(now_empty),
        )

    def to_dict(self):
        """Every figure in plain Python types."""
        return {
            "name": self.name,
            "need": self.need,
            "live_bytes": self.live_bytes,
            "free_bytes": self.free_bytes,
            "free_ranges": self.free_ranges,
            "largest_free_bytes": self.largest_free_bytes,
            "segments": self.segments,
            "at_once": dict(self.at_once),
            "walls": [wall._asdict() for wall in self.walls],
            "separators": [row._asdict() for row in self.separators],
            "holders": [row._asdict() for row in self.holders],
            **{
                name: [{**plan._asdict(), "moves": [list(move) for move in plan.moves]} for plan in plans]
                for name, plans in (("joins", self.joins), ("releases", self.releases))
            },
        }

    def __repr__(self):
        return (
            f"<vpool defragmentation report of {self.name!r}: {format_bytes(self.free_bytes)} free in "
            f"{plural(self.free_ranges, 'range')}, the largest {format_bytes(self.largest_free_bytes)}>"
        )

    def __str__(self):
        lines = [
            f"pool {self.name!r}: {format_bytes(self.free_bytes)} free in {plural(self.free_ranges, 'range')} of "
            f"{plural(self.segments, 'segment')}, the largest {format_bytes(self.largest_free_bytes)}; "
            f"{format_bytes(self.live_bytes)} live",
            f"without moving data: trim() gives back {format_bytes(self.at_once['released_bytes'])} in "
            f"{plural(self.at_once['segments'], 'segment')}; coalesce() adds "
            f"{format_bytes(self.at_once['coalesced_bytes'])} to the largest free block",
        ]
        if self.at_once["movable_bytes"] is not None:
            movable = format_bytes(self.at_once["movable_bytes"])
            lines.append(f"free handles, which come together where they are needed: {movable}")
        blocks = sum(wall.blocks for wall in self.walls)
        beside = sum(wall.nbytes - wall.fixed_bytes for wall in self.walls)
        lines.append(
            f"kept apart within segments by {plural(blocks, 'live block')} of {format_bytes(beside)} in "
            f"{plural(sum(wall.blocks > 0 for wall in self.walls), 'place')}"
        )
        for kind in KINDS:
            lines += _table_of(kind, self.separators, ("free beside", "largest without"))
        lines += self._plan_lines("for one free range of", self.joins, "largest_free_bytes", "gained_bytes", "more by")
        if not self.joins:
            what = "a longer range" if self.need is None else f"a range of {self.need:,} bytes"
            free = ""
            if self.need is not None and self.need > self.free_bytes:
                free = f": only {format_bytes(self.free_bytes)} are free"
            lines += ["", f"no moves were found that make {what}{free}"]
        if self.releases:
            held = self.releases[-1]
            lines += [
                "",
                f"{format_bytes(held.released_bytes)} in {plural(held.segments, 'segment')} are held by "
                f"{plural(len(held.moves), 'live block')} of {format_bytes(held.moved_bytes)} that fit elsewhere",
            ]
            for kind in KINDS:
                lines += _table_of(kind, self.holders, ("segments", "of bytes"))
        lines += self._plan_lines("to give back", self.releases, "released_bytes", "segments", "segments")
        return "\n".join(lines)

    def _plan_lines(self, title, plans, gain, second, second_title):
        if not plans:
            return []
        rows = [
            (
                format_bytes(getattr(plan, gain)),
                f"{plan.segments:,}" if second == "segments" else format_bytes(getattr(plan, second)),
                format_bytes(plan.moved_bytes),
                f"{len(plan.moves):,}",
            )
            for plan in plans
        ]
        return ["", table((title, second_title, "move", "blocks"), rows)]


def report(snapshot, need=None):
    """Tell what keeps a pool's free memory from being whole, and what moving live blocks would gain.

    Parameters
    ----------
    snapshot : Snapshot
        Of `Pool.snapshot`, `Snapshot.load` or `vpool.moments.moment`.
    need : int or str, optional
        Bytes of the one free range to be made; as long a one as can be if not given.

    Returns
    -------
    Defrag

    Raises
    ------
    TypeError, ValueError
        For what is no snapshot, or no size.

    Notes
    -----
    Moves are found on paper; nothing is done.  Pending blocks stay where they are.  What a move may not do it cannot
    know: whether kernels that are queued have the old address, or another process has opened the block, and how a
    block was aligned beyond 256 bytes.  Finding the fewest bytes is bin packing; the moves are those of the cheapest
    window that best fit empties, the largest block first (Johnson, "Near-optimal bin packing algorithms", 1973), so
    more may be possible.  O(n log n) for n blocks, and for each of the plans.

    Examples
    --------
    >>> import vpool
    >>> pool = vpool.Pool(vpool.Dynamic(initial="1MiB"), source="simulated")
    >>> blocks = [pool.allocate(256 << 10) for _ in range(4)]
    >>> for ptr in blocks[1], blocks[3]:
    ...     pool.deallocate(ptr)
    >>> found = vpool.defrag.report(pool.snapshot())
    >>> found.largest_free_bytes, found.joins[-1].largest_free_bytes, found.joins[-1].moved_bytes
    (262144, 524288, 262144)
    """
    if not isinstance(snapshot, Snapshot):
        raise TypeError(f"a defragmentation report is of a Snapshot, not {type(snapshot).__name__}")
    return Defrag(snapshot, None if need is None else max(1, parse_size(need, "need")))


def _keys(snapshot):
    """By kind: a number for each block, and what a number is called."""
    blocks = snapshot.blocks
    bounds = np.array([bound for bound, _ in _AGES])
    age = np.where(blocks["age_us"] < 0, -1, np.searchsorted(bounds, blocks["age_us"], side="left"))
    names = [f"up to {name}" for _, name in _AGES] + [f"above {_AGES[-1][1]}"]
    return {
        "requested": (blocks["requested"].astype(np.int64), int),
        "tag": (blocks["tag"].astype(np.int64), snapshot.tag_name),
        "site": (blocks["site"].astype(np.int64), lambda number: snapshot.sites[number] or None),
        "age": (age, lambda number: None if number < 0 else names[number]),
    }


def _holders(one, moves, kind, keys, name_of):
    """Who the blocks are that moves take out of segments; what holds the most first."""
    rows = np.searchsorted(one.address, [move.source for move in moves])
    values, index = np.unique(keys[one.row[rows]], return_inverse=True)
    segments, nbytes = np.unique(one.segment, return_inverse=True)
    nbytes = np.bincount(nbytes, one.nbytes)
    pairs = distinct(index * len(segments) + np.searchsorted(segments, one.segment[rows]))
    holds = pairs // len(segments)
    columns = (
        np.bincount(index),
        np.bincount(index, one.nbytes[rows]),
        np.bincount(holds),
        np.bincount(holds, nbytes[pairs % len(segments)]),
    )
    figures = np.stack(columns, 1).astype(np.int64)
    found = [Holder(kind, name_of(value), *row) for value, row in zip(values.tolist(), figures.tolist(), strict=True)]
    return sorted(found, key=lambda row: (-row.segment_bytes, -row.live_bytes))[:_MOST_TOLD]


def _table_of(kind, rows, titles):
    rows = [row for row in rows if row.kind == kind]
    if not rows:
        return []
    cells = [
        (
            _shown(kind, row.name),
            f"{row.blocks:,}",
            format_bytes(row.live_bytes),
            *map(_figure, row._fields[4:], row[4:]),
        )
        for row in rows[:_MOST_ROWS]
    ]
    more = [f"and {len(rows) - _MOST_ROWS} more"] if len(rows) > _MOST_ROWS else []
    return ["", table((kind, "blocks", "bytes", *titles), cells), *more]


def _figure(field, value):
    return format_bytes(value) if field.endswith("_bytes") else f"{value:,}"


def _shown(kind, name):
    if name is None:
        return "none" if kind == "tag" else "not known"
    if kind == "requested":
        return f"{name:,}"
    return shortened(name, _NAMES)

"""Why a request failed: who holds memory, and the steps that would help, each computed from the blocks."""

import functools
from typing import NamedTuple

import numpy as np

from vpool.arrays import among, distinct
from vpool.compaction import FREE, areas_of
from vpool.separators import separators_of
from vpool.sizes import MAX_SIZE, format_bytes, plural
from vpool.tables import cut, shortened, wrapped

__all__ = ["Holder", "Remedy", "Shortage"]

_GRANULE = 256  # bytes
_MOST_HOLDERS = 5  # of a kind
_MOST_ADDRESSES = 4  # that a text names
_MOST_SEPARATORS = 3  # that a text names
_WIDTH = 96
_NAMES = 60  # columns
_BOUNDLESS = 1 << 60  # bytes of a device that only simulates


class Holder(NamedTuple):
    """Live blocks that have something in common."""

    kind: str  # "tag", "site" or "size"
    name: str | int | None  # None: what has no tag; for "size" the bytes that were asked for
    blocks: int
    live_bytes: int


class Remedy(NamedTuple):
    """A step after which the request would succeed.

    Attributes
    ----------
    kind : str
        ``"wait"`` for pending work; ``"release"`` captures, for which `nbytes` are kept; ``"raise_limit"`` to `nbytes`;
        ``"free"`` the blocks at `addresses`, of `nbytes` together; ``"capacity"``: a device of `nbytes`, with the limit
        raised to that; ``"raise_tag_limit"``.
    text : str
        The same as a sentence.
    nbytes : int
    addresses : tuple of int
    """

    kind: str
    text: str
    nbytes: int = 0
    addresses: tuple[int, ...] = ()


class Shortage:
    """What a failed request is up against.  Its text has at most 30 lines.

    Parameters
    ----------
    report : Report
        The pool when the request had failed.
    requested : int
        Bytes.
    nbytes : int, optional
        What they come to with rounding and guards, if that is more than whole granules.
    alignment : int
    tag : dict, optional
        The tag whose limit was in the way, as a row of `Report.tags`.
    captured : bool
        Whether a capture asked: what is kept for it serves it.

    Attributes
    ----------
    holders : list of Holder
        Of each kind that is known, the largest first.
    separators : list of vpool.separators.Separator
        Where free memory would do if it were whole: the live blocks between pieces of it, by size, and by tag where
        there are tags; the size or tag with the most free bytes beside it first.  Empty elsewhere.
    remedies : list of Remedy
        The least invasive first.  Empty where nothing helps that this pool could be told.
    """

    def __init__(self, report, requested, nbytes=None, alignment=_GRANULE, tag=None, *, captured=False):
        self.requested = requested
        rounded = -(-requested // _GRANULE) * _GRANULE
        self._nbytes = rounded if nbytes is None else nbytes
        self._alignment = alignment
        self._need = self._nbytes + alignment - _GRANULE  # wherever it begins
        self._report = report
        self._live = report.blocks["state"] == "live"
        self._kept = np.zeros(len(report.blocks), bool) if captured else report.captured
        self._tag = tag
        self._origins = None
        self._maps = None

    # Each is worked out when somebody asks: a program that catches the error and goes on does not wait for it.

    @functools.cached_property
    def holders(self):
        return list(self._holders())

    @functools.cached_property
    def separators(self):
        return [] if self._tag is not None else list(self._separators())

    @functools.cached_property
    def remedies(self):
        return list(self._remedies() if self._tag is None else self._of_tag(self._tag))

    def name_sites(self, origins):
        """Tell also which sites hold memory; `origins` are all of them, and for each block the index of its own."""
        if len(origins[0]) > 1:
            self._origins = origins

    def _holders(self):
        tags = [row for row in self._report.tags if row["live_blocks"]]
        if any(row["tag"] is not None for row in tags):
            rows = [Holder("tag", row["tag"], row["live_blocks"], row["live_bytes"]) for row in tags]
            yield from _largest(rows)
        live = self._report.blocks[self._live]
        yield from _largest([Holder("size", *rest) for rest in _sums(live["requested"], live["nbytes"])])
        if self._origins is not None:
            texts, numbers, _ = self._origins
            sums = _sums(numbers[self._live], live["nbytes"])
            yield from _largest([Holder("site", texts[number] or None, *rest) for number, *rest in sums])

    def _separators(self):
        report = self._report
        if report.free_bytes < self._need or report.largest_free_bytes >= self._need:
            return
        self._maps = [blocks for blocks, _ in areas_of(report.blocks, report.core)]
        tags = report.blocks["tag"].astype(np.int64)
        if tags.any():
            yield from separators_of(self._maps, "tag", tags, report.tag_name, _MOST_SEPARATORS)
        sizes = report.blocks["requested"].astype(np.int64)
        yield from separators_of(self._maps, "requested", sizes, int, _MOST_SEPARATORS)
        if self._origins is not None:
            texts, numbers, _ = self._origins
            names = [text or None for text in texts]
            yield from separators_of(self._maps, "site", numbers.astype(np.int64), names.__getitem__, _MOST_SEPARATORS)

    def _of_tag(self, tag):
        limit = tag["requested_bytes"] + self.requested
        name = shortened(repr(tag["tag"]), _NAMES)
        yield Remedy(
            "raise_tag_limit",
            f"raise the tag's limit to {limit:,} bytes ({format_bytes(limit)}): pool.limit({name}, {limit})",
            limit,
        )
        number = next(number for number, row in self._report.tag_rows() if row["tag"] == tag["tag"])
        mine = self._report.blocks[self._live & (self._report.blocks["tag"] == number)]
        order = np.argsort(mine["requested"], kind="stable")[::-1]
        over = limit - tag["limit_bytes"]
        count = int(np.searchsorted(np.cumsum(mine["requested"][order].astype(np.int64)), over)) + 1
        if count <= len(mine):
            yield _freeing(mine[order[:count]], f"of tag {name}")

    def _remedies(self):
        report = self._report
        confined = report.core is not None and report.core["exclusive"] and self.requested <= report.core["largest"]
        cheapest, pending = self._cheapest(confined, self._kept)
        if cheapest is not None and not len(cheapest):
            text = (
                f"wait for work on the device: a range that would do is free but for {format_bytes(pending)} that "
                f"are pending"
                if pending
                else "retry on a stream that does not capture, or once `trim()` has waited for the work that may still"
                " use what is free"
            )
            yield Remedy("wait", text)
        elif self._kept.any() and self._is_empty(confined):
            nbytes = report.captured_bytes
            text = (
                f"destroy graphs that are not launched any more, or call release_capture() with their ids, which "
                f"pool.captures has: {format_bytes(nbytes)} are kept for them"
            )
            yield Remedy("release", text, nbytes)
        growth = None if confined or not report.grows else self._growth()
        if growth is not None and growth.kind == "raise_limit":
            yield growth
        if cheapest is not None and len(cheapest):
            yield _freeing(cheapest, "which makes a range that is long enough")
        if growth is not None and growth.kind == "capacity":  # not of this pool's making
            yield growth

    def _growth(self):
        """A higher limit, where the device has more; else a larger device."""
        report = self._report
        free, total = report.device_free_bytes, report.device_total_bytes
        need = -(-(self._need + report.base_slack_bytes) // report.growth_unit) * report.growth_unit
        limit = report.reserved_bytes + need
        if free is None or free >= need:
            if not report.limit_bytes < limit <= MAX_SIZE:
                return None
            room = "" if free is None or free > _BOUNDLESS else f"; the device has {format_bytes(free)} free"
            text = f"raise the limit to {limit:,} bytes ({format_bytes(limit)}): pool.set_limit({limit}){room}"
            return Remedy("raise_limit", text, limit)
        enough = total + need - free
        others = max(0, total - free - report.reserved_bytes)
        taken = f", and others have {format_bytes(others)}" if others else ""
        text = (
            f"have a device of {enough:,} bytes ({format_bytes(enough)}) and no lower limit; this one has "
            f"{format_bytes(free)} of {format_bytes(total)} free{taken}"
        )
        return Remedy("capacity", text, enough)

    def _is_empty(self, confined):
        """Whether a range that would do has no live block, but what is kept for captures."""
        live, _ = self._cheapest(confined, np.zeros(len(self._kept), bool))
        return live is not None and not len(live)

    def _cheapest(self, confined, kept):
        """The live blocks that have to go at least, and the pending bytes among what would serve.

        None where no range of this pool is long enough, whatever goes.  What is `kept` is in none.
        """
        report = self._report
        best, best_cost, best_pending = None, None, 0
        blocks = report.blocks
        if kept.any():
            blocks = blocks.copy()
            blocks["state"][kept] = "unmapped"
        order = np.argsort(blocks["segment"], kind="stable")
        ends = np.cumsum(np.bincount(blocks["segment"], minlength=len(report.segment_table)))
        for number, segment in enumerate(report.segment_table):
            in_core = number == 0 and report.core is not None
            equal = in_core and len(report.core["block_sizes"]) > 0
            least = self._nbytes if equal else self._need
            if (confined and not in_core) or (in_core and not self._in_core()) or segment["nbytes"] < least:
                continue
            mine = blocks[order[ends[number - 1] if number else 0 : ends[number]]]
            found = _solid(mine, self._nbytes, self._alignment) if equal else _window(mine, self._need)
            if found is not None and (best_cost is None or found[1] < best_cost):
                window, best_cost = found
                best = window[window["state"] == "live"]
                best_pending = int(window["nbytes"][window["state"] == "pending"].sum(dtype=np.uint64))
        if not confined and report.grows:
            segments = self._segments_to_empty(kept)
            if segments is not None and (best_cost is None or segments[1] < best_cost):
                best, best_pending = segments[0], 0
        return best, best_pending

    def _in_core(self):
        core = self._report.core
        return core["smallest"] <= self.requested <= core["largest"]

    def _segments_to_empty(self, kept):
        """The live blocks of segments that would have to go back for another one to come, and their bytes."""
        report = self._report
        need = self._need + report.base_slack_bytes - report.growth_bytes
        rows = list(enumerate(report.segment_rows))[1 if report.core else 0 :]
        mine = report.blocks[kept]
        stays = np.bincount(mine["segment"], mine["nbytes"].astype(float), report.segments).astype(np.int64).tolist()
        if report.movable_bytes is None:
            rows = [row for row in rows if not stays[row[0]]]  # nor does what lies beside it go back
        rows.sort(key=lambda one: one[1]["live_bytes"] / max(1, one[1]["nbytes"]))  # a range may have no memory yet
        chosen = []
        for number, row in rows:
            if need <= 0:
                break
            chosen.append(number)
            need -= row["nbytes"] - stays[number]
        if need > 0 or not chosen:
            return None
        blocks = report.blocks[self._live & among(report.blocks["segment"], chosen)]
        return blocks, int(blocks["nbytes"].sum(dtype=np.uint64))

    def __str__(self):
        report = self._report
        live = plural(report.live_blocks, "live block")
        lines = [f"Largest holders of {format_bytes(report.allocated_bytes)} in {live}:"]
        for holder in self.holders:
            lines.append(cut(f"  {format_bytes(holder.live_bytes):>9} in {holder.blocks:,} x {_name(holder)}", _WIDTH))
        if not self.holders:
            lines = ["Nothing is live in this pool."]
        if self._kept.any():
            lines.append(f"{format_bytes(report.captured_bytes)} that are free or pending are kept for captures.")
        lines += self._separator_lines()
        if self.remedies:
            lines.append("What would help:" if len(self.remedies) == 1 else "What would help, any of these:")
            for remedy in self.remedies:
                lines += wrapped(remedy.text, _WIDTH)
        return "\n".join(lines)

    def _separator_lines(self):
        """Of the kind that says most: sites if they are known, else tags, else sizes."""
        separators = self.separators
        if self._maps is None:
            return []
        ranges = sum(int((one.kind == FREE).sum()) for one in self._maps)
        segments = sum(len(distinct(one.segment[one.kind == FREE])) for one in self._maps)
        lines = [
            f"Free memory of {format_bytes(self._report.free_bytes)} is in {ranges:,} ranges of {segments:,} segment"
            f"{'' if segments == 1 else 's'}{'; between them are:' if separators else '.'}"
        ]
        kinds = [row.kind for row in separators]
        kind = next((one for one in ("site", "tag", "requested") if one in kinds), None)
        for row in separators:
            if row.kind == kind:
                beside = f"{format_bytes(row.beside_bytes)} free beside"
                line = f"  {format_bytes(row.live_bytes):>9} in {row.blocks:,} x {_name(row)}, {beside}"
                lines.append(cut(line, _WIDTH))
        return lines


def _name(holder):
    if holder.kind in ("size", "requested"):
        return f"{holder.name:,} bytes"
    if holder.name is None:
        return f"no {holder.kind}" if holder.kind == "tag" else "unknown sites"
    return f"{holder.kind} {holder.name!r}" if holder.kind == "tag" else str(holder.name)


def _largest(holders):
    return sorted(holders, key=lambda holder: -holder.live_bytes)[:_MOST_HOLDERS]


def _sums(keys, nbytes):
    """For each key the number of blocks and their bytes."""
    values, index = np.unique(keys, return_inverse=True)
    blocks = np.bincount(index, minlength=len(values))
    sums = np.bincount(index, nbytes.astype(float), len(values)).tolist() if len(values) else []
    return [
        (value, count, int(total)) for value, count, total in zip(values.tolist(), blocks.tolist(), sums, strict=True)
    ]


def _solid(mine, nbytes, alignment):
    """The one of equal blocks, which never merge, that would serve for the fewest live bytes, and these, or None."""
    sizes = mine["nbytes"].astype(np.int64)
    before = (-mine["address"].astype(np.int64)) % alignment
    fits = np.flatnonzero((sizes - before >= nbytes) & (mine["state"] != "unmapped"))
    if not len(fits):
        return None
    live = np.where(mine["state"] == "live", sizes, 0)[fits]
    one = fits[np.argmin(live)]
    return mine[one : one + 1], int(live.min())


def _window(mine, need):
    """The neighbours of `need` bytes together with the fewest live bytes among them, and these; None for none.

    Each end is a whole block.  O(blocks), by a window that grows at its end and shrinks at its start.
    """
    sizes = mine["nbytes"].astype(np.int64)
    live = np.where(mine["state"] == "live", sizes, 0)
    ends = np.concatenate(([0], np.cumsum(sizes)))
    gaps = np.flatnonzero(mine["state"] == "unmapped")
    if len(gaps):  # what is on both sides of one is no range
        begins, stops = np.append(0, gaps + 1), np.append(gaps, len(mine))
        long = np.flatnonzero(ends[stops] - ends[begins] >= need)
        found = [_window(mine[begins[part] : stops[part]], need) for part in long.tolist()]
        return min(found, key=lambda window: window[1], default=None)
    if need > ends[-1]:
        return None
    costs = np.concatenate(([0], np.cumsum(live)))
    last = np.searchsorted(ends, ends[:-1] + need)  # a window from block i ends before block last[i]
    starts = np.flatnonzero(last <= len(sizes))
    if not len(starts):
        return None
    cost = costs[last[starts]] - costs[starts]
    best = starts[np.argmin(cost)]
    return mine[best : last[best]], int(cost.min())


def _freeing(blocks, why):
    nbytes = int(blocks["nbytes"].sum(dtype=np.uint64))
    addresses = tuple(blocks["address"].tolist())
    shown = ", ".join(f"{address:#x}" for address in addresses[:_MOST_ADDRESSES])
    more = f" and {len(addresses) - _MOST_ADDRESSES} more" if len(addresses) > _MOST_ADDRESSES else ""
    return Remedy(
        "free",
        f"free {plural(len(addresses), 'block')} of {format_bytes(nbytes)} {why}: at {shown}{more}",
        nbytes,
        addresses,
    )

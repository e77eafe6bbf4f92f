"""The report of a pool: what `inspect` returns.  Made of copied figures; holds no memory of the pool."""

import json
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from vpool.advice import advice
from vpool.arrays import among, distinct
from vpool.plots import draw
from vpool.rendering import as_html, as_text
from vpool.sizes import MAPPED_GRANULE, format_bytes, parse_size
from vpool.streams import stream_handle

__all__ = ["BLOCK_DTYPE", "SEGMENT_DTYPE", "Report", "SizeClass", "schema"]

BLOCK_DTYPE = np.dtype(
    [
        ("address", np.uint64),
        ("nbytes", np.uint64),
        ("requested", np.uint64),
        ("state", "U9"),
        ("stream", np.uint64),
        ("segment", np.uint32),
        ("tag", np.uint16),
    ]
)
SEGMENT_DTYPE = np.dtype([("address", np.uint64), ("nbytes", np.uint64), ("stream", np.uint64)])
# Upper bounds of the tiers that reports show; the last has none.
SIZE_TIERS = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, None)


class SizeClass(NamedTuple):
    """One tier of block sizes in a report.  All but the counts in bytes."""

    up_to: int | None
    live_blocks: int
    live_bytes: int
    requested_bytes: int
    free_blocks: int
    free_bytes: int


def _ratio(part, whole, empty):
    return part / whole if whole else empty


class Report:
    """Fragmentation and everything else of one pool at one moment.

    Sizes are in bytes.  The figures of blocks and segments are of one moment: reserved is allocated
    plus free plus pending, plus what the ends of segments lose to alignment.

    Attributes
    ----------
    reserved_bytes, allocated_bytes, requested_bytes, free_bytes, pending_bytes : int
        Held from the source; lent, after rounding; lent, as asked for; free; freed but perhaps in use.
    captured_bytes : int
        Free or pending, but kept for the graphs of captures: see `Pool.release_capture`.
    captured : numpy.ndarray of bool
        Of each block whether it is one of those, which nobody gets but the capture that it is kept for.
    suspended_bytes : int
        Lent, but without memory: see `Pool.suspend`.  Neither reserved nor allocated, but for what shares a handle with
        other blocks.
    largest_free_bytes : int
        The largest contiguous free range, of one block or of some side by side that streams have yet to merge.
    peak_reserved_bytes, peak_allocated_bytes, peak_requested_bytes : int
        The highest values so far.
    limit_bytes : int
        The most that this pool reserves; what else is on the device does not count.
    device_free_bytes, device_total_bytes : int or None
        Of the device, with all that others hold there; None where it did not answer.
    movable_bytes : int or None
        Of a source whose memory can be moved: bytes of handles that hold nothing but free memory, which
        can come together in one piece; None of other sources.
    live_blocks, free_blocks, segments, source_calls : int
        Counts.
    utilization : float
        allocated / reserved; 0 when nothing is reserved.
    external_fragmentation : float
        1 - largest free / free; 0 when nothing is free.
    internal_fragmentation : float
        1 - requested / allocated; 0 when nothing is live.
    reuse_ratio : float
        Bytes served without a source call / bytes served.
    sharing : float
        1 - peak reserved / bytes requested so far: what reuse across disjoint lifetimes saves.  Of a trace with
        marks it is over the step of the moment: bytes that were live when it began count as requested in it.
    blocks : numpy.ndarray
        One row a block, in the order of addresses within a segment; the fields are those of
        `BLOCK_DTYPE`.
    size_classes : list of SizeClass
        A row for each of up to 64 KiB, 256 KiB, 1 MiB, 4 MiB, 16 MiB, and above.
    core : dict or None
        Of the strategy's fixed core, if it has one: ``reserved_bytes``, ``allocated_bytes``, ``allocations``
        (how many it served) and ``share`` (of all), ``smallest`` and ``largest`` (bytes of the requests that
        it serves), ``exclusive`` (whether they are served from nowhere else), ``block_sizes`` (pairs of size and
        count; none for a slab), and ``oversize`` and
        ``largest_oversize``, number and bytes of the requests that no block could hold.  Everything else
        in a report counts the core in.
    streams : list of dict
        Of each stream its handle, ``live_blocks``, and ``live_bytes``, ``free_bytes`` and ``pending_bytes``.
    tags : list of dict
        Of each tag its name (None for what has none), ``live_blocks``, ``live_bytes`` after rounding,
        ``requested_bytes``, ``peak_bytes`` (the most that was live; None for no tag) and ``limit_bytes``.
    pending : list of dict
        Of what is pending ``stream``, ``blocks``, ``pending_bytes``, and why: ``waits_for``, the stream whose work is
        not known to be complete, or None, and ``reason`` in words.
    segment_rows : list of dict
        Of each segment ``address``, ``nbytes`` and ``stream``, and of its blocks ``live_blocks``, ``live_bytes``,
        ``free_bytes``, ``pending_bytes`` and ``largest_free_bytes``.
    advice : list of str
        Sentences a user can act on.
    """

    def __init__(self, figures, blocks, segments):
        self._figures = figures
        self.blocks = blocks
        self.segment_table = segments
        states = blocks["state"]
        self._live = blocks[states == "live"]
        self._free = blocks[states == "free"]
        self.name = figures["name"]
        self.source = figures["source"]
        self.device = figures["device"]
        self.limit_bytes = figures["limit_bytes"]
        self.device_free_bytes = figures["device_free_bytes"]
        self.device_total_bytes = figures["device_total_bytes"]
        self.reserved_bytes = figures["reserved_bytes"]
        self.peak_reserved_bytes = figures["peak_reserved_bytes"]
        self.peak_allocated_bytes = figures["peak_allocated_bytes"]
        self.peak_requested_bytes = figures["peak_requested_bytes"]
        self.source_calls = figures["source_calls"]
        self.allocated_bytes = _total(self._live)
        self.requested_bytes = int(self._live["requested"].sum(dtype=np.uint64))
        self.free_bytes = _total(self._free)
        self.pending_bytes = _total(blocks[states == "pending"])
        self.suspended_bytes = _total(blocks[states == "suspended"])
        self.captured = np.zeros(len(blocks), bool)
        self.captured[np.array(figures.get("captured", ()), np.int64)] = True
        self.captured_bytes = _total(blocks[self.captured])
        self.largest_free_bytes = _longest_run(blocks, blocks["state"] != "free")
        self.live_blocks = len(self._live)
        self.free_blocks = len(self._free)
        self.segments = len(segments)
        self.core = figures["core"]
        if self.core is not None:  # lists where they come from a file
            self.core = self.core | {"block_sizes": tuple(map(tuple, self.core["block_sizes"]))}
        self.movable_bytes = figures.get("movable_bytes")
        self.utilization = _ratio(self.allocated_bytes, self.reserved_bytes, 0.0)
        self.external_fragmentation = 1 - _ratio(self.largest_free_bytes, self.free_bytes, 1.0)
        self.internal_fragmentation = 1 - _ratio(self.requested_bytes, self.allocated_bytes, 1.0)
        served = figures["served_bytes"]
        self.reuse_ratio = 1 - _ratio(figures["missed_bytes"], served, 1.0)
        of_step = figures.get("step_bytes")
        self.sharing = 1 - _ratio(self.peak_reserved_bytes, served if of_step is None else of_step, 1.0)

    def over_step(self, nbytes):
        """The same report, whose `sharing` is over a step of so many requested bytes; None is none."""
        return Report({**self._figures, "step_bytes": nbytes}, self.blocks, self.segment_table)

    @property
    def guarded(self):
        """Whether blocks have guards beside them, which count as allocated."""
        return self._figures.get("guarded", False)

    @property
    def grows(self):
        """Whether the pool asks its source for more when its memory does not do."""
        return self._figures["grows"]

    @property
    def adaptive(self):
        """Whether the pool gives idle segments back by itself."""
        return self._figures.get("adaptive", False)

    @property
    def peaks_anew(self):
        """Whether the peaks began anew, so that nobody knows what was in use before."""
        return self._figures.get("peaks_anew", False)

    @property
    def largest_block_bytes(self):
        """Bytes of the largest free block."""
        return int(self._free["nbytes"].max(initial=0))

    @property
    def rounding(self):
        """Bytes of which blocks are multiples; None where that is not known, as of recordings."""
        return self._figures.get("rounding")

    @property
    def minimum_remainder(self):
        """Where less would be left of a free block, it is lent whole; None where that is not known."""
        return self._figures.get("minimum_remainder")

    @property
    def base_slack_bytes(self):
        """What a segment has to have more where the source's addresses are no multiples of 256."""
        return self._figures["base_slack_bytes"]

    @property
    def growth_unit(self):
        """Bytes that the pool takes from its source at least, and whole multiples of."""
        return 256 if self.movable_bytes is None else MAPPED_GRANULE

    @property
    def growth_bytes(self):
        """What the pool may still take from its source, the rest of its limit or of the device."""
        if not self.grows:
            return 0
        room = max(0, self.limit_bytes - self.reserved_bytes)
        return room if self.device_free_bytes is None else min(room, self.device_free_bytes)

    @property
    def size_classes(self):
        rows = []
        below = 0
        for bound in SIZE_TIERS:
            live, free = (
                part[(part["nbytes"] > below) & (part["nbytes"] <= (bound or np.iinfo(np.uint64).max))]
                for part in (self._live, self._free)
            )
            requested = int(live["requested"].sum(dtype=np.uint64))
            rows.append(SizeClass(bound, len(live), _total(live), requested, len(free), _total(free)))
            below = bound or below
        return rows

    @property
    def streams(self):
        rows = []
        for stream in distinct(self.blocks["stream"]):
            mine = self.blocks[self.blocks["stream"] == stream]
            row = {"stream": int(stream), "live_blocks": int(np.count_nonzero(mine["state"] == "live"))}
            for state in ("live", "free", "pending"):
                row[f"{state}_bytes"] = _total(mine[mine["state"] == state])
            rows.append(row)
        return rows

    @property
    def tags(self):
        return [row for _, row in self.tag_rows()]

    def tag_rows(self):
        """Pairs of a tag's number in `blocks` and its row in `tags`."""
        known = self._figures["tags"]
        for number in sorted({*distinct(self._live["tag"]).tolist(), *known}):
            mine = self._live[self._live["tag"] == number]
            told = known.get(number, {"tag": None, "peak_bytes": None, "limit_bytes": None})
            yield (
                number,
                {
                    "tag": told["tag"],
                    "live_blocks": len(mine),
                    "live_bytes": _total(mine),
                    "requested_bytes": int(mine["requested"].sum(dtype=np.uint64)),
                    "peak_bytes": told["peak_bytes"],
                    "limit_bytes": told["limit_bytes"],
                },
            )

    def tag_name(self, number):
        """Name of a tag by its number in `blocks`; None for none."""
        return self._figures["tags"].get(number, {"tag": None})["tag"]

    @property
    def pending(self):
        return [{**row, "reason": row.get("reason") or _reason(row["waits_for"])} for row in self._figures["pending"]]

    @property
    def segment_rows(self):
        number = self.blocks["segment"]
        rows = [
            {"address": int(row["address"]), "nbytes": int(row["nbytes"]), "stream": int(row["stream"])}
            for row in self.segment_table
        ]

        def sums(part, weights=None):
            return np.bincount(number[part], weights, len(rows)).astype(np.int64).tolist() if rows else []

        states = self.blocks["state"]
        columns = {"live_blocks": sums(states == "live")}
        for state in ("live", "free", "pending"):
            part = states == state
            columns[f"{state}_bytes"] = sums(part, self.blocks["nbytes"][part].astype(float))
        largest = np.zeros(len(rows), np.uint64)
        np.maximum.at(largest, *_runs(self.blocks, states != "free"))
        columns["largest_free_bytes"] = largest.tolist()
        for index, row in enumerate(rows):
            row.update((name, values[index]) for name, values in columns.items())
        return rows

    @property
    def advice(self):
        return list(advice(self))

    def largest_allocatable(self, stream=None):
        """The largest request that would succeed now, in bytes: with waits, moves between streams and growth.

        Parameters
        ----------
        stream : optional
            The stream that asks.  Memory that other streams freed serves it too, so it makes no difference; but what
            is kept for a capture serves nobody else, and counts as taken whichever stream asks.

        Notes
        -----
        The larger of the longest range without a live block, and of what the pool may take from its
        source once idle segments went back.  Other users of the device can change that at any moment.  Where memory
        can be moved a little more may succeed, as what comes new may lie beside free memory.
        """
        stream_handle(stream)
        first, in_core = (0, 0) if self.core is None else (1, self._largest_in_core())
        blocks = self.blocks[self.blocks["segment"] >= first]
        taken = among(blocks["state"], ("live", "unmapped", "suspended"))
        taken |= self.captured[self.blocks["segment"] >= first]
        longest = _longest_run(blocks, taken)
        # Segments that have blocks, none of them somebody's.
        full, used = (np.bincount(part["segment"], minlength=self.segments) for part in (blocks, blocks[taken]))
        idle = int(self.segment_table["nbytes"][(full > 0) & (used == 0)].sum(dtype=np.uint64))
        idle += self.movable_bytes or 0
        room = self.limit_bytes - self.reserved_bytes + idle
        if self._figures["device_free_bytes"] is not None:
            room = min(room, self._figures["device_free_bytes"] + idle)
        longest = max(longest, room // self.growth_unit * self.growth_unit - self.base_slack_bytes, 0)
        longest = self._without_rounding(longest, self.rounding)
        if self.core is not None and self.core["exclusive"] and longest <= self.core["largest"]:
            longest = 0
        return max(in_core, longest)

    def _largest_in_core(self):
        """The largest request that the fixed core, the first segment, could serve."""
        inside = self.blocks["segment"] == 0
        mine = self.blocks[inside]
        taken = (mine["state"] == "live") | self.captured[inside]
        whole = int(mine["nbytes"][~taken].max(initial=0))  # equal blocks never merge
        if self.core["block_sizes"]:
            longest = self._without_rounding(whole, None)  # to their sizes alone
        else:
            longest = self._without_rounding(_longest_run(mine, taken), self.rounding)
        longest = min(longest, self.core["largest"])
        return longest if longest >= self.core["smallest"] else 0

    def _without_rounding(self, nbytes, rounding):
        """The largest request that with its guards, rounded up, takes no more than so many bytes."""
        return max(0, nbytes // (rounding or 1) * (rounding or 1) - self._figures.get("guard_bytes", 0))

    def unusable_bytes(self, nbytes):
        """Free bytes in pieces too small for a request of `nbytes`, an integer or a string such as ``"2MiB"``."""
        nbytes = parse_size(nbytes, "nbytes")
        return _total(self._free[self._free["nbytes"] < nbytes])

    def to_dict(self):
        """Every figure, without the blocks, in plain Python types."""
        figures = {
            name: getattr(self, name)
            for name in (
                "name",
                "source",
                "device",
                "limit_bytes",
                "device_free_bytes",
                "device_total_bytes",
                "reserved_bytes",
                "allocated_bytes",
                "requested_bytes",
                "free_bytes",
                "pending_bytes",
                "captured_bytes",
                "suspended_bytes",
                "largest_free_bytes",
                "peak_reserved_bytes",
                "peak_allocated_bytes",
                "peak_requested_bytes",
                "live_blocks",
                "free_blocks",
                "segments",
                "source_calls",
                "movable_bytes",
                "utilization",
                "external_fragmentation",
                "internal_fragmentation",
                "reuse_ratio",
                "sharing",
                "core",
                "streams",
                "tags",
                "pending",
                "segment_rows",
                "advice",
            )
        }
        figures["size_classes"] = [row._asdict() for row in self.size_classes]
        if self.core is not None:
            figures["core"] = self.core | {"block_sizes": [list(pair) for pair in self.core["block_sizes"]]}
        return figures

    def to_json(self, indent=None):
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def __repr__(self):
        return (
            f"<vpool report of {self.name!r}: {format_bytes(self.allocated_bytes)} allocated, "
            f"{format_bytes(self.reserved_bytes)} reserved>"
        )

    def __str__(self):
        return as_text(self)

    def _repr_html_(self):
        return as_html(self)

    def plot(self, trace=None):
        """Draw the memory map and the sizes of free blocks, and beside them a trace's course.

        Parameters
        ----------
        trace : Trace, optional
            What led here, as a recording of the pool.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        Error
            Where matplotlib is not installed; ``pip install "vpool[plot]"`` has it.
        """
        return draw(self, trace)


def schema():
    """The JSON schema of `Report.to_dict`, a dict."""
    return json.loads((files("vpool.data") / "report.schema.json").read_text())


def _reason(waits_for):
    if waits_for is None:
        return "complete: the next request that looks for it gets it"
    return f"work on stream {waits_for:#x} may still use it"


def _total(blocks):
    return int(blocks["nbytes"].sum(dtype=np.uint64))


def _runs(blocks, taken):
    """Segment and bytes of the runs of neighbours in one segment of which none is taken; some of them have no bytes."""
    order = np.argsort(blocks["segment"], kind="stable")
    segment = blocks["segment"][order]
    begins = taken[order]
    begins[1:] |= np.diff(segment) != 0
    begins[:1] = True
    starts = np.flatnonzero(begins)
    nbytes = np.where(taken, 0, blocks["nbytes"])[order]
    return segment[starts], np.add.reduceat(nbytes, starts) if len(starts) else nbytes


def _longest_run(blocks, taken):
    """Bytes of the longest run of neighbours in one segment of which none is taken."""
    return int(_runs(blocks, taken)[1].max(initial=0))

"""The report of a pool: what `inspect` returns.  Made of copied figures; holds no memory of the pool."""

import html
import json
import textwrap
from typing import NamedTuple

import numpy as np

from vpool.sizes import format_bytes
from vpool.streams import stream_handle

__all__ = ["BLOCK_DTYPE", "SEGMENT_DTYPE", "Report", "SizeClass"]

BLOCK_DTYPE = np.dtype(
    [
        ("address", np.uint64),
        ("nbytes", np.uint64),
        ("requested", np.uint64),
        ("state", "U8"),
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
    largest_free_bytes : int
        The largest contiguous free range.
    peak_reserved_bytes, peak_allocated_bytes, peak_requested_bytes : int
        The highest values so far.
    limit_bytes : int
        The most that this pool reserves; what else is on the device does not count.
    device_free_bytes, device_total_bytes : int or None
        Of the device, with all that others hold there; None where it did not answer.
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
        1 - peak reserved / bytes requested so far: what reuse across disjoint lifetimes saves.
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
    streams, tags : list of dict
        Live, free and pending bytes of each stream; live bytes of each tag.
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
        self.largest_free_bytes = int(self._free["nbytes"].max()) if len(self._free) else 0
        self.live_blocks = len(self._live)
        self.free_blocks = len(self._free)
        self.segments = len(segments)
        self.core = figures["core"]
        self.utilization = _ratio(self.allocated_bytes, self.reserved_bytes, 0.0)
        self.external_fragmentation = 1 - _ratio(self.largest_free_bytes, self.free_bytes, 1.0)
        self.internal_fragmentation = 1 - _ratio(self.requested_bytes, self.allocated_bytes, 1.0)
        served = figures["served_bytes"]
        self.reuse_ratio = 1 - _ratio(figures["missed_bytes"], served, 1.0)
        self.sharing = 1 - _ratio(self.peak_reserved_bytes, served, 1.0)

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
        for stream in np.unique(self.blocks["stream"]):
            mine = self.blocks[self.blocks["stream"] == stream]
            row = {"stream": int(stream)}
            for state in ("live", "free", "pending"):
                row[f"{state}_bytes"] = _total(mine[mine["state"] == state])
            rows.append(row)
        return rows

    @property
    def tags(self):
        return [
            {"tag": int(tag), "live_bytes": _total(self._live[self._live["tag"] == tag])}
            for tag in np.unique(self._live["tag"])
        ]

    @property
    def advice(self):
        sentences = []
        idle = self.reserved_bytes - self.peak_allocated_bytes
        sentences += self._core_advice()
        if self.core is None and self.reserved_bytes and idle > self.reserved_bytes // 2:
            sentences.append(
                f"{format_bytes(idle)} of {format_bytes(self.reserved_bytes)} reserved were never in use at once: "
                f"a smaller first segment or growth would do "
                f"(peak allocated {format_bytes(self.peak_allocated_bytes)})."
            )
        equal_blocks = self.core is not None and len(self.core["block_sizes"]) > 0
        guarded = self._figures.get("guarded", False)
        if not equal_blocks and not guarded and self.internal_fragmentation > 0.25:
            sentences.append(
                f"Rounding to 256 bytes wastes {self.internal_fragmentation:.0%} of what is allocated: "
                f"{self.live_blocks} blocks of {format_bytes(self.allocated_bytes // self.live_blocks)} on average; "
                f"larger allocations that you cut yourself would waste less."
            )
        if not equal_blocks and self.external_fragmentation > 0.5:
            sentences.append(
                f"Free memory is in {self.free_blocks} pieces: {format_bytes(self.free_bytes)} are free, but the "
                f"largest request they can serve is {format_bytes(self.largest_free_bytes)}."
            )
        takes_all = self.core is not None and self.core["reserved_bytes"] == self.limit_bytes
        if not takes_all and self.limit_bytes - self.reserved_bytes < self.limit_bytes // 20:
            sentences.append(
                f"The pool has reserved {format_bytes(self.reserved_bytes)} of the {format_bytes(self.limit_bytes)} "
                f"that it may take: raise the strategy's limit if the device has more to give."
            )
        return sentences

    def _core_advice(self):
        core = self.core
        if core is None:
            return
        if core["oversize"]:
            were = "request was" if core["oversize"] == 1 else "requests were"
            yield (
                f"{core['oversize']:,} {were} larger than every block of the core: blocks of "
                f"{format_bytes(core['largest_oversize'])} ({core['largest_oversize']:,} bytes) would have served."
            )
        unused = core["reserved_bytes"] - self.peak_allocated_bytes
        if self.peak_allocated_bytes and unused > core["reserved_bytes"] // 2:
            yield (
                f"{format_bytes(unused)} of the fixed core's {format_bytes(core['reserved_bytes'])} were never in use: "
                f"{format_bytes(self.peak_allocated_bytes)} would have been enough."
            )

    def largest_allocatable(self, stream=None):
        """The largest request that would succeed now, in bytes: with waits, moves between streams and growth.

        Parameters
        ----------
        stream : optional
            The stream that asks.  Memory that other streams freed serves it too, so it makes no difference.

        Notes
        -----
        The larger of the longest range without a live block, and of what the pool may take from its
        source once idle segments went back.  Other users of the device can change that at any moment.
        """
        stream_handle(stream)
        longest = idle = 0
        first = in_core = 0
        if self.core is not None:
            first, in_core = 1, self._largest_in_core()
        for number, segment in enumerate(self.segment_table[first:], first):
            mine = self.blocks[self.blocks["segment"] == number]
            runs = _runs_without(mine["state"] == "live", mine["nbytes"])
            longest = max(longest, *runs, 0)
            if len(mine) and not (mine["state"] == "live").any():
                idle += int(segment["nbytes"])
        room = self.limit_bytes - self.reserved_bytes + idle
        if self._figures["device_free_bytes"] is not None:
            room = min(room, self._figures["device_free_bytes"] + idle)
        longest = max(longest, room // 256 * 256 - self._figures["base_slack_bytes"], 0)
        if self.core is not None and self.core["exclusive"] and longest <= self.core["largest"]:
            longest = 0
        return max(in_core, longest)

    def _largest_in_core(self):
        """The largest request that the fixed core, the first segment, could serve."""
        mine = self.blocks[self.blocks["segment"] == 0]
        live = mine["state"] == "live"
        if self.core["block_sizes"]:
            longest = int(mine["nbytes"][~live].max(initial=0))
        else:
            longest = max(_runs_without(live, mine["nbytes"]))
        longest = min(longest, self.core["largest"])
        return longest if longest >= self.core["smallest"] else 0

    def unusable_bytes(self, nbytes):
        """Free bytes in pieces too small for a request of `nbytes`."""
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
                "largest_free_bytes",
                "peak_reserved_bytes",
                "peak_allocated_bytes",
                "peak_requested_bytes",
                "live_blocks",
                "free_blocks",
                "segments",
                "source_calls",
                "utilization",
                "external_fragmentation",
                "internal_fragmentation",
                "reuse_ratio",
                "sharing",
                "core",
                "streams",
                "tags",
                "advice",
            )
        }
        figures["size_classes"] = [row._asdict() for row in self.size_classes]
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
        limit = "no limit" if self.limit_bytes >= 2**62 else f"limit {format_bytes(self.limit_bytes)}"
        lines = [
            f"pool {textwrap.shorten(self.name, 40)!r} on source {self.source!r}, device {self.device}, {limit}",
            "",
            _figures_line("reserved", self.reserved_bytes, f"in {self.segments} segments", self.peak_reserved_bytes),
            _figures_line(
                "allocated", self.allocated_bytes, f"in {self.live_blocks} blocks", self.peak_allocated_bytes
            ),
            _figures_line("requested", self.requested_bytes, "by callers", self.peak_requested_bytes),
            _figures_line("free", self.free_bytes, f"in {self.free_blocks} blocks"),
            _figures_line("largest", self.largest_free_bytes, "free in one piece"),
            _figures_line("pending", self.pending_bytes, "freed, perhaps in use"),
            "",
            f"utilization {self.utilization:.1%}   external fragmentation {self.external_fragmentation:.1%}   "
            f"internal {self.internal_fragmentation:.1%}",
            f"reuse {self.reuse_ratio:.1%} of bytes   {self.source_calls} source calls",
            *self._core_lines(),
            "",
            f"{'blocks up to':>14} {'live':>9} {'bytes':>11} {'free':>9} {'bytes':>11}",
        ]
        for row in self.size_classes:
            label = format_bytes(row.up_to) if row.up_to else "above"
            lines.append(
                f"{label:>14} {row.live_blocks:>9} {format_bytes(row.live_bytes):>11} "
                f"{row.free_blocks:>9} {format_bytes(row.free_bytes):>11}"
            )
        if self.advice:
            lines.append("")
        for sentence in self.advice:
            lines += _wrapped(sentence)
        return "\n".join(lines)

    def _core_lines(self):
        core = self.core
        if core is None:
            return
        blocks = ", ".join(f"{count:,} of {format_bytes(size)}" for size, count in core["block_sizes"][:4])
        more = ", ..." if len(core["block_sizes"]) > 4 else ""
        yield (
            f"fixed core: {format_bytes(core['allocated_bytes'])} live of {format_bytes(core['reserved_bytes'])} "
            f"({blocks + more or 'one slab'}), served {core['share']:.1%} of requests"
        )

    def _repr_html_(self):
        return f"<pre>{html.escape(str(self))}</pre>"


def _total(blocks):
    return int(blocks["nbytes"].sum(dtype=np.uint64))


def _figures_line(name, nbytes, where, peak=None):
    line = f"{name:>14} {format_bytes(nbytes):>11}  {where}"
    return line if peak is None else f"{line:<52} peak {format_bytes(peak)}"


def _wrapped(sentence, width=98):
    return textwrap.wrap(sentence, width, initial_indent="* ", subsequent_indent="  ")


def _runs_without(live, nbytes):
    """Bytes of each run of neighbours that are not live."""
    runs = [0]
    for is_live, size in zip(live.tolist(), nbytes.tolist(), strict=True):
        if is_live:
            runs.append(0)
        else:
            runs[-1] += size
    return runs

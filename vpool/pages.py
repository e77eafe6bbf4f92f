"""One self-contained page of a trace or a snapshot: ``vpool view``.

The page holds its data: a header in JSON and columns of numbers, packed by `vpool.packing`.  What it shows of a moment
it works out itself; the rules are those of `vpool.moments`.
"""

import html
import re
from importlib.resources import files

import numpy as np

from vpool.arrays import distinct
from vpool.packing import Packed
from vpool.trace import ALLOCATE
from vpool.version import __version__

__all__ = ["page_of_snapshot", "page_of_trace"]

_SCRIPTS = ("decode", "format", "model", "raster", "charts", "tables", "main")
_SAMPLES = 1000  # moments for which the page knows the largest free range beforehand
_BEYOND = "some blocks lie beyond the recorded segments: what was reserved and free is not known"
_STATES = ("live", "free", "pending", "unmapped")


def page_of_trace(trace, title, placement):
    """The page of a trace with addresses.

    Parameters
    ----------
    trace : Trace
        One with `details`, as of a recording or of `vpool.placing.placed`.
    title : str
        Names it, as the name of its file.
    placement : str
        How it got its addresses, in words.

    Returns
    -------
    str
        HTML that needs nothing else.

    Raises
    ------
    ValueError
        Where the trace has no details, or numbers beyond 2**53.

    Notes
    -----
    O(events), and up to 1,500 times O(allocations) for the curve of fragmentation.
    """
    details = trace.details
    if details is None:
        raise ValueError("a page needs addresses: a recording has them, and vpool.placing.placed makes them")
    space = _Space(details)
    births = np.flatnonzero(trace.op == ALLOCATE)
    frees = np.flatnonzero(trace.op != ALLOCATE)
    deaths = np.full(len(births), len(trace), np.int64)
    deaths[trace.number[frees]] = frees
    offsets = space.offset(details.address[births])
    sizes = details.allocated[births] // np.uint64(space.unit)
    streams, stream = np.unique(trace.stream[births], return_inverse=True)
    clock = np.maximum.accumulate(trace.t_us) if len(trace) else trace.t_us
    start = int(clock[0]) if len(trace) else 0
    moved = details.segments
    moved_offsets = space.offset(moved.address)
    packed = Packed()
    packed.add("birth", births, rising=True)
    packed.add("life", np.where(deaths < len(trace), deaths - births, 0))
    packed.add("offset", offsets)
    packed.add("size", sizes)
    packed.add("requested", trace.bytes[births])
    packed.add("stream", stream)
    packed.add("tag", details.tag[births])
    packed.add("site", details.site[births])
    packed.add("time", clock - start, rising=True)
    packed.add("segmentEvent", moved.event)
    packed.add("segmentOffset", moved_offsets)
    packed.add("segmentSize", np.abs(moved.nbytes) // space.unit)
    packed.add("segmentLeft", moved.nbytes < 0)
    at, largest = _largest_free(births, deaths, offsets, sizes, moved, moved_offsets, clock, space.unit)
    packed.add("sampleEvent", at, rising=True)
    packed.add("sampleLargest", largest)
    header = {
        "kind": "trace",
        "events": len(trace),
        "peakEvent": trace.peak_event,
        "unit": space.unit,
        "ranges": space.rows(),
        "streams": [f"stream {index}" for index in streams.tolist()],
        "tags": details.tags,
        "sites": details.sites,
        "marks": (np.sort(trace.marks_us) - start).tolist(),
        "failures": trace.failures.tolist(),
        "notes": trace.notes if _within_segments(details) else [*trace.notes, _BEYOND],
        "placement": placement,
    }
    return _page(title, header, packed)


def page_of_snapshot(snapshot, title):
    """The page of a snapshot: see `page_of_trace`.

    Parameters
    ----------
    snapshot : vpool.Snapshot
    title : str

    Returns
    -------
    str
    """
    segments = np.argsort(snapshot.segments["address"], kind="stable")
    place = np.empty(len(segments), np.int64)
    place[segments] = np.arange(len(segments))
    table = snapshot.segments[segments]
    segment = place[snapshot.blocks["segment"]]
    order = np.lexsort((snapshot.blocks["address"], segment))
    blocks, segment = snapshot.blocks[order], segment[order]
    unit = _unit(blocks["address"], blocks["nbytes"], table["address"], table["nbytes"])
    streams, stream = np.unique(blocks["stream"], return_inverse=True)
    tags, tag = np.unique(np.append(np.uint16(0), blocks["tag"]), return_inverse=True)
    state = np.zeros(len(blocks), np.uint8)
    for number, name in enumerate(_STATES):
        state[blocks["state"] == name] = number
    state[blocks["state"] == "suspended"] = _STATES.index("unmapped")
    packed = Packed()
    packed.add("segment", segment, rising=True)
    packed.add("offset", (blocks["address"] - table["address"][segment]) // np.uint64(unit))
    packed.add("size", blocks["nbytes"] // np.uint64(unit))
    packed.add("requested", blocks["requested"])
    packed.add("state", state)
    packed.add("stream", stream)
    packed.add("tag", tag[1:])
    packed.add("site", blocks["site"])
    packed.add("age", blocks["age_us"] + 1)  # 0: not known
    packed.add("segmentSize", table["nbytes"] // np.uint64(unit))
    # Up to the last piece that is mapped: behind it there may be far more addresses than memory.
    extent = table["nbytes"].copy()
    mapped = blocks["state"] != "unmapped"
    ends = blocks["address"] + blocks["nbytes"] - table["address"][segment]
    np.maximum.at(extent, segment[mapped], ends[mapped])
    packed.add("segmentExtent", extent // np.uint64(unit))
    header = {
        "kind": "snapshot",
        "unit": unit,
        "reserved": snapshot.report.reserved_bytes,
        "segmentAddresses": [f"{address:#x}" for address in table["address"].tolist()],
        "streams": [f"stream {handle:#x}" for handle in streams.tolist()],
        "tags": ["" if number == 0 else snapshot.tag_name(number) or "" for number in tags.tolist()],
        "sites": snapshot.sites,
        "advice": snapshot.report.advice,
        "notes": [],
        "taken": snapshot.taken,
        "pool": snapshot.name,
    }
    return _page(title, header, packed)


def _within_segments(details):
    """Whether every block begins in a segment that was there at some time."""
    moved = details.segments
    came = moved.nbytes > 0
    order = np.argsort(moved.address[came], kind="stable")
    begins, sizes = moved.address[came][order], moved.nbytes[came][order].astype(np.uint64)
    addresses = details.address[details.allocated > 0]
    if not len(begins):
        return not len(addresses)
    ends = np.maximum.accumulate(begins + sizes)
    place = np.searchsorted(begins, addresses, side="right") - 1
    return bool(((place >= 0) & (addresses < ends[np.maximum(place, 0)])).all())


class _Space:
    """The addresses that a trace ever used, without the gaps between: ranges, one above the other.

    Attributes
    ----------
    unit : int
        Bytes that every address and size is a multiple of.
    begins, offsets : array
        Where each range begins, and where in units it stands.
    """

    def __init__(self, details):
        blocks = details.allocated > 0
        came = details.segments.nbytes > 0
        begin = np.concatenate((details.segments.address[came], details.address[blocks]))
        size = np.concatenate((details.segments.nbytes[came].astype(np.uint64), details.allocated[blocks]))
        self.unit = _unit(begin, size)
        begin, once = np.unique(begin, return_inverse=True)
        end = np.zeros(len(begin), np.uint64)
        np.maximum.at(end, once, begin[once] + size)
        end = np.maximum.accumulate(end)
        first = np.ones(len(begin), bool)
        first[1:] = begin[1:] > end[:-1]
        last = np.append(np.flatnonzero(first)[1:] - 1, len(begin) - 1) if len(begin) else np.zeros(0, int)
        self.begins, self.ends = begin[first], end[last]
        sizes = (self.ends - self.begins) // np.uint64(self.unit)
        self.offsets = np.concatenate((np.zeros(1, np.uint64), np.cumsum(sizes, dtype=np.uint64)))

    def offset(self, addresses):
        """Where addresses stand, in units; 0 for those of blocks without bytes."""
        if not len(self.begins):
            return np.zeros(len(addresses), np.uint64)
        place = np.searchsorted(self.begins, addresses, side="right") - 1
        inside = (place >= 0) & (addresses < self.ends[np.maximum(place, 0)])
        place = np.maximum(place, 0)
        found = self.offsets[place] + (addresses - self.begins[place]) // np.uint64(self.unit)
        return np.where(inside, found, np.uint64(0))

    def rows(self):
        """For each range its first address, and the offset of its first and last byte in units."""
        bounds = zip(self.begins.tolist(), self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True)
        return [[f"{begin:#x}", low, high] for begin, low, high in bounds]


def _unit(*columns):
    """The largest power of two that divides every number."""
    bits = np.uint64(1 << 20)
    for column in columns:
        if len(column):
            bits |= np.bitwise_or.reduce(column.astype(np.uint64))
    return int(bits & (~bits + np.uint64(1)))


def _largest_free(births, deaths, offsets, sizes, moved, moved_offsets, clock, unit):
    """Events all over a trace, and the largest free range in bytes after each."""
    events = len(clock)
    if not events:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    even = np.linspace(0, events - 1, _SAMPLES).astype(np.int64)
    timely = np.searchsorted(clock, np.linspace(clock[0], clock[-1], _SAMPLES // 2), side="right") - 1
    at = distinct(np.concatenate((even, timely)))
    order = np.argsort(offsets, kind="stable")
    order = order[sizes[order] > 0]
    birth, death = births[order], deaths[order]
    begin = offsets[order].astype(np.int64)
    end = begin + sizes[order].astype(np.int64)
    there: dict[int, int] = {}
    changes = list(zip(moved.event.tolist(), moved_offsets.tolist(), (moved.nbytes // unit).tolist(), strict=True))
    largest, done = [], 0
    for event in at.tolist():
        while done < len(changes) and changes[done][0] <= event:
            _, offset, size = changes[done]
            if size > 0:
                there[offset] = size
            else:
                there.pop(offset, None)
            done += 1
        live = (birth <= event) & (death > event)
        low = np.array(sorted(there), np.int64)
        high = low + np.array([there[offset] for offset in low.tolist()], np.int64)
        # Free ranges begin where a segment does or a block ends, and end where a block begins or a segment ends.
        # Both are sorted but for the segments, which a stable sort sees and merges.
        gaps = _merged(begin[live], high) - _merged(end[live], low)
        largest.append(max(0, int(gaps.max(initial=0)) * unit))
    return at, np.array(largest, np.int64)


def _merged(first, second):
    return np.sort(np.concatenate((first, second)), kind="stable")


def _page(title, header, packed):
    # The name of a file may hold what UTF-8 cannot.
    title = title.encode(errors="backslashreplace").decode()
    header = {**header, "title": title, "version": __version__}
    folder = files("vpool.data") / "view"
    parts = {
        "title": html.escape(title),
        "style": (folder / "view.css").read_text(),
        "script": "\n".join((folder / f"{name}.js").read_text() for name in _SCRIPTS),
        "data": packed.text(header),
    }
    # At once: what was put in is not looked at again.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], (folder / "page.html").read_text())

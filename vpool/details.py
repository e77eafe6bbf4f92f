"""What a recording knows of each event beyond what a replay needs."""

import bisect
import json
from typing import Any, NamedTuple

import numpy as np

from vpool.errors import FormatError

__all__ = ["Details", "Runs", "SegmentEvents", "packed_names", "unpacked_names"]

_EVENT_ARRAYS = {"address": "u8", "allocated": "u8", "tag": "u2", "site": "u4", "thread": "u4"}
_SEGMENT_ARRAYS = {"segment_event": "i8", "segment_address": "u8", "segment_bytes": "i8"}


def packed_names(names):
    """Names as an array for a file: one text in JSON, as rows of equal length take what the longest name does."""
    return np.array(json.dumps(list(names)))


def unpacked_names(array, what):
    """The names of such an array, or of one that has a row for each.

    Raises
    ------
    FormatError
        For an array of something else, which is called `what`.
    """
    if array.dtype.kind == "U" and array.ndim == 1:
        return [str(name) for name in array]
    try:
        names = json.loads(str(array)) if array.dtype.kind == "U" and array.ndim == 0 else None
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FormatError(f"array {what} of {array.dtype} and shape {array.shape} is none of names")
    return names


class SegmentEvents(NamedTuple):
    """Segments that came from the source and went back, one entry each.

    Where memory is mapped in pieces, segments are the runs of them: one that grows or shrinks goes, and comes with
    its new bytes before the same event.

    Attributes
    ----------
    event : numpy.ndarray
        The event of the trace before which it was, int64.
    address : numpy.ndarray
        uint64.
    nbytes : numpy.ndarray
        Positive for one that came, negative for one that went, int64.
    """

    event: np.ndarray
    address: np.ndarray
    nbytes: np.ndarray

    def reserved_bytes(self, events):
        """Reserved bytes after each event of a trace of so many, int64.  O(events + segments)."""
        before = self.event < events
        change = np.zeros(events, np.int64)
        np.add.at(change, self.event[before], self.nbytes[before])
        return np.cumsum(change)


class Runs:
    """What is mapped in pieces, with pieces side by side as one segment.

    Memory at address 0 is mapped nowhere, and one segment.
    """

    def __init__(self):
        self._begins: list[int] = []
        self._ends: dict[int, int] = {}
        self._nowhere = 0

    def change(self, address, nbytes):
        """The segments that go and come as a piece comes, or for negative bytes goes: address and signed bytes.

        O(log(segments)), and a step of `list.insert`.
        """
        if address == 0:
            before = self._nowhere
            self._nowhere += nbytes
            return [(0, size) for size in (-before, self._nowhere) if size]
        if nbytes > 0:
            begin, end = address, address + nbytes
            place = bisect.bisect(self._begins, begin)
            gone = []
            if place < len(self._begins) and self._begins[place] == end:
                gone.append(self._pop(place))
                end = gone[-1][1]
            if place and self._ends[self._begins[place - 1]] == begin:
                gone.append(self._pop(place - 1))
                begin = gone[-1][0]
            came = [(begin, end)]
        else:
            gone = [self._pop(bisect.bisect(self._begins, address) - 1)]
            (begin, end), hole = gone[0], address - nbytes
            came = [(low, high) for low, high in ((begin, address), (hole, end)) if low < high]
        for begin, end in came:
            bisect.insort(self._begins, begin)
            self._ends[begin] = end
        return [(begin, begin - end) for begin, end in gone] + [(begin, end - begin) for begin, end in came]

    def _pop(self, place):
        begin = self._begins.pop(place)
        return begin, self._ends.pop(begin)


class Details(NamedTuple):
    """Arrays of one entry an event, and the names that they refer to.

    Attributes
    ----------
    address : numpy.ndarray
        Of the block, uint64.
    allocated : numpy.ndarray
        Its bytes after rounding, uint64.
    tag, site : numpy.ndarray
        Index into `tags` and `sites`; a free has its block's tag, and site 0.
    thread : numpy.ndarray
        A number for each thread, from 1, uint32; 0 for blocks that were there before.
    tags, sites : list of str
        The first of each is empty: no tag, and no site that is known.
    segments : SegmentEvents
    """

    address: np.ndarray
    allocated: np.ndarray
    tag: np.ndarray
    site: np.ndarray
    thread: np.ndarray
    tags: list
    sites: list
    segments: SegmentEvents

    def named(self, names_of, sites):
        """With names for the numbers of tags, which `names_of` knows, and numbers without gaps."""
        numbers, tag = np.unique(np.append(np.uint16(0), self.tag), return_inverse=True)
        return self._replace(
            tag=tag[1:].astype(np.uint16), tags=["", *names_of(numbers[1:].tolist())], sites=list(sites)
        )

    def part(self, rows, before, begin, end):
        """Of some events, the first of which are what was live `before`; then those from `begin` to before `end`."""
        columns = {name: getattr(self, name)[rows] for name in _EVENT_ARRAYS}
        there: dict[int, int] = {}
        moved = []
        for event, address, nbytes in zip(*(column.tolist() for column in self.segments), strict=True):
            if event > end:
                break
            if event > begin:
                moved.append((event - begin + before, address, nbytes))
            elif nbytes > 0:
                there[address] = nbytes
            else:
                there.pop(address, None)
        moved = [*((0, address, nbytes) for address, nbytes in there.items()), *moved]
        kinds = zip(range(3), _SEGMENT_ARRAYS.values(), strict=True)
        numbers = [np.array([row[column] for row in moved], kind) for column, kind in kinds]
        return self._replace(**columns, segments=SegmentEvents(*numbers))

    def to_arrays(self):
        """Arrays for a file, by name."""
        arrays = {name: getattr(self, name) for name in _EVENT_ARRAYS}
        arrays |= dict(zip(_SEGMENT_ARRAYS, self.segments, strict=True))
        return {**arrays, "tags": packed_names(self.tags), "sites": packed_names(self.sites)}

    @classmethod
    def from_arrays(cls, arrays, events):
        """Of a file's arrays, for a trace of so many events; None where it has none.

        Raises
        ------
        FormatError
            Where they do not fit one another.
        """
        if "address" not in arrays:
            return None
        wanted = {**_EVENT_ARRAYS, **_SEGMENT_ARRAYS}
        missing = [name for name in (*wanted, "tags", "sites") if name not in arrays]
        if missing:
            raise FormatError(f"no array named {', '.join(missing)}, but one named address")
        taken: dict[str, Any] = {}
        for name, kind in wanted.items():
            array = arrays[name]
            right = array.dtype == kind
            if name in _EVENT_ARRAYS:
                right = right and array.shape == (events,)
            elif name in _SEGMENT_ARRAYS:
                right = right and array.shape == arrays["segment_event"].shape
            if array.ndim != 1 or not right:
                raise FormatError(f"array {name} of {array.dtype} and shape {array.shape} does not fit the trace")
            taken[name] = array
        for name in ("tags", "sites"):
            taken[name] = unpacked_names(arrays[name], name)
        for name, names in (("tag", "tags"), ("site", "sites")):
            if len(taken[name]) and int(taken[name].max()) >= len(taken[names]):
                raise FormatError(f"array {name} names more than the {len(taken[names])} {names} that there are")
        order = taken["segment_event"]
        if (order[1:] < order[:-1]).any() or (len(order) and not 0 <= order[0] <= order[-1] <= events):
            raise FormatError(f"array segment_event is not of events, in order, of the {events} that there are")
        segments = SegmentEvents(*(taken.pop(name) for name in _SEGMENT_ARRAYS))
        return cls(**taken, segments=segments)

"""Traces: recorded allocations and frees, in order."""

import itertools
import os
from pathlib import Path

import numpy as np

from vpool import formats
from vpool.errors import FormatError
from vpool.formats import npz, writers
from vpool.formats.npz import FORMAT_VERSION
from vpool.sizes import plural

__all__ = ["FORMAT_VERSION", "Trace", "named"]

ALLOCATE, FREE = 0, 1

_ARRAYS = npz.ARRAYS
# Events that are checked at a time, where a check needs more memory than the events.
_CHUNK = 1 << 20


class Trace:
    """Every allocation and free of a recorded program, in order.

    Parameters
    ----------
    op : array of uint8
        0 allocates, 1 frees.
    id : array of uint32
        The allocation's number, given once; a free names the allocation that it ends.
    bytes : array of uint64
        Requested bytes; on a free, those of its allocation.
    stream : array of uint16
        Index of the stream.
    t_us : array of int64
        Microseconds since the first event.
    marks_us : array of int64, optional
        When each step began.
    notes : list of str, optional
        What was odd in the file.
    failures : array of int64, optional
        A row for each request that failed: the event before which it came, and its bytes.
    figures : dict, optional
        What a reader counted in the file, by names of its format's (see :doc:`formats`).
    details : vpool.details.Details, optional
        Addresses, tags and more of each event, which a recording knows.

    Attributes
    ----------
    notes : list of str
        What was odd in the file, a sentence each.
    failures : numpy.ndarray
        The requests that failed.
    figures : dict
        What a reader counted in the file.
    details : vpool.details.Details or None
        What only a recording knows.

    Raises
    ------
    FormatError
        Where the arrays contradict each other; the message names the event.
    """

    def __init__(self, op, id, bytes, stream, t_us, marks_us=(), notes=(), failures=(), figures=None, details=None):
        given = {"op": op, "id": id, "bytes": bytes, "stream": stream, "t_us": t_us}
        arrays = {name: _as(values, _ARRAYS[name], name) for name, values in given.items()}
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) != 1:
            raise FormatError(f"arrays of different lengths: {lengths}")
        self.op = arrays["op"]
        self.id = arrays["id"]
        self.bytes = arrays["bytes"]
        self.stream = arrays["stream"]
        self.t_us = arrays["t_us"]
        self.marks_us = _as(marks_us, "i8", "marks_us")
        self.notes = list(notes)
        self.failures = _failures(failures, len(self))
        self.figures = dict(figures or {})
        self.details = details
        self._check()

    def _check(self):
        """Each id is allocated once, and freed at most once and later."""
        _expect(self.op <= FREE, "op is neither 0 nor 1")
        _expect(self.bytes < 2**63, "a size beyond 63 bits")
        live = 0.0
        for begin in range(0, len(self), _CHUNK):
            sizes = self.bytes[begin : begin + _CHUNK].astype(float)
            lives = live + np.cumsum(np.where(self.op[begin : begin + _CHUNK] == ALLOCATE, sizes, -sizes))
            _expect(lives < 2.0**63, "more than 63 bits are live", begin)
            live = lives[-1]
        if self._is_numbered():
            self.number = self.id
        else:
            self._number()

    def _is_numbered(self):
        """Whether ids are numbers in the order of birth and all is sound, which takes little memory to see."""
        births, frees = self.op == ALLOCATE, self.op == FREE
        born, freed = self.id[births], self.id[frees]
        if (born != np.arange(len(born), dtype=np.uint32)).any() or (freed >= len(born)).any():
            return False
        once = np.zeros(len(born), bool)
        once[freed] = True
        before = np.cumsum(births, dtype=np.uint32)[frees]
        return bool(
            np.count_nonzero(once) == len(freed)
            and (freed < before).all()
            and (self.bytes[births][freed] == self.bytes[frees]).all()
        )

    def _number(self):
        """Number the allocations; what is wrong with an event is told with its place."""
        allocates = np.flatnonzero(self.op == ALLOCATE)
        frees = np.flatnonzero(self.op == FREE)
        born, first = np.unique(self.id[allocates], return_index=True)
        again = np.ones(len(self), bool)
        again[allocates] = False
        again[allocates[first]] = True
        _expect(again, "an id that was allocated before")
        place = np.searchsorted(born, self.id[frees])
        known = place < len(born)
        known[known] = born[place[known]] == self.id[frees][known]
        sound = np.ones(len(self), bool)
        sound[frees] = known
        _expect(sound, "a free of an id that is never allocated")
        birth = allocates[first][place]
        sound[frees] = birth < frees
        _expect(sound, "a free before its allocation")
        _, last = np.unique(self.id[frees], return_index=True)
        sound[frees] = False
        sound[frees[last]] = True
        _expect(sound, "an id that was freed before")
        sound[frees] = self.bytes[frees] == self.bytes[birth]
        _expect(sound, "a free whose bytes are not its allocation's")
        # What replays use: numbers without gaps, in the order of birth.
        order = np.empty(len(born), np.uint32)
        order[np.argsort(first, kind="stable")] = np.arange(len(born), dtype=np.uint32)
        self.number = order[np.searchsorted(born, self.id)] if len(born) else np.zeros(0, np.uint32)

    def __len__(self):
        return len(self.op)

    def __repr__(self):
        return (
            f"<vpool.{type(self).__name__} of {plural(len(self), 'event')}, {plural(self.allocations, 'allocation')}>"
        )

    @property
    def allocations(self):
        """How many allocations there are."""
        return int((self.op == ALLOCATE).sum())

    @property
    def live_bytes(self):
        """Requested bytes that are live after each event, an array of int64."""
        sizes = self.bytes.astype(np.int64)
        return np.cumsum(np.where(self.op == ALLOCATE, sizes, -sizes))

    @property
    def peak_event(self):
        """The event after which the most bytes are live; -1 for an empty trace."""
        return int(self.live_bytes.argmax()) if len(self) else -1

    @property
    def peak_live_bytes(self):
        """The most requested bytes that are live at once."""
        return int(self.live_bytes.max(initial=0))

    @property
    def mark_events(self):
        """The event that each mark's step begins with, in rising order; a clock that goes back stands still here."""
        return np.sort(np.searchsorted(np.maximum.accumulate(self.t_us), self.marks_us))

    @property
    def steps(self):
        """First event and end of each step that has events."""
        bounds = np.append(self.mark_events, len(self)).tolist()
        return [(begin, end) for begin, end in itertools.pairwise(bounds) if begin < end]

    def step_bytes(self, event):
        """Requested bytes live before the step of an event, and those that it asks for; None before the first step."""
        for begin, end in self.steps:
            if begin <= event < end:
                before = int(self.live_bytes[begin - 1]) if begin else 0
                return before + int(self.bytes[begin:end][self.op[begin:end] == ALLOCATE].sum(dtype=np.uint64))
        return None

    def part(self, begin, end):
        """The events from one to before another, as a recording of them would be.

        Parameters
        ----------
        begin, end : int
            Numbers of events; what is outside the trace is left away.

        Returns
        -------
        Trace
            First come allocations of what was live before, by address if that is known, at the time of the first
            event; a note counts them.
        """
        begin, end = max(0, begin), min(len(self), end)
        if begin == 0 and end == len(self):
            return self
        inside = np.arange(begin, max(begin, end))
        births = np.flatnonzero(self.op == ALLOCATE)
        alive = np.zeros(self.allocations, bool)
        alive[self.number[births[births < begin]]] = True
        alive[self.number[:begin][self.op[:begin] == FREE]] = False
        before = births[alive[self.number[births]]]
        if self.details is not None:
            before = before[np.argsort(self.details.address[before], kind="stable")]
        rows = np.concatenate((before, inside))
        times = self.t_us[rows]
        start = int(self.t_us[begin]) if len(inside) else 0
        times[: len(before)] = start
        marks = self.marks_us[(self.marks_us >= start) & (self.marks_us <= times.max(initial=start))]
        failures = self.failures[(self.failures[:, 0] >= begin) & (self.failures[:, 0] <= end)]
        failures = failures + np.array([len(before) - begin, 0])
        notes = list(self.notes)
        if len(before):
            live = f"{plural(len(before), 'block')} {'was' if len(before) == 1 else 'were'} live"
            notes.append(f"{live} before event {begin:,}, where this part begins")
        details = None if self.details is None else self.details.part(rows, len(before), begin, end)
        columns = (self.op[rows], self.id[rows], self.bytes[rows], self.stream[rows])
        return Trace(*columns, times - start, marks - start, notes, failures, None, details)

    def scaled(self, peak_bytes):
        """This trace with every size divided so that its peak is at most `peak_bytes`.

        Returns
        -------
        Trace
            This one itself where nothing has to be done.  No size becomes 0 that was not.
        """
        if peak_bytes < 1:
            raise ValueError(f"a peak must be at least 1 byte, got {peak_bytes}")
        peak = self.peak_live_bytes
        if peak <= peak_bytes:
            return self
        divisor = peak / peak_bytes
        smaller, failures = self, self.failures
        while smaller.peak_live_bytes > peak_bytes:
            sizes = np.maximum(self.bytes / divisor, np.minimum(self.bytes, 1)).astype(np.uint64)
            if len(failures):
                failures = np.column_stack((self.failures[:, 0], (self.failures[:, 1] / divisor).astype(np.int64)))
            smaller = Trace(self.op, self.id, sizes, self.stream, self.t_us, self.marks_us, self.notes, failures)
            divisor *= 1.01
            if sizes.max() <= 1:
                break
        return smaller

    @classmethod
    def merge(cls, *traces):
        """Several traces at once, as of programs that start together and share a device.

        Events are interleaved by time, each trace's clock from its first event; of equal times, those of
        the trace that was given first come first.  Where a trace's clock goes back, the event counts as of
        the time before.  Every trace has streams and ids of its own, numbered anew; marks are merged.

        Parameters
        ----------
        *traces : Trace

        Returns
        -------
        Trace

        Raises
        ------
        TypeError, ValueError
            For what is no trace, for none at all, and for more allocations or streams than a trace can have.
        FormatError
            Where more than 63 bits of bytes or microseconds come together.

        Notes
        -----
        O(n log n) for n events in all.
        """
        for trace in traces:
            if not isinstance(trace, Trace):
                raise TypeError(f"merge takes traces, not {type(trace).__name__}")
        if not traces:
            raise ValueError("merge needs at least one trace")
        clocks, marks, ids, streams = [], [], [], []
        first_id = first_stream = 0
        for trace in traces:
            clock = np.maximum.accumulate(trace.t_us)
            start = int(clock[0]) if len(trace) else 0
            clocks.append(_since(start, clock))
            marks.append(_since(start, trace.marks_us))
            used, stream = np.unique(trace.stream, return_inverse=True)
            ids.append(trace.number.astype(np.int64) + first_id)
            streams.append(stream + first_stream)
            first_id += trace.allocations
            first_stream += len(used)
        _expect_room("id", first_id, "allocations")
        _expect_room("stream", first_stream, "streams")
        clock = np.concatenate(clocks)
        order = np.argsort(clock, kind="stable")
        return cls(
            np.concatenate([trace.op for trace in traces])[order],
            np.concatenate(ids)[order],
            np.concatenate([trace.bytes for trace in traces])[order],
            np.concatenate(streams)[order],
            clock[order],
            np.sort(np.concatenate(marks)),
            dict.fromkeys(note for trace in traces for note in trace.notes),
            _merged_failures(traces, order),
        )

    @classmethod
    def load(cls, path, device=None):
        """Read a trace file.

        What it is tells its content, gzip or not: see :doc:`formats`.

        Parameters
        ----------
        path : str or os.PathLike
        device : int or str, optional
            The device to read from a file that has several; the one with the most events if not given.

        Returns
        -------
        Trace
            `notes` tells what was odd, and `figures` what the reader counted.

        Raises
        ------
        FormatError
            For a file that is damaged or of another form; the message names the place.
        OSError
            For a file that is not there or not readable.

        Notes
        -----
        O(n) for n bytes.  Text and JSON are read in pieces, so that memory grows with the allocations and
        frees in a file and not with the rest of it.
        """
        path = Path(path)
        with open(path, "rb") as file:
            try:
                return cls(**formats.read(file, device))
            except FormatError as reason:
                raise FormatError(f"{path}: {reason}") from None
            except MemoryError:
                raise FormatError(f"{path}: too large for this machine's memory") from None
            except OSError:
                raise
            except Exception as reason:
                # What a reader did not foresee is the file's fault all the same.
                raise FormatError(f"{path}: not readable: {type(reason).__name__}: {reason}") from reason

    def save(self, path, format="npz"):
        """Write the trace, as vpool's own ``.npz`` unless another format is named.

        Parameters
        ----------
        path : str or os.PathLike
            Compressed if it ends in ``.gz``.
        format : {"npz", "rmm", "torch-pickle", "torch-json", "kineto", "umpire", "stalloc", "minimalloc", "pprof"}
            The others than ``"npz"`` lose what they have no place for, and make addresses up.

        Raises
        ------
        ValueError
            For a format that is none of these.
        OSError
            Where the file cannot be written.
        """
        writers.write(self, path, format)


def named(traces, *, taken=()):
    """One trace or several, by names that each has to itself.

    Parameters
    ----------
    traces : Trace, path, or iterable of them
        A file has its own name without the ending, what is none has a number.
    taken : iterable of str
        Names that none gets.

    Returns
    -------
    dict of Trace
    """
    if isinstance(traces, (Trace, str, os.PathLike)):
        traces = [traces]
    found: dict[str, Trace] = {}
    for number, trace in enumerate(traces, start=1):
        name = f"trace {number}"
        if not isinstance(trace, Trace):
            name, trace = Path(trace).stem, Trace.load(trace)
        while name in found or name in taken:
            name = f"{name} ({number})"
        found[name] = trace
    return found


def _failures(failures, events):
    """Rows of an event and bytes, in order."""
    rows = np.asarray(failures)
    if rows.size == 0:
        return np.zeros((0, 2), np.int64)
    if rows.ndim != 2 or rows.shape[1] != 2 or rows.dtype.kind not in "iu":
        raise FormatError(f"failures must be rows of an event and bytes, not {rows.dtype} of shape {rows.shape}")
    if (rows[:, 0] > events).any() or (rows < 0).any() or (rows >= 2**63).any():
        raise FormatError("failures of events or bytes that are out of range")
    return np.ascontiguousarray(rows[np.argsort(rows[:, 0], kind="stable")], np.int64)


def _merged_failures(traces, order):
    """The failures of traces whose events were put into an order."""
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    merged, first = [], 0
    for trace in traces:
        # Before an event of its own trace, and after the last one at the end.
        own = place[first : first + len(trace)]
        own = np.append(own, own[-1] + 1 if len(own) else 0)
        merged.append(np.column_stack((own[trace.failures[:, 0]], trace.failures[:, 1])))
        first += len(trace)
    return np.concatenate(merged)


def _as(values, kind, name):
    """A one-dimensional array of the wanted integer type, if that loses nothing."""
    array = np.asarray(values)
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, kind)
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise FormatError(f"array {name} must be one row of integers, not {array.dtype} of shape {array.shape}")
    bounds = np.iinfo(kind)
    outside = (array < bounds.min) | (array > bounds.max) if array.dtype != kind else np.zeros(len(array), bool)
    if outside.any():
        raise FormatError(f"event {int(outside.argmax())}: {name} is out of range")
    return np.ascontiguousarray(array, kind)


def _since(start, times):
    """Microseconds from a start to each of some times."""
    ends = (int(times.min()), int(times.max())) if len(times) else (start, start)
    if max(abs(end - start) for end in ends) >= 2**63:
        raise FormatError(f"times from {ends[0]} to {ends[1]} do not fit a clock that starts at {start}")
    return times - start


def _expect_room(array, count, what):
    most = np.iinfo(_ARRAYS[array]).max + 1
    if count > most:
        raise ValueError(f"the traces have {count:,} {what} together, and a trace at most {most:,}")


def _expect(holds, otherwise, before=0):
    if not holds.all():
        raise FormatError(f"event {before + int(np.argmin(holds))}: {otherwise}")

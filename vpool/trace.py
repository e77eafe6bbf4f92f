"""Traces: recorded allocations and frees, in order."""

from pathlib import Path

import numpy as np

from vpool.errors import FormatError

__all__ = ["FORMAT_VERSION", "Trace"]

FORMAT_VERSION = 1
ALLOCATE, FREE = 0, 1

_ARRAYS = {"op": "u1", "id": "u4", "bytes": "u8", "stream": "u2", "t_us": "i8"}


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

    Raises
    ------
    FormatError
        Where the arrays contradict each other; the message names the event.
    """

    def __init__(self, op, id, bytes, stream, t_us, marks_us=(), notes=()):
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
        self._check()

    def _check(self):
        """Each id is allocated once, and freed at most once and later."""
        _expect(self.op <= FREE, "op is neither 0 nor 1")
        _expect(self.bytes < 2**63, "a size beyond 63 bits")
        sizes = self.bytes.astype(float)
        _expect(np.cumsum(np.where(self.op == ALLOCATE, sizes, -sizes)) < 2.0**63, "more than 63 bits are live")
        allocates = np.flatnonzero(self.op == ALLOCATE)
        frees = np.flatnonzero(self.op == FREE)
        born, first = np.unique(self.id[allocates], return_index=True)
        again = np.ones(len(self), bool)
        again[allocates] = np.isin(np.arange(len(allocates)), first)
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
        sound[frees] = np.isin(np.arange(len(frees)), last)
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
        return f"<vpool.Trace of {len(self)} events, {self.allocations} allocations>"

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
        smaller = self
        while smaller.peak_live_bytes > peak_bytes:
            sizes = np.maximum(self.bytes / divisor, np.minimum(self.bytes, 1)).astype(np.uint64)
            smaller = Trace(self.op, self.id, sizes, self.stream, self.t_us, self.marks_us, self.notes)
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
        )

    @classmethod
    def load(cls, path):
        """Read a trace file.

        Parameters
        ----------
        path : str or os.PathLike
            A file of vpool's own form, ``.npz``.

        Raises
        ------
        FormatError
            For a file that is damaged or of another form; the message names the place.
        OSError
            For a file that is not there or not readable.
        """
        path = Path(path)
        with open(path, "rb") as file:
            try:
                return cls(**_arrays_of(file))
            except FormatError as reason:
                raise FormatError(f"{path}: {reason}") from None
            except MemoryError:
                raise FormatError(f"{path}: an array too large for this machine's memory") from None
            except Exception as reason:
                # Whatever a damaged file makes zip, zlib and numpy raise: there is no end to the kinds.
                raise FormatError(f"{path}: not a readable .npz file: {type(reason).__name__}: {reason}") from None

    def save(self, path):
        """Write the trace as ``.npz``, with the format's version."""
        with open(path, "wb") as file:
            np.savez_compressed(
                file,
                op=self.op,
                id=self.id,
                bytes=self.bytes,
                stream=self.stream,
                t_us=self.t_us,
                marks_us=self.marks_us,
                format_version=FORMAT_VERSION,
            )


def _arrays_of(file):
    """The arrays of an open .npz file, by the names of `Trace`'s parameters."""
    # Plain arrays only: an object array would run code on loading.
    loaded = np.load(file, allow_pickle=False)
    if not isinstance(loaded, np.lib.npyio.NpzFile):
        raise FormatError("one array, not a trace of several")
    version = loaded["format_version"] if "format_version" in loaded else np.array(FORMAT_VERSION)
    if version.shape or version.dtype.kind not in "iu" or version < 1:
        raise FormatError(f"format version {version} is none")
    if version > FORMAT_VERSION:
        raise FormatError(f"format version {version}; this vpool reads up to version {FORMAT_VERSION}")
    missing = [name for name in _ARRAYS if name not in loaded]
    if missing:
        raise FormatError(f"no array named {', '.join(missing)}")
    arrays = {name: loaded[name] for name in _ARRAYS}
    if "marks_us" in loaded:
        arrays["marks_us"] = loaded["marks_us"]
    return arrays


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


def _expect(holds, otherwise):
    if not holds.all():
        raise FormatError(f"event {int(np.argmin(holds))}: {otherwise}")

"""Trace files of every kind that is read: which it is, its content tells.

A reader is a module with a function that takes a `Source` and the device that is wanted, and returns the
parameters of a `Trace`.
"""

import re

from vpool.errors import FormatError
from vpool.formats import bfc, kineto, minimalloc, npz, rmm, stalloc, timeline, torch_snapshot, umpire
from vpool.formats.json_stream import JsonStream
from vpool.formats.source import Cut, Source

__all__ = ["read", "reader_of"]

_HEAD = 1 << 16
# Lines that tell what a log is: one may be the rest of a line, of a file that lost its beginning.
_FIRST = 2
_LONGEST = 400
_KNOWN = (
    "vpool's .npz, PyTorch memory snapshots and raw memory timelines, profiler traces, logs of RMM, Umpire, STAlloc "
    "and TensorFlow's BFC allocator, MiniMalloc's CSV"
)
# Protocol 2 and later begin with their number; earlier ones with a list or dict that is empty at first.
_PICKLE = re.compile(rb"\x80[\x00-\x10]|[\]}](?:q.|r....|\()|\((?:dp|lp|dq|lq)[\d\x00-\xff]|\}\.|\]\.", re.DOTALL)
# Its first field is a message of two small numbers: what is counted, and in which unit.
_PROFILE = re.compile(rb"\x0a\x04\x08[\x01-\x7f]\x10[\x01-\x7f]")
_JSON_KEYS = {
    "traceEvents": kineto.read,
    "segments": torch_snapshot.read_json,
    "device_traces": torch_snapshot.read_json,
}


def read(file, device=None):
    """The parameters of a `Trace`, from an open file.

    Parameters
    ----------
    file : binary file, seekable
    device : int or str, optional
        The device to read, where a file has several.

    Raises
    ------
    FormatError
        For content that is none of the known ones, or damaged; the message names the place.
    """
    source = Source(file)
    try:
        reader = reader_of(source)
        source.rewind()
        return reader(source, device)
    except FormatError as reason:
        # It may quote what the file holds.
        text = str(reason)
        raise FormatError(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…") from None


def reader_of(source):
    """The function that reads such content."""
    head = source.head(_HEAD)
    if not head:
        raise FormatError("an empty file" if not source.compressed else "no content in the gzip data")
    if _PROFILE.match(head):
        raise FormatError("a profile of pprof, which sums up and does not tell single allocations")
    if head[:2] == b"PK" or head[:6] == b"\x93NUMPY":
        return npz.read
    if _PICKLE.match(head):
        return torch_snapshot.read_pickle
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] in (b"{", b"[") and not _is_umpire(text):
        return _json_reader(source)
    return _log_reader(source, text)


def _lines_of(text):
    """The first lines of a log that say something."""
    return [line.strip() for line in text.split(b"\n") if line.strip() and not line.lstrip().startswith(b"#")]


def _is_umpire(text):
    return any(map(_is_record, _lines_of(text)[:_FIRST]))


def _is_record(line):
    try:
        return umpire.record_of(line) is not None
    except ValueError:
        return False


def _json_reader(source):
    """By what stands in the array or under which name."""
    source.rewind()
    stream = JsonStream(source)
    try:
        if stream.peek() == "{":
            for name in stream.members():
                if name in _JSON_KEYS:
                    return _JSON_KEYS[name]
                stream.skip()
        else:
            for _ in stream.items():
                return _array_reader(stream)
    except Cut:
        raise FormatError(f"character {stream.offset}: the file ends before anything that tells what it is") from None
    raise FormatError(f"JSON of another kind; vpool reads {_KNOWN}")


def _array_reader(stream):
    if stream.peek() == "[":
        # A row of a raw timeline begins with a time and an action; totals begin with a row of times.
        row = stream.head_of_items(5)
        if len(row) == 4:
            return timeline.read
        raise FormatError("a memory timeline's totals, which do not tell single allocations: export it as .raw.json.gz")
    if stream.peek() != "{":
        raise FormatError(f"JSON of another kind; vpool reads {_KNOWN}")
    for name in stream.members():
        if name in ("blocks", "total_size", "segment_type", "allocated_size"):
            return torch_snapshot.read_json
        if name in ("ph", "ts", "name", "args", "cat", "pid"):
            return kineto.read
        stream.skip()
    raise FormatError(f"JSON of another kind; vpool reads {_KNOWN}")


def _log_reader(source, text):
    lines = _lines_of(text)
    first = lines[0] if lines else b""
    if any(map(rmm.columns_of, lines[:_FIRST])):
        return rmm.read
    if minimalloc.columns_of(first):
        return minimalloc.read
    if stalloc.STEP.match(first) or any(stalloc.EVENT.fullmatch(line) for line in lines[:100]):
        return stalloc.read
    if _is_umpire(text):
        return umpire.read
    # Anything may stand around a dump, and for as long as it likes.
    source.rewind()
    if any(line is not None and bfc.CHUNK.search(line) for _, line in source.lines()):
        return bfc.read
    raise FormatError(f"begins with {first[:24]!r}, which is none of what vpool reads: {_KNOWN}")

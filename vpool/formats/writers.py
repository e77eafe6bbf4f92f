"""Traces in the formats of others.

None of them but vpool's own has a place for everything; addresses, which a trace has not, are made up so that blocks
that are live at once do not overlap.
"""

import contextlib
import gzip
import json
import os
import pickle
from pathlib import Path

import numpy as np

from vpool.formats import npz

__all__ = ["FORMATS", "by_suffix", "write"]

_DAY_US = 86_400_000_000
_GRAIN = 512
_BASE = 1 << 40
_SUFFIXES = {
    ".npz": "npz",
    ".csv": "rmm",
    ".pickle": "torch-pickle",
    ".pkl": "torch-pickle",
    ".json": "torch-json",
    ".txt": "stalloc",
    ".log": "umpire",
}


def by_suffix(path):
    """The format that a file's name means; None if it means none."""
    name = str(path).lower().removesuffix(".gz")
    return next((form for suffix, form in _SUFFIXES.items() if name.endswith(suffix)), None)


def write(trace, path, form):
    """Write a trace to a file, which stays as it was if that fails."""
    if form not in FORMATS:
        raise ValueError(f"no format {form!r}; there are {', '.join(FORMATS)}")
    target = Path(path)
    # Beside it, so that it can take its place; a device or a pipe is written as it is.
    whole = not target.exists() or target.is_file()
    written = target.with_name(f".{target.name}.{os.getpid()}.part") if whole else target
    try:
        with gzip.open(written, "wb") if target.suffix == ".gz" else open(written, "wb") as file:
            FORMATS[form](trace, file)
        if whole:
            os.replace(written, target.resolve())
    except BaseException as error:
        if isinstance(error, OSError) and error.filename == str(written):
            error.filename, error.filename2 = str(path), None
        if whole:
            with contextlib.suppress(OSError):
                written.unlink()
        raise


class _Placed:
    """A trace with addresses.

    Attributes
    ----------
    events : list
        Op, number, bytes, stream and microseconds of each event.
    addresses : list of int
        Of each allocation by its number.  What was freed serves the same size on the same stream again.
    ranges : dict
        Begin and bytes of what the blocks of each stream take.
    """

    def __init__(self, trace):
        columns = (trace.op, trace.number, trace.bytes, trace.stream, trace.t_us)
        self.events = list(zip(*(column.tolist() for column in columns), strict=True))
        offsets: list[int] = []
        homes: list[int] = []
        spare: dict[tuple, list] = {}
        ends: dict[int, int] = {}
        for op, one, nbytes, stream, _ in self.events:
            size = _rounded(nbytes)
            if op:
                spare.setdefault((homes[one], size), []).append(offsets[one])
                continue
            same = spare.get((stream, size))
            homes.append(stream)
            offsets.append(same.pop() if same else ends.get(stream, 0))
            ends[stream] = max(ends.get(stream, 0), offsets[one] + size)
        begin, self.ranges = _BASE, {}
        for stream, nbytes in sorted(ends.items()):
            self.ranges[stream] = begin, nbytes
            begin += nbytes
        self.addresses = [self.ranges[home][0] + offset for home, offset in zip(homes, offsets, strict=True)]
        self.homes = homes


def _failed(trace):
    """Bytes of the requests that failed before each event, by its number."""
    before: dict[int, list] = {}
    for event, nbytes in trace.failures.tolist():
        before.setdefault(event, []).append(nbytes)
    return before


def _rounded(nbytes):
    return max(_GRAIN, -(-nbytes // _GRAIN) * _GRAIN)


def _hex(stream):
    """A stream as `%p` and RMM write it."""
    return f"{stream:#x}" if stream else "0"


def _write_lines(file, lines):
    for line in lines:
        file.write(line.encode("ascii") + b"\n")


def _rmm(trace, file):
    placed = _Placed(trace)
    before = _failed(trace)

    def row(t, action, address, nbytes, stream):
        seconds, part = divmod(t % _DAY_US, 1_000_000)
        clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{part:06}"
        return f"1,{clock},{action},{address},{nbytes},{_hex(stream)}"

    def lines():
        yield "Thread,Time,Action,Pointer,Size,Stream"
        t = 0
        for event, (op, one, nbytes, stream, at) in enumerate(placed.events):
            t = at
            for failed in before.get(event, ()):
                yield row(t, "allocate failure", "(nil)", failed, 0)
            yield row(t, "free" if op else "allocate", f"{placed.addresses[one]:#x}", nbytes, stream)
        for failed in before.get(len(placed.events), ()):
            yield row(t, "allocate failure", "(nil)", failed, 0)

    _write_lines(file, lines())


def _stalloc(trace, file):
    placed = _Placed(trace)
    steps = np.searchsorted(np.maximum.accumulate(trace.t_us), trace.marks_us).tolist()

    def lines():
        step = 0
        for event, (op, one, nbytes, stream, _) in enumerate(placed.events):
            while step < len(steps) and steps[step] <= event:
                yield f"Iteration Index : {step}"
                step += 1
            yield f"{1 - op} {placed.addresses[one]:#x} {nbytes} {_hex(stream)}"
        yield "Iteration Index : end"

    _write_lines(file, lines())


def _umpire(trace, file):
    placed = _Placed(trace)

    def lines():
        yield '{"category": "metadata", "name": "version", "tags": {"replay": "true"}, "timestamp": 0}'
        for op, one, nbytes, _, t in placed.events:
            told = {"allocator_ref": "0x1", "pointer": f"{placed.addresses[one]:#x}"}
            record = {"category": "operation", "name": "deallocate" if op else "allocate"}
            numbers = {} if op else {"numeric_args": {"size": nbytes}}
            rest = {"string_args": told, "tags": {"replay": "true"}, "timestamp": t * 1000}
            yield json.dumps({**record, **numbers, **rest})

    _write_lines(file, lines())


def _minimalloc(trace, file):
    # Events stand for times, which may be equal or go back.
    births = np.flatnonzero(trace.op == 0)
    ends = np.full(len(births), len(trace), np.int64)
    frees = np.flatnonzero(trace.op == 1)
    ends[trace.number[frees]] = frees
    rows = zip(births.tolist(), ends.tolist(), trace.bytes[births].tolist(), strict=True)
    _write_lines(file, ["id,lower,upper,size"])
    _write_lines(file, (f"{one},{begin},{end},{nbytes}" for one, (begin, end, nbytes) in enumerate(rows)))


def _kineto(trace, file):
    placed, before = _Placed(trace), _failed(trace)
    clock = np.maximum.accumulate(trace.t_us).tolist()
    live = trace.live_bytes.tolist()

    def instant(name, t, told):
        what = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": name, "pid": 1, "tid": 1, "ts": t}
        return {**what, "args": {"Device Type": 1, "Device Id": 0, **told}}

    def events():
        for step, t in enumerate(trace.marks_us.tolist()):
            yield {
                "ph": "X",
                "cat": "user_annotation",
                "name": f"ProfilerStep#{step}",
                "pid": 1,
                "tid": 1,
                "ts": t,
                "dur": 0,
            }
        for event, (op, one, nbytes, _, _) in enumerate(placed.events):
            for failed in before.get(event, ()):
                yield instant("[OutOfMemory]", clock[event], {"Bytes": failed})
            told = {"Addr": placed.addresses[one], "Bytes": -nbytes if op else nbytes, "Total Allocated": live[event]}
            yield instant("[memory]", clock[event], told)
        for failed in before.get(len(clock), ()):
            yield instant("[OutOfMemory]", clock[-1] if clock else 0, {"Bytes": failed})

    file.write(b'{"schemaVersion": 1, "profile_memory": 1, "traceEvents": [\n')
    for number, event in enumerate(events()):
        file.write((b",\n" if number else b"") + json.dumps(event).encode())
    file.write(b"\n]}\n")


def _snapshot(trace):
    """What PyTorch's viewer reads: plain types alone, and blocks that tile each segment."""
    placed = _Placed(trace)
    before = _failed(trace)
    entries: list[dict] = []
    live: dict[int, int] = {}
    for event, (op, one, nbytes, stream, t) in enumerate(placed.events):
        address = placed.addresses[one]
        entries += [_entry("oom", {"device_free": 0}, failed, 0, t) for failed in before.get(event, ())]
        if op:
            del live[one]
            # A free shows its block's stream.
            actions: tuple = ("free_requested", "free_completed")
            stream = placed.homes[one]
        else:
            live[one] = nbytes
            actions = ("alloc",)
        entries += [_entry(action, {"addr": address}, nbytes, stream, t) for action in actions]
    last = placed.events[-1][4] if placed.events else 0
    entries += [_entry("oom", {"device_free": 0}, failed, 0, last) for failed in before.get(len(placed.events), ())]
    segments = [_segment(placed, stream, live) for stream in placed.ranges]
    annotations = [
        {"stage": "START", "name": f"ProfilerStep#{step}", "device": 0, "time_us": t}
        for step, t in enumerate(trace.marks_us.tolist())
    ]
    return {
        "segments": segments,
        "device_traces": [entries],
        "allocator_settings": {},
        "external_annotations": annotations,
    }


def _entry(action, where, nbytes, stream, t):
    return {"action": action, **where, "size": nbytes, "stream": stream, "time_us": t, "frames": []}


def _segment(placed, stream, live):
    begin, total = placed.ranges[stream]
    mine = sorted((placed.addresses[one], nbytes) for one, nbytes in live.items() if placed.homes[one] == stream)
    blocks, at = [], begin

    def block(address, size, requested, state):
        return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": []}

    for address, nbytes in mine:
        if address > at:
            blocks.append(block(at, address - at, 0, "inactive"))
        blocks.append(block(address, _rounded(nbytes), nbytes, "active_allocated"))
        at = address + _rounded(nbytes)
    if at < begin + total:
        blocks.append(block(at, begin + total - at, 0, "inactive"))
    allocated = sum(_rounded(nbytes) for _, nbytes in mine)
    return {
        "device": 0,
        "address": begin,
        "total_size": total,
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(nbytes for _, nbytes in mine),
        "stream": stream,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _torch_pickle(trace, file):
    # The viewer reads protocols up to 4.
    pickle.dump(_snapshot(trace), file, protocol=4)


def _torch_json(trace, file):
    file.write(json.dumps(_snapshot(trace)).encode())


FORMATS = {
    "npz": npz.write,
    "rmm": _rmm,
    "torch-pickle": _torch_pickle,
    "torch-json": _torch_json,
    "kineto": _kineto,
    "umpire": _umpire,
    "stalloc": _stalloc,
    "minimalloc": _minimalloc,
}

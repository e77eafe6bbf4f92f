"""Traces in the formats of others.

None of them but vpool's own has a place for everything.  Addresses are those of a recording, or made up so that blocks
that are live at once do not overlap.
"""

import gzip
import json
import os
from pathlib import Path

import numpy as np

from vpool.files import whole_file
from vpool.formats import kineto_writer, npz, pprof, torch_writer
from vpool.formats.placement import Placement, failed_before

__all__ = ["FORMATS", "by_suffix", "write"]

_DAY_US = 86_400_000_000
_SUFFIXES = {
    ".npz": "npz",
    ".csv": "rmm",
    ".pickle": "torch-pickle",
    ".pkl": "torch-pickle",
    ".json": "torch-json",
    ".txt": "stalloc",
    ".log": "umpire",
    ".pb": "pprof",
}


def by_suffix(path):
    """The format that a file's name means; None if it means none."""
    name = str(path).lower().removesuffix(".gz")
    return next((form for suffix, form in _SUFFIXES.items() if name.endswith(suffix)), None)


def write(trace, path, form):
    """Write a trace to a file, which stays as it was if that fails."""
    if form not in FORMATS:
        raise ValueError(f"no format {form!r}; there are {', '.join(FORMATS)}")
    with whole_file(path) as file:
        if Path(path).suffix == ".gz":
            with gzip.GzipFile(os.fspath(path), "wb", fileobj=file) as packed:
                FORMATS[form](trace, packed)
        else:
            FORMATS[form](trace, file)


def _hex(stream):
    """A stream as `%p` and RMM write it."""
    return f"{stream:#x}" if stream else "0"


def _write_lines(file, lines):
    for line in lines:
        file.write(line.encode("ascii") + b"\n")


def _rmm(trace, file):
    placed = Placement(trace)
    before = failed_before(trace)
    # The earliest time is midnight: one below it would be read as the evening of the first day.
    midnight = int(trace.t_us.min(initial=0))

    def row(t, action, address, nbytes, stream):
        seconds, part = divmod((t - midnight) % _DAY_US, 1_000_000)
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
    placed = Placement(trace)
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
    placed = Placement(trace)

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


FORMATS = {
    "npz": npz.write,
    "rmm": _rmm,
    "torch-pickle": torch_writer.write_pickle,
    "torch-json": torch_writer.write_json,
    "kineto": kineto_writer.write,
    "umpire": _umpire,
    "stalloc": _stalloc,
    "minimalloc": _minimalloc,
    "pprof": pprof.write,
}

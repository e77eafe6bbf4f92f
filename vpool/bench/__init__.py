"""What an allocation costs here, beside the machine's own floor and every peer that is installed, in one run.

`bench` measures; `Results` keeps what it gave, `goals.goals` says which goals hold, and `page.page` writes it down.
"""

import contextlib
import os
import tempfile

import numpy as np

from vpool import sources
from vpool._interface import bench as loops
from vpool.bench.calls import in_parts
from vpool.bench.cases import GROUPS, cases_of, checked_groups
from vpool.bench.machine import machine, packages
from vpool.bench.own import own_subjects
from vpool.bench.peers import started_peers
from vpool.bench.results import Results, Row, ratio
from vpool.bench.runner import lock_ns, rows_of
from vpool.data import bundled_trace
from vpool.errors import SourceError
from vpool.trace import Trace

__all__ = ["GROUPS", "Results", "Row", "bench", "ratio"]

_ROUNDS = {False: 5, True: 9}
_SAMPLE_NS = {False: 3e6, True: 20e6}
_CLOCKS = 100_000
_EVENT = np.dtype([("is_free", "<u4"), ("number", "<u4"), ("bytes", "<u8"), ("stream", "<u8")])  # as in peer.cpp


def bench(only=None, full=False, traces=(), source=None, *, peers=True, scale=1.0, rounds=None, progress=None):
    """Measure what an allocation costs, every way.

    All that is measured takes turns, round by round, so that a slow moment of the machine falls on all.

    Parameters
    ----------
    only : iterable of str, optional
        Groups to measure, of `GROUPS`; all if not given.
    full : bool
        All sizes and numbers of threads, longer samples and more rounds.
    traces : iterable of path
        Recorded traces beside the one that comes with vpool.
    source : str or vpool.sources.Source, optional
        Where the pools of everything but the traces have memory from: CUDA where it works, else simulated memory.
    peers : bool
        Whether the peers that are installed take part.
    scale : float
        Of the nanoseconds of a sample.
    rounds : int, optional
    progress : callable, optional
        Called with the cases done and those in all.

    Returns
    -------
    Results

    Raises
    ------
    ValueError, TypeError
        For a group that is none, or numbers that make no sense.
    SourceError, FormatError, OSError
        Where a source or a trace cannot be used.
    """
    groups = checked_groups(only)
    rounds = _ROUNDS[bool(full)] if rounds is None else rounds
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale}")
    on_device = _on_device()
    source = sources.resolve(source if source is not None else "cuda" if on_device else "simulated")
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="vpool-bench-") as folder, contextlib.ExitStack() as stack:
        cases = cases_of(groups, full, _written(traces, folder) if "traces" in groups else ())
        subjects = own_subjects(source, _trace_sources(on_device))
        if peers:
            workers = started_peers(cases, on_device, notes)
            for worker in workers:
                stack.callback(worker.close)
            subjects += workers
        rows: list[Row] = []
        floors = [lock_ns()]
        for number, case in enumerate(cases):
            if progress:
                progress(number, len(cases))
            measured, locks = rows_of(case, subjects, rounds, _SAMPLE_NS[bool(full)] * scale, notes)
            rows += measured
            floors += locks
    return Results(
        machine=machine(),
        packages=packages(),
        settings={"groups": groups, "full": bool(full), "rounds": rounds, "source": source.name},
        floor_ns=float(np.median(floors)),
        clock_ns=in_parts(loops.clock_reads, _CLOCKS)["ns"],
        notes=notes,
        rows=rows,
    )


def _on_device():
    try:
        return sources.Cuda() is not None
    except SourceError:
        return False


def _trace_sources(on_device):
    return [*(("cuda", "cuda-vmm") if on_device else ()), "simulated", "simulated-vmm", "host"]


def _written(paths, folder):
    """Name, trace and file for peers of each trace, the one that comes with vpool first."""
    found = {"two_streams": bundled_trace()}
    for path in paths:
        found.setdefault(os.path.basename(os.fspath(path)).partition(".")[0], Trace.load(path))
    written = []
    for number, (name, trace) in enumerate(found.items()):
        events = np.zeros(len(trace), _EVENT)
        events["is_free"], events["number"] = trace.op, trace.number
        events["bytes"], events["stream"] = trace.bytes, trace.stream
        path = os.path.join(folder, f"{number}")
        events.tofile(path)
        written.append((name, trace, path))
    return written

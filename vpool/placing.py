"""Addresses for a trace that has none: where a pool's strategy would have put its blocks."""

import numpy as np

from vpool._interface.replay import Replayer
from vpool.details import Details, SegmentEvents
from vpool.replay import policy_of
from vpool.runs import pool_for, streams_of
from vpool.sizes import format_bytes
from vpool.trace import Trace

__all__ = ["placed"]

# Events that segments may add to those of the trace before it is replayed anew; the ring is mapped as it is written.
_SEGMENT_EVENTS = 1 << 16


def placed(trace, strategy=None, capacity=None):
    """A trace with the addresses that its blocks get in a simulated pool.

    Parameters
    ----------
    trace : Trace
        Its tags, sites and threads stay, if it has any.
    strategy : str, path, Policy or strategy, optional
        As of `vpool.replay`.
    capacity : int, optional
        Bytes that the pool may take.

    Returns
    -------
    Trace
        One with `details`.  Where the pool runs out of memory it ends before that request, which is the last of its
        `failures`, and a note says so.

    Notes
    -----
    A replay, recorded, so O(events); blocks without bytes have address 0.
    """
    policy = policy_of(strategy, trace, capacity)
    needed, room = len(trace) + _SEGMENT_EVENTS, 0
    while needed > room:
        room = needed
        with pool_for(policy, "simulated", capacity) as pool, streams_of(pool.source.driver, trace) as streams:
            replayer = Replayer(pool, trace, streams)
            with pool.record(capacity=room) as recording:
                done = replayer.run(0, len(trace))
            needed = len(trace) + pool.stats.source_calls + 1  # one that fails is the last
            replayer.finish()
    return _placed(trace if done == len(trace) else _ended(trace, done), recording)


def _placed(trace, recording):
    """A trace with what its recorded replay says of addresses."""
    told = recording.details
    with_bytes = np.flatnonzero(trace.bytes > 0)
    if len(with_bytes) != len(recording):
        raise AssertionError(f"{len(with_bytes)} events were replayed, and {len(recording)} recorded")

    def spread(values):
        column = np.zeros(len(trace), values.dtype)
        column[with_bytes] = values
        return column

    old = trace.details
    none = np.zeros(len(trace), np.uint32)
    moved = told.segments
    details = Details(
        spread(told.address),
        spread(told.allocated),
        none.astype(np.uint16) if old is None else old.tag,
        none if old is None else old.site,
        none if old is None else old.thread,
        [""] if old is None else old.tags,
        [""] if old is None else old.sites,
        SegmentEvents(np.append(with_bytes, len(trace))[moved.event], moved.address, moved.nbytes),
    )
    return _like(trace, len(trace), trace.notes, trace.failures, details)


def _ended(trace, event):
    """The part of a trace before a request that failed."""
    requested = int(trace.bytes[event])
    note = f"out of memory at event {event:,}, a request of {format_bytes(requested)}: what comes after it is left out"
    before = trace.failures[trace.failures[:, 0] <= event]
    failures = np.concatenate((before, np.array([[event, requested]], np.int64)))
    old = trace.details
    if old is not None:
        columns = {name: getattr(old, name)[:event] for name in ("address", "allocated", "tag", "site", "thread")}
        old = old._replace(**columns)
    return _like(trace, event, [*trace.notes, note], failures, old)


def _like(trace, events, notes, failures, details):
    """The first events of a trace, with other notes, failures and details."""
    marks = trace.marks_us
    if events < len(trace):  # no steps that begin after the request that fails
        marks = marks[marks <= trace.t_us[: events + 1].max()]
    op, number, nbytes, stream, t_us = (
        column[:events] for column in (trace.op, trace.number, trace.bytes, trace.stream, trace.t_us)
    )
    return Trace(
        op,
        number,
        nbytes,
        stream,
        t_us,
        marks_us=marks,
        notes=notes,
        failures=failures,
        figures=trace.figures,
        details=details,
    )

"""A moment of a recording: every block and segment that there was after one of its events."""

import numpy as np

from vpool.report import SEGMENT_DTYPE
from vpool.snapshot import SNAPSHOT_DTYPE, Snapshot
from vpool.trace import ALLOCATE

__all__ = ["moment"]


def moment(trace, event):
    """The snapshot of a recorded pool after an event.

    What no block covered counts as free, so what was pending does too; a block that had not all of its memory was
    suspended.  Figures that a recording has nothing of,
    as the limit and the device's memory, are those of a pool without bounds.  A request before which memory came
    counts as served by a source call, and what was there from the beginning came before the first one; where memory is
    mapped in pieces, each change of a run of them counts as a call.

    Parameters
    ----------
    trace : Trace
        One with `details`: a recording, or loaded from the file of one.
    event : int
        Number of the event; -1 is before the first one.

    Returns
    -------
    Snapshot
        Streams are the trace's indices.

    Raises
    ------
    ValueError
        Where the trace has no details, or no such event.

    Notes
    -----
    O(events).
    """
    details = trace.details
    if details is None:
        raise ValueError("only a recording has the addresses of its blocks")
    if not -1 <= event < len(trace):
        raise ValueError(f"no event {event} in a trace of {len(trace)}")
    now = int(trace.t_us[event]) if event >= 0 else 0
    births = _alive(trace, event)
    live = np.zeros(len(births), SNAPSHOT_DTYPE)
    live["address"], live["nbytes"] = details.address[births], details.allocated[births]
    live["requested"], live["stream"] = trace.bytes[births], trace.stream[births]
    live["tag"], live["site"] = details.tag[births], details.site[births]
    live["state"], live["serial"] = "live", trace.number[births]
    live["age_us"] = now - trace.t_us[births]
    live = np.sort(live[live["nbytes"] > 0], order="address")
    segments, reserved, changes = _segments(details.segments, event)
    if len(live) and not (segments["address"] <= live["address"][0]).any():  # a range that has no memory
        segments = np.concatenate((np.zeros(1, SEGMENT_DTYPE), segments))
        segments["address"][0] = live["address"][0]
    blocks = _with_gaps(live, segments)
    return Snapshot(_figures(trace, event, reserved, changes), blocks, segments, details.sites, now / 1e6)


def _alive(trace, event):
    """The events that allocated what is live after an event."""
    op, number = trace.op[: event + 1], trace.number[: event + 1]
    birth = np.full(trace.allocations, -1, np.int64)
    born = np.flatnonzero(op == ALLOCATE)
    birth[number[born]] = born
    birth[number[op != ALLOCATE]] = -1
    return birth[birth >= 0]


def _segments(moved, event):
    """The segments after an event, by address; reserved bytes from each event with changes on; and how many changes."""
    there: dict[int, int] = {}
    total = changes = 0
    reserved = {-1: 0}
    for at, address, nbytes in zip(*(column.tolist() for column in moved), strict=True):
        if at > max(event, 0):
            break
        if nbytes > 0:
            there[address] = nbytes
        else:
            there.pop(address, None)
        total += nbytes
        changes += 1
        reserved[at] = total  # once all of one event is done: a segment that only grows was never gone
    segments = np.zeros(len(there), SEGMENT_DTYPE)
    segments["address"] = sorted(there)
    segments["nbytes"] = [there[address] for address in sorted(there)]
    return segments, list(reserved.values()), changes


def _with_gaps(live, segments):
    """Blocks that tile the segments: what is live, and what is free between; beside them what has no memory."""
    number = np.maximum(np.searchsorted(segments["address"], live["address"], side="right") - 1, 0)
    live["segment"] = number
    until = (segments["address"] + segments["nbytes"])[number]
    begin, end = live["address"], live["address"] + live["nbytes"]
    live["state"][(begin < segments["address"][number]) | (end > until)] = "suspended"
    # Each segment's start and then its blocks; there may be a gap before what comes next.
    owner = np.concatenate((np.arange(len(segments)), number))
    order = np.argsort(owner, kind="stable")
    owner = owner[order]
    begins = np.concatenate((segments["address"], begin))[order]
    ends = np.concatenate((segments["address"], end))[order]
    until = (segments["address"] + segments["nbytes"])[owner]
    followed = np.flatnonzero(owner[1:] == owner[:-1])
    until[followed] = np.minimum(until[followed], begins[followed + 1])
    gaps = np.flatnonzero(until > ends)
    free = np.zeros(len(gaps), SNAPSHOT_DTYPE)
    free["address"], free["nbytes"] = ends[gaps], until[gaps] - ends[gaps]
    free["state"], free["segment"], free["age_us"] = "free", owner[gaps], -1
    blocks = np.concatenate((live, free))
    return blocks[np.lexsort((blocks["address"], blocks["segment"]))]


def _figures(trace, event, reserved, changes):
    """What a report needs beyond blocks."""
    details = trace.details
    signs = np.where(trace.op[: event + 1] == ALLOCATE, 1, -1)
    change = signs * details.allocated[: event + 1].astype(np.int64)
    peaks = _peaks(change, details.tag[: event + 1], len(details.tags))
    tags = {
        index: {"tag": details.tags[index], "peak_bytes": peaks[index], "limit_bytes": None}
        for index in range(1, len(details.tags))
    }
    return {
        "name": "recording",
        "source": "recorded",
        "device": 0,
        "limit_bytes": 2**63 - 1,
        "device_free_bytes": None,
        "device_total_bytes": None,
        "base_slack_bytes": 0,
        "reserved_bytes": reserved[-1],
        "peak_reserved_bytes": max(reserved),
        "peak_allocated_bytes": int(np.cumsum(change).max(initial=0)),
        "peak_requested_bytes": int(trace.live_bytes[: event + 1].max(initial=0)),
        "served_bytes": int(trace.bytes[: event + 1][signs > 0].sum(dtype=np.uint64)),
        "step_bytes": trace.step_bytes(event),
        "missed_bytes": _missed_bytes(trace, event),
        "source_calls": changes,
        "grows": True,
        "core": None,
        "tags": tags,
        "pending": [],
    }


def _missed_bytes(trace, event):
    """Bytes of the requests up to an event that memory came right before, and not what was left of a longer run."""
    grown = set()
    gone: list[tuple] = []
    last = -1
    for at, address, nbytes in zip(*(column.tolist() for column in trace.details.segments), strict=True):
        if at > event:
            break
        if at != last:
            gone, last = [], at
        if nbytes < 0:
            gone.append((address, address - nbytes))
        elif not any(begin <= address and address + nbytes <= end for begin, end in gone):
            grown.add(at)
    events = np.array(sorted(grown), np.int64)
    return int(trace.bytes[events[trace.op[events] == ALLOCATE]].sum(dtype=np.uint64))


def _peaks(change, group, groups):
    """The highest running total of each group of changes, 0 at least."""
    order = np.argsort(group, kind="stable")
    total = np.cumsum(change[order])
    present, first = np.unique(group[order], return_index=True)
    peaks = np.zeros(groups, np.int64)
    if len(present):
        before = np.concatenate((np.zeros(1, np.int64), total))[first]
        peaks[present] = np.maximum(np.maximum.reduceat(total, first) - before, 0)
    return peaks.tolist()

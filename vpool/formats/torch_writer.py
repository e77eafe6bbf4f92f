"""What PyTorch's memory viewer reads: plain types alone, and blocks that tile each segment."""

import json
import pickle

from vpool.formats.placement import Placement, failed_before, frames_of

__all__ = ["write_json", "write_pickle"]


def write_pickle(trace, file):
    """A pickle for pytorch.org/memory_viz."""
    # It reads protocols up to 4.
    pickle.dump(_snapshot(trace), file, protocol=4)


def write_json(trace, file):
    """The same as JSON."""
    file.write(json.dumps(_snapshot(trace)).encode())


class _Told:
    """What is told of blocks beyond their places: frames and tags, by the number of the allocation."""

    def __init__(self, trace):
        details = trace.details
        self.frames = self.tags = None
        if details is None:
            return
        births = (trace.op == 0).nonzero()[0]
        if any(details.sites):
            # One list a site: a pickle keeps it once.
            frames = [
                [{"filename": file, "line": line, "name": name} for file, line, name in frames_of(site)]
                for site in details.sites
            ]
            self.frames = [frames[site] for site in details.site[births].tolist()]
        if any(details.tags):
            self.tags = [details.tags[tag] for tag in details.tag[births].tolist()]

    def frames_of(self, one):
        return [] if self.frames is None else self.frames[one]

    def entry(self, action, where, nbytes, stream, t, one=None):
        entry = {"action": action, **where, "size": nbytes, "stream": stream, "time_us": t}
        entry["frames"] = [] if one is None else self.frames_of(one)
        if self.tags is not None and one is not None:
            entry["user_metadata"] = self.tags[one]
        return entry


def _snapshot(trace):
    placed, told = Placement(trace), _Told(trace)
    live: dict[int, int] = {}
    entries = _entries(placed, told, failed_before(trace), live)
    annotations = [
        {"stage": "START", "name": f"ProfilerStep#{step}", "device": 0, "time_us": t}
        for step, t in enumerate(trace.marks_us.tolist())
    ]
    return {
        "segments": _segments(placed, told, live),
        "device_traces": [entries],
        "allocator_settings": {},
        "external_annotations": annotations,
    }


def _entries(placed, told, before, live):
    """The history; `live` gets the bytes of what is live at its end, by number."""
    entries: list[dict] = []

    def come_before(event, t):
        for address, nbytes in placed.changes.get(event, ()):
            action = "segment_alloc" if nbytes > 0 else "segment_free"
            entries.append(told.entry(action, {"addr": address}, abs(nbytes), 0, t))
        for failed in before.get(event, ()):
            entries.append(told.entry("oom", {"device_free": 0}, failed, 0, t))

    for event, (op, one, nbytes, stream, t) in enumerate(placed.events):
        come_before(event, t)
        where = {"addr": placed.addresses[one]}
        if not op:
            live[one] = nbytes
            entries.append(told.entry("alloc", where, nbytes, stream, t, one))
            continue
        del live[one]
        for action in ("free_requested", "free_completed"):
            # A free shows its block's stream.
            entries.append(told.entry(action, where, nbytes, placed.homes[one], t, one))
    come_before(len(placed.events), placed.events[-1][4] if placed.events else 0)
    return entries


def _segments(placed, told, live):
    """The segments at the end, by address, with their blocks."""
    order = sorted((placed.addresses[one], one) for one in live)
    begins = sorted(placed.segments)
    rows, at = [], 0
    for begin in begins:
        mine = []
        end = begin + placed.segments[begin][0]
        while at < len(order) and order[at][0] < end:
            address, one = order[at]
            # Not what was suspended, below which there is no memory, or not everywhere.
            if begin <= address and address + placed.sizes[one] <= end:
                mine.append(one)
            at += 1
        rows.append(_segment(placed, told, begin, mine, live))
    return rows


def _segment(placed, told, begin, mine, live):
    total, stream = placed.segments[begin]
    blocks, at = [], begin

    def block(address, size, requested, state, frames):
        return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}

    for one in mine:
        address, size = placed.addresses[one], placed.sizes[one]
        if address > at:
            blocks.append(block(at, address - at, 0, "inactive", []))
        blocks.append(block(address, size, live[one], "active_allocated", told.frames_of(one)))
        at = address + size
    if at < begin + total:
        blocks.append(block(at, begin + total - at, 0, "inactive", []))
    allocated = sum(placed.sizes[one] for one in mine)
    return {
        "device": 0,
        "address": begin,
        "total_size": total,
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(live[one] for one in mine),
        "stream": stream,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }

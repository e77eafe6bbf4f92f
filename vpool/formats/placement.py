"""Addresses for the formats that need them: where a recording's blocks were, or made up."""

import numpy as np

__all__ = ["Placement", "failed_before", "frames_of", "rounded"]

_GRAIN = 512
_BASE = 1 << 40


def rounded(nbytes):
    """Bytes of a block whose address is made up."""
    return max(_GRAIN, -(-nbytes // _GRAIN) * _GRAIN)


def failed_before(trace):
    """Bytes of the requests that failed before each event, by its number."""
    before: dict[int, list] = {}
    for event, nbytes in trace.failures.tolist():
        before.setdefault(event, []).append(nbytes)
    return before


def frames_of(site):
    """File, line and function of each caller that a site names, the nearest first."""
    frames = []
    for part in site.split(" < ") if site else ():
        where, _, name = part.rpartition(" in ")
        file, _, line = where.rpartition(":")
        frames.append((file, int(line), name) if line.isdigit() else (part, 0, part))
    return frames


class Placement:
    """A trace with addresses.

    Those of a recording are its own.  Else blocks that are live at once do not overlap, and what was freed serves the
    same size on the same stream again.

    Attributes
    ----------
    events : list
        Op, number, bytes, stream and microseconds of each event.
    addresses, sizes, homes : list of int
        Of each allocation by its number: where it is, its bytes after rounding, and its stream.
    changes : dict
        By event, the segments that came or went before it: address, and bytes, which are negative for one that went.
    segments : dict
        Begin and bytes of those that are there at the end, each with its stream.
    """

    def __init__(self, trace):
        columns = (trace.op, trace.number, trace.bytes, trace.stream, trace.t_us)
        self.events = list(zip(*(column.tolist() for column in columns), strict=True))
        births = np.flatnonzero(trace.op == 0)
        self.homes = trace.stream[births].tolist()
        self.changes: dict[int, list] = {}
        self.segments: dict[int, tuple[int, int]] = {}
        details = trace.details
        if details is not None and details.allocated[births].all():
            self.addresses = details.address[births].tolist()
            self.sizes = details.allocated[births].tolist()
            self._recorded(details.segments)
        else:
            self.sizes = [rounded(nbytes) for nbytes in trace.bytes[births].tolist()]
            self._make_up()

    def _recorded(self, moved):
        for event, address, nbytes in zip(*(column.tolist() for column in moved), strict=True):
            self.changes.setdefault(event, []).append((address, nbytes))
            if nbytes > 0:
                self.segments[address] = nbytes, 0
            else:
                self.segments.pop(address, None)

    def _make_up(self):
        offsets: list[int] = []
        spare: dict[tuple, list] = {}
        ends: dict[int, int] = {}
        for op, one, _, stream, _ in self.events:
            size = self.sizes[one]
            if op:
                spare.setdefault((self.homes[one], size), []).append(offsets[one])
                continue
            same = spare.get((stream, size))
            offsets.append(same.pop() if same else ends.get(stream, 0))
            ends[stream] = max(ends.get(stream, 0), offsets[one] + size)
        begin, begins = _BASE, {}
        for stream, nbytes in sorted(ends.items()):
            begins[stream] = begin
            self.segments[begin] = nbytes, stream
            begin += nbytes
        self.addresses = [begins[home] + offset for home, offset in zip(self.homes, offsets, strict=True)]

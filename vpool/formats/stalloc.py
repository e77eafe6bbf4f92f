"""Logs of STAlloc: ``1 address bytes stream`` allocates and ``0 address bytes stream`` frees."""

import re

from vpool.formats.events import Events
from vpool.formats.logs import Others, read_lines
from vpool.sizes import plural

__all__ = ["EVENT", "STEP", "read"]

EVENT = re.compile(rb"([01])\s+(0x[0-9a-f]{1,16}|0)\s+(\d+)(?:\s+((?:0x)?[0-9a-f]+))?", re.IGNORECASE)
STEP = re.compile(rb"Iteration Index\s*:\s*(\S+)")


class _Log:
    def __init__(self):
        self.events = Events()
        self.others = Others()
        self.streamless = None

    def add(self, line, text):
        events = self.events
        found = EVENT.fullmatch(text)
        if not found:
            step = STEP.match(text)
            if step:
                if step[1].isdigit():
                    # The file has no times: events are counted.
                    events.mark(len(events))
            elif text[:1] in b"01" and text[1:2] in b" \t":
                raise ValueError("no event of four columns")
            else:
                self.others.add(line, text.split(b":")[0].strip())
            return
        kind, address, size, stream = found.groups()
        if self.streamless is None:
            self.streamless = stream is None
        elif self.streamless != (stream is None):
            # As of a line that was cut, whose last number is not whole then.
            raise ValueError("another number of columns than before")
        address, size = int(address, 16), int(size)
        # Streams are pointers, and 0 is written in more than one way.
        stream = int(stream or b"0", 16)
        if kind == b"0":
            events.free(address, len(events), stream, size)
        elif size and not address:
            events.fail(size)
        else:
            events.allocate(address, size, stream, len(events))


def read(source, device=None):
    """The arrays of a log, which is of one device and without times."""
    log = _Log()
    events = log.events
    read_lines(source, log.add, events.notes)
    events.notes.append("no times in the file: an event counts as a microsecond")
    if log.others.count:
        events.notes.append(f"{plural(log.others.count, 'line')} without an event {log.others}: left out")
    births = events.allocations
    figures = {"allocs": births, "frees": len(events) - births + events.orphans, "orphan_frees": events.orphans}
    return {**events.arrays(), "figures": figures}

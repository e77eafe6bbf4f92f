"""Logs of RMM's allocators: CSV of today, of the releases before, and of 2019."""

import re
from collections import Counter

from vpool.errors import FormatError
from vpool.formats.devices import chosen
from vpool.formats.events import Events, short
from vpool.formats.logs import DATED, Others, cells_of, microseconds, read_lines
from vpool.sizes import plural

__all__ = ["columns_of", "read"]

_DAY_US = 86_400_000_000
# So much earlier than the row before means the next day; less is threads that wrote out of order, or a clock
# that was set.
_WRAP_US = 2 * 3_600_000_000
_JITTER_US = 60_000_000
_CLOCK = re.compile(rb"(\d\d):(\d\d):(\d\d)(?:[.:,](\d{1,9}))?")
_HEX = re.compile(rb"(?:0x)?[0-9a-f]{1,16}", re.IGNORECASE)
_NULLS = (b"", b"(nil)", b"nil", b"0", b"0x0", b"(null)", b"null", b"nullptr")
_ACTIONS = {
    b"allocate": "allocate",
    b"alloc": "allocate",
    b"free": "free",
    b"deallocate": "free",
    b"allocate failure": "allocate failure",
    b"alloc failure": "allocate failure",
}
_MOST_DEVICES = 1024
# Names of the columns, by what they are; the first that a file has counts.
_NAMES = {
    "thread": (b"thread",),
    "time": (b"time", b"start"),
    "action": (b"action", b"event type"),
    "address": (b"pointer", b"address"),
    "size": (b"size", b"size (bytes)"),
    "stream": (b"stream",),
    "device": (b"device id", b"device"),
}


def columns_of(line):
    """The place of each column that a line names, or that a row has without a header; None if it is neither.

    Returns
    -------
    (dict, bool) or None
        Whether the line is a header comes with the places.
    """
    if b"\r" in line:
        # Lines that end with it alone are one to us, and a header would hide every row after it.
        return None
    cells = cells_of(line.lower())
    places: dict[str, int] = {}
    for what, names in _NAMES.items():
        place = next((cells.index(name) for name in names if name in cells), None)
        if place is not None:
            places[what] = place
    if {"action", "address", "size"} <= places.keys():
        return {**places, "cells": len(cells)}, True
    for row in (("thread", "time", *_UNTHREADED), ("time", *_UNTHREADED)):
        if len(cells) == len(row) and cells[row.index("action")] in _ACTIONS:
            return {**{what: place for place, what in enumerate(row)}, "cells": len(cells)}, False
    return None


_UNTHREADED = ("action", "address", "size", "stream")
_HEADS = (b"thread", b"time", b"event type")
_MOST_THREADS = 1 << 16


class _Log:
    """One log, row by row."""

    def __init__(self, notes):
        self.notes = notes
        self.columns: dict = {}
        self.devices = {}
        self.rows: Counter[str] = Counter()
        self.unknown = Others()
        self.threads, self.streams = set(), {}
        self.failed_at = None
        self.days, self.before = 0, None
        self.wraps = self.headers = 0
        self.headless = False
        self.first = None

    def add(self, line, text):
        """One row, or a header: logs that were put together have several."""
        if text[:1] == b"#":
            return
        may_tell = not self.columns or text.lstrip(b'"')[:12].lower().startswith(_HEADS)
        found = columns_of(text) if may_tell else None
        if found and found[1]:
            self.headers += 1
            self.columns = found[0]
            self.take_first()
        elif self.columns:
            self._row(line, text)
        elif self.first is None:
            self.first = line, text
        elif found is None:
            raise ValueError("no header and no row of a log of RMM")
        else:
            self.columns, self.headless = found[0], True
            self.take_first()
            self._row(line, text)

    def take_first(self):
        """The first row of a file without a header, which waits for the second: it may begin in its middle."""
        if self.first is None:
            return
        (line, text), self.first = self.first, None
        found = columns_of(text)
        if found and not self.columns:
            self.columns, self.headless = found[0], True
        try:
            if found is None or found[0] != self.columns:
                raise ValueError("of another form")
            self._row(line, text)
        except (ValueError, OverflowError):
            self.notes.append(f"line {line}, the first, does not begin as a row does: left out")

    def _row(self, line, text):
        columns, cells = self.columns, cells_of(text)
        if len(cells) < columns["cells"]:
            raise ValueError(f"{plural(len(cells), 'column')}, not {columns['cells']}")
        written = cells[columns["action"]].lower()
        action = _ACTIONS.get(written)
        if action is None:
            self.unknown.add(line, written)
            return
        events = self._events(cells)
        address = cells[columns["address"]].lower()
        size = int(cells[columns["size"]])
        stream = short(cells[columns["stream"]]).decode("ascii") if "stream" in columns else "0"
        stream = "0" if stream in ("0x0", "(nil)", "") else stream
        if size < 0:
            raise ValueError(f"a size of {size} bytes")
        if address not in _NULLS and not _HEX.fullmatch(address):
            raise ValueError(f"{address!r:.40} is no address")
        t = self._time(cells)
        if "thread" in columns and len(self.threads) < _MOST_THREADS:
            self.threads.add(short(cells[columns["thread"]]))
        self.rows[action] += 1
        self.streams[stream] = None
        null = address in _NULLS
        if action == "allocate failure" or (null and action == "allocate" and size):
            events.fail(size)
            self.failed_at = self.failed_at or line
        elif action == "allocate":
            events.allocate(0 if null else int(address, 16), size, stream, t)
        else:
            # Logs of 2019 tell no size when they free.
            events.free(0 if null else int(address, 16), t, stream, None if self.legacy else size)

    @property
    def legacy(self):
        return "device" in self.columns

    def _events(self, cells):
        device = int(cells[self.columns["device"]]) if self.legacy else 0
        if device not in self.devices:
            if len(self.devices) == _MOST_DEVICES:
                raise ValueError(f"more than {_MOST_DEVICES} devices")
            self.devices[device] = Events()
        return self.devices[device]

    def _time(self, cells):
        """Microseconds; a time of day that is far before the last one is of the next day."""
        if "time" not in self.columns:
            return sum(self.rows.values())
        text = cells[self.columns["time"]]
        found = _CLOCK.fullmatch(text)
        if not found:
            if DATED.fullmatch(text.removesuffix(b"Z")):
                return microseconds(text.removesuffix(b"Z"))
            t = float(text) * 1e6
            if not abs(t) < 2.0**62:
                raise ValueError(f"a time of {text!r:.40}")
            return round(t)
        hour, minute, second, part = found.groups(b"0")
        if hour > b"24" or minute > b"59" or second > b"60":
            raise ValueError(f"{text!r} is no time of day")
        t = (int(hour) * 60 + int(minute)) * 60_000_000 + int(second) * 1_000_000 + int(part.ljust(6, b"0")[:6])
        before, self.before = self.before, t
        if before is not None:
            if t < before - _WRAP_US:
                self.days += 1
                self.wraps += 1
            elif self.days and before < _JITTER_US and t > _DAY_US - _JITTER_US:
                # Written late, by another thread: still of the day before.
                self.before = before
                return t + (self.days - 1) * _DAY_US
        return t + self.days * _DAY_US

    def arrays(self, wanted):
        best, note = chosen({device: len(events) for device, events in self.devices.items()}, wanted)
        events = self.devices.get(best, Events())
        events.notes += self.notes
        if note:
            events.notes.append(note)
        if self.headless:
            events.notes.append("no header: columns as RMM writes them")
        if self.headers > 1:
            events.notes.append(f"{self.headers} headers: logs one after the other, of which addresses may be reused")
        if self.wraps:
            events.notes.append(f"the time of day passes midnight {plural(self.wraps, 'time')}")
        if self.unknown.count:
            events.notes.append(f"{plural(self.unknown.count, 'row')} of another kind {self.unknown}: left out")
        if self.failed_at:
            events.notes.append(f"the first request that failed is in line {self.failed_at}")
        figures = {
            "rows": dict(self.rows),
            "orphan_or_double_frees": events.orphans,
            "cross_stream_frees": events.crossed,
            "streams": sorted(self.streams),
            "threads": len(self.threads),
        }
        return {**events.arrays(), "figures": figures}


def read(source, device=None):
    """The arrays of a log."""
    log = _Log([])
    read_lines(source, log.add, log.notes)
    log.take_first()
    if not log.columns:
        raise FormatError("no header and no row of a log of RMM")
    return log.arrays(device)

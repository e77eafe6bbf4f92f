"""Umpire's replay logs: lines of JSON, with two records for most calls, or with one since 2022."""

from collections import Counter

from vpool.formats.events import Events, number, short
from vpool.formats.json_stream import parsed_line
from vpool.formats.logs import read_lines
from vpool.sizes import plural

__all__ = ["read", "record_of"]

_MOST_KINDS = 1000


def record_of(line):
    """The record on a line; None for JSON of another kind, and a ValueError for what is none."""
    # Some tools make an array of the lines.
    value = parsed_line(line.lstrip(b"[ ").rstrip(b", ]"))
    return value if _is_record(value) else None


def _is_record(value):
    return isinstance(value, dict) and (
        (value.get("kind") == "replay" and "event" in value)
        or ("name" in value and value.get("category") in ("operation", "statistic", "metadata"))
    )


class _Log:
    def __init__(self):
        self.events = Events()
        self.records: Counter[str] = Counter()
        self.allocators = {}
        self.last = None
        self.foreign = self.lines = 0

    def add(self, line, text):
        if text[:1] == b"#" or text in (b"[", b"]"):
            return
        self.lines += 1
        try:
            record = record_of(text)
        except ValueError:
            if self.lines > 1:
                raise
            record = None  # the file may begin in the middle of a line
        if record is None:
            self.foreign += 1
            return
        if "event" in record:
            name, told, result = record["event"], record.get("payload") or {}, record.get("result")
            kind = f"{name} (intention)" if result is None else name
        else:
            # Newer logs have one record for a call, when it is done.
            name = kind = record["name"]
            told = result = {**(record.get("numeric_args") or {}), **(record.get("string_args") or {})}
        if len(self.records) < _MOST_KINDS or kind in self.records:
            self.records[short(str(kind))] += 1
        t = number(record.get("timestamp", len(self.events)))
        if not abs(t) < 2**62:
            raise OverflowError(f"a time of {t}")
        # The addresses of several processes may be in one log.
        self._event(name, short(record.get("uid")), told, result, t)

    def _event(self, name, process, told, result, t):
        events = self.events
        if name in ("allocate", "named_allocate") and result is not None:
            self._count(told)
            events.allocate((process, _pointer(result, "memory_ptr", "pointer")), number(told["size"]), 0, t)
        elif name == "deallocate":
            address = process, _pointer(told, "memory_ptr", "pointer")
            # If the call is told twice, the second is the same one.
            if result is told or result is None or self.last != address:
                events.free(address, t)
            self.last = address if result is None else None
        elif name == "reallocate" and result is not None:
            old = process, _pointer(told, "current_ptr", "current_pointer")
            if old[1]:
                events.free(old, t)
            if number(told["size"]):
                self._count(told)
                new = _pointer(result, "memory_ptr", "new_ptr", "new_pointer", "pointer")
                events.allocate((process, new), number(told["size"]), 0, t)

    def _count(self, told):
        allocator = short(str(told.get("allocator_ref")))
        if allocator in self.allocators or len(self.allocators) < _MOST_KINDS:
            self.allocators[allocator] = self.allocators.get(allocator, 0) + 1


def _pointer(told, *names):
    for name in names:
        if name in told:
            value = told[name]
            return 0 if value in ("(nil)", "") else number(value)
    raise KeyError(names[0])


def read(source, device=None):
    """The arrays of a log; all its allocators count together."""
    log = _Log()
    events = log.events
    read_lines(source, log.add, events.notes)
    if len(log.allocators) > 1:
        events.notes.append(f"{len(log.allocators)} allocators, which count together")
    if log.foreign:
        events.notes.append(f"{plural(log.foreign, 'line')} without a record of Umpire: left out")
    if log.records["reallocate"]:
        events.notes.append(f"{plural(log.records['reallocate'], 'reallocation')}: each a free and an allocation")
    figures = {
        "records": dict(log.records),
        "allocs_at_an_address_already_live": events.doubled,
        "orphan_frees_ignoring_reallocate": events.orphans,
    }
    return {**events.arrays(per_us=1000), "figures": figures}

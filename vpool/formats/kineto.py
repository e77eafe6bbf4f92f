"""Traces of PyTorch's profiler (Kineto) with `profile_memory`: instants named ``[memory]``."""

from array import array

import numpy as np

from vpool.errors import FormatError
from vpool.formats.devices import chosen
from vpool.formats.events import Events, number, short
from vpool.formats.json_stream import JsonStream
from vpool.formats.source import Cut
from vpool.sizes import plural

__all__ = ["read"]

_CPU = 0
_MOST_DEVICES = 1 << 12
_MEMORY, _FAILED, _STEP = "[memory]", "[OutOfMemory]", "ProfilerStep"


class _Instants:
    """Memory events of every device, as they stand in the file."""

    def __init__(self):
        self.events = 0
        self.t, self.address, self.bytes, self.device = array("d"), array("Q"), array("q"), array("H")
        self.devices = {}
        self.unnamed = self.failed = 0
        self.steps = {}

    def add(self, event):
        self.events += 1
        name = event.get("name")
        if name in (_MEMORY, _FAILED):
            self._memory(event, name == _FAILED)
        elif isinstance(name, str) and name.startswith(_STEP) and event.get("ph") in ("X", "B"):
            # The device's copy of a step begins later.
            t = _time(event)
            self.steps[short(name)] = min(t, self.steps.get(name, t))

    def _memory(self, event, failed):
        told = event["args"]
        kind, index = number(told.get("Device Type", 1)), number(told.get("Device Id", 0))
        address = told.get("Addr")
        self.unnamed += address is None and not failed
        nbytes = number(told["Bytes"])
        t = _time(event)
        if failed:
            # No address of an allocation is the largest of all.
            address, nbytes = _NOWHERE, abs(nbytes)
        self.failed += failed
        self.t.append(t)
        self.bytes.append(nbytes)
        self.address.append(_UNNAMED if address is None else number(address))
        if (kind, index) not in self.devices and len(self.devices) == _MOST_DEVICES:
            raise ValueError(f"more than {_MOST_DEVICES} devices")
        self.device.append(self.devices.setdefault((kind, index), len(self.devices)))


def _time(event):
    t = float(event["ts"])
    if not abs(t) < 2.0**62:
        raise ValueError(f"a time of {t}")
    return t


_NOWHERE, _UNNAMED = 2**64 - 1, 2**64 - 2


def read(source, device=None):
    """The arrays of one device's memory events."""
    stream, instants, cut = JsonStream(source), _Instants(), None
    try:
        if stream.peek() == "[":
            _events(stream, instants)
        else:
            for name in stream.members():
                if name == "traceEvents" and stream.peek() == "[":
                    _events(stream, instants)
                else:
                    stream.skip()
        stream.finish()
    except Cut:
        cut = f"the file ends at character {stream.offset}, before its end: read up to there"
    return _arrays(instants, device, cut)


def _events(stream, instants):
    for index in stream.items():
        at, event = stream.offset, stream.value()
        try:
            instants.add(event)
        except KeyError as reason:
            raise FormatError(f"character {at}, event {index}: no {reason}") from None
        except (TypeError, ValueError, OverflowError, AttributeError) as reason:
            raise FormatError(f"character {at}, event {index}: {reason}") from None


def _arrays(instants, wanted, cut):
    t, nbytes = np.array(instants.t), np.array(instants.bytes, np.int64)
    address, device = np.array(instants.address, np.uint64), np.array(instants.device, np.uint16)
    counts = np.bincount(device, minlength=len(instants.devices))
    names = {_name(*key): number for key, number in instants.devices.items()}
    best, note = chosen({name: int(counts[number]) for name, number in names.items()}, wanted, ("cpu",))
    events = Events()
    events.notes += [sentence for sentence in (note, cut) if sentence]
    if best is None and not names:
        events.notes.append("no memory events: the profiler ran without profile_memory")
    mine = np.flatnonzero(device == names.get(best, len(names)))
    order = mine[np.argsort(t[mine], kind="stable")]
    if (np.diff(t[mine]) < 0).any():
        events.notes.append("the file's events are not in the order of their times: sorted")
    if instants.unnamed:
        events.notes.append(
            f"{plural(instants.unnamed, 'memory event')} without an address: a free ends the last allocation of its "
            "size"
        )
    start = np.floor(t[order[0]]) if len(order) else 0.0
    unnamed: dict[int, list] = {}
    for row in order.tolist():
        _add(events, unnamed, int(t[row] - start), int(address[row]), int(nbytes[row]))
    for begin in sorted(instants.steps.values()):
        events.mark(int(begin - start))
    cpu = int(counts[names["cpu"]]) if "cpu" in names else 0
    others = int(counts.sum()) - cpu
    figures = {
        "events": instants.events,
        "memory_events": int(counts.sum()) - instants.failed,
        "cuda_memory_events": others - instants.failed,
        "cpu_memory_events": cpu,
        "orphan_frees": events.orphans,
    }
    return {**events.arrays(), "figures": figures}


def _add(events, unnamed, t, address, nbytes):
    if address == _NOWHERE:
        events.fail(nbytes)
    elif address == _UNNAMED:
        same = unnamed.setdefault(abs(nbytes), [])
        if nbytes > 0:
            same.append(events.begin(nbytes, 0, t))
        elif nbytes < 0 and same:
            events.end(same.pop(), t)
        elif nbytes < 0:
            events.orphans += 1
    elif nbytes > 0:
        events.allocate(address, nbytes, 0, t)
    elif nbytes < 0:
        events.free(address, t, nbytes=-nbytes)


def _name(kind, index):
    """A device as its user names it."""
    if kind == _CPU:
        return "cpu"
    return index if kind == 1 else f"{index} of type {kind}"

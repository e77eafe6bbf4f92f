"""PyTorch's memory snapshots: `torch.cuda.memory._dump_snapshot`, as pickle or as JSON."""

from array import array
from collections import Counter

from vpool.errors import FormatError
from vpool.formats.devices import chosen
from vpool.formats.events import Events, number, short
from vpool.formats.json_stream import JsonStream
from vpool.formats.plain_pickle import DROPPED, PlainUnpickler
from vpool.formats.source import Cut
from vpool.sizes import plural

__all__ = ["read_json", "read_pickle"]

_MOST_DEVICES = 1024
_TOTALS = (
    "segments", "reserved_bytes", "allocated_bytes", "active_blocks", "inactive_blocks", "largest_inactive"
)  # fmt: skip
# Annotations that tell of steps: the profiler's, and an optimizer's.
_PROFILED, _OPTIMIZED = "ProfilerStep", "Optimizer.step"
_ACTIVE = ("active_allocated", "active_pending_free", "active_awaiting_free")


class _Row(int):
    """The number of a trace entry in `_Entries`, which stands for it."""

    __slots__ = ()


class _Entries:
    """Trace entries without what they do not need here, in little memory."""

    def __init__(self):
        self.actions, self.streams = {}, {}
        self.action, self.stream = array("H"), array("I")
        self.address, self.size, self.t = array("Q"), array("Q"), array("q")

    def add(self, entry):
        action, address, size, stream, t = _fields(entry)
        self.address.append(address)
        self.size.append(size)
        self.t.append(t)
        self.action.append(self.actions.setdefault(action, len(self.actions)))
        self.stream.append(self.streams.setdefault(stream, len(self.streams)))
        return _Row(len(self.t) - 1)

    def rows(self):
        """A function from a row's number to its fields."""
        actions, streams = list(self.actions), list(self.streams)

        def fields(row):
            return (
                actions[self.action[row]], self.address[row], self.size[row], streams[self.stream[row]], self.t[row]
            )  # fmt: skip

        return fields


# Entries that do not all tell a size.
_SIZELESS = ("snapshot", "oom")


def _fields(entry):
    """Action, address, size, stream and time of a trace entry."""
    action = entry["action"]
    if type(action) is not str:
        raise ValueError("an action that is no text")
    short(action)
    # An entry for a failed request has no address, and the size that was asked for.
    address = number(entry.get("addr", 0))
    if not 0 <= address < 2**64:
        raise ValueError(f"{address} is no address")
    return (
        action,
        address,
        number(entry.get("size", 0)) if action in _SIZELESS else number(entry["size"]),
        number(entry.get("stream", 0)),
        number(entry.get("time_us", 0)),
    )


class _Device:
    """What one device's entries say."""

    def __init__(self):
        self.events = Events()
        self.actions: Counter[str] = Counter()
        self.requested = {}

    def add(self, action, address, size, stream, t):
        """One entry."""
        events = self.events
        self.actions[action] += 1
        if action == "alloc":
            if address in self.requested and address in events.live:
                # Its address is in use again, so the free was completed.
                del self.requested[address]
                events.free(address, t)
            events.allocate(address, size, stream, t)
        elif action in ("free_completed", "free"):
            self.requested.pop(address, None)
            events.free(address, t, stream)
        elif action == "free_requested":
            if address in events.live:
                self.requested[address] = None
        elif action == "oom":
            events.fail(size)


class _Snapshot:
    """Segments and events of each device."""

    def __init__(self):
        self.devices = {}
        self.totals = {}
        self.blocks = {}
        self.profiled, self.optimized = [], []

    def device(self, index):
        if index not in self.devices and len(self.devices) == _MOST_DEVICES:
            raise ValueError(f"more than {_MOST_DEVICES} devices")
        return self.devices.setdefault(index, _Device())

    def segment(self, segment, blocks):
        """Add a segment, and its blocks as `_block` gives them."""
        device, stream = number(segment.get("device", 0)), number(segment.get("stream", 0))
        self.device(device)
        total = self.totals.setdefault(device, Counter())
        total["segments"] += 1
        total["reserved_bytes"] += number(segment["total_size"])
        total["allocated_bytes"] += number(segment.get("allocated_size", 0))
        after = number(segment.get("address", 0))
        for address, size, requested, state in blocks:
            address = after if address is None else address
            after = address + size
            if state in _ACTIVE:
                total["active_blocks"] += 1
                self.blocks.setdefault(device, {})[address] = (requested, stream)
            else:
                total["inactive_blocks"] += 1
                total["largest_inactive"] = max(total["largest_inactive"], size)

    def annotate(self, annotation):
        if not isinstance(annotation, dict):
            return
        told: list = [annotation.get(field) for field in ("name", "stage", "time_us")]
        # What else stands there says nothing of memory.
        if list(map(type, told)) == [str, str, int] and abs(told[2]) < 2**62:
            name, stage, t = told
            if name.startswith(_PROFILED) and stage == "START":
                self.profiled.append(t)
            elif name.startswith(_OPTIMIZED) and stage == "END":
                self.optimized.append(t)

    def arrays(self, wanted, cut):
        """The trace of one device."""
        for index in self.totals:
            self.device(index)
        busy = {index: (len(device.events), len(self.blocks.get(index, ()))) for index, device in self.devices.items()}
        index, note = chosen(busy, wanted)
        device = self.devices.get(index, _Device())
        events, blocks = device.events, self.blocks.get(index, {})
        if note:
            events.notes.append(note)
        if cut:
            events.notes.append(cut)
        if not len(events):
            self._picture(events, blocks)
        else:
            older = [size for address, (size, _) in blocks.items() if address not in events.live]
            if older:
                events.notes.append(
                    f"{plural(len(older), 'block')} of {sum(older):,} bytes in the segments older than the first "
                    "event: not in the trace"
                )
        if device.requested:
            events.notes.append(f"{plural(len(device.requested), 'free')} requested and not completed at the end")
        # Steps are the profiler's own, or else begin when an optimizer's ends.
        for t in self.profiled or self.optimized:
            events.mark(t)
        figures = {
            **dict.fromkeys(_TOTALS, 0),
            **self.totals.get(index, {}),
            "actions": dict(device.actions),
            "orphan_frees": events.orphans,
        }
        return {**events.arrays(), "figures": figures}

    @staticmethod
    def _picture(events, blocks):
        """Without a history the blocks are what there is."""
        events.notes.append(
            f"no events, only a picture of one moment: its {plural(len(blocks), 'active block')}, in the order of "
            "their addresses"
        )
        for address in sorted(blocks):
            size, stream = blocks[address]
            events.allocate(address, size, stream, 0)


def _block(block):
    """Address, if it is told, size, bytes that were asked for, and state of a block."""
    size, state = number(block["size"]), block["state"]
    if state not in _ACTIVE and state != "inactive":
        raise ValueError(f"a block in state {state!r:.40}")
    # Releases of PyTorch differ in where they keep it.
    requested, history = block.get("requested_size", size), block.get("history")
    if isinstance(history, list) and history and isinstance(history[0], dict):
        requested = history[0].get("real_size", requested)
    address, requested = block.get("address"), number(requested)
    for nbytes in (size, requested):
        if not 0 <= nbytes < 2**63:
            raise OverflowError(f"a block of {nbytes} bytes")
    return None if address is None else number(address), size, requested, state


def read_pickle(source, device=None):
    """The arrays of a pickled snapshot."""
    entries = _Entries()

    def finish(value):
        if "action" in value:
            try:
                return entries.add(value)
            except KeyError as reason:
                raise ValueError(f"an event without {reason}") from None
        if "filename" in value and "line" in value:
            return DROPPED
        value.pop("frames", None)
        return value

    pickle, cut = PlainUnpickler(source, finish), None
    try:
        root = pickle.load()
    except Cut:
        root = pickle.rest()
        cut = f"the file ends at byte {pickle.offset} of the pickle, before its end: read up to there"
    walk = _Walk(source.offset, entries.rows())
    try:
        walk.root(root)
    except _WRONG as reason:
        if not (cut and walk.last):
            raise FormatError(f"{walk.place}: {_said(reason)}") from None
    if not walk.known:
        raise FormatError("a pickle without segments and device_traces: no memory snapshot")
    return walk.snapshot.arrays(device, cut)


_PARTS = {"segments": dict, "device_traces": (list, tuple), "external_annotations": object}


class _Walk:
    """Through a snapshot in memory, whose parts may be shared: no further than its file is long.

    Attributes
    ----------
    place : str
        Where the walk is.
    last : bool
        Nothing comes after it.
    known : bool
        There is a part that snapshots have.
    """

    def __init__(self, most, fields):
        self.snapshot = _Snapshot()
        self.place, self.last, self.known = "the pickle", True, False
        self._left, self._fields = most, fields

    def root(self, root):
        """The whole of it."""
        if isinstance(root, (list, tuple)):
            # As `torch.cuda.memory_snapshot()` returns it.
            root = {"segments": root}
        if not isinstance(root, dict):
            return
        self.known = "segments" in root or "device_traces" in root
        names = [name for name in root if name in _PARTS]
        for name in names:
            self.last = name == names[-1]
            for item, index in self._each(root[name], name, _PARTS[name]):
                if name == "segments":
                    blocks = [
                        _block(block) for block, _ in self._each(item.get("blocks"), f"{self.place}, blocks", dict)
                    ]
                    self.snapshot.segment(item, blocks)
                elif name == "device_traces":
                    self._events(item, index)
                else:
                    self.snapshot.annotate(item)

    def _events(self, entries, index):
        if entries:
            device, fields = self.snapshot.device(index), self._fields
            for entry, _ in self._each(entries, f"device {index}, events", (_Row, dict)):
                device.add(*(fields(entry) if type(entry) is _Row else _fields(entry)))

    def _each(self, items, name, kinds):
        """The items of a list, each with its number."""
        outer = self.last
        self.place = name
        if items is None or items is DROPPED:
            return
        if not isinstance(items, (list, tuple)):
            raise TypeError("no list")
        for index, item in enumerate(items):
            self._left -= 1
            if self._left < 0:
                raise ValueError("more items than the file has bytes")
            self.place, self.last = f"{name} {index}", outer and index == len(items) - 1
            if item is None or item is DROPPED:
                continue
            if not isinstance(item, kinds):
                raise TypeError("not of the kind that stands here")
            yield item, index


_WRONG = (KeyError, TypeError, ValueError, OverflowError, AttributeError)


def _said(error):
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def read_json(source, device=None):
    """The arrays of a snapshot that was written as JSON."""
    stream, snapshot, cut = JsonStream(source), _Snapshot(), None
    try:
        if stream.peek() == "[":
            _segments(stream, snapshot)
        else:
            for name in stream.members():
                _member(stream, snapshot, name)
        stream.finish()
    except Cut:
        cut = f"the file ends at character {stream.offset}, before its end: read up to there"
    except FormatError:
        raise
    except _WRONG as reason:
        raise stream.error(_said(reason)) from None
    return snapshot.arrays(device, cut)


def _member(stream, snapshot, name):
    if name == "segments" and stream.peek() == "[":
        _segments(stream, snapshot)
    elif name == "device_traces" and stream.peek() == "[":
        for index in stream.items():
            if stream.peek() == "n":
                stream.skip()  # null, of a device without a history
                continue
            device = None
            for _ in stream.items():
                device = device or snapshot.device(index)
                device.add(*_fields(stream.value()))
    elif name == "external_annotations" and stream.peek() == "[":
        for _ in stream.items():
            snapshot.annotate(stream.value())
    else:
        stream.skip()


def _segments(stream, snapshot):
    for _ in stream.items():
        segment: dict = {}
        blocks: list = []
        for name in stream.members():
            if name == "blocks" and stream.peek() == "[":
                blocks.extend(_block(stream.value()) for _ in stream.items())
            elif stream.peek() in ("{", "["):
                stream.skip()
            else:
                segment[name] = stream.value()
        snapshot.segment(segment, blocks)

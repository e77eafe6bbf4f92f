"""Events of a file in the making: allocations and frees are matched here, and what is odd is counted."""

from array import array
from collections import deque

import numpy as np

from vpool.errors import FormatError
from vpool.sizes import plural

__all__ = ["Events", "number", "short"]

_MOST_STREAMS = 1 << 16
_MOST_ALLOCATIONS = 1 << 32
# Characters of what a file calls a stream, a thread, an action or the like, which is kept for each kind of them.
_LONGEST_NAME = 1 << 10
# So far a free looks for an allocation of its size, where several are live at its address.
_FAR = 8


class Events:
    """Allocations and frees in order, and what was odd about them.

    Attributes
    ----------
    notes : list of str
        What a reader has to add to what is counted here.
    orphans, doubled, crossed, resized : int
        Frees without an allocation, allocations at an address that is live, and frees that name another
        stream or another size than their allocation.
    """

    def __init__(self):
        self.op, self.id, self.bytes, self.stream = array("B"), array("I"), array("Q"), array("H")
        self.t, self.marks = array("q"), array("q")
        self.failed_before, self.failed_bytes = array("q"), array("q")
        self.sizes, self.homes = array("Q"), array("H")
        self.live, self.streams = {}, {}
        self.notes = []
        self.orphans = self.doubled = self.crossed = self.resized = 0

    def __len__(self):
        return len(self.op)

    @property
    def allocations(self):
        return len(self.sizes)

    @property
    def live_at_end(self):
        """Allocations that are not freed."""
        return 2 * len(self.sizes) - len(self.op)

    def begin(self, nbytes, stream, t):
        """An allocation; its id.  A size below 0 or of more than 64 bits is an OverflowError."""
        one = len(self.sizes)
        index = self.streams.get(stream)
        if index is None:
            index = self._new_stream(stream)
        if one == _MOST_ALLOCATIONS:
            raise FormatError(f"more than {_MOST_ALLOCATIONS} allocations")
        self.bytes.append(nbytes)
        self.t.append(t)
        self.op.append(0)
        self.id.append(one)
        self.stream.append(index)
        self.sizes.append(nbytes)
        self.homes.append(index)
        return one

    def end(self, one, t, stream=None):
        """The free of an allocation, on its own stream if none is named."""
        index = self.homes[one]
        if stream is not None:
            home, index = index, self.streams.get(stream)
            if index is None:
                index = self._new_stream(stream)
            self.crossed += index != home
        self.t.append(t)
        self.op.append(1)
        self.id.append(one)
        self.bytes.append(self.sizes[one])
        self.stream.append(index)

    def allocate(self, address, nbytes, stream, t):
        """An allocation that is known by its address until it is freed."""
        one = self.begin(nbytes, stream, t)
        owner = self.live.setdefault(address, one)
        if owner is not one:
            # The free of the older one is late in the file or not there; or one of them has no bytes.
            self.doubled += 1
            if type(owner) is int:
                owner = self.live[address] = deque([owner])
            owner.append(one)

    def free(self, address, t, stream=None, nbytes=None):
        """The free of what is at an address.  Returns whether there is anything."""
        owner = self.live.pop(address, None)
        if owner is None:
            self.orphans += 1
            return False
        one = owner if type(owner) is int else self._one_of(address, owner, nbytes)
        if nbytes is not None and nbytes != self.sizes[one]:
            self.resized += 1
        self.end(one, t, stream)
        return True

    def fail(self, nbytes):
        """A request that failed."""
        if not 0 <= nbytes < 2**63:
            raise OverflowError("a size below 0 or beyond 63 bits")
        self.failed_before.append(len(self.op))
        self.failed_bytes.append(nbytes)

    def mark(self, t):
        """A step begins."""
        self.marks.append(t)

    def arrays(self, per_us=1):
        """The parameters of a `Trace`, of times that have so many units in a microsecond."""
        t, marks = np.frombuffer(self.t, np.int64), np.frombuffer(self.marks, np.int64)
        if len(t):
            first, last = int(t.min()), int(t.max())
            if last - int(t[0]) >= 2**63 or first - int(t[0]) < -(2**63):
                raise FormatError(f"times from {first} to {last} do not fit one clock")
            start = int(t[0])
            if len(marks) and max(abs(int(marks.min()) - start), abs(int(marks.max()) - start)) >= 2**63:
                raise FormatError("times of steps that do not fit the clock")
            t = (t - start) // per_us
            marks = np.sort((marks - start) // per_us)
        return {
            "op": np.frombuffer(self.op, np.uint8),
            "id": np.frombuffer(self.id, np.uint32),
            "bytes": np.frombuffer(self.bytes, np.uint64),
            "stream": np.frombuffer(self.stream, np.uint16),
            "t_us": t,
            "marks_us": marks,
            "failures": np.column_stack((self.failed_before, self.failed_bytes)),
            "notes": [*self.notes, *self._counted(t)],
        }

    def _new_stream(self, stream):
        if len(self.streams) == _MOST_STREAMS:
            raise FormatError(f"more than {_MOST_STREAMS} streams")
        return self.streams.setdefault(stream, len(self.streams))

    def _one_of(self, address, owners, nbytes):
        """Of several allocations at one address the oldest; before it, one of the size that is named."""
        place = 0
        if nbytes is not None:
            near = range(min(_FAR, len(owners)))
            place = next((place for place in near if self.sizes[owners[place]] == nbytes), 0)
        one = owners[place]
        del owners[place]
        self.live[address] = owners if len(owners) > 1 else owners[0]
        return one

    def _counted(self, t):
        """Sentences about what was counted."""
        if self.orphans:
            yield (
                f"{plural(self.orphans, 'free')} of what is not live in the file (allocated before it begins, or freed "
                "already): left out"
            )
        if self.doubled:
            yield (
                f"{plural(self.doubled, 'allocation')} at an address that was live already: the older block is freed "
                "first"
            )
        if self.crossed:
            yield f"{plural(self.crossed, 'free')} on another stream than the allocation"
        if self.resized:
            yield f"{plural(self.resized, 'free')} of another size than the allocation: the allocation's counts"
        if self.failed_bytes:
            event, nbytes, largest = self.failed_before[0], self.failed_bytes[0], max(self.failed_bytes)
            yield (
                f"{plural(len(self.failed_bytes), 'request')} failed, the largest of {largest:,} bytes; the first, of "
                f"{nbytes:,} bytes, with {self._live_bytes(event):,} bytes live, before event {event:,}"
            )
        back = int((np.diff(t) < 0).sum())
        if back:
            yield f"the clock goes back {plural(back, 'time')}: the order of the file counts"
        if self.live_at_end:
            nbytes = self._live_bytes(len(self.op))
            yield f"{plural(self.live_at_end, 'allocation')} of {nbytes:,} bytes in all live at the end"

    def _live_bytes(self, event):
        """Bytes that are live before an event."""
        sizes = np.frombuffer(self.bytes, np.uint64)[:event]
        births = np.frombuffer(self.op, np.uint8)[:event] == 0
        return int(sizes[births].sum()) - int(sizes[~births].sum())


def number(value):
    """A whole number that a file gives as one, as a float without fraction, or as text; else ValueError."""
    if type(value) is int:
        return value
    if isinstance(value, str):
        return int(short(value), 0)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise ValueError(f"{value!r:.40} is no whole number")


def short(name):
    """A name as it is; a ValueError for one that is longer than any honest one, so that names take little memory."""
    if isinstance(name, (str, bytes)) and len(name) > _LONGEST_NAME:
        raise ValueError(f"a name of {len(name)} characters")
    return name

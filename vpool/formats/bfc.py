"""What TensorFlow's and JAX's BFC allocator prints when memory runs out: every chunk of each region."""

import re

from vpool.errors import FormatError
from vpool.formats.devices import chosen
from vpool.formats.events import Events
from vpool.formats.logs import DATED, microseconds
from vpool.sizes import plural

__all__ = ["CHUNK", "read"]

CHUNK = re.compile(rb"\b(Chunk|InUse|Free)\s+at\s+(?:0x)?([0-9a-f]{1,16})\s+of size\s+(\d{1,19})\b", re.IGNORECASE)
_OUT = re.compile(rb"Allocator \(([^)]{1,80})\) ran out of memory trying to allocate ([\d.]{1,20})\s*([KMGTPE]?)i?B")
_ROUNDED = re.compile(rb"\(rounded to (\d{1,19})\)")
_DUMP = re.compile(rb"BFCAllocator dump for (\S{1,80})")
_UNITS = {b"": 1, b"K": 1 << 10, b"M": 1 << 20, b"G": 1 << 30, b"T": 1 << 40, b"P": 1 << 50, b"E": 1 << 60}
_MOST_ALLOCATORS = 1024


class _Allocator:
    """One allocator, from dump to dump."""

    def __init__(self):
        self.events = Events()
        self.chunks, self.live = {}, {}
        self.failed = None
        self.t = None
        self.dumps = 0

    def add(self, address, size, used, t):
        if address in self.chunks:
            self.finish()
        if not self.chunks:
            self.t = t
        self.chunks[address] = size, used

    def finish(self):
        """A dump is whole: what it does not show any more was freed, and what is new was allocated."""
        events = self.events
        if self.chunks:
            self.dumps += 1
            t = self.t if self.t is not None else self.dumps
            now = {address: size for address, (size, used) in self.chunks.items() if used}
            for address, size in self.live.items():
                if now.get(address) != size:
                    events.free(address, t)
            for address in sorted(now):
                if self.live.get(address) != now[address]:
                    events.allocate(address, now[address], 0, t)
            self.live, self.last, self.chunks = now, self.chunks, {}
        if self.failed is not None:
            events.fail(self.failed)
            self.failed = None

    def figures(self):
        last = getattr(self, "last", {}).values()
        free = [size for size, used in last if not used]
        return {
            "dumps": self.dumps,
            "chunks_in_use": len(self.live),
            "bytes_in_use": sum(self.live.values()),
            "free_chunks": len(free),
            "free_bytes": sum(free),
            "largest_free": max(free, default=0),
        }


class _Log:
    def __init__(self):
        self.allocators = {}
        self.name = None
        self.last = None

    def add(self, line):
        found = CHUNK.search(line)
        if found:
            kind, address, size = found.groups()
            self._allocator().add(int(address, 16), int(size), kind.lower() != b"free", self._time(line))
            return
        found = _OUT.search(line)
        if found:
            allocator = self._named(found[1])
            allocator.finish()
            rounded = _ROUNDED.search(line)
            failed = int(rounded[1]) if rounded else round(float(found[2]) * _UNITS[found[3]])
            if failed >= 2**63:
                raise ValueError(f"a request of {failed} bytes")
            allocator.failed = failed
            return
        found = _DUMP.search(line)
        if found:
            allocator = self._named(found[1])
            if allocator.chunks:
                allocator.finish()

    def _named(self, name):
        """The allocator that the next lines are of; also of those before, if the log did not begin with a name."""
        if self.allocators.keys() == {None}:
            self.allocators[name] = self.allocators.pop(None)
        self.name = name
        return self._allocator()

    def _allocator(self):
        if self.name not in self.allocators and len(self.allocators) == _MOST_ALLOCATORS:
            raise ValueError(f"more than {_MOST_ALLOCATORS} allocators")
        return self.allocators.setdefault(self.name, _Allocator())

    @staticmethod
    def _time(line):
        found = DATED.search(line)
        return microseconds(found[0]) if found else None


def read(source, device=None):
    """The arrays of a log with dumps; every other line is left out."""
    log, cut = _Log(), None
    for number, line in source.lines():
        if line is None:
            cut = f"line {number}, the last, has no end: it may have been cut"
            break
        try:
            log.add(line)
        except (ValueError, OverflowError) as reason:
            raise FormatError(f"line {number}: {reason}") from None
    for allocator in log.allocators.values():
        allocator.finish()
    names = {(name or b"?").decode("ascii", "replace"): one for name, one in log.allocators.items()}
    best, note = chosen({name: len(one.events) for name, one in names.items()}, device)
    if best is None:
        raise FormatError(_NONE)
    one = names[best]
    events, figures = one.events, one.figures()
    if note:
        events.notes.append(note)
    if source.cut:
        events.notes.append("the gzip data ends too early: read up to there")
    elif cut:
        events.notes.append(cut)
    if one.dumps:
        events.notes.append(
            f"{plural(one.dumps, 'picture')} of the allocator, the last of {plural(len(one.live), 'chunk')} in use and "
            f"{figures['free_chunks']} free: allocations in the order of their addresses, of rounded sizes"
        )
    return {**events.arrays(), "figures": figures}


_NONE = "no chunk of a BFC allocator in it"

"""Heap profiles of pprof: who holds memory when the most is live, and who has asked for it all along.

The format is a dozen fields of protocol buffers that have not changed since 2016, so they are encoded here: the
library and code that it generates would be more to depend on than these lines.  The tests read it with the library.
"""

from collections import Counter

from vpool.formats.placement import frames_of
from vpool.version import __version__

__all__ = ["write"]

_UNITS = (("objects", "count"), ("space", "bytes"))
_UNKNOWN = "call site not known"


def write(trace, file):
    """Write a trace's profile."""
    profile = _Profile()
    held, asked = _sums(trace)
    for key in sorted(asked):
        site, tag, stream = key
        profile.sample(site, (*held[key], *asked[key]), tag, stream)
    # Of clocks that go back too.
    seconds = (int(trace.t_us.max()) - int(trace.t_us.min())) / 1e6 if len(trace) else 0.0
    comment = f"vpool {__version__}: inuse is behind event {trace.peak_event}, when the most is live"
    file.write(profile.encoded(seconds, comment))


def _sums(trace):
    """Blocks and requested bytes by site, tag and stream: what is live at the peak, and all."""
    details, peak = trace.details, trace.peak_event
    freed = set(trace.number[: peak + 1][trace.op[: peak + 1] == 1].tolist())
    births = (trace.op == 0).nonzero()[0]
    sites = tags = [""] * len(births)
    if details is not None:
        sites = [details.sites[site] for site in details.site[births].tolist()]
        tags = [details.tags[tag] for tag in details.tag[births].tolist()]
    columns = (births, trace.number[births], trace.bytes[births], trace.stream[births])
    held: dict[tuple, Counter] = {}
    asked: dict[tuple, Counter] = {}
    for site, tag, event, one, nbytes, stream in zip(sites, tags, *(part.tolist() for part in columns), strict=True):
        key = site, tag, stream
        asked.setdefault(key, Counter()).update(blocks=1, bytes=nbytes)
        here = held.setdefault(key, Counter())
        if event <= peak and one not in freed:
            here.update(blocks=1, bytes=nbytes)
    return [{key: (row["blocks"], row["bytes"]) for key, row in rows.items()} for rows in (held, asked)]


def _varint(number):
    """A whole number in as few bytes as it needs, seven bits each."""
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _number(field, value):
    """A field that is a number; 0 is what one has that is not there."""
    return _varint(field << 3) + _varint(value) if value else b""


def _bytes(field, value):
    """A field that is text or a message."""
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _packed(field, numbers):
    """A field of many numbers."""
    return _bytes(field, b"".join(map(_varint, numbers)))


class _Profile:
    """A profile in the making; the numbers of fields are those of pprof's ``profile.proto``."""

    def __init__(self):
        self.samples = []
        self.locations: dict[tuple, int] = {}
        self.functions: dict[tuple, int] = {}
        self.strings = {"": 0}

    def string(self, text):
        """Its number in the table of texts."""
        return self.strings.setdefault(text, len(self.strings))

    def location(self, frame):
        return self.locations.setdefault(frame, len(self.locations) + 1)

    def sample(self, site, values, tag, stream):
        """Values of one call site and its callers."""
        frames = frames_of(site) or [("", 0, _UNKNOWN)]
        labels = b""
        if tag:
            labels += _bytes(3, _number(1, self.string("tag")) + _number(2, self.string(tag)))
        if stream:
            labels += _bytes(3, _number(1, self.string("stream")) + _number(3, stream))
        self.samples.append(_packed(1, map(self.location, frames)) + _packed(2, values) + labels)

    def _value_type(self, name, unit):
        return _number(1, self.string(name)) + _number(2, self.string(unit))

    def encoded(self, seconds, comment):
        """The whole of it."""
        kinds = [(f"{which}_{what}", unit) for which in ("inuse", "alloc") for what, unit in _UNITS]
        parts = [_bytes(1, self._value_type(*kind)) for kind in kinds]
        parts += [_bytes(2, sample) for sample in self.samples]
        for (file, line, name), number in self.locations.items():
            function = self.functions.setdefault((file, name), len(self.functions) + 1)
            parts.append(_bytes(4, _number(1, number) + _bytes(4, _number(1, function) + _number(2, line))))
        for (file, name), number in self.functions.items():
            named = self.string(name)
            parts.append(
                _bytes(5, _number(1, number) + _number(2, named) + _number(3, named) + _number(4, self.string(file)))
            )
        parts.append(_number(10, int(seconds * 1e9)))
        parts.append(_bytes(11, self._value_type("space", "bytes")) + _number(12, 1))
        parts.append(_packed(13, [self.string(comment)]) + _number(14, self.string("inuse_space")))
        # In the order of their numbers.
        parts += [_bytes(6, text.encode("utf-8", "replace")) for text in self.strings]
        return b"".join(parts)

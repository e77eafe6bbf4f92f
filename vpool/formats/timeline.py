"""Raw memory timelines of PyTorch's profiler: ``export_memory_timeline("….raw.json.gz")``.

Rows of time in nanoseconds, action, bytes (below 0 where something ends) and category.
"""

from collections import Counter

from vpool.errors import FormatError
from vpool.formats.events import Events, number
from vpool.formats.json_stream import JsonStream
from vpool.formats.source import Cut
from vpool.sizes import plural

__all__ = ["read"]

_PREEXISTING, _CREATE, _CHANGE, _DESTROY = 1, 2, 3, 4


class _Rows:
    """Allocations by size and category, which is all that a row tells of its tensor."""

    def __init__(self):
        self.events = Events()
        self.live, self.categories = {}, {}
        self.moving = []
        self.actions: Counter[str] = Counter()
        self.tallies: Counter[str] = Counter()
        self.before = self.count = 0
        self.began = None

    def add(self, row):
        if not isinstance(row, list) or len(row) != 4:
            raise ValueError("no row of four numbers")
        t, action, nbytes, category = map(number, row)
        if not _PREEXISTING <= action <= _DESTROY:
            raise ValueError(f"action {action} is none")
        if not abs(t) < 2**62:
            raise ValueError(f"a time of {t}")
        if not abs(nbytes) < 2**63:
            raise OverflowError("a size beyond 63 bits")
        self.count += 1
        self.actions[str(action)] += 1
        self.tallies[str(category)] += 1
        if t < 0:
            # Older than the recording; its clock begins with the first time there is.
            self.before += 1
            t = 0
        else:
            self.began = t if self.began is None else self.began
            t -= self.began
        if action in (_PREEXISTING, _CREATE):
            if nbytes < 0:
                raise ValueError("an allocation of less than 0 bytes")
            self._put(nbytes, category, self.events.begin(nbytes, 0, t))
        elif action == _DESTROY:
            one = self._take(abs(nbytes), category)
            if one is None:
                self.events.orphans += 1
            else:
                self.events.end(one, t)
        elif nbytes < 0:
            one = self._take(-nbytes, category)
            if one is not None:
                self.moving.append((-nbytes, one))
        elif self.moving and self.moving[-1][0] == nbytes:
            self._put(nbytes, category, self.moving.pop()[1])

    def _put(self, nbytes, category, one):
        self.live.setdefault((nbytes, category), []).append(one)

    def _take(self, nbytes, category):
        """The youngest of a size and category."""
        same = self.live.get((nbytes, category))
        return same.pop() if same else None


def read(source, device=None):
    """The arrays of a raw timeline, which is of one device."""
    stream, rows, cut = JsonStream(source), _Rows(), None
    try:
        for index in stream.items():
            at, row = stream.offset, stream.value()
            try:
                rows.add(row)
            except (TypeError, ValueError, OverflowError) as reason:
                raise FormatError(f"character {at}, row {index}: {reason}") from None
        stream.finish()
    except Cut:
        cut = f"the file ends at character {stream.offset}, before its end: read up to there"
    return _arrays(rows, cut)


def _arrays(rows, cut):
    events = rows.events
    if cut:
        events.notes.append(cut)
    events.notes.append(
        "no addresses in the file: a free ends the youngest allocation of its size and category, so single lifetimes "
        "are a guess and the live bytes are not"
    )
    if rows.before:
        events.notes.append(f"{plural(rows.before, 'row')} without a time, of before the recording: put at its start")
    figures = {
        "rows": rows.count,
        "by_action": dict(rows.actions),
        "by_category": dict(rows.tallies),
        "pre_existing_rows_ts_minus1": rows.before,
        "orphan_frees": events.orphans,
    }
    return {**events.arrays(per_us=1000), "figures": figures}

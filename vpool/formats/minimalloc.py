"""MiniMalloc's problems: a row for each buffer, with the times between which it is live."""

from array import array

import numpy as np

from vpool.formats.events import Events
from vpool.formats.logs import cells_of, read_lines
from vpool.sizes import plural

__all__ = ["columns_of", "read"]

_LOWER, _UPPER = (b"lower", b"start", b"begin"), (b"upper", b"end")


def columns_of(line):
    """Places of begin, end and size in a header, and what to add to an end; None if it is no header."""
    cells = cells_of(line.lower())
    lower = next((cells.index(name) for name in _LOWER if name in cells), None)
    upper = next((cells.index(name) for name in _UPPER if name in cells), None)
    if lower is None or upper is None or b"size" not in cells or len(set(cells)) != len(cells):
        return None
    # A column "end" names the last time of life, "upper" the first after it.
    return lower, upper, cells.index(b"size"), int(cells[upper] == b"end"), cells


class _Table:
    def __init__(self):
        self.columns = None
        self.lower, self.upper, self.size = array("q"), array("q"), array("Q")
        self.gaps = self.placed = 0

    def add(self, line, text):
        if text[:1] == b"#":
            return
        if self.columns is None:
            self.columns = columns_of(text)
            if self.columns is None:
                raise ValueError("no header with lower, upper and size")
            return
        lower, upper, size, more, names = self.columns
        cells = cells_of(text)
        if len(cells) != len(names):
            raise ValueError(f"{plural(len(cells), 'column')}, not {len(names)}")
        begin, end, nbytes = int(cells[lower]), int(cells[upper]) + more, int(cells[size])
        if end < begin:
            raise ValueError(f"a buffer that lives from {begin} to {end}")
        if nbytes < 0:
            raise ValueError(f"a size of {nbytes} bytes")
        if max(abs(begin), abs(end), nbytes) >= 2**62:
            raise OverflowError("a number beyond 62 bits")
        self.lower.append(begin)
        self.upper.append(end)
        self.size.append(nbytes)
        self.gaps += b"gaps" in names and bool(cells[names.index(b"gaps")])
        self.placed += b"offset" in names


def read(source, device=None):
    """The arrays of a problem, which knows no device; its times stand for microseconds."""
    table, events = _Table(), Events()
    read_lines(source, table.add, events.notes)
    lower, upper = np.array(table.lower), np.array(table.upper)
    alive = np.flatnonzero(lower < upper)
    # At one time what ends makes room for what begins.
    t = np.concatenate([lower[alive], upper[alive]])
    begins = np.repeat([1, 0], len(alive))
    for place in np.lexsort((begins, t)).tolist():
        row = int(alive[place % len(alive)])
        if begins[place]:
            events.allocate(row, table.size[row], 0, int(t[place]))
        else:
            events.free(row, int(t[place]))
    empty = len(lower) - len(alive)
    if empty:
        events.notes.append(f"{plural(empty, 'buffer')} that never live: left out")
    if table.gaps:
        events.notes.append(f"{plural(table.gaps, 'buffer')} with gaps, which are not used here: live all the time")
    if table.placed:
        events.notes.append("offsets in the file, of a placement that is not used here")
    figures = {"buffers": len(lower), "sum_sizes": sum(table.size)}
    return {**events.arrays(), "figures": figures}

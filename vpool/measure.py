"""Peaks of phases: what is highest within ``with pool.measure()``."""

import dataclasses
import threading
import time

from vpool._storage.fork import PerProcess
from vpool.sizes import format_bytes, plural

__all__ = ["Measure", "Measures"]


class Measure:
    """The highest figures of a pool within a ``with`` block.  Made by `Pool.measure`; it can be entered once.

    Within the block the figures are those so far.  Measures nest and overlap as they like.

    Attributes
    ----------
    peak_allocated_bytes, peak_requested_bytes, peak_reserved_bytes : int
        The highest values within the block.
    allocations, frees : int
        Blocks lent and taken back within it.
    seconds : float
        How long it took.
    """

    def __init__(self, measures):
        self._measures = measures
        self._peaks = [0, 0, 0]
        self._before: tuple[int, int] | None = None
        self._after: tuple[int, int] | None = None
        self._began = self._ended = 0.0

    def __enter__(self):
        if self._before is not None:
            raise RuntimeError("a measure can be entered once: call pool.measure() again")
        self._began = time.perf_counter()
        self._before = self._measures.begin(self)
        return self

    def __exit__(self, *exc_info):
        if self._before is None or self._after is not None:
            raise RuntimeError("this measure is not going on")
        self._ended = time.perf_counter()
        self._after = self._measures.end(self)

    def note(self, peaks):
        """Take in the highest values of a part of the block."""
        self._peaks = [max(pair) for pair in zip(self._peaks, peaks, strict=True)]

    def _now(self):
        """Peaks, and how many allocations and frees there were."""
        if self._before is None:
            raise RuntimeError("nothing was measured yet")
        peaks, counts = self._measures.look(self) if self._after is None else (self._peaks, self._after)
        return peaks, [now - before for now, before in zip(counts, self._before, strict=True)]

    @property
    def peak_allocated_bytes(self):
        return self._now()[0][0]

    @property
    def peak_requested_bytes(self):
        return self._now()[0][1]

    @property
    def peak_reserved_bytes(self):
        return self._now()[0][2]

    @property
    def allocations(self):
        return self._now()[1][0]

    @property
    def frees(self):
        return self._now()[1][1]

    @property
    def seconds(self):
        self._now()
        return (time.perf_counter() if self._after is None else self._ended) - self._began

    def __repr__(self):
        if self._before is None:
            return "<vpool measure, not begun>"
        return (
            f"<vpool measure: peaks {format_bytes(self.peak_allocated_bytes)} allocated, "
            f"{format_bytes(self.peak_reserved_bytes)} reserved; {plural(self.allocations, 'allocation')}, "
            f"{plural(self.frees, 'free')} in {self.seconds:.3f} s>"
        )


class Measures:
    """The measures of one pool that have begun and not ended.

    Each part of the time between two of their beginnings and ends has peaks of its own: the pool's are taken
    down there, and begin anew.  What the pool's peaks would be without that is kept beside them.

    Parameters
    ----------
    gauge : vpool._interface.gauge.Gauge
        Of the pool.
    """

    def __init__(self, gauge):
        self._gauge = gauge
        self._open: list[Measure] = []
        self._floor = (0, 0, 0)  # the pool's peaks before this part, while a measure is open
        self._anew = False  # whether the pool's peaks are not those since it was made
        # Re-entrant: a collection inside may run a finaliser that measures.
        self._changing = PerProcess(threading.RLock)

    def begin(self, measure):
        """Open a measure; the pool's counts of allocations and frees."""
        with self._changing.here:
            self._turn()
            self._open.append(measure)
        return self._gauge.counts()

    def end(self, measure):
        """Close a measure; the pool's counts."""
        with self._changing.here:
            self._turn()
            self._open.remove(measure)
            if not self._open:
                floor, self._floor = self._floor, (0, 0, 0)
                self._gauge.begin_peaks(*floor)
        return self._gauge.counts()

    def look(self, measure):
        """Peaks so far of an open measure, and the pool's counts."""
        with self._changing.here:
            self._turn()
            return measure._peaks, self._gauge.counts()

    def reset(self):
        """Begin anew with the pool's own peaks, and not with those of measures."""
        with self._changing.here:
            self._turn()
            self._floor = (0, 0, 0)
            self._anew = True

    def _turn(self):
        """End a part of the time, and begin the next one."""
        if self._open:  # before the pool's own are taken down, so that whoever reads meanwhile sees no less
            self._floor = _highest(self._floor, self._gauge.peaks())
        ended = self._gauge.begin_peaks(0, 0, 0)
        self._floor = _highest(self._floor, ended)
        for measure in self._open:
            measure.note(ended)

    def stats(self, stats):
        """The pool's counters, with its peaks over all parts."""
        allocated, _, reserved = self._floor
        return dataclasses.replace(
            stats,
            peak_allocated_bytes=max(allocated, stats.peak_allocated_bytes),
            peak_reserved_bytes=max(reserved, stats.peak_reserved_bytes),
        )

    def figures(self, figures):
        """The same of a report's figures."""
        for name, floor in zip(("allocated", "requested", "reserved"), self._floor, strict=True):
            figures[f"peak_{name}_bytes"] = max(floor, figures[f"peak_{name}_bytes"])
        figures["peaks_anew"] = self._anew
        return figures


def _highest(first, second):
    return tuple(max(pair) for pair in zip(first, second, strict=True))

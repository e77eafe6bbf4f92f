"""Plans: the blocks of a recorded step, placed with all of it known."""

import itertools
import operator
import os
import time

import numpy as np

from vpool._planning.packing import pack
from vpool._planning.search import Search
from vpool.placement import MAX_ROUNDING, UNPLANNED, Plan, rounded, section_loads, sections_of
from vpool.sizes import parse_count, parse_size
from vpool.strategies import GRANULE
from vpool.trace import Trace

__all__ = ["SECONDS", "Plan", "plan"]

SECONDS = 60.0  # that a search takes at most, unless it is told

_MOST_PAIRS = 50_000_000  # of blocks that live together: beyond it, what a search has to remember is too much
_TASKS = 8  # searches between two looks at what they have found, however many run at once
_WORK = 1_000_000  # blocks that the first of them look at, a fraction of a second; later ones more
_MORE_WORK = 1.05
_CLOSE = 0.0005  # above the bound
_LESS_FAR = 0.7  # from the best so far, where a search failed
_CROWDED = (0.95, 0.8, 0.65)  # loads, by the highest: blocks of such times go first
_VAIN = 8  # rounds without a find, after which a search begins anew
_MORE_WORK_ANEW = 1.3
_NOISE = 0.3  # of all ranks, by which those of a search differ from those that its turn begins with


def plan(trace, step=None, *, stream=None, capacity=None, rounding=None, seconds=SECONDS, seed=0, workers=None,
         progress=None):  # fmt: skip
    """Place the blocks of a step so that together they take little memory.

    Planned is what is born and freed within the step; what outlives it, or was born before, is left to a pool.
    A trace without steps is one step.

    Parameters
    ----------
    trace : Trace or path
    step : int, optional
        Which step, from 0, as the trace's marks begin them; the one with the highest peak of live bytes if not given.
    stream : int, optional
        Plan the requests of this stream alone, by its index in the trace.  A pool serves from a plan on one stream.
    capacity : int or str, optional
        Bytes that are enough: the search ends with the first plan that fits.
    rounding : int, optional
        Bytes, a power of two: sizes and offsets are multiples of it.  256 as in a pool if not given, and 1 for a
        MiniMalloc problem, whose units are its own.
    seconds : float
        Time for the search, which ends before that where the lower bound is reached.
    seed : int
        The same seed gives the same plan, but for what the time cuts off.
    workers : int, optional
        Threads; as many as there are cores if not given.  The plan does not depend on it, but for the time.
    progress : callable, optional
        Called now and then with the seconds gone and the seconds in all.

    Returns
    -------
    Plan
        The best that was found.

    Raises
    ------
    ValueError
        For a step or a stream that the trace does not have, or numbers that make no sense.
    TypeError
        For what is no integer where one is wanted.
    FormatError, OSError
        For a file that is no trace, or cannot be read.

    Notes
    -----
    Placing n blocks in a fixed order takes O(log n + k log k) for one that lives beside k others, and is done for a few
    orders.  Where none of them reaches the lower bound, a branch and bound over canonical placements is restarted
    with other orders until the time is over: see ``vpool._planning.search`` for its source.

    Examples
    --------
    >>> import vpool
    >>> plan = vpool.plan(vpool.data.bundled_trace())
    >>> print(f"{plan.ratio:.3f}")
    1.000
    """
    if not isinstance(trace, Trace):
        trace = Trace.load(trace)
    if rounding is None:
        # Only a reader of problems counts buffers.
        rounding = 1 if "buffers" in trace.figures else GRANULE
    rounding = parse_size(rounding, "rounding")
    if not 0 < rounding <= MAX_ROUNDING or rounding & (rounding - 1):
        raise ValueError(f"a rounding of {rounding} bytes: it must be a power of two of at most {MAX_ROUNDING}")
    step, stream = (
        None if given is None else _number(given, what) for given, what in ((step, "step"), (stream, "stream"))
    )
    workers = None if workers is None else parse_count(workers, "workers")
    capacity = 0 if capacity is None else parse_size(capacity, "capacity")
    if not seconds >= 0:
        raise ValueError(f"seconds must be at least 0, got {seconds}")
    number, begin, end = _step_of(trace, step)
    births = np.flatnonzero(trace.op[begin:end] == 0) + begin
    freed = _frees(trace)[trace.number[births]]
    freed[freed >= end] = -1
    planned = (freed >= 0) & (trace.bytes[births] > 0)
    if stream is not None:
        if not (trace.stream == stream).any():
            raise ValueError(f"the trace has no stream {stream}")
        planned &= trace.stream[births] == stream
    rows = births[planned]
    planner = _Planner(rows, freed[planned], rounded(trace.bytes[rows], rounding), capacity)
    planner.improve(seconds, np.random.default_rng(seed), workers or os.cpu_count() or 1, progress)
    offset = np.full(len(births), UNPLANNED, np.int64)
    offset[planned] = planner.offset
    return Plan(
        nbytes=trace.bytes[births],
        stream=trace.stream[births],
        born=births,
        freed=freed,
        offset=offset,
        rounding=rounding,
        step=number,
        trace_events=len(trace),
    )


def _number(value, what):
    if isinstance(value, bool):
        raise TypeError(f"{what} must be an integer, not a bool")
    return operator.index(value)


def _step_of(trace, step):
    """Number of a step and the events that it has; -1 and all for a trace without."""
    if len(trace.marks_us) == 0:
        if step is not None:
            raise ValueError("the trace has no steps")
        return -1, 0, len(trace)
    clock = np.maximum.accumulate(trace.t_us)
    bounds = np.append(np.searchsorted(clock, np.sort(trace.marks_us)), len(trace))
    if step is None:
        live = trace.live_bytes
        peaks = [int(live[a:b].max(initial=-1)) for a, b in itertools.pairwise(bounds)]
        step = int(np.argmax(peaks))
    if not 0 <= step < len(bounds) - 1:
        raise ValueError(f"step must be 0 to {len(bounds) - 2} in this trace, got {step}")
    return step, int(bounds[step]), int(bounds[step + 1])


def _frees(trace):
    """The event that frees each allocation, by its number; -1 for those that stay."""
    freed = np.full(trace.allocations, -1, np.int64)
    frees = np.flatnonzero(trace.op == 1)
    freed[trace.number[frees]] = frees
    return freed


class _Planner:
    """The best placement of some blocks so far, and how to find a better one."""

    def __init__(self, born, freed, size, enough):
        self.size = size
        self.first, self.end = sections_of(born, freed)
        loads = section_loads(self.first, self.end, size)
        self.least = int(loads.max(initial=0))
        self.enough = max(enough, self.least)
        self.length = self.end - self.first
        # The highest load of each block's sections, through a table of the maxima of 1, 2, 4, ... of them.
        self.crowd = _range_maxima(loads, self.first, self.end)
        self.offset = np.zeros(len(size), np.int64)
        self.peak = 1 << 62 if len(size) else 0
        for order in self._orders():
            self._try(pack(self.first, self.end, self.size, order))

    def _orders(self):
        """Orders that are often good: the largest first, the longest, or those of the most crowded times."""
        area = self.size.astype(float) * self.length
        orders = [(self.size, self.length), (area,), (self.length, self.size), (self.crowd, self.size)]
        for share in _CROWDED:
            crowded = self.crowd > share * self.least
            orders += [(crowded, self.length), (crowded, self.size, self.length), (crowded, self.length, self.size)]
        for keys in orders:
            if self.peak <= self.enough:
                return
            yield _falling(*keys)

    def _try(self, offset):
        peak = int((offset + self.size).max(initial=0))
        if peak < self.peak:
            self.offset, self.peak = offset, peak

    def improve(self, seconds, random, workers, progress):
        """Search until what was found is enough, nothing better is possible, or the time is over."""
        begin = time.monotonic()
        if self.peak <= self.enough or seconds == 0 or self._pairs() > _MOST_PAIRS:
            return
        search = _Restarts(self, random)
        from concurrent.futures import ThreadPoolExecutor  # refuses once the interpreter ends, where vpool does not

        with ThreadPoolExecutor(min(workers, _TASKS)) as threads:
            left = seconds
            while self.peak > max(self.enough, search.least) and left > 0:
                search.round(threads, left)
                left = begin + seconds - time.monotonic()
                if progress:
                    progress(seconds - max(0.0, left), seconds)

    def _pairs(self):
        """How many pairs of blocks live together."""
        return int((np.searchsorted(self.first, self.end) - np.arange(len(self.size)) - 1).sum())


class _Restarts:
    """Branch and bound, again and again with other orders."""

    def __init__(self, planner, random):
        self.planner = planner
        self.random = random
        self.unit = int(np.gcd.reduce(planner.size))
        size = planner.size // self.unit
        area = planner.size.astype(float) * planner.length
        length, crowd = planner.length, planner.crowd
        self.orders = [
            _falling(*keys)
            for keys in (
                (length, area, crowd),
                (crowd, length, area),
                (crowd, area, length),
                (length, crowd, area),
                (area, crowd, length),
                (area, length, crowd),
            )
        ]
        self.searches = [Search(planner.first, planner.end, size) for _ in range(_TASKS)]
        self.tried = 0
        self.vain = 0  # rounds since the last find
        self.work = self.work_anew = float(max(_WORK, len(size) ** 2))
        self.share = 0.5  # of the way from the best down to the bound, for the last of the aims
        self.least = planner.least  # no placement takes less: proved
        self.blame = np.zeros(len(size))

    def round(self, threads, seconds):
        """A task for each search; then all that they have found counts, in their order."""
        planner = self.planner
        near = planner.peak - max(self.unit, int((planner.peak - self.least) * self.share))
        # At the very bound, which makes every other aim needless; above it by what hardly matters; and by steps.
        aims = (0, min(near, int(self.least * (1 + _CLOSE))), near, near)
        tasks = []
        for search in self.searches:
            aim = aims[self.tried // len(self.orders) % len(aims)]
            capacity = max(aim, self.least, planner.enough) // self.unit
            job = threads.submit(search.run, capacity, self._ranks(), int(self.work), seconds)
            tasks.append((capacity, job))
            self.tried += 1
        self._collect(tasks)

    def _collect(self, tasks):
        reached = False
        try:
            for (capacity, task), search in zip(tasks, self.searches, strict=True):
                outcome = task.result()
                if outcome:
                    self.planner._try(search.offset * self.unit)
                    reached = True
                elif outcome is False:
                    self.least = max(self.least, (capacity + 1) * self.unit)
                self.blame = 0.9 * self.blame + search.conflicts / max(1, search.conflicts.sum())
                if self.planner.peak <= self.planner.enough:
                    break
        finally:
            # That was enough, whatever the later ones find; or it was an interrupt.
            for (_, task), search in zip(tasks, self.searches, strict=True):
                if not task.done():
                    search.stop()
        self.share = min(0.5, self.share * 1.5) if reached else self.share * _LESS_FAR
        self.work *= _MORE_WORK
        self.vain = 0 if reached else self.vain + 1
        if self.vain == _VAIN:
            # What has failed so far leads some searches astray for many minutes, where another start needs seconds.
            self.vain = 0
            self.blame[:] = 0
            self.work_anew *= _MORE_WORK_ANEW
            self.work = self.work_anew

    def _ranks(self):
        """A rank for each block: one of the orders, later with what often fails, and something else, put forward."""
        order = self.orders[self.tried % len(self.orders)]
        rank = np.empty(len(order), np.float64)
        rank[order] = np.arange(len(order))
        if self.tried >= 3 * len(self.orders):
            blame = self.blame / max(self.blame.max(), 1e-300)
            rank -= len(order) * (blame + _NOISE * self.random.random(len(order)))
        ranks = np.empty(len(order), np.int32)
        ranks[np.argsort(rank, kind="stable")] = np.arange(len(order), dtype=np.int32)
        return ranks


def _falling(*keys):
    """Blocks by falling keys, the first of which counts most."""
    return np.lexsort([-np.asarray(key, np.float64) for key in reversed(keys)]).astype(np.int32)


def _range_maxima(values, first, end):
    """The highest of the values from `first` to before `end`, for each pair."""
    if len(first) == 0:
        return np.zeros(0, values.dtype)
    level = np.frexp((end - first).astype(np.float64))[1] - 1  # of the largest power of two in the length
    highest = np.zeros(len(first), values.dtype)
    row = values
    for power in range(int(level.max()) + 1):
        here = level == power
        highest[here] = np.maximum(row[first[here]], row[end[here] - (1 << power)])
        if len(row) > 1 << power:
            row = np.maximum(row[: -(1 << power)], row[1 << power :])
    return highest

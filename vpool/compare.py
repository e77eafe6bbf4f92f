"""Comparison: every strategy and the models of other pools, side by side on recorded traces."""

import math
import os
from dataclasses import asdict, dataclass

from vpool.peers import PEERS, simulate
from vpool.replay import policy_of, replay
from vpool.sizes import format_bytes, parse_count, parse_size, plural
from vpool.sizing import fixed_for
from vpool.strategies import GRANULE, Dynamic, Hybrid
from vpool.tables import table
from vpool.trace import Trace, named

__all__ = ["STRATEGIES", "TOGETHER", "CompareResult", "CompareRow", "compare", "smallest_capacity"]

# What each strategy's name means for `replay`, given the trace.  Of equals the first is chosen: what grows
# also serves a program that is not quite the one recorded.
STRATEGIES = {
    "dynamic": lambda trace: Dynamic(),
    "adaptive": lambda trace: Dynamic(adaptive=True),
    "hybrid": lambda trace: Hybrid.from_trace(trace) if trace.peak_live_bytes else Hybrid(GRANULE),
    "fixed": lambda trace: "fixed",
}
_CAUTION = {
    "fixed": "its slab never grows, so leave room for what was not recorded",
    "hybrid": "its core is cut for this, and it grows for what was not recorded",
}
TOGETHER = "all together"
PRECISION = 0.005
# Ratios that differ by less are equal where one strategy is chosen.
_SAME = 0.02
# Above so many events a model's smallest capacity would take longer to find than it is worth.
_MOST_EVENTS = 200_000
_DOUBLINGS = 12


@dataclass(frozen=True)
class CompareRow:
    """One pool on one trace.

    Attributes
    ----------
    trace, name : str
        Names of the trace, and of the strategy or the peer.
    modelled : bool
        Whether this is a peer's model.
    peak_reserved_bytes : int
        The most that it held, over all passes.
    reserved_over_live : float
        peak reserved / peak live.
    utilization, external_fragmentation, internal_fragmentation : float
        As in `Report`, at the moment when the most bytes are live.
    source_calls, waited : int
        Segments asked of the source and given back, and requests that waited for new ones, over all passes.
    ns_per_event : float or None
        Nanoseconds of the last pass without driver time; None for a model.
    smallest_capacity : int or None
        Bytes of the smallest device, to 0.5 %, on which all passes complete; None where that was not looked
        for or not found.
    oom : dict or None
        ``event``, ``requested`` and ``live_bytes`` of the request that failed.
    refused : str or None
        Why the strategy cannot begin with the capacity; its figures are 0.
    """

    trace: str
    name: str
    modelled: bool
    peak_reserved_bytes: int
    reserved_over_live: float
    utilization: float
    external_fragmentation: float
    internal_fragmentation: float
    source_calls: int
    waited: int
    ns_per_event: float | None
    smallest_capacity: int | None
    oom: dict | None
    refused: str | None = None

    @property
    def completes(self):
        """Whether every request was served."""
        return self.oom is None and self.refused is None

    @property
    def title(self):
        """The name that tables show."""
        return f"{PEERS[self.name].title} (model)" if self.modelled else self.name


class CompareResult:
    """What a comparison found.

    Attributes
    ----------
    traces : dict
        ``events`` and ``peak_live_bytes`` by the name of each trace; the last is all of them together where
        there are several.
    rows : list of CompareRow
        By trace, strategies before models.
    suits : str or None
        The strategy that suits best; None where none completes.
    why : str
        A sentence that says so, with figures.
    """

    def __init__(self, traces, rows):
        self.traces = traces
        self.rows = rows
        self.suits, self.why = _choice(traces, rows)

    def to_dict(self):
        """All of it, as plain Python types."""
        rows = [asdict(row) for row in self.rows]
        return {"traces": self.traces, "rows": rows, "suits": self.suits, "why": self.why}

    def __str__(self):
        parts = [self._table_of(name) for name in self.traces]
        return "\n\n".join([*parts, self.why])

    def _table_of(self, name):
        about = self.traces[name]
        rows = [row for row in self.rows if row.trace == name]
        lines = [
            f"{name}: {plural(about['events'], 'event')}, {format_bytes(about['peak_live_bytes'])} live at most",
            "",
        ]
        lines.append(table(_HEADER, [_cells(row) for row in rows]))
        lines += [f"{row.title}: {_failure(row)}" for row in rows if not row.completes]
        return "\n".join(lines)

    def __repr__(self):
        return f"<vpool.CompareResult of {len(self.rows)} rows, {self.suits} suits>"


_HEADER = (
    "", "reserved", "/ live", "utilization", "external", "internal", "source calls", "waited", "ns an event",
    "completes in",
)  # fmt: skip


def _failure(row):
    if row.refused:
        return row.refused
    return (
        f"out of memory at event {row.oom['event']:,}, {format_bytes(row.oom['requested'])} more were asked for with "
        f"{format_bytes(row.oom['live_bytes'])} live"
    )


def _cells(row):
    return (
        row.title,
        format_bytes(row.peak_reserved_bytes),
        f"{row.reserved_over_live:.3f}",
        f"{row.utilization:.1%}",
        f"{row.external_fragmentation:.1%}",
        f"{row.internal_fragmentation:.1%}",
        f"{row.source_calls:,}",
        f"{row.waited:,}",
        "-" if row.ns_per_event is None else f"{row.ns_per_event:.0f}",
        "-" if row.smallest_capacity is None else format_bytes(row.smallest_capacity),
    )


def compare(traces, strategies=None, capacity=None, passes=2, peers=True, progress=None):
    """Run traces through every strategy and through models of other pools.

    Parameters
    ----------
    traces : Trace, path, or list of them
        Of several, also what they make when they run at once: see `Trace.merge`.
    strategies : list, optional
        Names, policies, their files or strategy objects; all of `STRATEGIES` if not given.
    capacity : int or str, optional
        Bytes that each pool may take; without it there is no bound.
    passes : int
        How often a trace is replayed into the same pool.
    peers : bool
        Whether to run the models.
    progress : callable, optional
        Called with the pools that are done and those in all.

    Returns
    -------
    CompareResult

    Raises
    ------
    ValueError, TypeError, FormatError, OSError
        Where traces, strategies or numbers cannot be used.

    Notes
    -----
    A pool takes about ten replays of a trace, most of them to find its smallest capacity.
    """
    traces = _named(traces)
    if capacity is not None:
        capacity = parse_size(capacity, "capacity")
        if capacity == 0:
            raise ValueError("capacity must not be 0 bytes")
    passes = parse_count(passes, "passes")
    contenders: list[_Strategy | _Model] = [_Strategy(name, made) for name, made in _strategies(strategies).items()]
    contenders += [_Model(name) for name in PEERS if peers]
    rows = []
    for name, trace in traces.items():
        for contender in contenders:
            rows.append(contender.row(name, trace, capacity, passes))
            if progress:
                progress(len(rows), len(traces) * len(contenders))
    about = {name: {"events": len(one), "peak_live_bytes": one.peak_live_bytes} for name, one in traces.items()}
    return CompareResult(about, rows)


def _named(traces):
    """The traces by name, and all of them together."""
    found = named(traces, taken=[TOGETHER])
    if not found:
        raise ValueError("there is no trace to compare with")
    if len(found) > 1:
        found[TOGETHER] = Trace.merge(*found.values())
    return found


def _strategies(given):
    """Functions from a trace to what `replay` takes, by name."""
    if given is None:
        return STRATEGIES
    if isinstance(given, str):
        raise TypeError("strategies must be a list, not a str")
    made = {}
    for one in given:
        name = one if isinstance(one, str) else os.fspath(one) if isinstance(one, os.PathLike) else repr(one)
        if name in STRATEGIES:
            made[name] = STRATEGIES[name]
        else:
            # Now, so that what is wrong with the last one is told before the first one takes time.
            made[name] = _always(policy_of(one))
    if not made:
        raise ValueError("there is no strategy to compare")
    return made


def _always(policy):
    return lambda trace: policy


class _Strategy:
    """A strategy as one side of a comparison."""

    def __init__(self, name, made):
        self.name = name
        self.made = made

    def row(self, name, trace, capacity, passes):
        strategy = self.made(trace)

        def completes(nbytes):
            tried, _ = self._replayed(trace, strategy, nbytes, passes)
            return tried is not None and tried.oom is None

        least = None
        if strategy == "fixed" and capacity is None:
            # One that is enough for every pass: `replay` would make it enough for the first.
            strategy = fixed_for(trace, passes)
            least = parse_size(strategy.capacity)
        result, refused = self._replayed(trace, strategy, capacity, passes)
        if least is None:
            enough = result.peak_reserved_bytes if result else capacity
            least = smallest_capacity(completes, trace.peak_live_bytes, enough)
        if refused:
            return CompareRow(name, self.name, False, 0, 0.0, 0.0, 0.0, 0.0, 0, 0, None, least, None, refused)
        return _row(name, self.name, False, result, result.warm_ns_per_event[-1], least)

    @staticmethod
    def _replayed(trace, strategy, capacity, passes):
        """The result, or None and why the strategy cannot begin."""
        try:
            return replay(trace, strategy, "simulated", capacity, passes), None
        except ValueError as error:
            if capacity is None:
                raise
            # What it takes at first is more than there is.
            return None, str(error)


class _Model:
    """A peer's model as one side of a comparison."""

    def __init__(self, name):
        self.name = name

    def row(self, name, trace, capacity, passes):
        result = simulate(trace, self.name, capacity, passes)

        def completes(nbytes):
            return simulate(trace, self.name, nbytes, passes).oom is None

        least = None
        if len(trace) <= _MOST_EVENTS:
            least = smallest_capacity(completes, trace.peak_live_bytes, result.peak_reserved_bytes)
        return _row(name, self.name, True, result, None, least)


def _row(trace, name, modelled, result, ns, least):
    return CompareRow(
        trace=trace,
        name=name,
        modelled=modelled,
        peak_reserved_bytes=result.peak_reserved_bytes,
        reserved_over_live=result.reserved_over_live,
        utilization=result.utilization,
        external_fragmentation=result.external_fragmentation,
        internal_fragmentation=result.internal_fragmentation,
        source_calls=result.source_calls,
        waited=result.waited,
        ns_per_event=ns,
        smallest_capacity=least,
        oom=result.oom,
    )


def smallest_capacity(completes, low, high):
    """The smallest capacity that is enough, found by halving.

    Parameters
    ----------
    completes : callable
        Whether a capacity in bytes is enough.
    low, high : int
        Bytes below which none is, and those that are thought to be enough.

    Returns
    -------
    int or None
        Bytes that are enough, at most 0.5 % above some that are not, or `low`; None where 4,096 times `high`
        is not enough.

    Notes
    -----
    About log2((high / low - 1) / 0.005) trials.  More memory can make a pool waste more, so a still smaller
    capacity may be enough by luck.
    """
    low = max(1, low)
    high = max(low, high)
    if completes(low):
        return low
    for _ in range(_DOUBLINGS):
        if completes(high):
            break
        low, high = high, 2 * high
    else:
        return None
    while high > low * (1 + PRECISION) + 1:
        middle = (low + high) // 2
        if completes(middle):
            high = middle
        else:
            low = middle
    return high


def _choice(traces, rows):
    """The name of the strategy that suits best, and a sentence that says why."""
    by_name: dict[tuple[bool, str], list[CompareRow]] = {}
    for row in rows:
        by_name.setdefault((row.modelled, row.name), []).append(row)
    ratios = {}
    for key, own in by_name.items():
        if all(row.completes for row in own):
            ratios[key] = math.exp(_mean(math.log(row.reserved_over_live or 1.0) for row in own))
    ours = {name: ratio for (modelled, name), ratio in ratios.items() if not modelled}
    if not ours:
        return None, _nothing_suits(by_name)
    near = [name for name, ratio in ours.items() if ratio <= min(ours.values()) * (1 + _SAME)]
    waits = {name: sum(row.waited for row in by_name[False, name]) for name in near}
    best = min(near, key=lambda name: (waits[name], name == "fixed", ours[name]))
    where = " in the mean of the tables" if len(traces) > 1 else ""
    sentence = (
        f"{best} suits: it reserves {ours[best]:.3f} times what is live{where}"
        f"{_others(best, ratios)}; {waits[best]:,} of its requests waited for the source, and "
        f"an event takes {_mean(row.ns_per_event for row in by_name[False, best]):.0f} ns"
    )
    if best in _CAUTION:
        sentence += f"; {_CAUTION[best]}"
    return best, sentence + "."


def _mean(values):
    values = list(values)
    return sum(values) / len(values)


def _others(best, ratios):
    """The ratios of all that `best` was chosen from or compared with, in brackets."""
    parts: dict[bool, list[str]] = {False: [], True: []}
    for (modelled, name), ratio in sorted(ratios.items(), key=lambda item: item[1]):
        if (modelled, name) != (False, best):
            parts[modelled].append(f"{PEERS[name].title if modelled else name} {ratio:.3f}")
    told = [", ".join(parts[False])] if parts[False] else []
    if parts[True]:
        told.append(f"models: {', '.join(parts[True])}")
    return f" ({'; '.join(told)})" if told else ""


def _nothing_suits(by_name):
    needed = {
        rows[0].name: max(row.smallest_capacity for row in rows)
        for (modelled, _), rows in by_name.items()
        if not modelled and all(row.smallest_capacity for row in rows)
    }
    if not needed:
        return "No strategy suits: none completes."
    least = min(needed, key=needed.__getitem__)
    return f"No strategy suits: none completes; {least} would in {format_bytes(needed[least])}, the least of them."

"""One run of a trace through a pool of its own, and what it showed."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import numpy as np

from vpool import sources
from vpool._interface.pool import Pool
from vpool._interface.replay import Replayer
from vpool.errors import PatternError, SourceError
from vpool.report import Report
from vpool.shortage import Shortage
from vpool.sizes import MAPPED_GRANULE, parse_count

__all__ = ["Figures", "ReplayResult", "measure", "pool_for", "run", "streams_of"]

_SIMULATED: dict[str, Callable[..., sources.Source]] = {
    "simulated": sources.Simulated,
    # A device has whole granules, so what a pool takes at first fits although it is rounded up to them.
    "simulated-vmm": lambda capacity: sources.SimulatedVmm(capacity + -capacity % MAPPED_GRANULE),
}
# Events between two calls of the progress function.
_CHUNK = 1 << 16


@dataclass(frozen=True)
class ReplayResult:
    """What one strategy did with one trace.

    Attributes
    ----------
    events, allocations : int
        Of the trace.
    peak_live_bytes : int
        The most requested bytes that are live at once.
    peak_reserved_bytes, peak_allocated_bytes : int
        The most that the pool held, and lent, over all passes.
    reserved_over_live : float
        peak reserved / peak live; 1 is perfect, 0 where nothing is ever live.
    source_calls : int
        Segments asked of the source and given back, refused ones counted, over all passes.
    external_fragmentation, internal_fragmentation, utilization : float
        Of the pool at the moment of the first pass when the most bytes are live (see `Report`), or
        when it ran out of memory.
    ns_per_event : float or None
        Nanoseconds of the first pass without driver time; None where patterns were written.
    oom : dict or None
        ``event``, ``requested`` and ``live_bytes`` of the request that failed.
    warm_ns_per_event : list of float or None
        `ns_per_event` of each pass.
    driver_calls, driver_ns : list of int
        Calls of the source's driver in each pass, and the nanoseconds that they took; those that a device would
        have taken, where it is modelled.
    worst_driver_ns : list of int
        The most nanoseconds that one event of each pass spent in the driver.
    waited : int
        Requests that waited for a new segment, over all passes.
    core_share : float or None
        Share of the requests that a fixed core served, over all passes; None for a strategy without one.
    verified_bytes : int
        Bytes of the blocks whose pattern was verified, over all passes; 0 without patterns.
    notes : list of str
        What was odd in the trace's file.
    report : Report
        Of the pool at that moment of the first pass.
    shortage : vpool.shortage.Shortage or None
        Of a run that was out of memory: who held it, and what would have helped.
    """

    events: int
    allocations: int
    peak_live_bytes: int
    peak_reserved_bytes: int
    reserved_over_live: float
    peak_allocated_bytes: int
    source_calls: int
    external_fragmentation: float
    internal_fragmentation: float
    utilization: float
    ns_per_event: float | None
    oom: dict | None
    warm_ns_per_event: list
    driver_calls: list
    driver_ns: list
    worst_driver_ns: list = field(default_factory=list)
    waited: int = 0
    core_share: float | None = None
    verified_bytes: int = 0
    notes: list = field(default_factory=list)
    report: Report | None = field(default=None, repr=False, compare=False)
    shortage: Shortage | None = field(default=None, repr=False, compare=False)

    def to_dict(self):
        """Every attribute but `report` and `shortage`, as plain Python types."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("report", "shortage")}


def run(
    trace,
    policy,
    source="simulated",
    capacity=None,
    passes=1,
    pessimistic=False,
    *,
    patterns=False,
    maintain=False,
    lag=0,
    progress=None,
):
    """Replay a trace by a policy: see `vpool.replay`, which takes names, paths and sizes as well."""
    passes = parse_count(passes, "passes")
    pool = pool_for(policy, source, capacity)
    if patterns and not pool.source.has_memory:
        raise ValueError(f"source {pool.source.name!r} has no memory to write patterns into")
    with pool, streams_of(pool.source.driver, trace) as streams:
        replayer = Replayer(pool, trace, streams, pessimistic, patterns, maintain, lag)
        return _Run(pool, trace, replayer, passes, patterns, progress).result()


class Figures(NamedTuple):
    """What a search asks of a run: a few figures, and no report."""

    reserved_bytes: int  # the most held, over all passes
    source_calls: int
    waited: int  # requests that waited for a new segment
    served: int  # events before the one that ran out of memory, over all passes
    completes: bool


def measure(trace, policy, capacity=None, passes=1, maintain=False):
    """Figures of one run on simulated memory, those of `vpool.replay` without what takes time to tell.

    Returns
    -------
    Figures

    Raises
    ------
    ValueError
        Where the policy cannot begin with the capacity.

    Notes
    -----
    O(n) for n events, nearly all of it without the GIL, so threads run at once.
    """
    pool = pool_for(policy, "simulated", capacity)
    served = 0
    with pool, streams_of(pool.source.driver, trace) as streams:
        replayer = Replayer(pool, trace, streams, maintain=maintain)
        for _ in range(passes):
            done = replayer.run(0, len(trace))
            served += done
            if done < len(trace):
                break
            replayer.finish()
        stats = pool.stats
        return Figures(
            stats.peak_reserved_bytes,
            stats.source_calls,
            stats.allocations - stats.hits,
            served,
            served == passes * len(trace),
        )


@contextlib.contextmanager
def streams_of(driver, trace):
    """A stream for each of the trace's by its index: 0 is the default stream, the others are new."""
    made = {}
    with contextlib.ExitStack() as stack:  # goes on where one cannot be destroyed
        for index in _by_first_use(trace.stream):
            made[index] = driver.create_stream() if index else 0
            if index:
                stack.callback(driver.destroy_stream, made[index])
        yield made


def _by_first_use(stream):
    """The streams of a trace in the order in which a pool gets to know them, in which it looks through their blocks."""
    first = np.full(int(stream.max(initial=0)) + 1, -1, np.int64)
    first[stream[::-1]] = np.arange(len(stream) - 1, -1, -1)
    order = np.argsort(first, kind="stable")
    return order[first[order] >= 0].tolist()


def pool_for(policy, source, capacity):
    """The pool that a replay runs through; without a capacity a simulated one has no bounds."""
    strategy = policy.strategy
    if capacity is not None:
        strategy = strategy.within(capacity)
        if source in _SIMULATED:
            source = _SIMULATED[source](capacity)
    elif source in _SIMULATED and isinstance(strategy.limit_of(), float):
        # Unbounded: the 80 % of a device that is not there would mean nothing.
        strategy = strategy.with_limit(1.0)
    policy = replace(policy, strategy=strategy)
    return Pool(**policy.pool_arguments(source=source), name="replay", debug=())


class _Run:
    """The passes of one replay and what they showed."""

    def __init__(self, pool, trace, replayer, passes, patterns, progress):
        self.pool = pool
        self.trace = trace
        self.passes = passes
        self.patterns = patterns
        self.progress = progress
        self.replayer = replayer
        self.worst = None
        self.oom = None
        self.stopped = None
        self.nanoseconds = []
        self.events = []  # of each pass, with the request that failed
        self.driver_calls = []
        self.driver_ns = []
        self.worst_driver_ns = []

    def result(self):
        for number in range(self.passes):
            self._run_pass(number)
            if self.oom is not None:
                break
        trace, stats = self.trace, self.pool.stats if self.stopped is None else self.stopped
        worst = self.worst if self.worst is not None else self.pool.inspect()
        per_event = [
            None if self.patterns else ns / max(1, events)
            for ns, events in zip(self.nanoseconds, self.events, strict=True)
        ]
        live = trace.peak_live_bytes
        return ReplayResult(
            events=len(trace),
            allocations=trace.allocations,
            peak_live_bytes=live,
            peak_reserved_bytes=stats.peak_reserved_bytes,
            reserved_over_live=stats.peak_reserved_bytes / live if live else 0.0,
            peak_allocated_bytes=stats.peak_allocated_bytes,
            source_calls=stats.source_calls,
            external_fragmentation=worst.external_fragmentation,
            internal_fragmentation=worst.internal_fragmentation,
            utilization=worst.utilization,
            ns_per_event=per_event[0],
            oom=self.oom,
            warm_ns_per_event=per_event,
            driver_calls=self.driver_calls,
            driver_ns=self.driver_ns,
            worst_driver_ns=self.worst_driver_ns,
            waited=stats.allocations - stats.hits,
            core_share=self.pool.core_share,
            verified_bytes=self.replayer.verified,
            notes=list(trace.notes),
            report=worst,
            shortage=None if self.oom is None else Shortage(worst, self.oom["requested"]),
        )

    def _driver_totals(self):
        """Calls, nanoseconds that passed in them, and nanoseconds that a model adds."""
        driver = self.pool.source.driver
        # Patterns are the replay's own doing, not the pool's.
        mine = [figures for name, figures in driver.calls().items() if name not in ("fill", "read", "write")]
        modelled = sum(driver.modelled_ns().values())
        return np.array([sum(one[0] for one in mine), sum(one[2] for one in mine), modelled])

    def _run_pass(self, number):
        begin = self.replayer.nanoseconds
        self.replayer.worst_ns = 0
        totals = self._driver_totals()
        peak = self.trace.peak_event + 1
        if self._run_events(number, 0, peak) and number == 0:
            before = self._driver_totals()
            self.worst = self._report(peak - 1)
            totals += self._driver_totals() - before
        if self.oom is None:
            self._run_events(number, peak, len(self.trace))
        calls, passed, modelled = (self._driver_totals() - totals).tolist()
        self.driver_calls.append(calls)
        self.driver_ns.append(passed + modelled)
        self.worst_driver_ns.append(self.replayer.worst_ns)
        self.events.append(len(self.trace) if self.oom is None else self.oom["event"] + 1)
        self.nanoseconds.append(max(0, self.replayer.nanoseconds - begin - passed))
        if self.oom is not None:
            self.stopped = self.pool.stats  # what the end frees may go back, which the trace never came to
        if not self.replayer.finish():
            self._source_failed("the end of the trace")
            raise PatternError("a block that was live at the end of the trace does not hold its pattern")

    def _run_events(self, number, begin, end):
        """Replay a range of events; False where it ran out of memory."""
        while begin < end:
            # Without somebody who looks at it, progress would only cost time.
            stop = min(end, begin + _CHUNK) if self.progress else end
            done = self.replayer.run(begin, stop)
            if self.progress:
                self.progress(number * len(self.trace) + done, self.passes * len(self.trace))
            if done < stop:
                self._stopped_at(done)
                return False
            begin = stop
        return True

    def _report(self, event):
        return self.pool.inspect().over_step(self.trace.step_bytes(event))

    def _source_failed(self, where):
        name = self.replayer.source_failed
        if name:
            raise SourceError(f"{where}: the source failed: {name}", name)

    def _stopped_at(self, event):
        if self.replayer.mismatch >= 0:
            raise PatternError(f"event {event}: the block that is freed does not hold its pattern")
        self._source_failed(f"event {event}")
        live = int(self.trace.live_bytes[event - 1]) if event else 0
        self.oom = {"event": event, "requested": int(self.trace.bytes[event]), "live_bytes": live}
        self.worst = self._report(event)

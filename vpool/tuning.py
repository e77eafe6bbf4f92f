"""Tuning: the policy that suits recorded traces best, and why."""

import contextlib
import math
import operator
from dataclasses import replace

from vpool.policy import Policy
from vpool.recommendation import Expected, Recommendation
from vpool.search import Point, Space, search
from vpool.sizes import format_bytes, parse_count, parse_size
from vpool.trace import named
from vpool.trials import Study, Workload, halves, on_threads

__all__ = ["OBJECTIVES", "tune"]

OBJECTIVES = ("reserved", "calls", "fits", "mix")
TRIALS = 3000
# Of the trials, for the first halves alone: what they choose is then tried on the second halves.
_HELD_OUT = 1 / 3
# Of what costs so little more than the best, that is chosen which is best where it is worst, on halves too; within
# the second bound only where all within the first cost more than the default somewhere.
_NEAR = (0.005, 0.008)
_FINALISTS = 64
_PARETO = 24
_WHOLE, _FIRST, _SECOND = "whole", "first half", "second half"
_HALVES = {_WHOLE: (_FIRST, _SECOND), _FIRST: ("first quarter", "second quarter")}


def tune(
    traces,
    capacity=None,
    objective="reserved",
    *,
    call_bytes="1MiB",
    trials=TRIALS,
    seed=0,
    workers=None,
    passes=1,
    maintain=False,
    holdout=True,
    study=None,
    scheduler=None,
    progress=None,
):
    """Search for the policy that suits traces best.

    Strategy, sizes, growth, blocks, rounding and the least remainder are searched, by replays on simulated memory.

    Parameters
    ----------
    traces : Trace, path, or list of them
        Of several, each is replayed on its own; a policy must not be worse than the default one on any.
    capacity : int or str, optional
        Bytes that the pool may take; a policy that runs out of memory with it is no choice.
    objective : {"reserved", "calls", "fits", "mix"}
        The least peak reserved; the fewest source calls, and then the least reserved; the same within `capacity`,
        which must be given; or the least of peak reserved + source calls x `call_bytes`.
    call_bytes : int or str
        Bytes that one source call is worth, for ``"mix"``.
    trials : int
        Policies to try.
    seed : int
        Of the search.  The same seed gives the same result, on any number of workers.
    workers : int, optional
        Threads of this process; as many as there are cores if not given.
    passes : int
        How often each trace is replayed into the same pool.
    maintain : bool
        Call `Pool.maintain` before each event, and search the watermark as well.
    holdout : bool
        Check that the choice generalises: spend a third of the trials on the first half of each trace's steps, try
        what is chosen there on the second half, and leave out kinds of policies that run out of memory on it.  Of
        policies that are as good as the best, choose what is best where it is worst, each half alone included.
    study : path, optional
        A file that keeps what was measured: a run that was interrupted goes on from it.
    scheduler : str or distributed.Client, optional
        Measure on Dask's workers instead: a scheduler's address, ``"local"`` for a cluster of processes on this
        machine, or a client.  Needs the extra ``dask``.
    progress : callable, optional
        Called with the trials that are done and those in all.

    Returns
    -------
    Recommendation

    Raises
    ------
    ValueError, TypeError, FormatError, OSError
        Where traces, numbers or the study cannot be used, or nothing that was tried completes within `capacity`.
    Error
        Where the scheduler cannot be reached, or Dask is not installed.

    Notes
    -----
    O(trials) replays.  Thread safety: may be called from several threads, with a study each.
    """
    traces = _named(traces)
    goal = _Goal(objective, capacity, call_bytes)
    trials, passes = parse_count(trials, "trials"), parse_count(passes, "passes")
    workers = None if workers is None else parse_count(workers, "workers")
    seed = operator.index(seed)
    workloads = {
        name: Workload(part, goal.capacity, passes, maintain) for name, part in _parts(traces, holdout).items()
    }
    with Study(workloads, study) as kept, _evaluator(scheduler, workers, workloads) as evaluate:
        return _Tuning(workloads, kept, evaluate, goal, trials, seed, progress).recommendation()


def _parts(traces, holdout):
    """The traces, their halves, and the halves of the first ones, as far as there are such."""
    parts = {_WHOLE: traces}
    for name in (_WHOLE, _FIRST) if holdout else ():
        cut = {title: halves(trace) for title, trace in parts.get(name, {}).items()}
        if cut and all(cut.values()):
            for half, place in zip(_HALVES[name], (0, 1), strict=True):
                parts[half] = {title: pair[place] for title, pair in cut.items()}
    return parts


@contextlib.contextmanager
def _evaluator(scheduler, workers, workloads):
    if scheduler is None:
        with on_threads(workers) as evaluate:
            yield evaluate
    else:
        from vpool.cluster import on_dask

        with on_dask(scheduler, workers, workloads.values()) as evaluate:
            yield evaluate


def _named(traces):
    found = named(traces)
    for name, trace in found.items():
        if not trace.peak_live_bytes:
            raise ValueError(f"{name} allocates nothing, so there is nothing to tune")
    if not found:
        raise ValueError("there is no trace to tune for")
    return found


class _Goal:
    """What is to be least."""

    def __init__(self, objective, capacity, call_bytes):
        if objective not in OBJECTIVES:
            raise ValueError(f"no objective {objective!r}; one of {', '.join(OBJECTIVES)}")
        self.objective = objective
        self.capacity = None if capacity is None else parse_size(capacity, "capacity")
        if self.capacity == 0:
            raise ValueError("capacity must not be 0 bytes")
        if objective == "fits" and capacity is None:
            raise ValueError('objective "fits" needs a capacity')
        self.call_bytes = parse_size(call_bytes, "call_bytes")

    def cost(self, figures, live):
        """What one trace costs: two numbers, the second for equals."""
        reserved = figures.reserved_bytes / live
        if self.objective == "reserved":
            return reserved, figures.source_calls
        if self.objective == "mix":
            return reserved + figures.source_calls * self.call_bytes / live, figures.source_calls
        return figures.source_calls, reserved

    def costs(self, workload, figures):
        """The costs of each trace."""
        return [self.cost(one, live) for one, live in zip(figures, workload.peaks, strict=True)]

    def excess(self, workload, figures, default):
        """By how much a policy costs more than the default where it does most, as a share; 0 for nowhere."""
        pairs = zip(self.costs(workload, figures), self.costs(workload, default), default, strict=True)
        return max([0.0, *(cost[0] / bound[0] - 1 for cost, bound, one in pairs if one.completes)])

    def value(self, workload, default):
        """A function from the figures of all traces to what is ordered, given those of the default policy.

        What does not complete comes last, by how far it came; before that what costs more than the default
        on some trace; and then the least mean, geometric where it is of ratios.
        """

        def value(figures):
            if not all(one.completes for one in figures):
                return (2, -sum(one.served / of for one, of in zip(figures, workload.events, strict=True)), 0)
            means = [_mean(column) for column in zip(*self.costs(workload, figures), strict=True)]
            excess = self.excess(workload, figures, default)
            return (1, excess, *means) if excess else (0, *means)

        return value

    def near(self, value, best, within):
        """Whether a value is as good as the best."""
        if value[0] == 2 or value[:-2] != best[:-2]:
            return value == best
        if self.objective in ("reserved", "mix"):
            return value[-2] <= best[-2] * (1 + within)
        return value[-2] == best[-2] and value[-1] <= best[-1] * (1 + within)


def _mean(values):
    """The geometric mean of ratios, the sum of counts."""
    if all(isinstance(one, int) for one in values):
        return sum(values)
    return math.exp(sum(map(math.log, values)) / len(values))


class _Tuning:
    """One search, with what it found on the way."""

    def __init__(self, workloads, study, evaluate, goal, trials, seed, progress):
        self.workloads = workloads
        self.study = study
        self.evaluate = evaluate
        self.goal = goal
        self.trials = trials
        self.seed = seed
        self.progress = progress
        self.done = 0

    def recommendation(self):
        held_out = int(self.trials * _HELD_OUT) if _SECOND in self.workloads else 0
        held, refused = self._held_out(held_out) if held_out else (None, {})
        space = Space(self.workloads[_WHOLE])
        ranked = self._search(
            _WHOLE, space, self.trials - self.done, lambda point: _is_default(point) or point.family not in refused
        )
        value, point, figures = self._chosen(_WHOLE, space, ranked)
        if value[0] == 2:
            raise ValueError(self._nothing_fits(figures))
        return Recommendation(
            policy=space.policy(point),
            objective=self.goal.objective,
            capacity=self.goal.capacity,
            seed=self.seed,
            trials=len(ranked) + self.done,
            expected=self._expected(_WHOLE, figures, self._default(_WHOLE)),
            holdout=held,
            refused=refused,
            sensitivity=self._sensitivity(space, point),
            pareto=_pareto(space, ranked, self.workloads[_WHOLE]),
        )

    def _default(self, name):
        return self._measure(name, [Policy()])[0]

    def _measure(self, name, policies):
        return self.study.measure(self.evaluate, name, policies)

    def _search(self, name, space, trials, allowed=lambda point: True):
        value = self.goal.value(self.workloads[name], self._default(name))
        show = None
        if self.progress:

            def show(done):
                self.progress(self.done + done, self.trials)

        return search(space, lambda policies: self._measure(name, policies), value, trials, self.seed, allowed, show)

    def _held_out(self, trials):
        """What the first halves choose, on the second halves; and why kinds are left out."""
        space = Space(self.workloads[_FIRST])
        ranked = self._search(_FIRST, space, trials)
        self.done += len(ranked)
        default = self._default(_SECOND)
        best: dict[str, Point] = {}
        for _, point, _ in ranked:
            best.setdefault(point.family, point)
        refused = {}
        tried = self._measure(_SECOND, [space.policy(point) for point in best.values()])
        for family, figures in zip(best, tried, strict=True):
            if any(other.completes and not one.completes for one, other in zip(figures, default, strict=True)):
                refused[family] = "the best on the first half of the steps runs out of memory on the second"
        fit = [one for one in ranked if one[1].family not in refused] or ranked
        point = self._chosen(_FIRST, space, fit)[1]
        held = self._measure(_SECOND, [space.policy(point)])[0]
        return self._expected(_SECOND, held, default), refused

    def _chosen(self, name, space, ranked):
        """Of those that are as good as the best, that which is best where it is worst.

        What cannot grow is no choice: it is as good as what can, and fails on the first step that needs more.
        """
        ranked = [one for one in ranked if one[1].grows] or ranked
        best = ranked[0][0]
        for within in _NEAR:
            near = self._finalists([one for one in ranked if self.goal.near(one[0], best, within)])
            robust = self._robustness(name, [space.policy(point) for _, point, _ in near])
            keys = [(*bad, _calls(one[2]), one[0]) for bad, one in zip(robust, near, strict=True)]
            chosen = min(keys)
            if chosen[0] == 0:
                break
        return near[keys.index(chosen)]

    @staticmethod
    def _finalists(near):
        """Not all, if there are many: the best, those that call the source least, and those that commit to least."""
        by_calls = sorted(near, key=lambda one: _calls(one[2]))
        by_size = sorted(near, key=lambda one: one[1].initial + one[1].core)
        third = _FINALISTS // 3
        return list(dict.fromkeys([*near[:third], *by_calls[:third], *by_size[:third]]))

    def _robustness(self, name, policies):
        """Of each policy, on a part and its halves: the most it costs beyond the default, and reserves beyond what is
        live.  To 1 %, since less is chance."""
        names = [part for part in (name, *_HALVES[name]) if part in self.workloads]
        bad = [(0.0, 0.0)] * len(policies)
        for part in names:
            workload, default = self.workloads[part], self._default(part)
            for place, figures in enumerate(self._measure(part, policies)):
                if all(one.completes for one in figures):
                    ratio = max(one.reserved_bytes / live for one, live in zip(figures, workload.peaks, strict=True))
                    excess = self.goal.excess(workload, figures, default)
                else:
                    ratio = excess = math.inf
                bad[place] = (max(bad[place][0], round(excess, 2)), max(bad[place][1], round(ratio, 2)))
        return bad

    def _expected(self, name, figures, default):
        traces = self.workloads[name].traces
        return [
            Expected(
                trace=title,
                peak_live_bytes=trace.peak_live_bytes,
                peak_reserved_bytes=one.reserved_bytes,
                reserved_over_live=one.reserved_bytes / trace.peak_live_bytes,
                source_calls=one.source_calls,
                waited=one.waited,
                completes=one.completes,
                default_reserved_bytes=other.reserved_bytes if other.completes else None,
                default_source_calls=other.source_calls if other.completes else None,
            )
            for (title, trace), one, other in zip(traces.items(), figures, default, strict=True)
        ]

    def _sensitivity(self, space, point):
        """What each knob does while the others stay."""
        rows = []
        workload = self.workloads[_WHOLE]
        for knob in space.knobs(point):
            values = space.values(point, knob)
            figures = self._measure(_WHOLE, [space.policy(replace(point, **{knob: value})) for value in values])
            for value, own in zip(values, figures, strict=True):
                complete = all(one.completes for one in own)
                rows.append(
                    {
                        "knob": knob,
                        "value": value,
                        "chosen": value == getattr(point, knob),
                        "reserved_over_live": _mean_ratio(own, workload) if complete else None,
                        "source_calls": _calls(own) if complete else None,
                    }
                )
        return rows

    def _nothing_fits(self, figures):
        traces = self.workloads[_WHOLE].traces
        name, trace, one = next(
            (name, trace, one) for (name, trace), one in zip(traces.items(), figures, strict=True) if not one.completes
        )
        return (
            f"none of {self.trials:,} policies completes within {format_bytes(self.goal.capacity)}: on {name}, which "
            f"has {format_bytes(trace.peak_live_bytes)} live at most, the best came to event {one.served:,} "
            f"of {len(trace):,}"
        )


def _calls(figures):
    return sum(one.source_calls for one in figures)


def _is_default(point):
    return point == Point("dynamic", 256 << 20, 1.5)


def _mean_ratio(figures, workload):
    return _mean([one.reserved_bytes / live for one, live in zip(figures, workload.peaks, strict=True)])


def _pareto(space, ranked, workload):
    """Of all that completes: what nothing beats both in reserved and in source calls, the least reserved first."""
    points = [
        (_mean_ratio(figures, workload), _calls(figures), number)
        for number, (_, _, figures) in enumerate(ranked)
        if all(one.completes for one in figures)
    ]
    front: list[tuple] = []
    for ratio, calls, number in sorted(points):
        if not front or calls < front[-1][1]:
            front.append((ratio, calls, number))
    # Evenly thinned, with both ends.
    step = max(1.0, (len(front) - 1) / (_PARETO - 1))
    kept = sorted({round(place * step) for place in range(_PARETO) if round(place * step) < len(front)})
    return [
        {
            "reserved_over_live": front[place][0],
            "source_calls": front[place][1],
            "policy": space.policy(ranked[front[place][2]][1]).dumps(),
            "family": ranked[front[place][2]][1].family,
        }
        for place in kept
    ]

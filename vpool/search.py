"""Search: a coarse grid over all that a policy says, then random steps around the best that was found."""

import random
from dataclasses import dataclass, replace

import numpy as np

from vpool.arrays import distinct
from vpool.policy import Policy
from vpool.sizes import MAPPED_GRANULE, MAX_SIZE
from vpool.sizing import block_lists, smallest_slab
from vpool.strategies import GRANULE, Dynamic, Fixed, Hybrid, Strategy
from vpool.trace import ALLOCATE

__all__ = ["KNOBS", "Point", "Space", "search"]

BATCH = 32  # policies at a time: a constant, so that the search is the same on any number of cores
_SMALLEST_STEP = 4096
_ROUNDINGS = (256, 512, 1024, 2048, 4096, 16384, 65536)
_REMAINDERS = (256, 1024, 4096, 65536, 1 << 20, 4 << 20)
_WATERMARKS = (0.6, 0.7, 0.8, 0.9, 1.0)
_FACTORS = (1.1, 1.25, 1.5, 2.0)
_SHARES = (0, 0.25, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05)  # of the peak, for a first segment
_CORES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85)
_STEPS = (14, 11, 9, 7, 5)  # a step is the peak shifted by so many bits
_QUANTILES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)
_MOST = 1.15  # of the peak, for sizes that are searched
# Of the local search: how far down the ranking parents are taken from, and how far a step goes.
_PARENTS = 6.0
_ELITE_SHARE = 0.2
_SPREADS = (0.2, 0.05, 0.01, 0.003)
_OCTAVES = (2.0, 0.5, 0.1)


@dataclass(frozen=True)
class Point:
    """A policy as the numbers that the search changes; sizes in bytes."""

    kind: str = "dynamic"  # or "fixed", "hybrid"
    initial: int = 0  # of a fixed pool its capacity
    growth: float | int = 1.5
    adaptive: bool = False
    rounding: int = GRANULE
    remainder: int = GRANULE
    core: int = 0
    cut: int = 0  # size up to which, or from which, requests belong to the core; 0: all
    large: bool = False  # whether the core is for sizes from `cut` rather than up to it
    watermark: float = 1.0
    blocks: tuple = ()

    @property
    def grows(self):
        """Whether it has an answer to what the traces do not have."""
        return self.kind != "fixed"

    @property
    def family(self):
        """What it is: points of a family generalise alike."""
        return "adaptive" if self.kind == "dynamic" and self.adaptive else self.kind


# What can be changed of each kind, the most telling first.
KNOBS = {
    "dynamic": ("initial", "growth", "adaptive", "rounding", "remainder"),
    "fixed": ("initial", "rounding", "remainder"),
    "hybrid": ("core", "cut", "large", "initial", "growth", "adaptive", "rounding", "remainder"),
}


class Space:
    """The policies that are searched for some traces.

    Parameters
    ----------
    workload : vpool.trials.Workload
    """

    def __init__(self, workload):
        self.workload = workload
        self.capacity = workload.capacity
        self.peak = max(workload.peaks)
        self.unit = max(GRANULE, min(MAPPED_GRANULE, 1 << max(0, self.peak.bit_length() - 12)))
        requests = np.concatenate([trace.bytes[trace.op == ALLOCATE] for trace in workload.traces.values()])
        sizes = np.quantile(requests[requests > 0], _QUANTILES, method="higher")
        # A step below the common number of digits would only tell twins apart.
        self.cuts = distinct(sizes[sizes < requests.max()]).astype(np.int64).tolist()

    def size(self, share):
        """A share of the peak in whole units."""
        return self._fit(int(share * self.peak))

    def _fit(self, nbytes):
        most = MAX_SIZE if self.capacity is None else self.capacity
        return min(most, max(0, nbytes) // self.unit * self.unit)

    def _step(self, nbytes):
        return max(_SMALLEST_STEP, self._fit(int(nbytes)) or int(nbytes) // GRANULE * GRANULE)

    def policy(self, point):
        """The policy that a point is."""
        strategy: Strategy
        if point.kind == "fixed":
            strategy = Fixed(max(GRANULE, point.initial), point.blocks or None)
        else:
            strategy = dynamic = Dynamic(point.initial, point.growth, adaptive=point.adaptive)
        if point.kind == "hybrid":
            band = {} if not point.cut else {"smallest" if point.large else "largest": point.cut}
            core = max(GRANULE, point.core)
            strategy = Hybrid(core, point.blocks or None, point.watermark, dynamic=dynamic, headroom=0, **band)
        if self.capacity is not None:
            strategy = strategy.within(max(GRANULE, self.capacity))  # less serves nothing
        return Policy(strategy, point.rounding, point.remainder)

    def grid(self):
        """The points that are tried first, in order: what is known to be good somewhere, then a coarse grid."""
        points = [Point("dynamic", 256 << 20, 1.5), Point("dynamic", 256 << 20, 1.5, True)]
        points += self._slabs()
        steps = [self._step(self.peak >> bits) for bits in _STEPS]
        shares = [self.size(share) for share in _SHARES]
        for initial in shares:
            points += [Point("dynamic", initial, growth, True) for growth in steps]
            points += [Point("dynamic", initial, growth) for growth in (*steps, *_FACTORS)]
        for rounding in _ROUNDINGS[1::2]:
            for remainder in _REMAINDERS[::2]:
                points.append(Point("dynamic", 0, steps[0], True, rounding, remainder))
                points.append(Point("dynamic", self.size(0.9), steps[1], True, rounding, remainder))
                points.append(Point("dynamic", self.size(1.0), steps[1], False, rounding, remainder))
        for core in map(self.size, _CORES):
            for cut in self.cuts[1::2]:
                for large in (False, True):
                    hybrid = Point("hybrid", 0, steps[0], True, core=core, cut=cut, large=large)
                    points += [hybrid, replace(hybrid, growth=steps[2]), replace(hybrid, growth=1.5, adaptive=False)]
        return list(dict.fromkeys(points))

    def _slabs(self):
        """One segment for all, and equal blocks, of the sizes that the traces need."""
        traces = self.workload.traces.values()
        slab = self._fit(max(smallest_slab(trace, passes=self.workload.passes) for trace in traces) + self.unit - 1)
        points = [Point("dynamic", slab, self._step(self.peak >> _STEPS[0])), Point("fixed", slab)]
        for core, blocks in block_lists(list(traces)):
            if self.capacity is None or core <= self.capacity:
                points.append(Point("hybrid", 0, self._step(self.peak >> _STEPS[0]), core=core, blocks=blocks))
                points.append(Point("fixed", core, blocks=blocks))
        return points

    def values(self, point, knob):
        """Values of one knob that are worth a look from a point, its own among them."""
        own = getattr(point, knob)
        if knob == "initial":
            near = [self._fit(int(own * factor)) for factor in (0.9, 0.95, 1.05, 1.1)]
            values = [*(self.size(share) for share in _SHARES), *near]
        elif knob == "core":
            values = [self.size(share) for share in (*_CORES, 1.0)]
        elif knob == "growth":
            values = [*(self._step(self.peak >> bits) for bits in _STEPS), *_FACTORS]
        elif knob == "cut":
            values = [0, *self.cuts]
        elif knob in ("adaptive", "large"):
            values = [False, True]
        elif knob == "watermark":
            values = list(_WATERMARKS)
        else:
            values = list(_ROUNDINGS if knob == "rounding" else _REMAINDERS)
        if point.blocks and knob in ("core", "initial", "cut", "large"):
            return [own]
        # By size, factors before steps.
        return sorted({*values, own}, key=lambda value: (not isinstance(value, float), value))

    def knobs(self, point):
        """What can be changed of a point, the most telling first."""
        more = ("watermark",) if self.workload.maintain and point.kind == "hybrid" else ()
        return KNOBS[point.kind] + more

    def neighbour(self, point, rng):
        """A point that grows and differs from another in one to three knobs."""
        if not point.grows:
            # What a slab does, a first segment of its size does too.
            kind = "hybrid" if point.blocks else "dynamic"
            step = self._step(self.peak >> _STEPS[0])
            core, initial = (point.initial, 0) if point.blocks else (0, point.initial)
            point = replace(point, kind=kind, core=core, initial=initial, growth=step)
        for _ in range(rng.choice((1, 1, 2, 3))):
            knobs = self.knobs(point)
            # The numbers of bytes matter most, and the first of the knobs are those.
            knob = rng.choice((*knobs, *knobs[:2]))
            point = replace(point, **{knob: self._moved(point, knob, rng)})
        return point

    def _moved(self, point, knob, rng):
        own = getattr(point, knob)
        if point.blocks and knob in ("core", "initial", "cut", "large"):
            return own
        if knob in ("initial", "core"):
            moved = own + int(self.peak * rng.gauss(0, rng.choice(_SPREADS)))
            return self._fit(min(moved, int(_MOST * self.peak)))
        if knob == "growth" and not isinstance(own, float):
            moved = own * 2.0 ** rng.gauss(0, rng.choice(_OCTAVES))
            return self._step(min(moved, self.peak))
        if knob == "cut":
            values = [0, *self.cuts]
            place = values.index(own) + rng.choice((-1, 1)) if own in values else 0
            return values[min(len(values) - 1, max(0, place))]
        if knob in ("adaptive", "large"):
            return own ^ (rng.random() < 0.3)
        return rng.choice(self.values(point, knob))


def search(space, measure, value, trials, seed=0, allowed=lambda point: True, progress=None):
    """Look for the point with the least value.

    Parameters
    ----------
    space : Space
    measure : callable
        From a list of policies to that of their figures.
    value : callable
        From figures to something that can be ordered, the least being the best.
    trials : int
        How many policies to try; the grid is cut where it has more.
    seed : int
    allowed : callable
        Whether a point may be tried.
    progress : callable, optional
        Called with the trials done.

    Returns
    -------
    list of (value, Point, figures)
        The best first; of equals, the one that was tried first.

    Notes
    -----
    After the grid, each batch steps from points far up the ranking, and some from the best of each family, so that
    one that is behind can still catch up: an evolution strategy without recombination.  The figures of all
    earlier batches decide the next one, never the time they took, so a seed has one outcome.
    """
    rng = random.Random(seed)
    tried: dict[Policy, tuple] = {}

    def attempt(points):
        policies: dict[Policy, Point] = {}
        for point in points:
            policies.setdefault(space.policy(point), point)
        fresh = {policy: point for policy, point in policies.items() if policy not in tried}
        for (policy, point), figures in zip(fresh.items(), measure(list(fresh)), strict=True):
            tried[policy] = (value(figures), len(tried), point, figures)
        if progress:
            progress(min(trials, len(tried)))

    grid = [point for point in space.grid() if allowed(point)][:trials]
    for begin in range(0, len(grid), BATCH):
        attempt(grid[begin : begin + BATCH])
    idle = 0
    while len(tried) < trials and idle < 10:
        before = len(tried)
        ranked = sorted(tried.values(), key=lambda one: one[:2])
        elites = list({one[2].family: one[2] for one in reversed(ranked)}.values())
        steps = [space.neighbour(_parent(ranked, elites, rng), rng) for _ in range(min(BATCH, trials - before))]
        attempt([point for point in steps if allowed(point)])
        idle = idle + 1 if len(tried) == before else 0
    ranked = sorted(tried.values(), key=lambda one: one[:2])
    return [(one[0], one[2], one[3]) for one in ranked]


def _parent(ranked, elites, rng):
    if rng.random() < _ELITE_SHARE:
        return rng.choice(elites)
    return ranked[min(len(ranked) - 1, int(rng.expovariate(1 / _PARENTS)))][2]

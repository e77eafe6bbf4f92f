"""How fast a pool shall be: each goal is a ratio within one run, so that it means the same on every machine."""

from dataclasses import dataclass

from vpool.bench.results import device_peers, place, ratio

__all__ = ["Goal", "goals"]

_NOT_MEASURED = "not measured in this run"
_NO_PEER = "no peer on a device was measured"


@dataclass(frozen=True)
class Goal:
    """One goal and what a run says of it.

    Attributes
    ----------
    text : str
    bound : float
    at_least : bool
        Whether the figure shall be at least the bound, not at most.
    figure : float or None
        None where the run does not tell; `why` says what it lacks.
    where : str
        The size, trace or number at which the figure is worst.
    why : str
    """

    text: str
    bound: float
    at_least: bool
    figure: float | None = None
    where: str = ""
    why: str = ""

    @property
    def holds(self):
        """Whether it holds; None where the run does not tell."""
        if self.figure is None:
            return None
        return self.figure >= self.bound if self.at_least else self.figure <= self.bound

    def to_dict(self):
        """What it says, as plain Python types."""
        names = ("text", "bound", "at_least", "figure", "where", "holds", "why")
        return {name: getattr(self, name) for name in names}


def goals(results):
    """Every goal, with its figure in a run.

    Parameters
    ----------
    results : Results

    Returns
    -------
    list of Goal
    """
    run = _Run(results)
    return [
        run.at_most("compiled pair, in locks", 3.5, run.floors("pair")),
        Goal("compiled pair from a front of blocks at hand, in locks", 1.0, False, why="there is no such front"),
        run.at_most("compiled pair of a fixed pool, in locks", 2.3, run.floors("pair_among", who="vpool, fixed pool")),
        run.at_least("compiled pair, times faster than the best peer", 10.0, run.peers("pair")),
        run.at_most("random sizes, 512 live, nanoseconds", 60.0, run.values("random", "ns")),
        run.at_least("random sizes, 512 live, times faster than the best peer", 10.0, run.peers("random")),
        run.at_most("pair from Python, in empty calls", 1.5, run.against("python_pair", "empty calls")),
        run.at_least("pair from Python, times faster than CuPy's pool", 8.0, run.times("python_pair", "CuPy pool")),
        run.at_most("vpool.empty, in empty objects", 2.2, run.against("buffer", "empty calls")),
        run.at_least("vpool.empty, times faster than cupy.cuda.alloc", 10.0, run.times("buffer", "CuPy pool")),
        run.at_most("pair among a million blocks, in pairs among a thousand", 1.5, run.many_blocks()),
        run.at_most("memory of a million blocks, bytes each", 64.0, run.values("resident", "bytes_whole")),
        run.at_most("the same, every second one freed", 96.0, run.values("resident", "bytes_halved")),
        *run.trace_goals(),
        *run.thread_goals(),
    ]


class _Run:
    """The ratios of a run: each method gives pairs of a figure and where it was found, or why there are none."""

    def __init__(self, results):
        self.results = results

    def at_most(self, text, bound, found):
        return self._goal(text, bound, False, found)

    def at_least(self, text, bound, found):
        return self._goal(text, bound, True, found)

    def _goal(self, text, bound, at_least, found):
        """The worst of some figures decides."""
        if isinstance(found, str):
            return Goal(text, bound, at_least, why=found)
        figure, where = (min if at_least else max)(found, key=lambda one: one[0])
        return Goal(text, bound, at_least, figure, where if len(found) > 1 else "")

    def _each(self, case, figure_of, lacking):
        places = self.results.places(case)
        found = [(figure_of(at), place(case, at)) for at in places]
        return _known(found) or (lacking if places else _NOT_MEASURED)

    def floors(self, case, figure="ns", who="vpool"):
        def of(at):
            row = self.results.find(case, figure, at, who)
            return None if row is None else row.floors

        return self._each(case, of, f"{who}: not measured")

    def values(self, case, figure, who="vpool"):
        def of(at):
            row = self.results.find(case, figure, at, who)
            return None if row is None else row.median

        return self._each(case, of, f"{who}: not measured")

    def against(self, case, other):
        """In multiples of another subject."""
        find = self.results.find
        return self._each(
            case, lambda at: ratio(find(case, at=at), find(case, at=at, who=other)), f"{other}: not measured"
        )

    def times(self, case, peer):
        """Times faster than one peer."""
        find = self.results.find
        return self._each(
            case, lambda at: ratio(find(case, at=at, who=peer), find(case, at=at)), f"{peer}: not measured"
        )

    def peers(self, case, figure="ns", own="ns", who="vpool"):
        """Times faster than the best peer on the device."""

        def of(at):
            mine = self.results.find(case, own, at, who)
            rows = device_peers(self.results, case, figure, at)
            return min(ratio(row, mine) for row in rows) if mine and rows else None

        return self._each(case, of, _NO_PEER)

    def many_blocks(self):
        many = self.results.find("blocks", at=1_000_000)
        found = ratio(many, self.results.find("blocks", at=1000))
        return _NOT_MEASURED if found is None else [(found, "")]

    def trace_goals(self):
        """Of the default strategy, on a device if there is one."""
        device = "vpool on cuda"
        on_device = self.results.having("trace", "warm_ns", kind="own")
        plain = device if any(row.who == device for row in on_device) else "vpool on simulated"
        moved = "vpool on cuda-vmm" if plain == device else "vpool on simulated-vmm"
        source, other = plain.rpartition(" ")[2], moved.rpartition(" ")[2]
        expandable, driver = "PyTorch expandable", "cudaMallocAsync"
        return [
            self.at_most(
                f"traces, warm, on {source}, in locks an operation", 3.5, self.floors("trace", "warm_ns", plain)
            ),
            self.at_most(
                f"traces, warm, on {other} without driver time, in locks an operation",
                3.5,
                self.floors("trace", "warm_own_ns", moved),
            ),
            self.at_least(
                f"traces, warm, on {source}, times faster than the best peer",
                7.0,
                self.peers("trace", "warm_ns", "warm_ns", plain),
            ),
            self.at_least(
                f"traces, warm, on {other} without driver time, times faster than the best peer",
                7.0,
                self.peers("trace", "warm_ns", "warm_own_ns", moved),
            ),
            self.at_least(
                f"traces, cold, on {source}, times faster than the best peer",
                1.0,
                self.peers("trace", "cold_ns", "cold_ns", plain),
            ),
            *(
                self.at_least(f"traces, cold, on {other}, times faster than {peer}", 1.0, self._cold(moved, peer))
                for peer in (expandable, driver)
            ),
        ]

    def _cold(self, who, peer):
        find = self.results.find
        return self._each(
            "trace",
            lambda at: ratio(find("trace", "cold_ns", at, peer), find("trace", "cold_ns", at, who)),
            f"{peer}: not measured",
        )

    def thread_goals(self):
        """Of 16 threads, where there are cores for them."""
        threads, cores = 16, self.results.machine["cores"]
        if threads not in self.results.places("own_same"):
            latency = total = peers = _NOT_MEASURED
        elif cores < threads:
            latency = total = peers = f"16 threads take turns on {cores} cores"
        else:
            sizes = (("own_same", "one size"), ("own_random", "random sizes"))
            latency = _known([(self._threads_ratio(case, "ns", threads), name) for case, name in sizes])
            total = _known([(self._threads_ratio("one_same", "per_us", threads), "")])
            latency, total = latency or _NOT_MEASURED, total or _NOT_MEASURED
            peers = self._total_of_peers(threads)
        return [
            self.at_most("16 threads on own streams, latency in that of one", 1.5, latency),
            self.at_least("16 threads on one stream, one size, total in that of one", 8.0, total),
            self.at_least("16 threads on one stream, random sizes, total in the best peer's", 10.0, peers),
        ]

    def _threads_ratio(self, case, figure, threads):
        find = self.results.find
        return ratio(find(case, figure, threads), find(case, figure, 1))

    def _total_of_peers(self, threads):
        mine = self.results.find("one_random", "per_us", threads)
        rows = device_peers(self.results, "one_random", "per_us", threads)
        return _known([(ratio(mine, row), row.who) for row in rows]) or _NO_PEER


def _known(found):
    return [one for one in found if one[0] is not None]

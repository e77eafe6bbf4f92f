"""What `vpool bench` measures: cases in groups, each with what varies in it."""

from dataclasses import dataclass, field

__all__ = ["GROUPS", "LIVE", "Case", "cases_of", "checked_groups"]

GROUPS = {
    "pair": "an allocation and its free, by size",
    "random": "a free and an allocation of a random size, 512 blocks live",
    "latency": "single operations: p50, p99 and p99.9",
    "python": "an allocation and its free from Python",
    "buffer": "a buffer made and dropped from Python",
    "threads": "threads on streams of their own and on one stream",
    "handoff": "one thread allocates, another one frees",
    "misses": "requests that the source serves, and the same as hits",
    "blocks": "many live blocks: their time and their memory",
    "traces": "recorded programs, cold and warm",
}
LIVE = 512  # blocks of random sizes that live in one thread
_NEIGHBOURS = 10_000  # live blocks of 4 KiB, each with a hole beside it
_PAIR_SIZES = {
    False: (512, 64 << 10, 1 << 20, 1 << 30),
    True: (512, 4 << 10, 64 << 10, 1 << 20, 2 << 20, 16 << 20, 256 << 20, 1 << 30),
}
_PYTHON_SIZES = {False: (4096,), True: (512, 1 << 20)}
_THREADS = {False: (1, 4, 16), True: (1, 2, 4, 8, 16)}
_COUPLES = {False: (1,), True: (1, 2, 4, 8)}
_MISSES = {2 << 20: 64, 64 << 20: 16}  # bytes of a request that misses, and how many


@dataclass(frozen=True)
class Case:
    """One workload with its numbers.

    Attributes
    ----------
    group, name : str
    at : int or str
        What varies: bytes, threads, live blocks, or a trace's name.
    numbers : tuple
        What a peer is told between the workload's name and the number of operations.
    count : int or None
        The number of operations; None for as many as the time allows.
    rounds : int
        The most rounds of it, where one takes long.
    subject : object
        The trace of a case that has one.
    """

    group: str
    name: str
    at: int | str
    numbers: tuple = ()
    count: int | None = None
    rounds: int = 1000
    subject: object = field(default=None, compare=False, repr=False)

    def line(self, count):
        """The line that a peer's process gets."""
        return " ".join(map(str, (self.name, *self.numbers, count)))


def checked_groups(names):
    """The groups of some names, in the order in which they are measured; all for None.

    Raises
    ------
    ValueError
        For a name that is no group.
    """
    if names is None:
        return list(GROUPS)
    for name in names:
        if name not in GROUPS:
            raise ValueError(f"no group {name!r}; the groups are {', '.join(GROUPS)}")
    return [name for name in GROUPS if name in names]


def cases_of(groups, full, traces=()):
    """Every case of some groups.

    Parameters
    ----------
    groups : list of str
    full : bool
        All sizes and numbers of threads, instead of a few.
    traces : iterable of tuple
        Name, trace, and path of its events as peers read them, of each.
    """
    return [case for group in groups for case in _MAKERS[group](full, traces)]


def _pair(full, _):
    sizes = [Case("pair", "pair", nbytes, (nbytes, 0)) for nbytes in _PAIR_SIZES[full]]
    return [*sizes, Case("pair", "pair_among", 4096, (4096, _NEIGHBOURS))]


def _random(full, _):
    return [Case("random", "random", LIVE, (LIVE,))]


def _latency(full, _):
    return [Case("latency", "latency_pair", 1 << 20, (1 << 20,)), Case("latency", "latency_random", LIVE, (LIVE,))]


def _python(full, _):
    return [Case("python", "python_pair", nbytes, (nbytes,)) for nbytes in _PYTHON_SIZES[full]]


def _buffer(full, _):
    return [Case("buffer", "buffer", nbytes, (nbytes,)) for nbytes in _PYTHON_SIZES[full]]


def _threads(full, _):
    return [
        Case("threads", name, threads, (parameter, threads), rounds=5)
        for name, parameter in (
            ("own_same", 64 << 10),
            ("own_random", LIVE),
            ("one_same", 64 << 10),
            ("one_random", LIVE),
        )
        for threads in _THREADS[full]
    ]


def _handoff(full, _):
    return [Case("handoff", "handoff", couples, (64 << 10, couples)) for couples in _COUPLES[full]]


def _misses(full, _):
    return [Case("misses", "miss", nbytes, (nbytes,), count, 5) for nbytes, count in _MISSES.items()]


def _blocks(full, _):
    times = [Case("blocks", "blocks", live, (512, live), rounds=5) for live in (1000, 1_000_000)]
    return [*times, Case("blocks", "resident", 1_000_000, (1_000_000,), 1, 1)]


def _traces(full, traces):
    return [Case("traces", "trace", name, (), 3, 3, (trace, path)) for name, trace, path in traces]


_MAKERS = {
    "pair": _pair,
    "random": _random,
    "latency": _latency,
    "python": _python,
    "buffer": _buffer,
    "threads": _threads,
    "handoff": _handoff,
    "misses": _misses,
    "blocks": _blocks,
    "traces": _traces,
}

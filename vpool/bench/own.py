"""vpool's own part of every case."""

import contextlib
import subprocess
import sys
import threading
from functools import partial

import numpy as np

from vpool._interface import bench as loops
from vpool._interface.pool import Pool
from vpool.bench.calls import dropped, in_parts, pairs
from vpool.defaults import empty
from vpool.errors import Error
from vpool.replay import replay
from vpool.strategies import Dynamic, Fixed, Hybrid

__all__ = ["Empty", "Own", "OwnEmpty", "OwnTrace", "own_subjects", "percentiles"]

SMALLEST, LARGEST = 512, 16 << 20  # bytes of random sizes; their logarithm is uniform
_DRAWS = 1 << 16
_PASSES = 3  # of a trace: the first is cold, the last is warm


def _sizes():
    rng = np.random.default_rng(17)
    return np.exp(rng.uniform(np.log(SMALLEST), np.log(LARGEST), _DRAWS)).astype(np.uint64)


def percentiles(each, elapsed):
    """The figures of operations that were timed one by one."""
    each.sort()
    at = {name: float(each[int(share * len(each))]) for name, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999))}
    return {"elapsed": elapsed, **{f"{name}_ns": value for name, value in at.items()}}


class Own:
    """A pool of one strategy: a fresh one for each measurement, which is warm when the clock starts.

    Parameters
    ----------
    source : vpool.sources.Source
    who : str
    strategy : Strategy, optional
        The default one if not given.
    cases : iterable of str, optional
        Names of the cases that it is measured in; those that it has a method for if not given.
    """

    kind = "own"

    def __init__(self, source, who="vpool", strategy=None, cases=None):
        self.source = source
        self.who = who
        self.strategy = strategy
        self.cases = cases

    def supports(self, case):
        """Whether it takes part in a case."""
        return case.name in self.cases if self.cases is not None else hasattr(self, case.name)

    def measure(self, case, count):
        """The figures of one sample, and ``elapsed``, the nanoseconds of its operations."""
        return getattr(self, case.name)(*case.numbers, count)

    @contextlib.contextmanager
    def pool(self, strategy=None):
        strategy = strategy or self.strategy or Dynamic()
        if not self.source.has_memory and isinstance(strategy.limit_of(), float):
            strategy = strategy.with_limit(1.0)
        with Pool(strategy, self.source, name="bench", debug=()) as pool:
            yield pool

    def pair(self, nbytes, neighbours, count):
        with self.pool() as pool:
            if neighbours:
                blocks = np.zeros(2 * neighbours + 1, np.uint64)
                loops.fill(pool, 4096, blocks)
                loops.drop(pool, blocks[1:], 2)
            loops.pair(pool, nbytes, count // 10 + 1)
            figures = in_parts(partial(loops.pair, pool, nbytes), count)
            if neighbours:
                loops.drop(pool, blocks)
        return figures

    pair_among = pair

    def random(self, live, count):
        with self.pool() as pool:
            replacements = loops.Replacements(pool, _sizes(), live, 17)
            figures = in_parts(replacements.run, count)
            replacements.free()
        return figures

    def latency_pair(self, nbytes, count):
        each = np.zeros(count, np.uint64)
        with self.pool() as pool:
            return percentiles(each, loops.pair_latencies(pool, nbytes, each))

    def latency_random(self, live, count):
        each = np.zeros(count, np.uint64)
        with self.pool() as pool:
            replacements = loops.Replacements(pool, _sizes(), live, 17)
            elapsed = replacements.latencies(each)
            replacements.free()
        return percentiles(each, elapsed)

    def python_pair(self, nbytes, count):
        with self.pool() as pool:
            pairs(pool.allocate, pool.deallocate, nbytes, 10)
            return in_parts(partial(pairs, pool.allocate, pool.deallocate, nbytes), count)

    def buffer(self, nbytes, count):
        dropped(empty, nbytes, 10)
        return in_parts(partial(dropped, empty, nbytes), count)

    def own_same(self, nbytes, threads, count):
        return self._threads(threads, count, False, _pairs(nbytes, count))

    def one_same(self, nbytes, threads, count):
        return self._threads(threads, count, True, _pairs(nbytes, count))

    def own_random(self, live, threads, count):
        return self._threads(threads, count, False, _replacements(live, count))

    def one_random(self, live, threads, count):
        return self._threads(threads, count, True, _replacements(live, count))

    def _threads(self, threads, count, same_stream, work):
        with _streams(self.source, 1 if same_stream else threads) as streams, self.pool() as pool:
            start = loops.Start(threads)
            turns = [partial(work, pool, streams[number % len(streams)], number, start) for number in range(threads)]
            return _together(start, turns, count, count * threads)

    def handoff(self, nbytes, couples, count):
        with _streams(self.source, couples) as streams, self.pool() as pool:
            start = loops.Start(2 * couples)
            turns = []
            for stream in streams:
                channel = loops.Channel()
                turns += [
                    partial(loops.produce, pool, channel, nbytes, count, stream, start),
                    partial(loops.consume, pool, channel, count, stream, start),
                ]
            return _together(start, turns, count, count * couples)

    def miss(self, nbytes, count):
        # Every block is a segment of its own.
        strategy = Dynamic(initial=0, growth=4096)
        with self.pool(strategy) as pool:
            blocks = np.zeros(count, np.uint64)
            before = _driver_ns(self.source)
            first = loops.fill(pool, nbytes, blocks)
            driver = _driver_ns(self.source) - before
            loops.drop(pool, blocks)
            again = loops.fill(pool, nbytes, blocks)
            loops.drop(pool, blocks)
        return {
            "elapsed": first + again,
            "miss_ns": first / count,
            "miss_own_ns": max(0, first - driver) / count,
            "hit_ns": again / count,
        }

    def blocks(self, nbytes, live, count):
        with self.pool() as pool:
            blocks = np.zeros(live, np.uint64)
            loops.fill(pool, nbytes, blocks)
            loops.pair(pool, nbytes, count // 10 + 1)
            figures = in_parts(partial(loops.pair, pool, nbytes), count)
            loops.drop(pool, blocks)
        return figures

    def resident(self, live, count):
        """In a process of its own: what this one has freed would hide what is taken."""
        command = [sys.executable, "-m", "vpool.bench.resident", str(live)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise Error(f"resident memory: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}")
        whole, halved = map(float, done.stdout.split())
        return {"elapsed": 1, "bytes_whole": whole / live, "bytes_halved": halved / live}


class OwnEmpty(Own):
    """Buffers of a pool that the caller has at hand; `vpool.empty` finds the current device's first."""

    def buffer(self, nbytes, count):
        with self.pool() as pool:
            dropped(pool.empty, nbytes, 10)
            return in_parts(partial(dropped, pool.empty, nbytes), count)


class OwnTrace:
    """The default strategy on recorded programs, on one source.

    Driver time of a simulated device is what its model says of a real one.
    """

    kind = "own"

    def __init__(self, source):
        self.source = source
        self.who = f"vpool on {source if isinstance(source, str) else source.name}"

    def supports(self, case):
        """Whether it takes part in a case."""
        return case.name == "trace"

    def measure(self, case, passes):
        """Figures with and without driver time, of the first pass and of the last."""
        trace, _ = case.subject
        result = replay(trace, source=self.source, passes=passes)
        if result.oom is not None:
            raise Error(f"out of memory at event {result.oom['event']:,} of {case.at}")
        events = max(1, len(trace))
        own = result.warm_ns_per_event
        driver = [nanoseconds / events for nanoseconds in result.driver_ns]
        return {
            "elapsed": events * (sum(own) + sum(driver)),
            "cold_ns": own[0] + driver[0],
            "cold_own_ns": own[0],
            "warm_ns": own[-1] + driver[-1],
            "warm_own_ns": own[-1],
            "reserved_bytes": result.peak_reserved_bytes,
        }


class Empty:
    """Python's own part of calls: the same calls with empty bodies."""

    kind = "floor"
    who = "empty calls"

    def supports(self, case):
        """Whether it takes part in a case."""
        return case.name in ("python_pair", "buffer")

    def measure(self, case, count):
        """The figures of one sample."""
        calls = loops.EmptyCalls()
        if case.name == "buffer":
            return in_parts(partial(dropped, calls.empty, case.at), count)
        return in_parts(partial(pairs, calls.allocate, calls.deallocate, case.at), count)


def own_subjects(source, trace_sources):
    """vpool in all its parts, and the floors of Python's calls.

    Parameters
    ----------
    source : vpool.sources.Source
        Of everything but traces.
    trace_sources : iterable of str
    """
    return [
        Own(source),
        Own(source, "vpool, fixed pool", Fixed("1GiB", block=4096), ("pair_among",)),
        Own(source, "vpool, hybrid pool", Hybrid("1GiB"), ("pair_among",)),
        OwnEmpty(source, "vpool, pool.empty", cases=("buffer",)),
        Empty(),
        *map(OwnTrace, trace_sources),
    ]


def _pairs(nbytes, count):
    """What a thread does that allocates and frees one size."""
    return lambda pool, stream, number, start: loops.pair(pool, nbytes, count, stream, start)


def _replacements(live, count):
    """What a thread does that has blocks of random sizes, and frees one for each that it allocates."""
    sizes = _sizes()

    def work(pool, stream, number, start):
        replacements = loops.Replacements(pool, sizes, live, 17 + number, stream)
        try:
            replacements.run(count, start)
        finally:
            replacements.free()

    return work


@contextlib.contextmanager
def _streams(source, count):
    """New streams, which outlive the pool that knows them."""
    driver = source.driver
    with contextlib.ExitStack() as stack:
        streams = []
        for _ in range(count):
            streams.append(driver.create_stream())
            stack.callback(driver.destroy_stream, streams[-1])
        yield streams


def _together(start, turns, each, operations):
    """Run each turn in a thread: the figures of `each` operations a thread, and of all operations.

    Raises
    ------
    Exception
        What a thread raised.
    """
    errors = []

    def body(turn):
        try:
            turn()
        except BaseException as error:
            start.give_up()
            errors.append(error)

    threads = [threading.Thread(target=body, args=(turn,)) for turn in turns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    begins, ends = zip(*start.spans, strict=True)
    wall = max(ends) - min(begins)
    median = float(np.median([end - begin for begin, end in start.spans]))
    return {"elapsed": wall, "ns": median / each, "per_us": operations / wall * 1000}


def _driver_ns(source):
    return sum(nanoseconds for _, _, nanoseconds in source.driver.calls().values())

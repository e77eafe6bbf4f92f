"""Threads that are made to change places all the time, on one core, under signals, and in a long soak.

In full length, ten minutes of the first and five of the last:

    python -m tests.helpers.storm --seconds 600
    python tests/gpu/soak.py --dry --seconds 300

`pytest -m long tests/test_threads_forced.py` runs both; `VPOOL_STORM_SECONDS` sets another length of the first.
"""

import gc
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import vpool
from tests.helpers.pools import MIB, assert_whole, host_pool, run_cleanly, simulated_pool

ROOT = Path(__file__).resolve().parent.parent
SOAK = ROOT / "tests" / "gpu" / "soak.py"


def figures_of(*command, seconds):
    """What a program printed as JSON; it ends by itself, with tracebacks where it hangs."""
    done = subprocess.run(
        [sys.executable, *map(str, command), "--seconds", str(seconds)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=seconds + 120,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    figures = json.loads(done.stdout)
    assert figures["errors"] == []
    return figures


def storm(*options, seconds):
    figures = figures_of("-m", "tests.helpers.storm", *options, seconds=seconds)
    assert figures["slowest"] > 0, "a thread did nothing"
    assert figures["ooms"] > 0
    assert figures["records"] > 0
    for rung in ("pressure callbacks", "collect Python's garbage", "other streams' free blocks"):
        assert figures["ladder"][rung][0] > 0, rung
    return figures


def test_forced_switches_find_no_deadlock():
    storm("--seed", 1, seconds=10)


def test_forced_switches_find_no_deadlock_in_a_watched_pool():
    storm("--seed", 4, "--debug", "guard,poison,quarantine=256KiB,sites", seconds=8)


@pytest.mark.long
def test_forced_switches_find_no_deadlock_in_ten_minutes():
    storm("--seed", 2, seconds=float(os.environ.get("VPOOL_STORM_SECONDS", "600")))


def test_one_core_makes_progress():
    storm("--seed", 3, "--one-core", seconds=4)


def test_one_core_makes_progress_without_the_gil():
    """Compiled loops on one lock: who waits must give the core to the holder."""
    code = """
import os, threading, time, vpool
from vpool._interface import bench
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
pool = vpool.Pool(vpool.Dynamic(initial="16MiB"), source="host")
done = [0] * 8
until = time.monotonic() + 2
def work(number):
    while time.monotonic() < until:
        bench.pair(pool, 4096, 1000)
        done[number] += 1
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join(60)
assert not any(thread.is_alive() for thread in threads)
assert min(done) > 0, done
pool.check()
print("end")
"""
    assert run_cleanly(code) == "end\n"


def soak(seconds, seed):
    figures = figures_of(SOAK, "--dry", "--seed", seed, seconds=seconds)
    assert figures["mismatches"] == 0
    assert figures["live_bytes"] == figures["reserved_bytes_after"] == 0
    assert figures["peak_reserved_bytes"] <= figures["limit"]
    assert min(figures["recorded"], figures["freed_elsewhere"], figures["handed_over"]) > 0
    assert figures["crossings"]["crossings"] > 0
    assert figures["crossings"]["waits"] > 0


def test_a_simulated_soak():
    """16 threads, 8 streams; besides the bytes, the streams themselves say whether work was ordered."""
    soak(60, seed=1)


@pytest.mark.long
def test_a_long_simulated_soak():
    soak(300, seed=2)


SIGNALS = """
import random, signal, sys, threading, time
import numpy.ma                   # later, and an interrupt might leave its file open
import vpool

class Interrupted(BaseException): pass

def interrupt(number, frame):
    raise Interrupted

pool = vpool.Pool(vpool.Dynamic(initial="64KiB", growth="64KiB", limit="2MiB"), source="host", debug=DEBUG)
sys.unraisablehook = lambda what: None if isinstance(what.exc_value, Interrupted) else sys.__unraisablehook__(what)
pool.on_pressure(lambda nbytes: kept and kept.pop().close())
import logging
logging.getLogger("vpool").addHandler(logging.NullHandler())
logging.getLogger("vpool").setLevel(logging.DEBUG)
logging.getLogger("vpool").propagate = False
rng = random.Random(1)
kept, interrupts, operations = [], 0, 0
signal.signal(signal.SIGALRM, interrupt)
until = time.monotonic() + 4
while time.monotonic() < until:
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 3e-3))
        for _ in range(1000):  # where a buffer is dropped an interrupt goes to the hook
            operations += 1
            way = rng.randrange(8)
            stream = rng.choice((None, 16, 32, 48))
            try:
                if way < 4:
                    kept.append(pool.empty(rng.randrange(1, 60000), stream=stream))
                elif way == 4 and kept:
                    kept.pop(rng.randrange(len(kept))).close(stream)
                elif way == 5 and kept:
                    kept[-1].record_stream(64)
                    kept.pop()
                elif way == 6:
                    pool.coalesce()
                    pool.stats, pool.ladder
                elif kept:
                    pool.deallocate(kept.pop())
            except vpool.OutOfMemoryError:
                del kept[::2]
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupted:
        interrupts += 1
signal.setitimer(signal.ITIMER_REAL, 0)
assert interrupts > 50, interrupts
kept.clear()
# No lock and no turn is held: another thread can do everything.
def use():
    pool.check()
    pool.coalesce()
    with pool.empty(1 << 20) as one, pool.empty(100, stream=80):
        one.record_stream(96)
    pool.close()
thread = threading.Thread(target=use, daemon=True)
thread.start()
thread.join(30)
assert not thread.is_alive(), "a lock is held"
stats = pool.stats
assert stats.allocated_bytes == 0, f"a signal lost a block: {stats}"
assert stats.reserved_bytes == 0, stats
print("end")
"""


@pytest.mark.parametrize("debug", ["", "guard,poison,quarantine=64KiB,sites"])
def test_signals_leave_no_lock_held_and_lose_no_block(debug):
    assert run_cleanly(SIGNALS.replace("=DEBUG", f"={debug!r}")) == "end\n"


def test_a_collection_while_a_stream_is_met_meets_another_one():
    """A finaliser that frees on a stream that is new, run inside the look-up of one that is new too."""
    code = """
import faulthandler, gc, vpool
faulthandler.dump_traceback_later(20, exit=True)
pool = vpool.Pool(vpool.Dynamic(initial="1MiB"), source="host")
class Finaliser:
    def __init__(self, stream):
        self.buffer, self.stream, self.myself = pool.empty(100), stream, self
    def __del__(self):
        self.buffer.close(self.stream)
for i in range(300):
    gc.disable()
    Finaliser(10000 + i)
    gc.set_threshold(gc.get_count()[0] + 1 + i % 20, 1, 1)
    gc.enable()
    pool.empty(100, stream=100 + i)
gc.collect()
assert pool.stats.allocated_bytes == 0
pool.check()
print("end")
"""
    assert run_cleanly(code) == "end\n"


def test_a_default_pool_may_be_asked_for_while_it_is_made(no_default_pools, monkeypatch):
    """As a finaliser does that a collection runs in the middle of it."""
    made = vpool.defaults.Pool
    asked = []

    def slow(**arguments):
        if not asked:
            asked.append(None)
            asked[0] = vpool.default_pool()
        return made(**{**arguments, "source": "host"})

    monkeypatch.setattr(vpool.defaults, "Pool", slow)
    found = []
    thread = threading.Thread(target=lambda: found.append(vpool.default_pool()), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "the pool waits for itself"
    assert found[0] is asked[0] is vpool.default_pool()


@pytest.mark.parametrize("make", [host_pool, simulated_pool])
def test_a_filter_that_raises_loses_no_block(make):
    """Filters and signal handlers may raise out of a log call, when the block is there already."""

    def refuse(record):
        raise KeyboardInterrupt

    logger = logging.getLogger("vpool")
    level = logger.level
    with make(initial=0) as pool:
        logger.addFilter(refuse)
        logger.setLevel(logging.DEBUG)
        try:
            for nbytes, grow in ((8 * MIB, pool.allocate), (16 * MIB, pool.empty)):
                with pytest.raises(KeyboardInterrupt):
                    grow(nbytes)
        finally:
            logger.removeFilter(refuse)
            logger.setLevel(level)
        gc.collect()
        assert pool.stats.allocated_bytes == 0
        assert_whole(pool)

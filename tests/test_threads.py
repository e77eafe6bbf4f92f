"""Many threads on one pool."""

import ctypes
import gc
import random
import sys
import threading
import time

import numpy as np
import pytest

import vpool
from tests.helpers.model import assert_disjoint
from tests.helpers.pools import GRANULE, KIB, MIB, assert_whole, host_pool, simulated_pool

THREADS = 8
SECONDS = 1.5


@pytest.fixture(autouse=True)
def hurried_interpreter():
    """Threads change places as often as the interpreter can let them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_threads(*works):
    """Run each function in a thread of its own, all from the same moment on; raise the first error."""
    start = threading.Barrier(len(works))
    errors = []

    def run(work):
        try:
            start.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


class Owner:
    """One thread's blocks: it writes its mark into each granule and finds it again."""

    def __init__(self, pool, number, seconds, streams=(None,)):
        self.pool = pool
        self.number = number
        self.until = time.monotonic() + seconds
        self.streams = streams
        self.rng = random.Random(number)
        self.blocks = []
        self.operations = 0
        self.verified = 0

    def words(self, ptr, nbytes):
        whole = -(-nbytes // GRANULE) * GRANULE
        return np.ctypeslib.as_array((ctypes.c_uint64 * (whole // 8)).from_address(ptr))[:: GRANULE // 8]

    def lend(self):
        nbytes = int(2 ** self.rng.uniform(0, 16))
        ptr = self.pool.allocate(nbytes, stream=self.rng.choice(self.streams))
        self.words(ptr, nbytes)[:] = ptr ^ self.number
        self.blocks.append((ptr, nbytes))

    def give_back(self):
        ptr, nbytes = self.blocks.pop(self.rng.randrange(len(self.blocks)))
        assert (self.words(ptr, nbytes) == ptr ^ self.number).all(), "two owners had the same memory"
        self.verified += 1
        self.pool.deallocate(ptr)

    def __call__(self):
        while time.monotonic() < self.until:
            self.operations += 1
            if len(self.blocks) < 100 and self.rng.random() < 0.55:
                self.lend()
            elif self.blocks:
                self.give_back()
        while self.blocks:
            self.give_back()


@pytest.mark.parametrize("streams", [(None,), (None, 7, 9)])
def test_no_two_threads_ever_own_the_same_memory(streams):
    with host_pool(limit=512 * MIB) as pool:
        owners = [Owner(pool, number, SECONDS, streams) for number in range(THREADS)]
        run_threads(*owners)
        assert min(owner.verified for owner in owners) > 10
        stats = pool.stats
        assert stats.allocations == stats.frees == sum(owner.verified for owner in owners)
        assert_whole(pool)


@pytest.mark.long
def test_no_two_threads_ever_own_the_same_memory_for_a_minute():
    with host_pool(limit=512 * MIB) as pool:
        run_threads(*[Owner(pool, number, 60, (None, 7)) for number in range(THREADS)])
        assert_whole(pool)


@pytest.mark.parametrize("growth", [1.5, "1MiB"])
def test_64_threads_never_pass_the_limit(growth):
    """Each wants a little more than its 64th: at least one fails, nothing is lost, the limit holds."""
    limit = 64 * MIB
    with simulated_pool(limit, initial=0, growth=growth) as pool:
        lent, failures, seen = [], [], []

        def take():
            try:
                lent.append(pool.allocate(limit // 64 + 1))
            except vpool.OutOfMemoryError as error:
                failures.append(error)
            seen.append(pool.source.driver.used)

        run_threads(*[take] * 64)
        assert len(lent) + len(failures) == 64
        assert failures
        assert max(seen) <= limit
        assert pool.stats.peak_reserved_bytes <= limit
        assert len(set(lent)) == len(lent) == pool.inspect().live_blocks
        for ptr in lent:
            pool.deallocate(ptr)
        assert_whole(pool)
        assert pool.source.driver.used == pool.stats.reserved_bytes


def test_threads_that_miss_together_grow_once():
    """Whoever waited for another's growth looks for a block before growing again."""
    with simulated_pool(initial=64 * MIB) as pool:
        run_threads(*[lambda: pool.allocate(1000)] * 16)
        assert pool.stats.source_calls == 1


def test_a_double_free_succeeds_once_whoever_comes_first():
    outcomes = []
    rounds = 300
    with simulated_pool() as pool:
        addresses = [pool.allocate(1000, stream=number % 2 * 7) for number in range(rounds)]

        def free_all():
            for ptr in addresses:
                try:
                    pool.deallocate(ptr)
                    outcomes.append("freed")
                except vpool.DoubleFreeError:
                    outcomes.append("refused")

        run_threads(*[free_all] * 4)
        assert outcomes.count("freed") == rounds
        assert outcomes.count("refused") == 3 * rounds
        assert_whole(pool)


def test_reports_and_checks_are_consistent_while_others_allocate():
    """A copy taken at any moment tiles its segments, and check() finds every invariant in force."""
    with host_pool(limit=512 * MIB) as pool:
        owners = [Owner(pool, number, SECONDS, (None, 7)) for number in range(4)]
        looks = {"inspect": 0, "check": 0, "stats": 0}

        def inspect():
            while time.monotonic() < owners[0].until:
                report = pool.inspect()
                in_blocks = report.allocated_bytes + report.free_bytes + report.pending_bytes
                assert in_blocks == report.reserved_bytes
                assert_disjoint(report.blocks["address"], report.blocks["nbytes"])
                assert report.peak_allocated_bytes >= report.allocated_bytes
                looks["inspect"] += 1

        def check():
            while time.monotonic() < owners[0].until:
                pool.check()
                looks["check"] += 1

        def stats():
            last = pool.stats
            while time.monotonic() < owners[0].until:
                now = pool.stats
                assert now.allocations >= last.allocations
                assert now.peak_reserved_bytes >= last.peak_reserved_bytes
                assert 0 <= now.allocated_bytes <= now.reserved_bytes <= 512 * MIB
                last = now
                looks["stats"] += 1

        run_threads(*owners, inspect, check, stats)
        assert min(looks.values()) > 2
        assert_whole(pool)


def test_the_collector_frees_into_the_pool_while_threads_allocate():
    """Buffers in cycles are freed by a collection that starts anywhere, in any thread."""
    threshold = gc.get_threshold()
    gc.set_threshold(5)
    try:
        with simulated_pool(limit=1 << 40) as pool:
            until = time.monotonic() + SECONDS

            def make_cycles():
                while time.monotonic() < until:
                    cycle = [pool.empty(1000), pool.empty(70 * KIB, stream=7)]
                    cycle.append(cycle)

            run_threads(*[make_cycles] * 4)
            gc.collect()
            assert pool.stats.allocations == pool.stats.frees > 100
            assert_whole(pool)
    finally:
        gc.set_threshold(*threshold)


def test_running_out_in_many_threads_harms_nobody():
    with simulated_pool(4 * MIB, initial=0) as pool:
        until = time.monotonic() + SECONDS
        failures = [0] * THREADS
        reserved = []

        def work(number):
            rng = random.Random(number)
            mine = []
            while time.monotonic() < until:
                try:
                    mine.append(pool.allocate(rng.randrange(1, MIB), alignment=rng.choice([256, 4096, MIB])))
                except vpool.OutOfMemoryError as error:
                    failures[number] += 1
                    reserved.append(error.report.reserved_bytes)
                    if mine:
                        pool.deallocate(mine.pop())
            for ptr in mine:
                pool.deallocate(ptr)

        run_threads(*[lambda number=number: work(number) for number in range(THREADS)])
        assert sum(failures) > THREADS
        assert max(reserved) <= 4 * MIB
        assert pool.stats.peak_reserved_bytes <= 4 * MIB
        assert_whole(pool)


@pytest.mark.parametrize("attempt", range(20))
def test_close_while_others_allocate_and_free(attempt):
    """Each call is served or refused with the pool's own error, and in the end nothing is left."""
    pool = simulated_pool()
    refused = []

    def work():
        mine = []
        try:
            while True:
                mine.append(pool.empty(5000))
                if len(mine) > 20:
                    mine.pop(0).close()
        except vpool.ClosedPoolError as error:
            refused.append(error.with_traceback(None))

    def close():
        time.sleep(0.0005 * (1 + attempt % 5))
        pool.close()

    run_threads(work, work, work, close)
    assert len(refused) == 3
    assert pool.stats.allocated_bytes == 0
    assert pool.source.driver.used == pool.stats.reserved_bytes == 0


def test_streams_of_many_threads_get_a_slot_each():
    with simulated_pool() as pool:
        kept = []

        def work(stream):
            for _ in range(50):
                pool.deallocate(pool.allocate(100, stream=stream), stream=stream)
            kept.append(pool.allocate(100, stream=stream))

        run_threads(*[lambda stream=stream: work(stream) for stream in range(16)])
        # Handle 1 is another spelling of 0, and 2 is a stream of its own in the one thread that used it.
        live = {row["stream"]: row["live_bytes"] for row in pool.inspect().streams if row["live_bytes"]}
        assert live == {0: 2 * GRANULE, **dict.fromkeys(range(2, 16), GRANULE)}
        for ptr in kept:
            pool.deallocate(ptr)
        # Of what the per-thread stream of a thread that ended has freed, only the idle device is proof.
        drains = pool.crossings["drains"]
        pool.coalesce()
        assert pool.crossings["drains"] == drains
        assert set(pool.inspect().blocks["state"]) <= {"free", "pending"}
    assert pool.crossings["drains"] > drains
    assert pool.stats.reserved_bytes == pool.stats.pending_bytes == pool.source.driver.used == 0

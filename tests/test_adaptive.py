"""The adaptive rule: steps follow demand, and idle segments go back once it has fallen."""

import functools
import itertools
import random

import pytest

import vpool
from tests.helpers.order import Checker
from tests.helpers.pools import GIB, KIB, MIB, assert_whole, live_rows
from tests.helpers.serving import hammer
from tests.helpers.swing import HIGH, LOW, Swing

SWINGS = 100
MOST_RESERVED = 1.15  # for each live byte
ILLEGAL_ADDRESS = 700


def adaptive_pool(capacity=None, **arguments):
    strategy = vpool.Dynamic(**{"limit": 1.0, "adaptive": True, **arguments})
    return vpool.Pool(strategy, vpool.sources.Simulated(capacity))


@functools.cache
def swung(growth):
    """What is reserved for each live byte at the end of each plateau, and the source calls of each swing."""
    with adaptive_pool(growth=growth) as pool:
        swing = Swing(pool)
        ratios, totals = [], [0]
        for _ in range(SWINGS):
            ratios += [swing.toward(HIGH), swing.toward(LOW)]
            totals.append(pool.stats.source_calls)
        pool.check()
    return ratios, [after - before for before, after in itertools.pairwise(totals)]


class TestSwing:
    """Between 1 GiB and 10 GiB live, a hundred times."""

    @pytest.mark.parametrize("growth", [1.5, 2.0, "64MiB"])
    def test_little_more_is_reserved_than_is_live(self, growth):
        ratios, _ = swung(growth)
        assert max(ratios) <= MOST_RESERVED

    @pytest.mark.parametrize("growth", [1.5, 2.0, "64MiB"])
    def test_the_source_calls_of_a_swing_stay_the_same(self, growth):
        _, calls = swung(growth)
        early, late = sum(calls[1:21]) / 20, sum(calls[-20:]) / 20
        assert 0.75 * early <= late <= 1.25 * early
        assert max(calls) <= 2 * early

    def test_without_it_what_was_once_needed_stays_reserved(self):
        with adaptive_pool(adaptive=False) as pool:
            swing = Swing(pool)
            swing.toward(HIGH)
            assert swing.toward(LOW) > 5


class TestGivingBack:
    """What is idle goes back by itself."""

    def test_after_a_burst_most_goes_back_while_the_burst_is_freed(self):
        with adaptive_pool() as pool:
            swing = Swing(pool)
            swing.toward(LOW)
            swing.toward(HIGH)
            swing.free_to(LOW)
            assert pool.stats.reserved_bytes <= 1.3 * swing.live
            swing.toggle(LOW, 200)
            assert pool.stats.reserved_bytes <= 1.3 * swing.live

    @pytest.mark.parametrize("blocks", [1, 2, 3, 5, 10])
    def test_a_pool_that_became_empty_keeps_little(self, blocks):
        """The last frees of all are not looked at: nobody knows yet that they are the last."""
        with adaptive_pool(initial=0) as pool:
            for ptr in [pool.allocate(100 * MIB) for _ in range(blocks)]:
                pool.deallocate(ptr)
            pool.maintain()
            assert pool.stats.reserved_bytes == 0

    @pytest.mark.parametrize("blocks", [1, 2, 3, 5, 100])
    def test_maintain_gives_all_that_is_idle_back_at_once(self, blocks):
        with adaptive_pool(initial=0) as pool:
            kept = pool.allocate(MIB)
            for ptr in [pool.allocate(100 * MIB) for _ in range(blocks)]:
                pool.deallocate(ptr)
            pool.maintain()
            assert pool.stats.reserved_bytes == pool.source.driver.used == MIB
            pool.deallocate(kept)
            pool.maintain()
            assert pool.stats.reserved_bytes == 0

    @pytest.mark.parametrize("kind", [2, ILLEGAL_ADDRESS])
    def test_a_source_that_takes_nothing_back_loses_nothing(self, kind):
        with adaptive_pool(initial=0) as pool:
            pool.source.driver.fail("free", kind, times=50)
            for ptr in [pool.allocate(10 * MIB) for _ in range(40)]:
                pool.deallocate(ptr)
                pool.check()
                assert pool.source.driver.used == pool.stats.reserved_bytes
            pool.source.driver.fail("free", times=0)
            pool.maintain()
            assert pool.stats.reserved_bytes <= 10 * MIB
            pool.deallocate(pool.allocate(70 * MIB))
        assert pool.source.driver.used == 0

    def test_what_work_may_still_use_stays(self):
        with adaptive_pool(initial=0) as pool:
            driver = pool.source.driver
            kept = [pool.allocate(10 * MIB) for _ in range(20)]
            for ptr in [pool.allocate(10 * MIB) for _ in range(20)]:
                pool.record_stream(ptr, 7)
                driver.queue_work(7)
                pool.deallocate(ptr)
            reserved = pool.stats.reserved_bytes
            pool.maintain()
            assert pool.stats.reserved_bytes == reserved
            assert pool.stats.pending_bytes == 200 * MIB
            assert sorted(kept) == live_rows(pool)["address"].tolist()
            driver.complete(7)
            pool.coalesce()
            pool.maintain()
            assert pool.stats.reserved_bytes < 1.3 * 200 * MIB

    def test_maintain_gives_back_what_streams_no_longer_use(self):
        with adaptive_pool(initial=0) as pool:
            ptr = pool.allocate(100 * MIB)
            pool.record_stream(ptr, 7)
            pool.source.driver.queue_work(7)
            pool.deallocate(ptr)
            pool.source.driver.complete(7)
            pool.maintain()
            assert pool.stats.reserved_bytes == 0


class TestSteadyState:
    """A pool whose demand stays the same leaves its source alone."""

    @pytest.mark.parametrize(
        ("level", "seed", "most"), [(HIGH, 0, 60), (HIGH, 1, 60), (4 * GIB, 0, 100), (LOW, 1, 600)]
    )
    def test_few_calls_in_ten_thousand_operations(self, level, seed, most):
        """A block is up to 64 MiB: at 1 GiB live, one is twice what the rule allows to lie idle."""
        with adaptive_pool() as pool:
            swing = Swing(pool, seed)
            swing.toggle(level, 4000)
            calls = pool.stats.source_calls
            swing.toggle(level, 10_000)
            assert pool.stats.source_calls - calls <= most

    @pytest.mark.parametrize("level", [GIB, 10 * GIB])
    def test_no_call_at_all_where_blocks_are_of_one_size(self, level):
        with adaptive_pool() as pool:
            swing = Swing(pool, smallest=22, largest=22)
            swing.toggle(level, 4000)
            calls = pool.stats.source_calls
            swing.toggle(level, 10_000)
            assert pool.stats.source_calls == calls


class TestStreamsAndThreads:
    @pytest.mark.parametrize("seed", range(4))
    def test_nobody_gets_memory_before_its_last_use_is_complete(self, seed):
        """While demand rises and falls, and segments come and go."""
        rng = random.Random(seed)
        with adaptive_pool(initial=0, growth="4KiB") as pool:
            checker = Checker(pool)
            streams = [pool.source.driver.create_stream() for _ in range(4)]
            for number in range(800):
                stream = rng.choice(streams)
                way = rng.random()
                ptr = rng.choice(list(checker.live)) if checker.live else None
                rising = 0.6 if number // 100 % 2 == 0 else 0.1
                if way < rising or ptr is None:
                    ptr = checker.allocate(rng.choice([256, 4096, 8192]), stream)
                    checker.use(ptr, stream)
                elif way < rising + 0.05:
                    checker.record_stream(ptr, stream)
                    checker.use(ptr, stream)
                elif way < 0.9:
                    freer = rng.choice([None, stream])
                    if checker.may_free(ptr, freer):
                        checker.free(ptr, freer)
                elif way < 0.98:
                    pool.source.driver.complete(rng.choice([None, stream]))
                    pool.coalesce()
                else:
                    pool.maintain()
                checker.check()
            assert pool.source.driver.calls()["free"][0] > 20
            checker.finish()

    def test_eight_threads_that_free_one_anothers_blocks_lose_nothing(self):
        strategy = vpool.Dynamic(initial=0, growth="64KiB", limit=64 * MIB, adaptive=True)
        with vpool.Pool(strategy, "host") as pool:
            lent, freed, refused = hammer(pool, largest=64 * KIB)
            pool.check()
            assert lent == freed == pool.stats.allocations == pool.stats.frees > 1000
            assert refused == pool.stats.allocated_bytes == pool.stats.requested_bytes == 0
            pool.maintain()
            assert_whole(pool)
            pool.trim()
            assert pool.stats.reserved_bytes == 0

"""Policies, limits and upkeep of a pool that is in use."""

import gc
import threading
import time
import weakref

import pytest

import vpool
from tests.helpers.pools import GIB, MIB, run_cleanly, simulated_pool, unchanged

HYBRID = vpool.Hybrid("4MiB", dynamic=vpool.Dynamic(initial="1MiB", limit="64MiB"))


def threads_of_pools():
    return [thread for thread in threading.enumerate() if thread.name.startswith("vpool maintains")]


class TestFromPolicy:
    def test_it_works_by_the_policy(self, tmp_path):
        policy = vpool.Policy(HYBRID, rounding=512, source="simulated", source_options={"capacity": "1GiB"})
        policy.save(tmp_path / "policy.toml")
        with vpool.Pool.from_policy(tmp_path / "policy.toml", name="mine") as pool:
            assert (pool.name, pool.source.name, pool.strategy) == ("mine", "simulated", HYBRID)
            pool.allocate(100)
            assert pool.stats.allocated_bytes == 512

    def test_a_source_replaces_the_policys(self):
        with vpool.Pool.from_policy(vpool.Policy(source="simulated"), source="host") as pool:
            assert pool.source.name == "host"


class TestLimit:
    def test_a_higher_one_lets_the_pool_grow_and_a_lower_one_stops_it(self):
        with simulated_pool(initial=MIB, limit=2 * MIB) as pool:
            pool.set_limit("8MiB")
            assert pool.inspect().limit_bytes == 8 * MIB
            ptr = pool.allocate(6 * MIB)
            pool.deallocate(ptr)
            pool.trim()
            pool.set_limit(3 * MIB)
            with pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(4 * MIB)

    def test_what_is_reserved_stays_and_so_a_limit_below_it_is_refused(self):
        with simulated_pool(initial=4 * MIB) as pool:
            pool.allocate(100)
            with unchanged(pool), pytest.raises(ValueError, match="trim it first"):
                pool.set_limit(4 * MIB - 1)

    def test_the_core_counts(self):
        with vpool.Pool(HYBRID, vpool.sources.Simulated(GIB)) as pool:
            with unchanged(pool), pytest.raises(ValueError, match="reserved"):
                pool.set_limit("3MiB")
            pool.set_limit("5MiB")
            assert pool.inspect().limit_bytes == 5 * MIB

    @pytest.mark.parametrize("limit", [0, -1, 1.5, "much", True, None])
    def test_a_limit_that_makes_no_sense(self, limit):
        with simulated_pool(initial=0) as pool, unchanged(pool), pytest.raises((ValueError, TypeError)):
            pool.set_limit(limit)

    def test_a_fixed_pool_never_grows_for_it(self):
        with vpool.Pool(vpool.Fixed("1MiB"), vpool.sources.Simulated(GIB)) as pool:
            pool.set_limit("64MiB")
            with pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(2 * MIB)


class TestApply:
    def test_a_policy_fits_a_pool_whose_limit_was_lowered(self):
        with simulated_pool(initial=GIB) as pool:
            pool.set_limit("512MiB")
            pool.apply(vpool.Dynamic(initial=0, growth=2.0, limit="256MiB"))
            assert pool.inspect().limit_bytes == 256 * MIB

    def test_growth_follows_the_new_policy(self):
        with simulated_pool(initial=MIB, growth=2.0) as pool:
            pool.allocate(MIB)
            pool.apply(vpool.Dynamic(growth="32MiB", limit=1.0))
            pool.allocate(MIB)
            assert pool.stats.reserved_bytes == 33 * MIB
            assert pool.strategy == vpool.Dynamic(growth="32MiB", limit=1.0)

    def test_adaptive_can_be_turned_on_and_off(self):
        with simulated_pool(initial=0) as pool:
            pool.apply(vpool.Dynamic(initial=0, adaptive=True, limit=1.0))
            pool.deallocate(pool.allocate(MIB))
            pool.maintain()
            assert pool.stats.reserved_bytes == 0
            pool.apply(vpool.Dynamic(initial=0, limit=1.0))
            pool.deallocate(pool.allocate(MIB))
            pool.maintain()
            assert pool.stats.reserved_bytes == MIB

    @pytest.mark.parametrize(
        ("policy", "reason"),
        [
            (vpool.Hybrid("5MiB", dynamic=vpool.Dynamic(limit="64MiB")), "the fixed core"),
            (vpool.Hybrid("4MiB", block="1MiB", dynamic=vpool.Dynamic(limit="64MiB")), "the core's blocks"),
            (vpool.Policy(HYBRID, rounding=512), "rounding"),
            (vpool.Policy(HYBRID, minimum_remainder=4096), "minimum_remainder"),
            (vpool.Hybrid("4MiB", dynamic=vpool.Dynamic(initial=0, limit="6MiB")), "trim it first"),
        ],
    )
    def test_what_cannot_change_is_refused_with_the_reason(self, policy, reason):
        with vpool.Pool(HYBRID, vpool.sources.Simulated(GIB)) as pool:
            pool.allocate(6 * MIB)
            with unchanged(pool), pytest.raises(ValueError, match=reason):
                pool.apply(policy)
            assert pool.strategy == HYBRID

    def test_the_watermark_and_the_band_can_change(self):
        with vpool.Pool(HYBRID, vpool.sources.Simulated(GIB)) as pool:
            pool.apply(vpool.Hybrid("4MiB", watermark=0.1, largest=MIB, dynamic=HYBRID.dynamic))
            pool.allocate(MIB)
            pool.maintain()
            assert pool.stats.reserved_bytes == 5 * MIB, "above the new watermark the first segment is taken"
            pool.allocate(MIB + 1)
            assert pool.inspect().core["allocated_bytes"] == MIB


class TestHelper:
    """A thread that maintains the pool."""

    @pytest.fixture(autouse=True)
    def none_left(self):
        yield
        self.wait_for(lambda: not threads_of_pools())

    def wait_for(self, what):
        end = time.monotonic() + 10
        while not what() and time.monotonic() < end:
            time.sleep(0.002)
        assert what()

    def test_it_grows_ahead_without_being_told(self):
        strategy = vpool.Hybrid("4MiB", watermark=0.5, dynamic=vpool.Dynamic(initial="2MiB", limit="64MiB"))
        with vpool.Pool(strategy, vpool.sources.Simulated(GIB), maintain_every=0.001) as pool:
            pool.allocate(3 * MIB)
            self.wait_for(lambda: pool.stats.reserved_bytes == 6 * MIB)

    def test_it_starts_only_if_wanted_and_stops_at_close(self):
        with simulated_pool():
            assert not threads_of_pools()
        pool = vpool.Pool(source="simulated", maintain_every=0.001)
        assert threads_of_pools()
        pool.close()
        self.wait_for(lambda: not threads_of_pools())
        pool.close()

    def test_an_adaptive_area_that_is_kept_ready_does_not_come_and_go(self):
        dynamic = vpool.Dynamic(initial="64MiB", adaptive=True)
        with vpool.Pool(vpool.Hybrid("64MiB", watermark=0.5, dynamic=dynamic), vpool.sources.Simulated(GIB)) as pool:
            pool.allocate(40 * MIB)
            for _ in range(20):
                pool.maintain()
            assert pool.stats.source_calls == 2

    def test_it_keeps_no_pool_alive(self):
        pool = vpool.Pool(source="simulated", maintain_every=0.001)
        gone = weakref.ref(pool)
        del pool
        gc.collect()
        self.wait_for(lambda: gone() is None and not threads_of_pools())

    def test_pools_that_the_collector_ends_deadlock_nothing(self):
        """Whatever ends a helper may run inside a collection, with any lock of `threading` held."""
        run_cleanly(
            """
            import gc, threading, time, vpool
            gc.set_threshold(5)
            end = time.monotonic() + 3
            while time.monotonic() < end:
                cycle = []
                cycle.append((cycle, vpool.Pool(source="simulated", maintain_every=0.0005)))
                del cycle
                threading.enumerate()
                thread = threading.Thread(target=[].sort)
                thread.start()
                thread.join()
            """.replace("\n            ", "\n")
        )

    def test_a_closed_pool_is_not_maintained(self):
        pool = vpool.Pool(HYBRID, vpool.sources.Simulated(GIB))
        pool.allocate(4 * MIB)
        pool.close()
        for call in (pool.maintain, lambda: pool.reserve(1), lambda: pool.set_limit(GIB), lambda: pool.apply(HYBRID)):
            with pytest.raises(vpool.ClosedPoolError):
                call()
        assert pool.stats.reserved_bytes == 4 * MIB

    @pytest.mark.parametrize("every", [0, -1, float("nan"), "often", True, float("inf")])
    def test_an_interval_that_makes_no_sense(self, every):
        with pytest.raises((ValueError, TypeError)):
            vpool.Pool(source="simulated", maintain_every=every)

    @pytest.mark.parametrize("ending", ["", "pool.close()", "del pool", "import sys; sys.exit(0)"])
    def test_the_process_ends_with_it(self, ending):
        run_cleanly(
            f"import vpool\npool = vpool.Pool(source='host', maintain_every=0.0001)\npool.allocate(9)\n{ending}"
        )

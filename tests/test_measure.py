"""Peaks of phases, and what an allocation could still get."""

import threading

import pytest

import vpool
from tests.helpers.pools import GIB, MIB, live_figures, simulated_pool

KEYS = ("peak_allocated_bytes", "peak_requested_bytes", "peak_reserved_bytes")


class TestMeasure:
    """`Pool.measure`."""

    def test_a_phase(self, pool):
        pool.deallocate(pool.allocate(10 * MIB))
        kept = pool.allocate(MIB)
        with pool.measure() as phase:
            pool.deallocate(pool.allocate(2 * MIB - 100))
            pool.deallocate(pool.allocate(MIB))
        assert phase.peak_allocated_bytes == 3 * MIB
        assert phase.peak_requested_bytes == 3 * MIB - 100
        assert phase.peak_reserved_bytes == pool.stats.reserved_bytes
        assert (phase.allocations, phase.frees) == (2, 2)
        assert phase.seconds > 0
        assert "3.00 MiB allocated" in repr(phase)
        pool.deallocate(kept)
        assert phase.peak_allocated_bytes == 3 * MIB

    def test_the_pools_own_peaks_go_on(self, pool):
        pool.deallocate(pool.allocate(10 * MIB))
        reserved = pool.stats.peak_reserved_bytes
        pool.trim()
        with pool.measure():
            pool.deallocate(pool.allocate(MIB))
            assert pool.stats.peak_allocated_bytes == 10 * MIB
            assert pool.stats.peak_reserved_bytes == reserved
            assert pool.inspect().peak_requested_bytes == 10 * MIB
        assert pool.stats.peak_allocated_bytes == pool.inspect().peak_allocated_bytes == 10 * MIB
        assert pool.stats.peak_reserved_bytes == pool.inspect().peak_reserved_bytes == reserved
        pool.allocate(12 * MIB)
        assert pool.stats.peak_allocated_bytes == 12 * MIB

    def test_they_nest(self, pool):
        with pool.measure() as outer:
            pool.deallocate(pool.allocate(3 * MIB))
            with pool.measure() as inner:
                pool.deallocate(pool.allocate(2 * MIB))
            with pool.measure() as other:
                pool.deallocate(pool.allocate(5 * MIB))
            with pool.measure() as nothing:
                pass
        peaks = [one.peak_allocated_bytes for one in (outer, inner, other, nothing)]
        assert peaks == [5 * MIB, 2 * MIB, 5 * MIB, 0]
        assert outer.allocations == 3

    def test_they_overlap(self, pool):
        first, second = pool.measure(), pool.measure()
        first.__enter__()
        pool.deallocate(pool.allocate(3 * MIB))
        second.__enter__()
        pool.deallocate(pool.allocate(MIB))
        first.__exit__(None, None, None)
        pool.deallocate(pool.allocate(2 * MIB))
        second.__exit__(None, None, None)
        assert (first.peak_allocated_bytes, second.peak_allocated_bytes) == (3 * MIB, 2 * MIB)
        assert pool.stats.peak_allocated_bytes == 3 * MIB

    def test_within_the_block(self, pool):
        with pool.measure() as phase:
            ptr = pool.allocate(MIB)
            assert (phase.peak_allocated_bytes, phase.allocations) == (MIB, 1)
            pool.deallocate(ptr)
            assert phase.peak_allocated_bytes == MIB

    def test_reset_peaks_within_the_block(self, pool):
        with pool.measure() as phase:
            pool.deallocate(pool.allocate(3 * MIB))
            pool.reset_peaks()
            assert pool.stats.peak_allocated_bytes == 0
            pool.deallocate(pool.allocate(MIB))
        assert phase.peak_allocated_bytes == 3 * MIB
        assert pool.stats.peak_allocated_bytes == MIB

    def test_an_exception_ends_it(self, pool):
        phase = pool.measure()
        with pytest.raises(KeyError), phase:
            raise KeyError
        assert phase.peak_allocated_bytes == 0

    def test_an_error_within_tells_the_pools_own_peaks(self):
        with simulated_pool(16 * MIB, initial=16 * MIB) as pool:
            pool.deallocate(pool.allocate(12 * MIB))
            with pool.measure(), pytest.raises(vpool.OutOfMemoryError) as caught:
                pool.allocate(20 * MIB)
            assert caught.value.report.peak_allocated_bytes == pool.inspect().peak_allocated_bytes == 12 * MIB

    def test_once_only(self, pool):
        phase = pool.measure()
        with pytest.raises(RuntimeError, match="nothing was measured"):
            _ = phase.seconds
        assert "not begun" in repr(phase)
        with pytest.raises(RuntimeError, match="not going on"):
            phase.__exit__(None, None, None)
        with phase, pytest.raises(RuntimeError, match="entered once"):
            phase.__enter__()
        seconds = phase.seconds
        with pytest.raises(RuntimeError, match="not going on"):
            phase.__exit__(None, None, None)
        assert phase.seconds == seconds

    def test_of_a_fixed_core(self):
        with vpool.Pool(vpool.Hybrid(16 * MIB, block=MIB), source="simulated") as pool:
            with pool.measure() as phase:
                for ptr in [pool.allocate(MIB), pool.allocate(20 * MIB)]:
                    pool.deallocate(ptr)
            assert phase.peak_allocated_bytes == 21 * MIB
            assert phase.peak_reserved_bytes == pool.stats.reserved_bytes == pool.stats.peak_reserved_bytes
            pool.trim()
            with pool.measure() as phase:
                pass
            assert phase.peak_reserved_bytes == 16 * MIB
            assert pool.stats.peak_reserved_bytes > 32 * MIB
            pool.check()

    def test_threads(self):
        """Each thread's phase has at least its own peak, and at most what the pool had."""
        with simulated_pool() as pool:
            phases = []

            def work(seed):
                for _ in range(50):
                    with pool.measure() as phase:
                        pool.deallocate(pool.allocate((seed + 1) * MIB))
                    phases.append((seed, phase))

            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            peak = pool.stats.peak_allocated_bytes
            assert len(phases) == 400
            assert all((seed + 1) * MIB <= phase.peak_allocated_bytes <= peak for seed, phase in phases)
            assert 8 * MIB <= peak <= 36 * MIB
            pool.check()


class TestMemoryInfo:
    """`Pool.memory_info`."""

    def test_figures(self):
        source = vpool.sources.Simulated(GIB)
        with vpool.Pool(vpool.Dynamic(initial=64 * MIB, limit=256 * MIB), source=source) as pool:
            kept = pool.allocate(10 * MIB)
            pool.record_stream(kept, 7)
            pool.allocate(5 * MIB)
            pool.deallocate(kept)
            info = pool.memory_info()
            assert (info.device_total_bytes, info.device_free_bytes) == (GIB, GIB - 64 * MIB)
            assert (info.reserved_bytes, info.pending_bytes, info.reusable_bytes) == (64 * MIB, 10 * MIB, 49 * MIB)
            assert (info.growth_bytes, info.others_bytes) == (192 * MIB, 0)
            assert info.available_bytes == 251 * MIB == 256 * MIB - pool.stats.allocated_bytes
            with vpool.Pool(vpool.Dynamic(initial=900 * MIB, limit=1.0), source=source) as other:
                other.allocate(1)
                info = pool.memory_info()
                assert (info.others_bytes, info.growth_bytes) == (900 * MIB, 60 * MIB)

    def test_what_it_promises_can_be_had(self):
        source = vpool.sources.Simulated(256 * MIB)
        with vpool.Pool(vpool.Dynamic(initial=0, limit=1.0), source=source) as pool:
            pool.allocate(3 * MIB)
            info = pool.memory_info()
            pool.allocate(info.available_bytes)
            assert pool.memory_info().available_bytes == 0

    def test_of_a_fixed_pool(self):
        with vpool.Pool(vpool.Fixed(16 * MIB), source="simulated") as pool:
            info = pool.memory_info()
            assert not info.grows
            assert (info.growth_bytes, info.available_bytes) == (0, 16 * MIB)

    def test_it_changes_nothing(self, pool):
        before = live_figures(pool)
        pool.memory_info()
        assert live_figures(pool) == before

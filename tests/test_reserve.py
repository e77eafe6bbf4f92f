"""`pool.reserve`: memory that is taken ahead, so that requests find it."""

import contextlib
import threading

import pytest

import vpool
from tests.helpers.pools import GIB, KIB, MIB, unchanged
from vpool._storage.fake_cuda import FakeCudaDriver

SIMULATED = {"simulated": vpool.sources.Simulated, "simulated-vmm": vpool.sources.SimulatedVmm}
EACH = pytest.mark.parametrize("source", SIMULATED.values(), ids=SIMULATED)


def calls(pool):
    return pool.stats.source_calls


class TestGrows:
    @EACH
    @pytest.mark.parametrize("nbytes", [1, 1000, MIB, 10 * MIB + 1, "100MiB", "1.5GiB"])
    def test_what_fits_into_it_asks_the_source_for_nothing(self, source, nbytes):
        with vpool.Pool(source=source(8 * GIB)) as pool:
            pool.reserve(nbytes)
            pool.check()
            reserved, before = pool.stats.reserved_bytes, calls(pool)
            wanted = vpool.sizes.parse_size(nbytes)
            assert reserved >= wanted
            ptr = pool.allocate(wanted)
            assert (pool.stats.reserved_bytes, calls(pool)) == (reserved, before)
            assert pool.stats.hits == pool.stats.allocations == 1
            pool.deallocate(ptr)

    @EACH
    def test_many_blocks_of_several_streams_find_it(self, source):
        with vpool.Pool(vpool.Dynamic(initial=0), source=source(GIB)) as pool:
            pool.reserve("64MiB")
            before = calls(pool)
            blocks = [pool.allocate(MIB, stream) for _ in range(16) for stream in (0, 7, 9, 11)]
            assert calls(pool) == before
            assert pool.stats.reserved_bytes == 64 * MIB
            for ptr in blocks:
                pool.deallocate(ptr)
            pool.check()

    @EACH
    def test_it_is_beyond_what_is_live(self, source):
        with vpool.Pool(vpool.Dynamic(initial=0), source=source(GIB)) as pool:
            held = pool.allocate(8 * MIB)
            pool.reserve(8 * MIB)
            before = calls(pool)
            pool.deallocate(pool.allocate(8 * MIB))
            assert calls(pool) == before
            assert pool.stats.reserved_bytes == 16 * MIB
            pool.deallocate(held)

    @EACH
    def test_again_does_nothing(self, source):
        with vpool.Pool(source=source(8 * GIB)) as pool:
            pool.reserve("300MiB")
            before = pool.stats
            for nbytes in (0, 1, "100MiB", "300MiB"):
                pool.reserve(nbytes)
            assert pool.stats == before

    @pytest.mark.parametrize("limit", ["4GiB", "600MiB"])
    def test_a_free_block_behind_a_smaller_one_counts(self, limit):
        """A class holds sizes that differ by a 32nd: the first of it may be too small where another one does."""
        with vpool.Pool(vpool.Dynamic(initial=0, limit=limit), source="simulated") as pool:
            blocks = [pool.allocate(303 * MIB), pool.allocate(297 * MIB)]
            for ptr in blocks:
                pool.deallocate(ptr)
            with unchanged(pool):
                pool.reserve(300 * MIB)
            before = calls(pool)
            pool.deallocate(pool.allocate(300 * MIB))
            assert calls(pool) == before

    @pytest.mark.parametrize("on_pressure", ["wait", "raise"])
    def test_what_a_stream_freed_that_is_gone_counts_if_the_pool_may_wait_for_it(self, on_pressure):
        source = vpool.sources.Simulated(GIB)
        driver = source.driver
        stream = driver.create_stream()
        with vpool.Pool(vpool.Dynamic(initial=0), source, on_pressure=on_pressure) as pool:
            ptr = pool.allocate(4 * MIB, stream)
            driver.queue_work(stream)
            driver.destroy_stream(stream)
            pool.deallocate(ptr)
            pool.reserve(4 * MIB)
            assert pool.stats.reserved_bytes == (4 if on_pressure == "wait" else 8) * MIB
            before = calls(pool)
            pool.deallocate(pool.allocate(4 * MIB))
            assert calls(pool) == before
            driver.complete()

    def test_it_grows_by_the_rule(self):
        with vpool.Pool(source="simulated") as pool:
            pool.reserve(1)
            assert pool.stats.reserved_bytes == 256 * MIB

    def test_what_streams_lent_one_another_counts(self):
        with vpool.Pool(vpool.Dynamic(initial=0), source=vpool.sources.Simulated(GIB)) as pool:
            pool.reserve(8 * MIB)
            blocks = [pool.allocate(2 * MIB, stream) for stream in (0, 7, 9, 11)]
            for ptr in blocks:
                pool.deallocate(ptr)
            pool.source.driver.complete()
            before = calls(pool)
            pool.reserve(8 * MIB)
            assert calls(pool) == before
            assert pool.inspect().largest_free_bytes == 8 * MIB

    def test_nobody_counts_as_served(self):
        with vpool.Pool(source="simulated") as pool:
            with pool.record() as recording, pool.measure() as phase:
                pool.reserve("512MiB")
            assert recording.peak_live_bytes == phase.peak_allocated_bytes == 0
            assert phase.peak_reserved_bytes == pool.stats.peak_reserved_bytes == 512 * MIB
            figures = pool.stats
            assert figures.allocations == figures.frees == figures.peak_allocated_bytes == figures.ooms == 0

    def test_a_hybrid_grows_beside_its_core(self):
        strategy = vpool.Hybrid("64MiB", block="1MiB", dynamic=vpool.Dynamic(initial=0, limit="1GiB"))
        with vpool.Pool(strategy, source="simulated") as pool:
            pool.reserve("100MiB")
            before = calls(pool)
            pool.deallocate(pool.allocate(100 * MIB))
            assert calls(pool) == before
            assert pool.stats.reserved_bytes == 164 * MIB

    def test_a_debugged_pool(self):
        with vpool.Pool(vpool.Dynamic(initial=0), source="host", debug="guard,poison,quarantine") as pool:
            pool.reserve(4 * MIB)
            pool.check()
            assert pool.leaks().blocks == 0
            before = calls(pool)
            pool.deallocate(pool.allocate(4 * MIB))
            assert calls(pool) == before

    def test_guards_are_beside_what_is_reserved(self):
        with vpool.Pool(vpool.Dynamic(initial=0), source="host", debug="guard=4096") as pool:
            pool.reserve(4 * MIB)
            before = calls(pool)
            pool.deallocate(pool.allocate(4 * MIB))
            assert calls(pool) == before

    @pytest.mark.parametrize("strategy", [vpool.Dynamic(initial=0, limit="64MiB"), vpool.Fixed("64MiB")])
    def test_what_waits_in_quarantine_counts(self, strategy):
        with vpool.Pool(strategy, source="simulated", debug="quarantine=64MiB") as pool:
            pool.reserve("64MiB")
            for ptr in [pool.allocate(64 * KIB) for _ in range(1024)]:
                pool.deallocate(ptr)
            assert pool.stats.pending_bytes > 0
            pool.reserve("64MiB")
            pool.check()

    def test_the_device_is_left_with_nothing_idle_in_the_way(self):
        """Idle segments that are too small go back where there is no room beside them."""
        with vpool.Pool(vpool.Dynamic(initial=0, limit="10MiB"), source="simulated") as pool:
            blocks = [pool.allocate(2 * MIB) for _ in range(5)]
            for ptr in blocks:
                pool.deallocate(ptr)
            pool.reserve("7MiB")
            assert pool.stats.reserved_bytes == 7 * MIB
            pool.check()

    @pytest.mark.parametrize("on_pressure", ["wait", "raise"])
    def test_what_is_pending_is_waited_for_if_the_pool_may(self, on_pressure):
        source = vpool.sources.Simulated(GIB)
        stream = source.driver.create_stream()
        with vpool.Pool(vpool.Dynamic(initial=0, limit="10MiB"), source, on_pressure=on_pressure) as pool:
            ptr = pool.allocate(4 * MIB)
            source.driver.queue_work(0)
            pool.deallocate(ptr)
            source.driver.queue_work(stream)
            if on_pressure == "wait":
                pool.reserve("8MiB")
                assert pool.stats.reserved_bytes == 8 * MIB
            else:
                with pytest.raises(vpool.OutOfMemoryError):
                    pool.reserve("8MiB")
            source.driver.complete()


class TestNeverGrows:
    @pytest.mark.parametrize("block", [None, "1MiB"])
    def test_what_is_free_of_it_counts(self, block):
        with vpool.Pool(vpool.Fixed("8MiB", block=block), source="simulated") as pool:
            ptr = pool.allocate(MIB)
            pool.reserve("7MiB")
            with unchanged(pool), pytest.raises(vpool.OutOfMemoryError) as caught:
                pool.reserve("8MiB")
            assert caught.value.requested == 8 * MIB
            assert caught.value.report.free_bytes == 7 * MIB
            assert "its strategy takes nothing after construction" in str(caught.value)
            pool.deallocate(ptr)
            pool.reserve("8MiB")

    @pytest.mark.parametrize("block", [None, "1MiB"])
    @pytest.mark.parametrize("on_pressure", ["wait", "raise"])
    def test_what_is_pending_counts_once_it_is_complete(self, block, on_pressure):
        source = vpool.sources.Simulated(GIB)
        stream = source.driver.create_stream()
        with vpool.Pool(vpool.Fixed("8MiB", block=block), source, on_pressure=on_pressure) as pool:
            ptr = pool.allocate(MIB)
            pool.record_stream(ptr, stream)
            source.driver.queue_work(stream)
            pool.deallocate(ptr)
            if on_pressure == "wait":
                pool.reserve("8MiB")
                return
            with pytest.raises(vpool.OutOfMemoryError):
                pool.reserve("8MiB")
            source.driver.complete()
            pool.reserve("8MiB")

    def test_what_a_handle_has_beyond_the_core_does_not_count(self):
        with vpool.Pool(vpool.Fixed("5MiB"), source="simulated-vmm") as pool:
            pool.reserve("5MiB")
            with unchanged(pool), pytest.raises(vpool.OutOfMemoryError):
                pool.reserve("6MiB")

    def test_one_that_serves_the_rest_directly_grows(self):
        strategy = vpool.Fixed("8MiB", block="1MiB", oversize="direct", limit="64MiB")
        with vpool.Pool(strategy, source="simulated") as pool:
            pool.reserve("16MiB")
            before = calls(pool)
            pool.deallocate(pool.allocate(16 * MIB))
            assert calls(pool) == before


class TestRefused:
    @EACH
    @pytest.mark.parametrize("nbytes", ["40MiB", "1TiB", 2**63 - 1])
    def test_beyond_the_limit(self, source, nbytes):
        with vpool.Pool(vpool.Dynamic(initial=0, limit="64MiB"), source=source(GIB)) as pool:
            ptr = pool.allocate(32 * MIB)
            with unchanged(pool), pytest.raises(vpool.OutOfMemoryError) as caught:
                pool.reserve(nbytes)
            error = caught.value
            assert error.requested == vpool.sizes.parse_size(nbytes)
            assert "cannot reserve" in str(error)
            assert error.steps[:3] == ("merge across streams", "grow", "give idle segments back and grow")
            assert error.steps[3:] == ("wait for pending work",)
            assert error.report.reserved_bytes == 32 * MIB
            assert pool.stats.ooms == 1
            pool.check()
            pool.deallocate(ptr)

    @EACH
    def test_more_than_the_device_has(self, source):
        source = source(64 * MIB)
        with vpool.Pool(vpool.Dynamic(initial=0, limit="1GiB"), source=source) as pool:
            ptr = pool.allocate(32 * MIB)
            with unchanged(pool), pytest.raises(vpool.OutOfMemoryError, match="cannot reserve"):
                pool.reserve("40MiB")
            pool.reserve("32MiB")
            pool.deallocate(ptr)

    @pytest.mark.parametrize("strategy", [vpool.Dynamic(initial="4MiB", limit="4MiB"), vpool.Fixed("4MiB")])
    def test_a_wait_that_fails_is_the_error(self, strategy):
        """Not a want of memory, which freeing something would help."""
        driver = FakeCudaDriver(64 * MIB)
        pool = vpool.Pool(strategy, vpool.sources.Source(driver, "cuda", 0))
        dying = driver.create_stream()
        ptr = pool.allocate(4 * MIB)
        pool.record_stream(ptr, dying)
        pool.deallocate(ptr)
        driver.destroy_stream(dying)
        driver.fail("synchronize", 700, times=100)
        with pytest.raises(vpool.SourceError, match="cudaErrorIllegalAddress"):
            pool.reserve(4 * MIB)
        assert pool.stats.ooms == 0
        driver.fail("synchronize", times=0)
        pool.reserve(4 * MIB)
        pool.close()

    @pytest.mark.parametrize(
        ("nbytes", "error"),
        [(-1, ValueError), ("a lot", ValueError), (1.5, TypeError), (True, TypeError), (None, TypeError),
         (2**63, OverflowError)],
    )  # fmt: skip
    def test_what_is_no_size(self, nbytes, error):
        with vpool.Pool(source="simulated") as pool, unchanged(pool), pytest.raises(error, match="nbytes"):
            pool.reserve(nbytes)

    def test_a_closed_pool(self):
        pool = vpool.Pool(source="simulated")
        pool.close()
        for nbytes in (0, 1):
            with pytest.raises(vpool.ClosedPoolError):
                pool.reserve(nbytes)

    def test_a_pool_that_is_closed_meanwhile_keeps_nothing(self):
        for _ in range(20):
            pool = vpool.Pool(vpool.Dynamic(initial=0, growth="64KiB"), source="simulated")
            taker = threading.Thread(target=reserve_until_closed, args=(pool,))
            taker.start()
            pool.close()
            taker.join()
            assert pool.stats.reserved_bytes == 0


def reserve_until_closed(pool):
    with contextlib.suppress(vpool.ClosedPoolError):
        for granules in range(1, 100_000):
            pool.reserve(granules * 4 * KIB)


def test_threads():
    """Others take what is reserved at once: each call returns, and nothing is lost."""
    pool = vpool.Pool(vpool.Dynamic(initial=0, limit="32MiB"), source="host")
    failed = []

    def work(stream):
        try:
            for _ in range(200):
                try:
                    pool.reserve(4 * MIB)
                    ptr = pool.allocate(4 * MIB, stream)
                except vpool.OutOfMemoryError:
                    continue
                pool.deallocate(ptr)
                if stream == 3:
                    pool.trim()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(stream,)) for stream in range(3, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    pool.check()
    assert pool.stats.reserved_bytes <= 32 * MIB
    pool.close()
    assert pool.stats.reserved_bytes == 0

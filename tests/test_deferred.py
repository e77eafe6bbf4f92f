"""Blocks that are used on streams nobody names: none comes back before the device was waited for."""

import ctypes
import os
import threading

import pytest

import vpool
from tests.helpers.pools import KIB, MIB, assert_whole, run_cleanly
from vpool._interface.deferred import Deferred
from vpool._interface.segments import bind
from vpool._storage.fake_cuda import FakeCudaDriver
from vpool._storage.source import Source

LEND = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
TAKE = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


@pytest.fixture
def driver():
    return FakeCudaDriver(64 * MIB, devices=2)


def pool_on(driver, strategy=None, **options):
    strategy = strategy or vpool.Dynamic(initial=MIB, limit=4 * MIB)
    return vpool.Pool(strategy, Source(driver, "cuda", 0, checks_handles=False), **options)


@pytest.fixture
def pool(driver):
    with pool_on(driver) as pool:
        yield pool
        pool.check()


@pytest.fixture(scope="module")
def bound():
    """A pool with a pair of C functions, for all tests here: a pair is never given back."""
    driver = FakeCudaDriver(64 * MIB, devices=2)
    driver.current_device = 0
    pool = pool_on(driver)
    lend, take, blocks = bind(pool)
    return pool, LEND(lend), TAKE(take), blocks


def busy(driver):
    """Unfinished work on a new stream: its number and place."""
    stream = driver.create_stream()
    position = driver.queue_work(stream)
    return driver.number_of(stream), position


class TestDeferred:
    def test_a_block_comes_back_after_all_work(self, pool, driver):
        blocks = Deferred(pool)
        ptr = blocks.allocate(MIB)
        work = busy(driver)
        blocks.deallocate(ptr)
        assert driver.finished(*work)
        assert pool.stats.allocated_bytes == 0
        assert blocks.allocate(MIB) == ptr

    def test_many_at_a_time(self, pool, driver):
        blocks = Deferred(pool, most=3)
        taken = [blocks.allocate(KIB) for _ in range(3)]
        work = busy(driver)
        for waiting, ptr in enumerate(taken[:2], 1):
            blocks.deallocate(ptr)
            assert (blocks.waiting, driver.finished(*work)) == (waiting, False)
            assert blocks.allocate(KIB) not in taken
        blocks.deallocate(taken[2])
        assert (blocks.waiting, driver.finished(*work)) == (0, True)
        assert driver.calls()["synchronize"][0] == 1
        assert blocks.allocate(KIB) in taken

    def test_many_bytes_at_a_time(self, pool):
        blocks = Deferred(pool, most=100, most_bytes=MIB)
        first, second = blocks.allocate(KIB), blocks.allocate(MIB)
        blocks.deallocate(first, KIB)
        assert blocks.waiting == 1
        blocks.deallocate(second, MIB)
        assert blocks.waiting == 0

    def test_what_waits_serves_a_request_that_would_fail(self, pool, driver):
        blocks = Deferred(pool, most=100)
        ptr = blocks.allocate(4 * MIB)
        work = busy(driver)
        blocks.deallocate(ptr)
        assert pool.allocate(4 * MIB, stream=driver.create_stream()) == ptr
        assert driver.finished(*work)

    def test_nothing_is_freed_while_it_is_held(self, pool, driver):
        blocks = Deferred(pool)
        blocks.hold(1)
        work = busy(driver)
        blocks.deallocate(blocks.allocate(MIB))
        assert (blocks.waiting, driver.finished(*work)) == (1, False)
        assert blocks.settle()
        assert (blocks.waiting, driver.finished(*work)) == (0, True)
        blocks.deallocate(blocks.allocate(MIB))
        blocks.hold(-1)
        blocks.deallocate(blocks.allocate(MIB))
        assert blocks.waiting == 0

    def test_a_capture_is_not_invalidated(self, pool, driver):
        blocks = Deferred(pool)
        stream = driver.create_stream()
        taken = [blocks.allocate(KIB), blocks.allocate(KIB)]
        driver.begin_capture(stream)
        pool.allocate(KIB, stream=stream)  # now the pool knows of it
        blocks.deallocate(taken[0])
        assert not blocks.settle()
        assert blocks.waiting == 1
        assert blocks.allocate(KIB) != taken[0]
        assert driver.end_capture(stream)
        assert pool.captures
        pool.allocate(KIB, stream=stream)  # and that it is over
        blocks.deallocate(taken[1])
        assert blocks.waiting == 0

    def test_a_device_that_does_not_answer_keeps_the_blocks(self, pool, driver):
        blocks = Deferred(pool)
        taken = [blocks.allocate(KIB) for _ in range(200)]
        driver.fail("synchronize", 719, times=200)
        for ptr in taken:
            blocks.deallocate(ptr)
        assert blocks.waiting == 200
        assert pool.stats.allocated_bytes == 200 * KIB
        driver.fail("synchronize", times=0)
        assert blocks.settle()
        assert_whole(pool)

    def test_a_dropped_one_frees_what_waits(self, pool):
        blocks = Deferred(pool, most=100)
        blocks.deallocate(blocks.allocate(MIB))
        del blocks
        assert pool.stats.allocated_bytes == 0
        with pytest.raises(vpool.OutOfMemoryError):
            pool.allocate(8 * MIB)

    def test_what_is_abandoned_is_not_freed(self, pool):
        blocks = Deferred(pool, most=100)
        other = blocks.allocate(MIB)
        blocks.deallocate(blocks.allocate(MIB))
        blocks.abandon()
        blocks.abandon()
        blocks.deallocate(other)
        assert blocks.settle()
        del blocks
        assert pool.stats.allocated_bytes == 2 * MIB

    def test_a_child_of_the_pools_process_calls_no_driver(self, pool, driver):
        blocks = Deferred(pool)
        ptr = blocks.allocate(KIB)
        before = {name: figures[0] for name, figures in driver.calls().items()}
        child = os.fork()
        if child == 0:
            blocks.deallocate(ptr)
            blocks.settle()
            after = {name: figures[0] for name, figures in driver.calls().items()}
            os._exit(0 if after == before else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        blocks.deallocate(ptr)

    def test_zero_bytes(self, pool):
        blocks = Deferred(pool)
        assert blocks.allocate(0) == 0
        blocks.deallocate(0)
        assert pool.stats.frees == 0

    def test_debug_modes_see_the_free(self, driver):
        with pool_on(driver, debug=("guard", "leaks")) as pool:
            blocks = Deferred(pool)
            ptr = blocks.allocate(1000)
            ctypes.memset(ptr, 1, 1000)
            blocks.deallocate(ptr)
            assert not pool.leaks().groups

    def test_threads(self, pool):
        blocks = Deferred(pool, most=7)

        def work():
            for _ in range(500):
                blocks.deallocate(blocks.allocate(KIB), KIB)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert blocks.settle()
        assert_whole(pool)


class TestFunctions:
    def test_they_lend_and_take_back(self, bound):
        pool, lend, take, _ = bound
        ptr = lend(MIB, 0, None)
        assert pool.stats.allocated_bytes == MIB
        work = busy(pool.source.driver)
        take(ptr, MIB, 0, None)
        assert pool.source.driver.finished(*work)
        assert_whole(pool)

    @pytest.mark.parametrize(("nbytes", "device"), [(0, 0), (MIB, 1), (MIB, -1), (8 * MIB, 0), (2**64 - 1, 0)])
    def test_what_cannot_be_had_is_null(self, bound, nbytes, device):
        pool, lend, take, _ = bound
        assert lend(nbytes, device, None) is None
        take(None, 0, 0, None)
        assert_whole(pool)

    def test_the_same_pool_has_the_same_pair(self, bound):
        pool, lend, _, blocks = bound
        again = bind(pool)
        assert again[0] == ctypes.cast(lend, ctypes.c_void_p).value
        assert again[2] is blocks

    def test_a_capture_goes_on(self, bound):
        """One that no other call has told the pool of, while its memory would have to be waited for."""
        pool, lend, take, _ = bound
        driver = pool.source.driver
        unknown = driver.create_stream(blocking=False)  # which cannot be waited for alone
        free = [pool.allocate(MIB, stream=unknown) for _ in range(4)]
        driver.queue_work(unknown)
        for ptr in free:
            pool.deallocate(ptr)
        stream = driver.create_stream(blocking=False)
        driver.begin_capture(stream)
        assert lend(4 * MIB, 0, stream) is None
        assert driver.end_capture(stream)
        ptr = lend(4 * MIB, 0, stream)
        assert ptr
        take(ptr, 4 * MIB, 0, stream)

    def test_recordings_and_tags_go_on(self, bound):
        pool, lend, take, _ = bound
        with pool.record() as trace, vpool.tag("segments"):
            ptr = lend(MIB, 0, None)
            (row,) = [row for row in pool.inspect().tags if row["tag"] == "segments"]
            assert row["live_bytes"] == MIB
            take(ptr, MIB, 0, None)
        assert len(trace.op) == 2

    def test_no_pool_that_needs_the_gil(self, driver):
        with pool_on(driver, debug="guard") as pool, pytest.raises(ValueError, match="debug"):
            bind(pool)

    def test_no_pool_that_is_closed(self, driver):
        pool = pool_on(driver)
        pool.close()
        with pytest.raises(vpool.ClosedPoolError):
            bind(pool)

    def test_a_pool_that_is_closed_later_gives_null_and_takes_back(self):
        code = """
import ctypes, vpool
from vpool._interface.segments import bind
pools = [vpool.Pool(vpool.Dynamic(initial="1MiB"), source="host") for _ in range(16)]
pairs = [bind(pool) for pool in pools]
assert len({pair[0] for pair in pairs}) == 16
lend = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(pairs[3][0])
take = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(pairs[3][1])
ptr = lend(1000, 0, None)
pools[3].close()
print(lend(1000, 0, None), pools[3].stats.allocated_bytes)
take(ptr, 1000, 0, None)
print(pools[3].stats.reserved_bytes)
try:
    bind(vpool.Pool(source="host"))
except RuntimeError as error:
    print(error)
"""
        lines = run_cleanly(code).splitlines()
        assert lines[:2] == ["None 1024", "0"]
        assert "16 pools are bound" in lines[2]

"""Blocks for the host: what they get is complete, and what they leave serves everybody at once."""

import pickle

import pytest

import vpool
from tests.helpers.pools import KIB, MIB, assert_whole
from vpool._storage.fake_cuda import FakeCudaDriver
from vpool._storage.source import Source
from vpool.streams import HOST, stream_handle


@pytest.fixture
def driver():
    return FakeCudaDriver(64 * MIB)


def pool_on(driver, strategy=None, **options):
    strategy = strategy or vpool.Dynamic(initial=MIB, limit=4 * MIB)
    return vpool.Pool(strategy, Source(driver, "cuda", 0, checks_handles=False), **options)


STRATEGIES = {
    "dynamic": vpool.Dynamic(initial=MIB, limit=4 * MIB),
    "a core of blocks": vpool.Hybrid(core=2 * MIB, block=MIB, dynamic=vpool.Dynamic(initial=0, limit=4 * MIB)),
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_a_block_that_a_stream_may_still_use_is_not_given_to_the_host(driver, strategy):
    stream = driver.create_stream()
    with pool_on(driver, strategy) as pool:
        taken = [pool.allocate(MIB, stream=stream) for _ in range(3)]
        position = driver.queue_work(stream)
        for ptr in taken:
            pool.deallocate(ptr)
        number = driver.number_of(stream)
        assert pool.allocate(MIB, stream=HOST) not in taken
        assert not driver.finished(number, position)
        assert pool.crossings["drains"] == 0
        # Only then is the work waited for.
        assert pool.allocate(MIB, stream=HOST) in taken
        assert driver.finished(number, position)
        pool.check()


def test_what_is_known_to_be_complete_is_not_waited_for(driver):
    class Stream:
        ptr = driver.create_stream()

    stream = Stream()
    with pool_on(driver) as pool:
        ptr = pool.allocate(MIB, stream=stream)
        pool.deallocate(ptr)
        driver.complete()
        assert pool.allocate(MIB, stream=HOST) == ptr
        assert pool.crossings["drains"] == 0
        assert pool.stats.reserved_bytes == MIB


def test_the_hosts_own_memory_is_lent_again_at_once(driver):
    with pool_on(driver) as pool:
        ptr = pool.allocate(KIB, stream=HOST)
        pool.deallocate(ptr)
        before = driver.calls()
        assert pool.allocate(KIB, stream=HOST) == ptr
        assert driver.calls() == before
        pool.deallocate(ptr)
        assert_whole(pool)


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_what_the_host_freed_serves_every_stream_without_a_wait(driver, strategy):
    with pool_on(driver, strategy) as pool:
        blocks = [pool.allocate(MIB, stream=HOST) for _ in range(4)]
        for ptr in blocks:
            pool.deallocate(ptr)
        for stream in (0, driver.create_stream()):
            driver.queue_work(0)
            assert pool.allocate(MIB, stream=stream) in blocks
        assert (pool.crossings["waits"], pool.crossings["drains"]) == (0, 0)
        assert driver.calls()["synchronize"][0] == driver.calls()["stream_wait_event"][0] == 0
        pool.check()


def test_a_stream_that_was_recorded_is_waited_for(driver):
    stream = driver.create_stream()
    with pool_on(driver, vpool.Fixed(MIB)) as pool:
        buffer = pool.empty(MIB, stream=HOST)
        buffer.record_stream(stream)
        position = driver.queue_work(stream)
        number = driver.number_of(stream)
        buffer.close()
        assert pool.stats.pending_bytes == MIB
        pool.allocate(MIB, stream=HOST)
        assert driver.finished(number, position)


def test_a_block_of_a_stream_can_be_freed_on_the_host(driver):
    stream = driver.create_stream()
    with pool_on(driver, vpool.Fixed(MIB)) as pool:
        buffer = pool.empty(MIB, stream=stream)
        position = driver.queue_work(stream)
        number = driver.number_of(stream)
        buffer.close(stream=HOST)
        assert pool.stats.allocated_bytes == 0
        pool.allocate(MIB, stream=HOST)
        assert driver.finished(number, position), "the host's word is about its own work"


def test_waiting_for_all_streams_does_not_wait_for_the_device_because_of_the_host(driver):
    with pool_on(driver) as pool:
        keep = pool.empty(KIB, stream=HOST)
        other = pool.allocate(KIB, stream=0)
        driver.queue_work(0)
        pool.deallocate(other)
        pool.trim()
        assert pool.crossings["drains"] == 0
        keep.close()


def test_a_pool_that_never_waits_refuses(driver):
    stream = driver.create_stream()
    with pool_on(driver, vpool.Fixed(MIB), on_pressure="raise") as pool:
        ptr = pool.allocate(MIB, stream=stream)
        driver.queue_work(stream)
        pool.deallocate(ptr)
        with pytest.raises(vpool.OutOfMemoryError):
            pool.allocate(MIB, stream=HOST)
        driver.complete()
        pool.check()


def test_no_call_ever_names_the_hosts_number(driver):
    """CUDA's driver crashes on what is no handle; this one counts such calls."""
    stream = driver.create_stream()
    with pool_on(driver) as pool, vpool.stream(HOST):
        for turn in range(4):
            ptr = pool.allocate(MIB)
            other = pool.allocate(MIB, stream=stream)
            pool.record_stream(ptr, stream)
            pool.record_stream(other, HOST)
            pool.deallocate(ptr, stream=None if turn % 2 else stream)
            pool.deallocate(other, stream=HOST if turn % 2 else None)
            pool.trim()
        pool.forget_stream(HOST)
        pool.check()
        assert driver.calls_on_dead_streams == 0


def test_the_host_has_a_number_in_reports(driver):
    with pool_on(driver) as pool:
        buffer = pool.empty(KIB, stream=HOST)
        assert buffer.stream == stream_handle(HOST) == 2**63 - 1
        assert [row["stream"] for row in pool.inspect().streams if row["live_blocks"]] == [2**63 - 1]
        buffer.close()
    assert repr(HOST) == "vpool.streams.HOST"
    assert pickle.loads(pickle.dumps(HOST)) is HOST


def test_debug_modes_see_the_hosts_blocks(driver):
    with pool_on(driver, debug=("guard", "poison")) as pool:
        buffer = pool.empty(KIB, stream=HOST)
        buffer.close()
        assert pool.allocate(KIB, stream=HOST)
        pool.check()

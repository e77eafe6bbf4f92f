"""What a pool lends, counts, names and gives back."""

import threading

import numpy as np
import pytest

import vpool
from tests.helpers.pools import (
    GRANULE,
    MIB,
    assert_whole,
    host_pool,
    live_rows,
    round_up,
    run_cleanly,
    simulated_pool,
)

LARGEST_ALIGNMENT = 2 * MIB


@pytest.mark.parametrize("nbytes", [1, 255, 256, 257, 1000, MIB, np.int32(1000), np.uint64(4096), np.int64(1)])
def test_a_block_has_at_least_what_was_asked_for_and_whole_granules(pool, nbytes):
    ptr = pool.allocate(nbytes)
    (row,) = live_rows(pool)
    assert type(ptr) is int
    assert ptr == row["address"]
    assert ptr % GRANULE == 0
    assert row["requested"] == nbytes
    assert row["nbytes"] == round_up(int(nbytes))
    pool.deallocate(ptr)
    assert_whole(pool)


def test_an_address_may_come_back_as_any_integer_like(pool):
    for kind in (int, np.uint64, np.int64):
        pool.deallocate(kind(pool.allocate(100)))
    assert_whole(pool)


def test_no_bytes_are_address_0_and_freeing_0_does_nothing(pool):
    """allocate(0) is a null pointer; freeing it twice is fine, and nothing is counted."""
    assert [pool.allocate(0), pool.allocate(np.int8(0)), pool.allocate(0, alignment=4096)] == [0, 0, 0]
    pool.deallocate(0)
    pool.deallocate(0)
    pool.deallocate(0, stream=7)
    assert pool.stats.allocations == pool.stats.frees == pool.stats.source_calls == 0


@pytest.mark.parametrize("alignment", [2**power for power in range(22)])
def test_every_alignment_is_honoured_after_splits(pool, alignment):
    """alignment 1 to 2 MiB, with the lists cut up before; every block stays a multiple of 256."""
    pool.allocate(GRANULE)
    for nbytes in (1, 300, 5000, alignment, alignment + 1):
        assert pool.allocate(nbytes, alignment=alignment) % max(alignment, GRANULE) == 0
        pool.allocate(GRANULE)
    pool.check()


def test_alignment_may_be_a_numpy_integer(pool):
    assert pool.allocate(100, alignment=np.int32(4096)) % 4096 == 0


def test_live_blocks_never_overlap(pool):
    sizes = [1, 256, 257, 5000, MIB, 3 * MIB] * 20
    for nbytes in sizes:
        pool.allocate(nbytes)
    rows = live_rows(pool)
    assert len(rows) == len(sizes)
    assert (rows["address"][1:] >= rows["address"][:-1] + rows["nbytes"][:-1]).all()


def test_stats_follow_every_allocation_and_free(pool):
    first = pool.allocate(1000)
    second = pool.allocate(300)
    stats = pool.stats
    assert (stats.allocated_bytes, stats.requested_bytes) == (1024 + 512, 1300)
    assert (stats.reserved_bytes, stats.peak_reserved_bytes, stats.source_calls) == (2 * MIB // 2, MIB, 1)
    assert (stats.allocations, stats.frees, stats.hits, stats.ooms, stats.pending_bytes) == (2, 0, 1, 0, 0)
    pool.deallocate(first)
    pool.deallocate(second)
    stats = pool.stats
    assert (stats.allocated_bytes, stats.requested_bytes, stats.frees) == (0, 0, 2)
    assert (stats.peak_allocated_bytes, stats.reserved_bytes) == (1536, MIB)


def test_pools_have_names(pool):
    assert pool.name == "under test"
    assert "under test" in repr(pool)
    with simulated_pool() as first, simulated_pool() as second:
        assert first.name != second.name
    assert "closed" in repr(first)


def test_pools_lists_the_open_ones():
    with simulated_pool() as mine:
        assert mine in vpool.pools()
    assert mine not in vpool.pools()


def test_a_pool_says_where_its_memory_comes_from(pool):
    assert (pool.source.name, pool.device) == ("simulated", 0)
    with vpool.Pool(source="host") as host:
        assert host.source.name == "host"


def test_close_gives_memory_back_and_may_be_called_again():
    pool = simulated_pool()
    pool.deallocate(pool.allocate(5 * MIB))
    pool.close()
    pool.close()
    assert pool.closed
    assert pool.source.driver.used == pool.stats.reserved_bytes == 0
    pool.check()


def test_what_is_live_at_close_goes_back_when_it_is_freed():
    pool = simulated_pool()
    small, large = pool.allocate(100), pool.allocate(5 * MIB)
    pool.close()
    assert pool.source.driver.used == pool.stats.reserved_bytes > 0
    pool.deallocate(large)
    pool.deallocate(small)
    assert pool.source.driver.used == pool.stats.reserved_bytes == 0
    pool.check()


def test_a_context_manager_closes_also_on_an_error():
    with pytest.raises(KeyError), simulated_pool() as pool:
        raise KeyError
    assert pool.closed


def test_a_dropped_pool_gives_memory_back():
    source = vpool.sources.Simulated("1GiB")
    pool = vpool.Pool(source=source)
    pool.allocate(100)
    assert source.driver.used > 0
    del pool
    assert source.driver.used == 0


def test_stream_spellings_of_the_default_stream_share_its_memory(pool):
    class Framework:
        cuda_stream = 1

    class Protocol:
        def __cuda_stream__(self):
            return (0, 0)

    for stream in (None, 0, 1, Framework(), Protocol()):
        ptr = pool.allocate(1000, stream=stream)
        assert live_rows(pool)["stream"].tolist() == [0]
        pool.deallocate(ptr, stream=stream)
    assert_whole(pool)


@pytest.mark.parametrize("freed_on", [None, 7, 0, 9])
def test_a_block_of_a_stream_can_be_freed_from_any(pool, freed_on):
    ptr = pool.allocate(1000, stream=7)
    assert live_rows(pool)["stream"].tolist() == [7]
    pool.deallocate(ptr, stream=freed_on)
    assert_whole(pool)


def test_memory_freed_on_one_stream_serves_another_once_its_work_is_complete(pool):
    """By proof: nobody waits."""
    driver = pool.source.driver
    ptr = pool.allocate(MIB, stream=7)
    driver.queue_work(7)
    pool.deallocate(ptr, stream=7)
    driver.complete(7)
    assert pool.allocate(MIB, stream=8) == ptr
    assert live_rows(pool)["stream"].tolist() == [8]
    assert pool.crossings == {"crossings": 1, "waits": 0, "overwaits": 0, "drains": 0}
    assert pool.stats.source_calls == 1
    assert driver.calls()["stream_wait_event"][0] == driver.calls()["synchronize"][0] == 0


def test_memory_freed_on_one_stream_serves_another_behind_an_event_while_its_work_goes_on(pool):
    driver = pool.source.driver
    ptr = pool.allocate(MIB, stream=7)
    queued = driver.queue_work(7)
    pool.deallocate(ptr, stream=7)
    assert not driver.ordered(8, 7, queued)
    assert pool.allocate(MIB, stream=8) == ptr
    assert driver.ordered(8, 7, queued)
    assert pool.crossings == {"crossings": 1, "waits": 1, "overwaits": 0, "drains": 0}
    assert pool.stats.source_calls == 1


def test_freeing_on_another_stream_makes_no_driver_call_and_gives_that_stream_the_memory(pool):
    class Framework:
        cuda_stream = 9

    stream = Framework()
    driver = pool.source.driver
    ptr = pool.allocate(MIB, stream=7)
    queued = driver.queue_work(7)
    pool.deallocate(pool.allocate(100, stream=stream), stream=stream)
    before = driver.calls()
    pool.deallocate(ptr, stream=stream)
    assert driver.calls() == before
    # Nothing says that stream 9 comes after what stream 7 still does with the block.
    assert pool.stats.pending_bytes == MIB
    driver.complete(7)
    assert driver.ordered(9, 7, queued)
    assert pool.coalesce() >= 0
    assert pool.stats.pending_bytes == 0
    assert pool.allocate(pool.inspect().largest_free_bytes, stream=stream) == ptr, "all of the pool, from its start"


def test_per_thread_default_streams_of_two_threads_are_two_streams_that_share_by_proof(pool):
    first = pool.allocate(MIB // 2, stream=2)
    assert pool.crossings["crossings"] == 0
    thread = threading.Thread(target=pool.allocate, args=(MIB // 2,), kwargs={"stream": 2})
    thread.start()
    thread.join()
    assert pool.crossings == {"crossings": 1, "waits": 0, "overwaits": 0, "drains": 0}
    assert live_rows(pool)["address"].tolist() == [first, first + MIB // 2]
    assert pool.inspect().segments == 1


@pytest.mark.usefixtures("no_default_pools")
class TestDefaultPools:
    """Functions of the module work on the default pool of the current device."""

    def test_the_default_pool_is_made_once(self):
        assert vpool.default_pool() is vpool.default_pool(0) is vpool.default_pool()

    def test_module_functions_use_it(self):
        mine = host_pool()
        assert vpool.set_default_pool(mine) is None
        ptr = vpool.allocate(1000, alignment=4096)
        buffer = vpool.empty(2000)
        assert ptr % 4096 == 0
        assert buffer.pool is mine
        assert mine.stats.requested_bytes == vpool.inspect().requested_bytes == 3000
        vpool.deallocate(ptr)
        vpool.deallocate(buffer)
        assert_whole(mine)

    def test_set_default_pool_returns_the_one_before_and_leaves_it_open(self):
        first, second = host_pool(), host_pool()
        vpool.set_default_pool(first)
        assert vpool.set_default_pool(second) is first
        assert vpool.default_pool() is second
        assert not first.closed

    def test_a_closed_default_pool_is_replaced(self):
        with vpool.default_pool() as first:
            pass
        assert vpool.default_pool() is not first

    def test_all_threads_get_the_same_one(self):
        found = []
        start = threading.Barrier(8)

        def look():
            start.wait()
            found.append(vpool.default_pool())

        threads = [threading.Thread(target=look) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        assert len(set(map(id, found))) == 1

    @pytest.mark.parametrize("device", [-1, 999, 2**70])
    def test_a_device_that_is_not_there_is_named_with_how_many_there_are(self, device):
        with pytest.raises(ValueError, match=r"has \d+"):
            vpool.default_pool(device)

    @pytest.mark.parametrize("device", [1.5, "0", True, False, 0.0])
    @pytest.mark.parametrize("made_before", [False, True])
    def test_a_device_that_is_no_integer_is_refused(self, device, made_before):
        if made_before:
            vpool.set_default_pool(host_pool())
        with pytest.raises(TypeError):
            vpool.default_pool(device)

    @pytest.mark.parametrize("no_pool", [None, 5, "host", vpool.Pool])
    def test_only_a_pool_can_be_the_default(self, no_pool):
        with pytest.raises(TypeError):
            vpool.set_default_pool(no_pool)


def test_the_default_source_without_a_gpu_is_host_memory():
    printed = run_cleanly(
        "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''\n"
        "import vpool\n"
        "pool = vpool.Pool()\n"
        "print(pool.source.name, vpool.default_pool().source.name)"
    )
    assert printed.split() == ["host", "host"]

"""What a pool tries before it says that there is no memory: rung by rung, and each is counted."""

import gc
import sys
import threading
import types

import pytest

import vpool
from tests.helpers.pools import GRANULE, KIB, MIB, unchanged
from vpool._management.ladder import RUNG_NAMES

SEARCH, READY, STEAL, MERGE, GROW, TRIM, CALL, COLLECT, WAIT = RUNG_NAMES


def full_pool(nbytes=8 * MIB, capacity=None, initial=None, **options):
    """A pool that may take `nbytes`, which it takes at once unless `initial` says otherwise."""
    source = vpool.sources.Simulated(nbytes if capacity is None else capacity)
    strategy = vpool.Dynamic(initial=nbytes if initial is None else initial, limit=nbytes)
    return vpool.Pool(strategy, source, **options)


def hits(pool, rung):
    return pool.ladder[rung][1]


def test_an_alignment_that_the_head_of_the_class_misses_is_searched():
    with full_pool() as pool:
        blocks = [pool.allocate(MIB) for _ in range(8)]
        pool.deallocate(blocks[4])
        assert pool.allocate(MIB, alignment=MIB) == blocks[4]
        assert hits(pool, SEARCH) == 1


def test_pending_blocks_that_are_ready_come_before_growth():
    with full_pool() as pool:
        driver = pool.source.driver
        mine, other = driver.create_stream(), driver.create_stream()
        ptr = pool.allocate(8 * MIB, mine)
        driver.queue_work(other)
        pool.record_stream(ptr, other)
        pool.deallocate(ptr)
        driver.complete(other)
        assert pool.allocate(8 * MIB, mine) == ptr
        assert (hits(pool, READY), pool.crossings["waits"]) == (1, 0)


def test_small_blocks_of_another_stream_serve_a_large_request_without_growth():
    with full_pool(initial=4 * MIB) as pool:
        driver = pool.source.driver
        one, two = driver.create_stream(), driver.create_stream()
        for ptr in [pool.allocate(64 * KIB, one) for _ in range(64)]:
            pool.deallocate(ptr)
        reserved = pool.stats.reserved_bytes
        pool.deallocate(pool.allocate(4 * MIB, two))
        assert pool.stats.reserved_bytes == reserved
        assert hits(pool, STEAL) == 1


def test_halves_on_two_streams_merge_before_growth():
    with full_pool() as pool:
        driver = pool.source.driver
        one, two, three = (driver.create_stream() for _ in range(3))
        halves = [pool.allocate(4 * MIB, stream) for stream in (one, two)]
        for ptr in halves:
            driver.queue_work(one)
            pool.deallocate(ptr)
        assert pool.allocate(8 * MIB, three) == min(halves)
        assert hits(pool, MERGE) == 1
        assert pool.stats.source_calls == 1


def test_growth_is_counted():
    with full_pool(initial=MIB) as pool:
        pool.allocate(MIB)
        pool.allocate(MIB)
        assert hits(pool, GROW) == 2


def test_idle_segments_go_when_somebody_else_took_the_rest():
    with full_pool(16 * MIB, initial=MIB) as pool:
        for ptr in [pool.allocate(2 * MIB) for _ in range(3)]:
            pool.deallocate(ptr)
        pool.source.driver.set_free(0)
        pool.allocate(6 * MIB)
        assert hits(pool, TRIM) == 1
        assert pool.stats.reserved_bytes <= 6 * MIB


@pytest.mark.parametrize("on_pressure", ["wait", "raise"])
def test_idle_segments_of_another_stream_go_too_when_their_work_is_complete(on_pressure):
    with full_pool(16 * MIB, initial=MIB, on_pressure=on_pressure) as pool:
        driver = pool.source.driver
        one, two = driver.create_stream(), driver.create_stream()
        for ptr in [pool.allocate(2 * MIB, one) for _ in range(3)]:
            driver.queue_work(one)
            pool.deallocate(ptr)
        driver.complete(one)
        driver.set_free(0)
        pool.allocate(6 * MIB, two)
        assert hits(pool, TRIM) == 1
        assert driver.calls()["synchronize"][0] == 0


# Callbacks.


def test_callbacks_are_called_by_priority_then_age_until_one_helps():
    with full_pool() as pool:
        called = []
        ptr = pool.allocate(8 * MIB)
        pool.on_pressure(lambda nbytes: called.append(("low", nbytes)), priority=-1)
        pool.on_pressure(lambda nbytes: called.append(("first", nbytes)))
        pool.on_pressure(lambda nbytes: (called.append(("second", nbytes)), pool.deallocate(ptr)))
        pool.on_pressure(lambda nbytes: called.append(("high", nbytes)), priority=5)
        assert pool.allocate(1000) == ptr
        assert called == [("high", 1000), ("first", 1000), ("second", 1000)]
        assert hits(pool, CALL) == 1
        assert pool.ladder[CALL][0] == 3


def test_a_callback_may_free_and_allocate_in_the_pool():
    with full_pool() as pool:
        kept = [pool.allocate(2 * MIB) for _ in range(4)]

        def callback(nbytes):
            pool.deallocate(kept.pop())
            pool.deallocate(pool.allocate(MIB))
            pool.inspect()
            pool.coalesce()

        pool.on_pressure(callback)
        pool.allocate(2 * MIB)
        assert len(kept) == 3
        pool.check()


def test_a_request_that_fails_inside_a_callback_calls_none_again():
    with full_pool() as pool:
        pool.allocate(8 * MIB)
        called = []

        def callback(nbytes):
            called.append(nbytes)
            with pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(nbytes + 1)

        pool.on_pressure(callback)
        for count in (1, 2):
            with unchanged(pool), pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(1000)
            assert len(called) == count


def test_what_a_callback_raises_is_the_cause():
    with full_pool() as pool:
        pool.allocate(8 * MIB)
        reason = RuntimeError("the cache is stuck")

        def callback(nbytes):
            raise reason

        pool.on_pressure(callback)
        pool.on_pressure(lambda nbytes: True)
        with unchanged(pool), pytest.raises(vpool.OutOfMemoryError) as caught:
            pool.allocate(1000)
        assert caught.value.__cause__ is reason


def test_a_callback_that_raises_after_it_freed_has_helped():
    with full_pool() as pool:
        ptr = pool.allocate(8 * MIB)

        def callback(nbytes):
            pool.deallocate(ptr)
            raise RuntimeError

        pool.on_pressure(callback)
        assert pool.allocate(1000) == ptr


def test_callbacks_that_free_nothing_are_called_once_for_each_request():
    with full_pool() as pool:
        pool.allocate(8 * MIB)
        called = []
        pool.on_pressure(lambda nbytes: called.append(nbytes) or True)
        for _ in range(3):
            with pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(1000)
        assert called == [1000] * 3


def test_an_interrupt_in_a_callback_is_no_want_of_memory():
    with full_pool() as pool:
        pool.allocate(8 * MIB)

        def callback(nbytes):
            raise KeyboardInterrupt

        pool.on_pressure(callback)
        with unchanged(pool), pytest.raises(KeyboardInterrupt):
            pool.allocate(1000)


@pytest.mark.parametrize("callback", [None, 1, "x"])
def test_what_cannot_be_called_is_refused(callback):
    with full_pool() as pool, pytest.raises(TypeError):
        pool.on_pressure(callback)


# Garbage.


def test_callbacks_that_threads_add_at_once_are_all_called():
    called = set()

    def add(first):
        for number in range(first, first + 300):
            pool.on_pressure(lambda nbytes, number=number: called.add(number), priority=number % 7)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with full_pool() as pool:
            threads = [threading.Thread(target=add, args=(300 * i,)) for i in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            with pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(1 << 40)
    finally:
        sys.setswitchinterval(before)
    assert called == set(range(1200))


@pytest.mark.parametrize("priority", [None, 1.5, "1", 2j, float("nan")])
def test_a_priority_that_is_no_integer_is_refused(pool, priority):
    with pytest.raises(TypeError):
        pool.on_pressure(print, priority)
    pool.on_pressure(print, -1)


@pytest.mark.parametrize("lend", ["allocate", "empty"])
def test_a_pool_that_a_callback_closes_lends_nothing(lend):
    pool = full_pool(initial=MIB)
    kept = pool.allocate(MIB)

    def close(nbytes):
        pool.close()
        pool.source.driver.fail("malloc", times=0)

    pool.on_pressure(close)
    pool.source.driver.fail("malloc", times=100)
    with unchanged(pool), pytest.raises(vpool.ClosedPoolError, match="meanwhile"):
        getattr(pool, lend)(2 * MIB)
    pool.deallocate(kept)
    assert pool.source.driver.used == 0


def test_buffers_in_cycles_are_collected():
    with full_pool() as pool:
        gc.collect()
        gc.disable()
        try:
            cycle = [pool.empty(8 * MIB)]
            cycle.append(cycle)
            del cycle
            pool.allocate(8 * MIB)
        finally:
            gc.enable()
        assert hits(pool, COLLECT) == 1


# Waiting.


def blocked(pool):
    """Fill the pool with blocks that a stream may still use; that stream."""
    driver = pool.source.driver
    mine, other = driver.create_stream(), driver.create_stream()
    for ptr in [pool.allocate(MIB, mine) for _ in range(8)]:
        driver.queue_work(other)
        pool.record_stream(ptr, other)
        pool.deallocate(ptr)
    driver.destroy_stream(other)  # nobody can be made to wait for it
    return mine


def test_raise_never_waits():
    with full_pool(on_pressure="raise") as pool:
        driver = pool.source.driver
        mine, other = driver.create_stream(), driver.create_stream()
        ptr = pool.allocate(8 * MIB, other)
        for _ in range(3):
            driver.queue_work(other)
            with pytest.raises(vpool.OutOfMemoryError) as caught:
                pool.allocate(1000, mine)
        assert driver.calls()["synchronize"][0] == driver.calls()["event_synchronize"][0] == 0
        assert WAIT not in str(caught.value)
        pool.deallocate(ptr)


def test_raise_never_waits_for_a_stream_that_is_gone():
    with full_pool(on_pressure="raise") as pool:
        mine = blocked(pool)
        with pytest.raises(vpool.OutOfMemoryError):
            pool.allocate(8 * MIB, mine)
        assert pool.source.driver.calls()["synchronize"][0] == 0


def test_waiting_makes_the_last_request_succeed():
    with full_pool() as pool:
        mine = blocked(pool)
        pool.allocate(8 * MIB, mine)
        assert pool.source.driver.calls()["synchronize"][0] > 0
        pool.check()


def test_idle_segments_whose_work_goes_on_are_waited_for():
    with full_pool(16 * MIB, initial=MIB) as pool:
        driver = pool.source.driver
        one = driver.create_stream()
        for ptr in [pool.allocate(2 * MIB, one) for _ in range(3)]:
            driver.queue_work(one)
            pool.deallocate(ptr)
        driver.set_free(0)
        pool.allocate(6 * MIB, one)
        assert hits(pool, WAIT) == 1
        pool.check()


@pytest.mark.parametrize("gone", [False, True])
def test_just_enough_is_waited_for(gone):
    """The stream whose segment makes room, no other; the device where it is out of reach."""
    with full_pool(12 * MIB, initial=4 * MIB) as pool:
        driver = pool.source.driver
        slow, quick, mine = (driver.create_stream() for _ in range(3))
        pool.allocate(3 * MIB, slow)
        ptrs = [pool.allocate(nbytes, stream) for nbytes, stream in ((6 * MIB, quick), (MIB, slow))]
        number, position = driver.number_of(slow), driver.queue_work(slow)
        driver.queue_work(quick)
        for ptr in ptrs:
            pool.deallocate(ptr)
        if gone:
            driver.destroy_stream(quick)
        pool.allocate(7 * MIB, mine)
        assert hits(pool, WAIT) == 1
        assert driver.finished(number, position) == gone
        assert (driver.calls()["synchronize"][0] > 0) == gone
        pool.check()


def test_a_block_that_many_streams_use_is_waited_for_behind_events():
    with full_pool(on_pressure="raise") as pool:
        driver = pool.source.driver
        streams = [driver.create_stream() for _ in range(400)]
        mine = streams.pop()
        ptr = pool.allocate(8 * MIB, mine)
        for stream in streams:
            driver.queue_work(stream)
            pool.record_stream(ptr, stream)
        pool.deallocate(ptr)
        assert pool.allocate(8 * MIB, mine) == ptr
        assert pool.crossings["waits"] == 399
        pool.deallocate(ptr)


def test_many_pending_blocks_hide_no_memory_from_a_pool_that_never_waits():
    count = 10_000
    with full_pool(count * GRANULE, on_pressure="raise") as pool:
        driver = pool.source.driver
        mine = driver.create_stream()
        others = [driver.create_stream() for _ in range(3)]
        for at, ptr in enumerate([pool.allocate(GRANULE, mine) for _ in range(count)]):
            stream = others[at * len(others) // count]
            driver.queue_work(stream)
            pool.record_stream(ptr, stream)
            pool.deallocate(ptr)
        pool.allocate(count * GRANULE, mine)
        assert hits(pool, MERGE) == 1
        assert driver.calls()["synchronize"][0] == 0


def test_the_error_lists_every_rung():
    with full_pool() as pool:
        pool.on_pressure(lambda nbytes: None)
        other = pool.source.driver.create_stream()
        pool.allocate(8 * MIB)
        with unchanged(pool), pytest.raises(vpool.OutOfMemoryError) as caught:
            pool.allocate(1000, other)
        for rung in RUNG_NAMES:
            assert rung in str(caught.value)
        assert all(tries > 0 for tries, _ in pool.ladder.values())


# The error.


def test_the_error_keeps_no_memory_alive():
    """Its report has figures; only frames of its traceback may hold what a program has."""
    with full_pool() as pool:
        buffers = [pool.empty(MIB) for _ in range(8)]
        try:
            pool.empty(8 * MIB)
        except vpool.OutOfMemoryError as error:
            kept = error.with_traceback(None)
        assert kept.report.live_blocks == 8
        kept.report.blocks, str(kept.report), kept.report.to_dict()
        reached, left = {}, [kept]
        while left:
            found = left.pop()
            if id(found) not in reached and not isinstance(found, (type, types.ModuleType, types.FunctionType)):
                reached[id(found)] = found
                left += gc.get_referents(found)
        assert kept.report is reached[id(kept.report)]
        assert not [found for found in reached.values() if isinstance(found, (vpool.Buffer, vpool.Pool))]
        del buffers, found
        assert pool.stats.allocated_bytes == 0
        assert pool.empty(8 * MIB).ptr
        assert kept.report.allocated_bytes == 8 * MIB


def test_no_list_is_too_long_for_the_last_search():
    """Thousands of blocks of the request's own class that are a little too small, and one behind them that is not."""
    short, enough, count = 4096 * GRANULE, 4100 * GRANULE, 5000
    with full_pool(count * (short + GRANULE) + enough) as pool:
        last = pool.allocate(enough)
        blocks = []
        for _ in range(count):
            pool.allocate(GRANULE)
            blocks.append(pool.allocate(short))
        for ptr in [last, *blocks]:
            pool.deallocate(ptr)
        assert pool.allocate(enough) == last
        pool.deallocate(last)
        assert pool.allocate(enough, pool.source.driver.create_stream()) == last
        assert pool.stats.ooms == 0
        pool.check()


@pytest.mark.parametrize("who", ["a capture", "the host", "a pool that never waits"])
def test_what_is_complete_is_found_behind_what_is_not(who):
    """By whoever cannot have the other behind an event."""
    with full_pool(4 * MIB, on_pressure="raise" if who == "a pool that never waits" else "wait") as pool:
        driver = pool.source.driver
        one, other = driver.create_stream(), driver.create_stream()
        blocks = [pool.allocate(MIB, one) for _ in range(4)]
        pool.deallocate(blocks[0])
        pool.trim()  # now that is known to be complete
        driver.queue_work(one)
        pool.deallocate(blocks[2])
        if who == "a capture":
            driver.begin_capture(other)
        elif who == "a pool that never waits":
            driver.destroy_stream(one)
        drains = pool.crossings["drains"]
        assert pool.allocate(MIB, vpool.streams.HOST if who == "the host" else other) == blocks[0]
        assert (pool.crossings["drains"], pool.crossings["waits"]) == (drains, 0)

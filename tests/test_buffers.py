"""Buffers: they free themselves, whenever and in whatever order things go away."""

import contextlib
import ctypes
import gc
import sys
import threading
import weakref

import pytest

import vpool
from tests.helpers.pools import MIB, assert_whole, run_cleanly, simulated_pool, unchanged


@pytest.fixture
def frequent_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_buffer_tells_what_it_is(pool):
    buffer = pool.empty(1000, stream=7)
    assert int(buffer) == buffer.ptr > 0
    assert (buffer.nbytes, buffer.requested, buffer.stream, buffer.device) == (1024, 1000, 7, 0)
    assert buffer.pool is pool
    assert not buffer.closed
    assert "1000" in repr(buffer)


def test_a_dropped_buffer_is_freed(pool):
    buffer = pool.empty(1000)
    assert pool.stats.allocated_bytes == 1024
    del buffer
    assert_whole(pool)


def test_a_closed_buffer_is_freed_once(pool):
    buffer = pool.empty(1000)
    buffer.close()
    buffer.close()
    assert buffer.closed
    assert (buffer.ptr, buffer.nbytes, buffer.requested) == (0, 0, 0)
    assert "closed" in repr(buffer)
    del buffer
    assert pool.stats.frees == 1
    assert_whole(pool)


@pytest.mark.parametrize("stream", [0, 7, 9])
def test_a_buffer_can_be_closed_on_a_stream(pool, stream):
    buffer = pool.empty(1000, stream=7)
    buffer.close(stream=stream)
    assert buffer.closed
    assert_whole(pool)


def test_a_buffer_is_a_context_manager(pool):
    with pool.empty(1000) as buffer:
        assert pool.stats.allocated_bytes == 1024
    assert buffer.closed
    assert_whole(pool)


def test_a_buffer_of_no_bytes(pool):
    buffer = pool.empty(0)
    assert (int(buffer), buffer.nbytes, buffer.requested, buffer.closed) == (0, 0, 0, False)
    buffer.close()
    buffer.close()
    assert buffer.closed
    assert pool.stats.allocations == pool.stats.frees == 0


def test_deallocate_takes_a_buffer_too(pool):
    buffer = pool.empty(1000)
    pool.deallocate(buffer)
    assert buffer.closed
    assert_whole(pool)


def test_buffers_are_made_by_pools_alone():
    with pytest.raises(TypeError, match="empty"):
        vpool.Buffer()


def test_a_buffer_has_no_attributes_to_set(pool):
    buffer = pool.empty(100)
    for name in ("ptr", "nbytes", "pool", "closed", "anything"):
        with pytest.raises(AttributeError):
            setattr(buffer, name, None)


class TestFreedByHand:
    """Somebody frees the address of a live buffer."""

    def test_dropping_it_then_is_silent(self, pool):
        buffer = pool.empty(1000)
        pool.deallocate(buffer.ptr)
        del buffer
        assert pool.stats.frees == 1
        assert_whole(pool)

    def test_closing_it_then_is_a_double_free(self, pool):
        buffer = pool.empty(1000)
        pool.deallocate(buffer.ptr)
        with unchanged(pool), pytest.raises(vpool.DoubleFreeError):
            buffer.close()
        assert buffer.closed

    def test_dropping_it_after_reuse_leaves_the_new_owner_alone(self, pool):
        buffer = pool.empty(1000)
        pool.deallocate(buffer.ptr)
        assert pool.allocate(1000) == buffer.ptr
        with unchanged(pool):
            del buffer

    @pytest.mark.parametrize("close", [False, True])
    def test_nor_does_it_end_a_new_owner_that_has_the_very_same_record(self, pool, close):
        """Between live neighbours the block is neither cut nor merged, so only its generation tells."""
        neighbours = [pool.empty(1000)]
        buffer = pool.empty(1000)
        neighbours.append(pool.empty(1000))
        pool.deallocate(buffer.ptr)
        assert pool.allocate(1000) == buffer.ptr
        with unchanged(pool):
            if close:
                with pytest.raises(vpool.DoubleFreeError):
                    buffer.close()
            del buffer

    @pytest.mark.parametrize("neighbours", ["left", "right", "both"])
    def test_dropping_it_after_a_merge_is_silent(self, pool, neighbours):
        left, buffer, right = pool.empty(1000), pool.empty(1000), pool.empty(1000)
        guard = pool.empty(1000)
        if neighbours != "right":
            left.close()
        if neighbours != "left":
            right.close()
        pool.deallocate(buffer.ptr)
        with unchanged(pool):
            del buffer
        assert not guard.closed


class TestPoolGoneFirst:
    """A buffer keeps its pool alive and is freed properly whatever became of it."""

    def test_closed_pool(self):
        pool = simulated_pool()
        kept, dropped, closed = (pool.empty(MIB) for _ in range(3))
        pool.close()
        driver = pool.source.driver
        assert driver.used == pool.stats.reserved_bytes > 0
        del dropped
        closed.close()
        assert kept.nbytes == MIB
        pool.check()
        del kept
        assert driver.used == pool.stats.reserved_bytes == 0

    def test_dropped_pool(self):
        source = vpool.sources.Simulated()
        buffer = vpool.Pool(source=source).empty(1000)
        gc.collect()
        assert buffer.pool.stats.allocated_bytes == 1024
        buffer.pool.check()
        del buffer
        assert source.driver.used == 0

    def test_writing_after_the_pool_was_closed_and_dropped(self, writable_pool):
        pool = vpool.Pool(vpool.Dynamic(initial=MIB, limit="16MiB"), source="host")
        buffer = pool.empty(1000)
        pool.close()
        del pool
        ctypes.memset(buffer.ptr, 0x5A, buffer.nbytes)
        assert ctypes.string_at(buffer.ptr, 3) == b"ZZZ"
        buffer.close()


def test_a_buffer_that_is_closed_is_not_recorded_for_a_stream(pool):
    """Its address is another block's by now, which would stay pending."""
    closed, by_hand = pool.empty(1000), pool.empty(1000)
    pool.deallocate(by_hand.ptr)
    ptr = closed.ptr
    closed.close()
    owners = [pool.allocate(1000), pool.allocate(1000)]
    assert ptr in owners
    for buffer in (closed, by_hand):
        for record in (buffer.record_stream, lambda stream, buffer=buffer: pool.record_stream(buffer, stream)):
            with unchanged(pool), pytest.raises(vpool.InvalidPointerError):
                record(7)
    for ptr in owners:
        pool.deallocate(ptr)
    assert pool.stats.pending_bytes == 0


def test_nor_is_one_of_another_pool(pool):
    """Simulated devices all begin at the same address."""
    ptr = pool.allocate(1000)
    with simulated_pool(name="the owner") as other, other.empty(1000) as buffer:
        assert buffer.ptr == ptr
        with unchanged(pool), pytest.raises(vpool.ForeignPointerError, match="the owner"):
            pool.record_stream(buffer, 7)
    pool.deallocate(ptr)
    assert pool.stats.pending_bytes == 0


def test_an_object_that_was_never_a_buffer_can_be_asked():
    nobody = vpool.Buffer.__new__(vpool.Buffer)
    nobody.record_stream(7)
    nobody.close()
    assert (nobody.closed, nobody.ptr, nobody.pool) == (True, 0, None)


class TestCycles:
    """Reference cycles with buffers and pools in them."""

    def test_a_buffer_in_a_cycle_is_freed_by_the_collector(self, pool):
        cycle = [pool.empty(1000)]
        cycle.append(cycle)
        del cycle
        assert pool.stats.allocated_bytes == 1024
        gc.collect()
        assert_whole(pool)

    def test_a_pool_in_a_cycle_gives_its_memory_back(self):
        source = vpool.sources.Simulated()
        cycle = [vpool.Pool(source=source)]
        cycle[0].allocate(1000)
        cycle.append(cycle)
        assert source.driver.used > 0
        del cycle
        gc.collect()
        assert source.driver.used == 0

    def test_a_pool_and_its_source_in_a_cycle_with_a_buffer(self):
        driver = vpool.sources.Simulated().driver
        source = vpool.sources.Source(driver, "simulated", has_memory=False)
        pool = vpool.Pool(source=source)
        cycle = [pool, source, pool.empty(1000), pool.empty(2000)]
        cycle.append(cycle)
        gone = weakref.ref(pool)
        del cycle, pool, source
        gc.collect()
        assert gone() is None
        assert driver.used == 0

    @pytest.mark.parametrize("closed", [False, True])
    @pytest.mark.parametrize("adaptive", [False, True])
    def test_a_pool_whose_callback_leads_back_to_it(self, adaptive, closed):
        """What a buffer needs of its pool is there when both are collected, whichever goes first."""
        pool = vpool.Pool(vpool.Dynamic(initial="1MiB", adaptive=adaptive), vpool.sources.Simulated())
        driver = pool.source.driver
        buffers = [pool.empty(1000) for _ in range(10)]
        cycle = [pool, buffers]
        pool.on_pressure(cycle.append)
        if closed:
            pool.close()
        del pool, buffers, cycle
        gc.collect()
        assert driver.used == 0

    def test_buffers_freed_by_the_collector_while_the_pool_allocates(self, pool):
        """A collection may start inside an allocation and free into the same pool."""
        threshold = gc.get_threshold()
        gc.set_threshold(1)
        try:
            for _ in range(500):
                cycle = [pool.empty(1000), pool.empty(300, stream=7)]
                cycle.append(cycle)
        finally:
            gc.set_threshold(*threshold)
        del cycle
        gc.collect()
        assert_whole(pool)


def test_a_buffer_can_be_dropped_in_another_thread(pool):
    buffers = [pool.empty(1000) for _ in range(100)]
    thread = threading.Thread(target=buffers.clear)
    thread.start()
    thread.join()
    assert_whole(pool)


@pytest.mark.parametrize("tagged", [False, True])
def test_buffers_closed_in_two_threads_are_freed_once(pool, tagged, frequent_switches):
    with vpool.tag("closed twice") if tagged else contextlib.nullcontext():
        buffers = [pool.empty(1000) for _ in range(5000)]
    errors = []

    def close_all():
        for buffer in buffers:
            try:
                buffer.close()
            except vpool.Error as error:
                errors.append(error)

    threads = [threading.Thread(target=close_all) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert pool.stats.frees == 5000
    assert_whole(pool)


INTERPRETER_ENDS = {
    "live pool and buffers at module level": """
pool = vpool.Pool(source="host")
buffers = [pool.empty(1000) for _ in range(100)]
ptr = pool.allocate(1000)
""",
    "default pool": """
buffer = vpool.empty(1000)
ptr = vpool.allocate(1000)
""",
    "closed pool with live buffers": """
pool = vpool.Pool(source="simulated")
buffers = [pool.empty(1000, stream=7) for _ in range(100)]
pool.close()
""",
    "pool and buffer in a cycle": """
pool = vpool.Pool(source="simulated")
cycle = [pool, pool.empty(1000)]
cycle.append(cycle)
del pool, cycle
""",
    "pool and buffer in a cycle that a module keeps": """
import builtins
class Holder: pass
builtins.holder = Holder()
holder.pool = vpool.Pool(source="host")
holder.buffers = [holder.pool.empty(1000)]
holder.me = holder
""",
    "buffer freed by hand": """
pool = vpool.Pool(source="host")
buffer = pool.empty(1000)
pool.deallocate(buffer.ptr)
""",
    "used in an exit function": """
import atexit
pool = vpool.Pool(source="host")
buffer = pool.empty(1000)
atexit.register(lambda: (buffer.close(), pool.empty(5), pool.close()))
""",
    "daemon thread that allocates": """
import threading
pool = vpool.Pool(source="host")
def work():
    while True:
        pool.empty(1000)
        pool.deallocate(pool.allocate(5000))
threading.Thread(target=work, daemon=True).start()
while pool.stats.frees < 1000: pass
""",
    "the collector finds a finaliser that frees": """
class Owner:
    def __init__(self): self.ptr = pool.allocate(1000); self.me = self
    def __del__(self): pool.deallocate(self.ptr)
pool = vpool.Pool(source="host")
owners = [Owner() for _ in range(10)]
""",
}


@pytest.mark.parametrize("ending", INTERPRETER_ENDS)
def test_the_interpreter_ends_quietly(ending):
    """Exit status 0 and nothing on standard error, whatever is still alive."""
    assert run_cleanly("import vpool\n" + INTERPRETER_ENDS[ending] + "print('end')") == "end\n"

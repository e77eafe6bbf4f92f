"""CuPy's plug-in against CuPy itself, as far as that goes without a device."""

import itertools
import sys
import threading

import pytest

import vpool
from tests.helpers.frameworks import Stream, fake_pool
from tests.helpers.pools import GIB, KIB, MIB, assert_whole, unchanged
from vpool._interface.c_allocator import Blocks
from vpool.integrations import cupy as plugin
from vpool.streams import HOST, stream_handle

cupy = pytest.importorskip("cupy")


class Current(threading.local):
    """What CuPy's runtime would know of each thread."""

    device = 0
    stream = None


@pytest.fixture
def current(monkeypatch):
    current = Current()
    monkeypatch.setattr(cupy.cuda.device, "get_device_id", lambda: current.device)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: current.stream)
    return current


@pytest.fixture
def pool(current):
    with fake_pool() as pool:
        current.stream = Stream(pool.source.driver)
        yield pool
        pool.check()


def test_a_block_is_cupys_memory(pool, current):
    allocate = plugin.allocator(pool)
    pointer = allocate(1000)
    assert (pointer.mem.size, pointer.device_id, pointer.ptr % 256) == (1000, 0, 0)
    assert pool.stats.requested_bytes == 1000
    assert pointer.mem._owner.stream == current.stream.ptr
    array = cupy.ndarray((100,), "u1", pointer)
    view = array[10:20][::2]
    del pointer, array, allocate
    assert view.data.mem.ptr
    assert pool.stats.requested_bytes == 1000
    del view
    assert_whole(pool)


def test_no_bytes(pool):
    pointer = plugin.allocator(pool)(0)
    assert (pointer.ptr, pointer.mem.size) == (0, 0)
    assert cupy.ndarray((0, 3), "f4", pointer).size == 0


def test_each_thread_has_its_stream_and_device(pool, current):
    driver = pool.source.driver
    with fake_pool(device=1, driver=driver) as second:
        allocate = plugin.allocator(pool, second)
        found = {}

        def work(number):
            current.device = number % 2
            current.stream = Stream(driver)
            pointer = allocate(KIB)
            found[number] = pointer.device_id, pointer.mem._owner.pool, pointer.mem._owner.stream == current.stream.ptr

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {number: (number % 2, second if number % 2 else pool, True) for number in range(4)}


def test_a_device_without_a_pool_has_its_default_pool(pool, current, no_default_pools):
    with fake_pool(device=1, driver=pool.source.driver) as second:
        vpool.set_default_pool(second)
        current.device = 1
        assert plugin.allocator(pool)(KIB).mem._owner.pool is second


def test_out_of_memory_is_cupys_own_error(pool):
    allocate = plugin.allocator(pool)
    with unchanged(pool), pytest.raises(cupy.cuda.memory.OutOfMemoryError, match="Limit") as caught:
        allocate(GIB)
    assert isinstance(caught.value, vpool.OutOfMemoryError)
    assert isinstance(caught.value, MemoryError)
    assert caught.value.requested == GIB
    allocate(KIB)


def test_garbage_is_collected_before_memory_is_out(pool):
    allocate = plugin.allocator(pool)
    cycle = [allocate(3 * MIB)]
    cycle.append(cycle)
    del cycle
    assert allocate(3 * MIB).mem.size == 3 * MIB


def test_other_errors_are_vpools_own(pool):
    allocate = plugin.allocator(pool)
    pool.close()
    with pytest.raises(vpool.ClosedPoolError):
        allocate(KIB)


def test_memory_comes_back_in_the_order_of_its_stream(pool, current):
    allocate = plugin.allocator(pool)
    first = allocate(KIB)
    address = first.ptr
    del first
    before = pool.source.driver.calls()["event_record"]
    assert allocate(KIB).ptr == address
    assert pool.source.driver.calls()["event_record"] == before


def test_a_stream_that_is_recorded_is_waited_for(current):
    with fake_pool(vpool.Fixed(MIB)) as pool:
        driver = pool.source.driver
        current.stream = Stream(driver)
        array = cupy.ndarray((MIB,), "u1", plugin.allocator(pool)(MIB))
        other = Stream(driver)
        plugin.record_stream(array[5:], other)
        position = driver.queue_work(other.ptr)
        del array
        assert pool.stats.pending_bytes == MIB
        plugin.allocator(pool)(MIB)
        assert driver.ordered(current.stream.ptr, other.ptr, position)


def test_memory_of_others_cannot_be_recorded():
    memory = cupy.cuda.UnownedMemory(0x1000, 16, None, 0)
    array = cupy.ndarray((16,), "u1", cupy.cuda.MemoryPointer(memory, 0))
    with pytest.raises(ValueError, match="no vpool pool"):
        plugin.record_stream(array, 0)


def test_install_and_uninstall(pool):
    before = cupy.cuda.get_allocator()
    try:
        plugin.install(pool)
        assert cupy.cuda.get_allocator()(KIB).mem._owner.pool is pool
        plugin.uninstall()
        assert cupy.cuda.get_allocator() == cupy.get_default_memory_pool().malloc
    finally:
        cupy.cuda.set_allocator(before)


def test_cupy_set_allocator_defaults(pool):
    """Whatever was there before comes back, and every array is freed where it came from, in any order."""
    for order in itertools.permutations(range(5)):
        install_twice_and_free(pool, order)


def install_twice_and_free(pool, order):
    at_first = cupy.cuda.get_allocator()
    with fake_pool(driver=pool.source.driver) as outer, fake_pool(driver=pool.source.driver) as inner:
        theirs = plugin.allocator(pool)  # in place of CuPy's default pool, which needs a device
        try:
            cupy.cuda.set_allocator(theirs)
            arrays, came_from = [], []
            install, uninstall = plugin.install, plugin.uninstall
            steps = (lambda: None, lambda: install(outer), lambda: install(inner), uninstall, uninstall)
            for step, owner in zip(steps, (pool, outer, inner, outer, pool), strict=True):
                step()
                arrays.append(cupy.cuda.get_allocator()(KIB))
                came_from.append(owner)
                assert arrays[-1].mem._owner.pool is owner
            assert cupy.cuda.get_allocator() is theirs
            for number in order:
                before = came_from[number].stats.frees
                arrays[number] = None
                assert came_from[number].stats.frees == before + 1
        finally:
            cupy.cuda.set_allocator(at_first)
        for one in (pool, outer, inner):
            assert_whole(one)


def test_pool_context_is_per_thread(pool, current):
    """One thread's scope is no other's.  A task of asyncio has that of its thread, as CuPy has it."""
    at_first = cupy.cuda.get_allocator()
    with fake_pool(driver=pool.source.driver) as scoped:
        entered, looked = threading.Event(), threading.Event()
        found = {}

        def inside():
            current.stream = Stream(pool.source.driver)
            with cupy.cuda.using_allocator(plugin.allocator(scoped)):
                entered.set()
                assert looked.wait(30)
                found["inside"] = cupy.cuda.get_allocator()(KIB).mem._owner.pool
            found["after"] = cupy.cuda.get_allocator()(KIB).mem._owner.pool

        try:
            plugin.install(pool)
            thread = threading.Thread(target=inside)
            thread.start()
            assert entered.wait(30)
            found["outside"] = cupy.cuda.get_allocator()(KIB).mem._owner.pool
            looked.set()
            thread.join()
        finally:
            plugin.uninstall()
            cupy.cuda.set_allocator(at_first)
        assert found == {"inside": scoped, "after": pool, "outside": pool}


def test_pinned_memory(current):
    with fake_pool(name="pinned") as pool:
        allocate = plugin.pinned_allocator(pool)
        pointer = allocate(1000)
        assert (pointer.mem.size, pointer.ptr, pool.stats.allocated_bytes) == (1000, pointer.mem.ptr, 1024)
        assert pointer.mem.buffer.stream == stream_handle(HOST)
        assert memoryview(pointer).nbytes == 1000
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            allocate(GIB)
        del pointer
        assert_whole(pool)


def test_memory_that_is_not_pinned_is_refused(pool):
    with pytest.raises(ValueError, match="not pinned"):
        plugin.pinned_allocator(pool)


class TestFunctionsOfC:
    @pytest.fixture(autouse=True)
    def without_a_device(self, monkeypatch, current):
        """CuPy's own allocator of functions asks the driver which device it is for; the memory itself is CuPy's."""

        class Allocator:
            def __init__(self, *functions):
                *self.functions, self.owner = functions

            def malloc(self, size):
                memory = cupy.cuda.memory.CFunctionAllocatorMemory(size, *self.functions, current.device)
                return cupy.cuda.MemoryPointer(memory, 0)

        monkeypatch.setattr(cupy.cuda.memory, "CFunctionAllocator", Allocator)

    def test_an_array_has_a_block(self, pool, current):
        allocate = plugin.c_allocator(pool)
        pointer = allocate(1000)
        assert (pointer.mem.size, pointer.device_id, pointer.ptr % 256) == (1000, 0, 0)
        assert pool.stats.requested_bytes == 1000
        assert current.stream.ptr in [row["stream"] for row in pool.inspect().streams if row["live_blocks"]]
        view = cupy.ndarray((100,), "u1", pointer)[10:20]
        del pointer, allocate
        assert view.data.mem.ptr
        assert pool.stats.requested_bytes == 1000
        del view
        assert_whole(pool)

    def test_what_cupy_calls_stays(self):
        """CuPy keeps the numbers alone, and frees at the end of the interpreter, when modules are cleared."""
        blocks = Blocks(None, None, None)
        before = sys.getrefcount(blocks)
        blocks.functions()
        assert sys.getrefcount(blocks) == before + 1

    def test_no_bytes(self, pool):
        assert plugin.c_allocator(pool)(0).ptr == 0

    def test_out_of_memory_is_cupys_own_error(self, pool):
        allocate = plugin.c_allocator(pool)
        with unchanged(pool), pytest.raises(cupy.cuda.memory.OutOfMemoryError, match="Limit") as caught:
            allocate(GIB)
        assert caught.value.requested == GIB
        assert allocate(KIB).ptr

    def test_other_errors_pass(self, pool):
        allocate = plugin.c_allocator(pool)
        pool.close()
        with pytest.raises(vpool.ClosedPoolError):
            allocate(KIB)

    def test_a_stream_that_is_recorded_is_waited_for(self, pool):
        array = cupy.ndarray((4 * MIB,), "u1", plugin.c_allocator(pool)(4 * MIB))
        plugin.record_stream(array[5:], Stream(pool.source.driver))
        del array
        assert pool.stats.pending_bytes == 4 * MIB

    def test_a_block_of_a_default_pool_that_was_replaced(self, current, no_default_pools):
        with fake_pool() as first, fake_pool() as second:
            current.stream = Stream(first.source.driver)
            vpool.set_default_pool(first)
            pointer = plugin.c_allocator()(KIB)
            vpool.set_default_pool(second)
            del pointer
            assert_whole(first)

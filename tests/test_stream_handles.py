"""A handle is touched only while its stream surely exists: CUDA's driver crashes on a destroyed one."""

import gc
import sys
import threading
import time
import types
import weakref

import pytest

import vpool
from tests.helpers.owned_stream import Stream
from vpool._interface.streams import _references
from vpool._storage.fake_cuda import FakeCudaDriver
from vpool._storage.simulated_driver import SimulatedDriver
from vpool.streams import stream_handle

MIB = 1 << 20
CAPACITY = 64 * MIB


@pytest.fixture
def pool():
    """One segment, on a source that does not answer for destroyed handles."""
    source = vpool.sources.Source(SimulatedDriver(CAPACITY), "simulated", has_memory=False, checks_handles=False)
    with vpool.Pool(vpool.Dynamic(initial=CAPACITY, limit=CAPACITY), source) as pool:
        yield pool


def fill_and_free(pool, stream):
    """All of the pool used on a stream, with work that is not complete, then freed there."""
    ptr = pool.allocate(CAPACITY, stream)
    pool.source.driver.queue_work(getattr(stream, "handle", stream))
    pool.deallocate(ptr)
    return ptr


def test_a_stream_that_an_object_holds_is_waited_for_with_an_event(pool):
    one, other = Stream(pool.source.driver), Stream(pool.source.driver)
    ptr = fill_and_free(pool, one)
    assert pool.allocate(CAPACITY, other) == ptr
    assert (pool.crossings["waits"], pool.crossings["drains"]) == (1, 0)
    assert pool.source.driver.ordered(other.handle, one.handle, 1)


@pytest.mark.parametrize("destroyed", [False, True])
def test_a_stream_known_by_its_number_alone_is_waited_for_with_the_device(pool, destroyed):
    driver = pool.source.driver
    one, other = driver.create_stream(), driver.create_stream()
    ptr = fill_and_free(pool, one)
    if destroyed:
        driver.destroy_stream(one)
    asked = driver.calls()["stream_id"][0]
    assert pool.allocate(CAPACITY, other) == ptr
    assert pool.crossings["waits"] == 0
    assert pool.crossings["drains"] >= 1
    # Only the number that the call passed was looked up.
    assert driver.calls()["stream_id"][0] == asked + 1
    assert driver.calls_on_dead_streams == 0


def test_a_stream_whose_object_died_is_not_touched(pool):
    driver = pool.source.driver
    one, other = Stream(driver), Stream(driver)
    ptr = fill_and_free(pool, one)
    del one
    gc.collect()
    assert pool.allocate(CAPACITY, other) == ptr
    assert pool.crossings["drains"] >= 1
    assert driver.calls_on_dead_streams == 0


def test_a_forgotten_stream_needs_no_wait_for_the_device(pool):
    driver = pool.source.driver
    one, other = Stream(driver), Stream(driver)
    ptr = fill_and_free(pool, one)
    pool.forget_stream(one)
    del one
    gc.collect()
    assert pool.allocate(CAPACITY, other) == ptr
    assert (pool.crossings["waits"], pool.crossings["drains"]) == (1, 0)
    assert driver.calls_on_dead_streams == 0


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("passed", ["its number", "an object of the new stream", "the old object"])
def test_who_has_the_handle_of_a_stream_that_is_gone_is_not_forgotten_in_its_place(pool, passed, captures):
    """What is marked on the new stream says nothing of the work that the old one left behind."""
    driver = pool.source.driver
    handle, other = driver.create_stream(), Stream(driver)
    number, old, new = driver.number_of(handle), types.SimpleNamespace(handle=handle), types.SimpleNamespace()
    ptr = pool.allocate(CAPACITY, old if passed == "the old object" else handle)
    position = driver.queue_work(handle)
    pool.deallocate(ptr)
    driver.destroy_stream(handle)
    new.handle = driver.create_stream(handle)
    if captures:
        driver.begin_capture(handle)
    pool.forget_stream({"its number": handle, "the old object": old}.get(passed, new))
    if captures:
        assert driver.end_capture(handle)
    assert pool.allocate(CAPACITY, other) == ptr
    assert driver.ordered(other.handle, None, position, number=number)
    assert driver.calls_on_dead_streams == 0


def test_more_streams_than_a_pool_tells_apart():
    """The error says what helps; a pool that never waits does not for a slot either."""
    driver = SimulatedDriver(CAPACITY)
    source = vpool.sources.Source(driver, "simulated", has_memory=False, checks_handles=False)
    with vpool.Pool(vpool.Dynamic(initial=CAPACITY, limit=CAPACITY), source, on_pressure="raise") as pool:
        for number in range(4095):
            pool.record_stream(0, 0x100000 + 16 * number)
        before = driver.calls()["synchronize"][0]
        with pytest.raises(MemoryError, match=r"knows 4,095 streams and has no room for 0xf0000: forget_stream\(\)"):
            pool.allocate(256, 0xF0000)
        assert driver.calls()["synchronize"][0] == before
        pool.forget_stream(0x100000)
        assert pool.allocate(256, 0xF0000)
        assert driver.calls()["synchronize"][0] == before
        pool.check()


def test_a_capture_does_not_wait_for_a_slot():
    """Streams that are gone still have work: to wait for it would invalidate the capture."""
    driver = FakeCudaDriver(CAPACITY)
    source = vpool.sources.Source(driver, "cuda", 0, checks_handles=False)
    with vpool.Pool(vpool.Dynamic(initial=CAPACITY // 2), source) as pool:
        streams = [driver.create_stream() for _ in range(4095)]
        for stream in streams:
            pool.record_stream(0, stream)
        driver.queue_work(streams[0])
        pool.forget_stream(streams[0])
        capturing = driver.create_stream()
        driver.begin_capture(capturing)
        waits = ("synchronize", "event_synchronize", "event_record")
        before = [driver.calls()[call][0] for call in waits]
        with pytest.raises(MemoryError, match="knows 4,095 streams"):
            pool.allocate(256, capturing)
        assert [driver.calls()[call][0] for call in waits] == before
        assert driver.end_capture(capturing)
        assert pool.allocate(256, capturing), "what may be waited for is"
        pool.check()


def test_a_stream_is_not_touched_by_what_happens_while_its_object_is_finalised(pool):
    """A finaliser comes before the weak references are cleared: what tells of the death is too late."""
    driver = pool.source.driver
    other = Stream(driver)
    served = []

    class Busy(Stream):
        def __del__(self):
            super().__del__()
            served.append(pool.allocate(CAPACITY, other))

    one = Busy(driver)
    ptr = fill_and_free(pool, one)
    del one
    pool.trim()
    assert served == [ptr]
    assert driver.calls_on_dead_streams == 0


def test_a_stream_is_not_destroyed_while_another_thread_names_it(pool):
    driver = pool.source.driver
    one, other = Stream(driver), Stream(driver)
    fill_and_free(pool, one)
    driver.delay_records(0.3)
    begun = driver.calls()["event_record"][0]
    thread = threading.Thread(target=pool.allocate, args=(CAPACITY, other))
    thread.start()
    while driver.calls()["event_record"][0] == begun:
        time.sleep(0.001)
    del one
    pool.trim()
    thread.join()
    assert driver.calls_on_dead_streams == 0


def test_an_object_that_nobody_else_has_goes_with_the_next_call_that_looks(pool):
    gone = []
    stream = Stream(pool.source.driver)
    weakref.finalize(stream, gone.append, True)
    pool.deallocate(pool.allocate(100, stream))
    del stream
    pool.trim()
    assert gone


def test_a_wrapper_that_is_dropped_holds_nothing_from_then_on(pool):
    """It does not own the stream, which may be destroyed by hand at once; and it is nobody's to keep."""

    class Wrapper:
        def __init__(self, handle):
            self.handle = handle

    driver = pool.source.driver
    one, other = driver.create_stream(), Stream(driver)
    wrapper = Wrapper(one)
    gone = weakref.ref(wrapper)
    ptr = fill_and_free(pool, wrapper)
    del wrapper
    assert gone() is None
    driver.destroy_stream(one)
    assert pool.allocate(CAPACITY, other) == ptr
    assert driver.calls_on_dead_streams == 0


def test_a_pool_keeps_few_objects_that_refer_to_themselves(pool):
    """Nothing tells that nobody else has these, so the eldest go, and their streams count as known by number alone."""
    driver = pool.source.driver
    alive = []
    for _ in range(200):
        stream = Stream(driver)
        stream.me = stream
        alive.append(weakref.ref(stream))
        pool.deallocate(pool.allocate(100, stream))
    del stream
    gc.collect()
    kept = sum(reference() is not None for reference in alive)
    assert 0 < kept <= 64
    pool.allocate(CAPACITY)
    assert driver.calls_on_dead_streams == 0


def test_a_stream_whose_object_was_let_go_of_is_held_again_when_it_is_named(pool):
    driver = pool.source.driver
    one = Stream(driver)
    fill_and_free(pool, one)
    many = [Stream(driver) for _ in range(100)]
    for stream in many:
        pool.deallocate(pool.allocate(256, stream))
    ptr = fill_and_free(pool, one)
    before = pool.crossings
    assert pool.allocate(CAPACITY, many[-1]) == ptr
    assert pool.crossings["waits"] == before["waits"] + 1
    assert pool.crossings["drains"] == before["drains"]


def test_a_stream_that_dies_in_a_cycle_with_its_pool():
    """The collector finalises the stream object first; then its handle must not be touched any more."""

    machine = FakeCudaDriver(CAPACITY)
    source = vpool.sources.Source(machine, "cuda", 0, checks_handles=False)  # as the real one: it would crash
    pool = vpool.Pool(vpool.Dynamic(initial=MIB), source=source)
    cycle = [pool, Stream(machine), Stream(machine)]
    cycle.append(cycle)
    cycle += [pool.empty(MIB, stream=stream) for stream in cycle[1:3]]
    cycle[-1].record_stream(cycle[1])
    pool.close()
    del pool, cycle
    gc.collect()
    assert machine.calls_on_dead_streams == 0
    assert machine.used() == 0


def test_a_stream_object_may_outlive_pools():
    stream = Stream(SimulatedDriver(CAPACITY))
    before = len(_references)
    for _ in range(50):
        with vpool.Pool(vpool.Dynamic(initial=0), source="host") as pool:
            pool.empty(100, stream=stream).close()
    del pool
    gc.collect()
    assert len(_references) == before
    assert weakref.getweakrefcount(stream) == 0
    del stream


def test_an_object_whose_own_code_passes_it_again_holds_its_stream_once(pool):
    class Reentrant(Stream):
        def __cuda_stream__(self):
            if not hasattr(self, "asked"):
                self.asked = True
                pool.deallocate(pool.allocate(100, self))
            return 0, self.handle

    driver = pool.source.driver
    one, other = Reentrant(driver), Stream(driver)
    ptr = fill_and_free(pool, one)
    del one
    gc.collect()
    assert pool.allocate(CAPACITY, other) == ptr
    assert driver.calls_on_dead_streams == 0


@pytest.mark.parametrize("status", [2, 36, 900, 999])
def test_a_stream_about_which_the_driver_once_gives_no_answer_is_not_gone(status):
    source = vpool.sources.Simulated(CAPACITY)
    driver = source.driver
    with vpool.Pool(vpool.Dynamic(initial=CAPACITY, limit=CAPACITY), source) as pool:
        one, other = driver.create_stream(), driver.create_stream()
        ptr = fill_and_free(pool, one)
        driver.fail("stream_id", status, after=1)
        assert pool.allocate(CAPACITY, other) == ptr
        assert driver.ordered(other, one, 1)
        assert pool.crossings["waits"] == 0, "the device was waited for"
        before = pool.crossings["drains"]
        driver.queue_work(other)
        pool.deallocate(ptr)
        assert fill_and_free(pool, one) == ptr
        assert pool.allocate(CAPACITY, other) == ptr
        assert (pool.crossings["waits"], pool.crossings["drains"]) == (2, before), "an event is enough again"


# The default stream of a thread.


def default_now(pool):
    with pool.empty(100) as buffer:
        return buffer.stream


def test_a_default_stream_that_another_thread_leaves_is_refused_and_nobody_loses_one():
    with vpool.Pool(vpool.Dynamic(initial="1MiB"), vpool.sources.Simulated()) as pool:
        block, own = vpool.stream(0x10), vpool.stream(0x20)
        seen = []

        def leave():
            with own:
                with pytest.raises(RuntimeError, match="another thread"):
                    block.__exit__(None, None, None)
                seen.append(default_now(pool))
            with pytest.raises(RuntimeError, match="another thread"):
                block.__exit__(None, None, None)

        with block:
            thread = threading.Thread(target=leave)
            thread.start()
            thread.join()
            seen.append(default_now(pool))
        assert [*seen, default_now(pool)] == [0x20, 0x10, 0]


def test_default_streams_that_are_left_out_of_order_are_an_error_and_leave_nothing_behind():
    with vpool.Pool(vpool.Dynamic(initial="1MiB"), vpool.sources.Simulated()) as pool:
        outer, inner = vpool.stream(0x10), vpool.stream(0x20)
        outer.__enter__()
        inner.__enter__()
        with pytest.raises(RuntimeError, match="left before"):
            outer.__exit__(None, None, None)
        assert default_now(pool) == 0x20
        inner.__exit__(None, None, None)
        assert default_now(pool) == 0


def test_a_default_stream_may_be_entered_again_inside_itself():
    with vpool.Pool(vpool.Dynamic(initial="1MiB"), vpool.sources.Simulated()) as pool:
        block = vpool.stream(0x10)
        with block, vpool.stream(0x20), block:
            assert default_now(pool) == 0x10
        assert default_now(pool) == 0


class CUDARuntimeError(RuntimeError):
    pass


def stand_in(name, ask, monkeypatch):
    """Have a framework imported, whose current stream on a device is what `ask` says."""

    def current_stream(device):
        return types.SimpleNamespace(ptr=ask(device), cuda_stream=ask(device))

    cuda = types.SimpleNamespace(
        current_stream=current_stream,
        get_current_stream=current_stream,
        is_available=lambda: True,
        is_initialized=lambda: True,
        runtime=types.SimpleNamespace(CUDARuntimeError=CUDARuntimeError),
    )
    for other in ("torch", "cupy"):
        monkeypatch.delitem(sys.modules, other, raising=False)
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(cuda=cuda))


@pytest.mark.parametrize("works", [True, False])
def test_the_current_stream_where_cupy_is_imported(works, monkeypatch):
    """Also on a machine without a device, where CuPy has none."""

    def ask(device):
        if not works:
            raise CUDARuntimeError("cudaErrorInsufficientDriver")
        return 0x7F0

    stand_in("cupy", ask, monkeypatch)
    assert stream_handle("current") == (0x7F0 if works else 0)


@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_the_current_stream_is_of_the_pools_device(name, monkeypatch):
    """Whatever device is the thread's: its streams could not be waited for by the pool's events."""
    driver = FakeCudaDriver(1 << 30, devices=2)
    streams = [driver.create_stream() for _ in range(2)]
    stand_in(name, lambda device: streams[device], monkeypatch)
    with vpool.Pool(vpool.Dynamic(initial="1MiB"), vpool.sources.Source(driver, "cuda", device=1)) as pool:
        assert pool.empty(100, "current").stream == streams[1]


@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_a_framework_that_is_being_imported_is_not_in_use(name, monkeypatch):
    """By another thread, in which its parts are not all there yet."""
    module = types.ModuleType(name)
    module.__spec__ = types.SimpleNamespace(_initializing=True)
    for other in ("torch", "cupy"):
        monkeypatch.delitem(sys.modules, other, raising=False)
    monkeypatch.setitem(sys.modules, name, module)
    assert stream_handle("current") == 0

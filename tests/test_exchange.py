"""Blocks in the hands of other libraries: what they see, which stream waits for which, when a block comes back."""

import ctypes
import gc
import threading

import numpy as np
import pytest

import vpool
from tests.helpers.pools import KIB, MIB, assert_whole, host_pool, run_cleanly, simulated_pool, unchanged
from vpool._storage.fake_cuda import FakeCudaDriver
from vpool._storage.source import Source
from vpool.streams import HOST

HOST_DEVICE = (1, 0)


class Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("number", ctypes.c_int32)]


class DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Plain(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", DELETER)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
ctypes.pythonapi.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
ctypes.pythonapi.PyCapsule_SetName.argtypes = (ctypes.py_object, ctypes.c_char_p)
KINDS = {None: (Plain, b"dltensor"), (1, 0): (Versioned, b"dltensor_versioned")}


class Consumer:
    """What a library does with a capsule."""

    def __init__(self, capsule, version=None):
        kind, name = KINDS[version]
        self.managed = kind.from_address(ctypes.pythonapi.PyCapsule_GetPointer(capsule, name))
        self.tensor = self.managed.tensor
        self.used_name = b"used_" + name  # the capsule points to it
        ctypes.pythonapi.PyCapsule_SetName(capsule, self.used_name)

    def drop(self):
        self.managed.deleter(ctypes.addressof(self.managed))  # without the GIL


@pytest.fixture
def driver():
    return FakeCudaDriver(64 * MIB)


@pytest.fixture
def cuda_pool(driver):
    source = Source(driver, "cuda", 0, checks_handles=False)
    with vpool.Pool(vpool.Dynamic(initial=MIB, limit=4 * MIB), source) as pool:
        yield pool
        pool.check()


def pool_of(name):
    """A pool whose source has the name and nature of another, on a device that is not there."""
    source = Source(FakeCudaDriver(64 * MIB, pins=name == "pinned"), name, 0, host_accessible=name != "cuda-vmm")
    return vpool.Pool(vpool.Dynamic(initial=MIB, limit=4 * MIB), source)


def waits_of(driver):
    """How often the host waited."""
    return sum(driver.calls()[name][0] for name in ("synchronize", "event_synchronize"))


class Stream:
    """An object that has a stream, and so keeps it."""

    def __init__(self, driver, **options):
        self.ptr = driver.create_stream(**options)


# What is shown.


@pytest.mark.parametrize("version", KINDS)
def test_a_capsule_describes_the_bytes_that_were_asked_for(cuda_pool, version):
    buffer = cuda_pool.empty(1000)
    consumer = Consumer(buffer.__dlpack__(stream=-1, max_version=version), version)
    tensor = consumer.tensor
    assert (tensor.data, tensor.device.kind, tensor.device.number) == (buffer.ptr, 2, 0)
    assert (tensor.ndim, tensor.shape[0], tensor.strides[0], tensor.byte_offset) == (1, 1000, 1, 0)
    assert (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) == (1, 8, 1)
    if version:
        assert (consumer.managed.major, consumer.managed.minor, consumer.managed.flags) == (1, 0, 0)
    consumer.drop()


@pytest.mark.parametrize(("wanted", "given"), [((0, 8), None), ((1, 2), (1, 0)), ((2, 0), (1, 0))])
def test_the_newest_version_that_both_know(cuda_pool, wanted, given):
    buffer = cuda_pool.empty(1000)
    Consumer(buffer.__dlpack__(max_version=wanted), given).drop()


@pytest.mark.parametrize(
    ("name", "device"), [("managed", (13, 0)), ("pinned", (3, 0)), ("host", (1, 0)), ("cuda-vmm", (2, 0))]
)
def test_devices(name, device):
    with pool_of(name) as pool:
        buffer = pool.empty(1000)
        assert buffer.__dlpack_device__() == device
        consumer = Consumer(buffer.__dlpack__())
        assert (consumer.tensor.device.kind, consumer.tensor.device.number) == device
        consumer.drop()


def test_guards_are_not_shown():
    with vpool.Pool(source="host", debug="guard") as pool:
        buffer = pool.empty(1000)
        array = np.from_dlpack(buffer)
        assert (array.nbytes, array.ctypes.data) == (1000, buffer.ptr)
        array[:] = 1
        del array
        buffer.close()


def test_addresses_without_memory_are_not_given():
    with simulated_pool() as pool:
        buffer = pool.empty(1000)
        for call in (buffer.__dlpack__, buffer.__dlpack_device__, lambda: memoryview(buffer)):
            with unchanged(pool), pytest.raises(BufferError):
                call()
        assert not hasattr(buffer, "__cuda_array_interface__")


def test_a_buffer_of_no_bytes(cuda_pool):
    buffer = cuda_pool.empty(0)
    consumer = Consumer(buffer.__dlpack__())
    assert (consumer.tensor.data, consumer.tensor.shape[0]) == (None, 0)
    consumer.drop()
    assert buffer.__cuda_array_interface__["data"] == (0, False)
    assert memoryview(buffer).nbytes == 0
    buffer.close()


# Who keeps the block.


def exports():
    yield "dlpack", np.from_dlpack
    yield "memoryview", memoryview
    yield "array", lambda buffer: np.asarray(memoryview(buffer))


@pytest.mark.parametrize("export", [pytest.param(call, id=name) for name, call in exports()])
def test_a_buffer_that_is_in_use_stays_open(export):
    with host_pool() as pool:
        buffer = pool.empty(1000)
        user = export(buffer)
        address = buffer.ptr
        with unchanged(pool):
            for stream in (None, 7):
                with pytest.raises(BufferError, match="in use by 1"):
                    buffer.close(stream)
            with pytest.raises(BufferError, match="in use"):
                pool.deallocate(buffer)
        assert (buffer.ptr, buffer.nbytes, buffer.requested, buffer.closed) == (address, 1024, 1000, False)
        buffer.record_stream(7)
        del user
        buffer.close()
        assert buffer.closed
        assert pool.stats.allocated_bytes == 0


@pytest.mark.parametrize("export", [pytest.param(call, id=name) for name, call in exports()])
def test_a_block_comes_back_with_its_last_user(export):
    with host_pool() as pool:
        buffer = pool.empty(1000)
        users = [export(buffer) for _ in range(3)]
        del buffer
        while users:
            assert pool.stats.allocated_bytes == 1024
            users.pop()
        assert_whole(pool)


def test_a_block_that_was_freed_by_hand_is_not_freed_again():
    with host_pool() as pool:
        buffer = pool.empty(1000)
        array = np.from_dlpack(buffer)
        pool.deallocate(buffer.ptr)
        assert buffer.closed
        other = pool.allocate(1000)
        del array, buffer
        assert pool.stats.allocated_bytes == 1024
        pool.deallocate(other)


def test_a_capsule_that_nobody_takes_keeps_nothing(cuda_pool):
    buffer = cuda_pool.empty(1000)
    for version in KINDS:
        capsule = buffer.__dlpack__(max_version=version)
        with pytest.raises(BufferError):
            buffer.close()
        del capsule
    buffer.close()


@pytest.mark.parametrize("version", KINDS)
def test_a_consumer_ends_on_a_thread_of_its_own(cuda_pool, version):
    buffer = cuda_pool.empty(1000)
    consumer = Consumer(buffer.__dlpack__(max_version=version), version)
    del buffer
    assert cuda_pool.stats.allocated_bytes == 1024
    thread = threading.Thread(target=consumer.drop)
    thread.start()
    thread.join()
    assert cuda_pool.stats.allocated_bytes == 0


def test_users_may_outlive_the_pool_and_the_interpreter():
    code = """
import numpy, vpool
pool = vpool.Pool(source="host")
arrays = [numpy.from_dlpack(pool.empty(1000)), numpy.asarray(memoryview(pool.empty(1000)))]
cycle = [pool, pool.empty(1000)]
cycle += [numpy.from_dlpack(cycle[1]), cycle]
pool.close()
del pool, cycle
arrays[0][:] = arrays[1][:] = 7
print(arrays[0].sum() + arrays[1].sum())
"""
    assert run_cleanly(code) == "14000\n"


def test_a_cycle_with_a_user_is_collected():
    with host_pool() as pool:
        cycle = [pool.empty(1000)]
        cycle += [memoryview(cycle[0]), cycle]
        del cycle
        gc.collect()
        assert pool.stats.allocated_bytes == 0


def test_the_bytes_are_the_buffers_own():
    with host_pool() as pool:
        buffer = pool.empty(1000)
        np.from_dlpack(buffer)[:] = 5
        memoryview(buffer)[0] = 6
        assert ctypes.string_at(buffer.ptr, 3) == b"\x06\x05\x05"
        assert np.frombuffer(buffer, np.uint64).shape == (125,)


# The order of streams.


def test_the_consumers_stream_comes_after_the_buffers(cuda_pool, driver):
    own, other = driver.create_stream(), driver.create_stream()
    buffer = cuda_pool.empty(1000, stream=own)
    position = driver.queue_work(own)
    assert not driver.ordered(other, own, position)
    consumer = Consumer(buffer.__dlpack__(stream=other))
    assert driver.ordered(other, own, position)
    consumer.drop()


@pytest.mark.parametrize("stream", [None, 1])
def test_a_consumer_on_the_legacy_stream(cuda_pool, driver, stream):
    own = driver.create_stream(blocking=False)
    buffer = cuda_pool.empty(1000, stream=own)
    position = driver.queue_work(own)
    assert not driver.ordered(0, own, position)
    Consumer(buffer.__dlpack__(stream=stream)).drop()
    assert driver.ordered(0, own, position)


def test_a_stream_that_is_kept_is_not_waited_for_by_the_host(cuda_pool, driver):
    own, other = Stream(driver), Stream(driver)
    cuda_pool.empty(KIB, stream=other).close()
    buffer = cuda_pool.empty(1000, stream=own)
    position = driver.queue_work(own.ptr)
    Consumer(buffer.__dlpack__(stream=other.ptr)).drop()
    assert driver.ordered(other.ptr, own.ptr, position)
    assert not driver.finished(driver.number_of(own.ptr), position)
    assert cuda_pool.crossings["drains"] == 0


def test_the_block_waits_for_its_consumer(driver):
    with vpool.Pool(vpool.Fixed(MIB), Source(driver, "cuda", 0)) as pool:
        stream = driver.create_stream()
        buffer = pool.empty(MIB)
        consumer = Consumer(buffer.__dlpack__(stream=stream))
        position = driver.queue_work(stream)
        consumer.drop()
        buffer.close()
        assert pool.stats.pending_bytes == MIB
        again = pool.empty(MIB)
        assert driver.ordered(0, stream, position)
        again.close()


def test_a_consumer_that_wants_no_order_gets_none(cuda_pool, driver):
    own = driver.create_stream()
    buffer = cuda_pool.empty(1000, stream=own)
    driver.queue_work(own)
    before = driver.calls()
    Consumer(buffer.__dlpack__(stream=-1)).drop()
    assert driver.calls() == before
    buffer.close()
    assert cuda_pool.stats.pending_bytes == 0


@pytest.mark.parametrize("name", ["pinned", "managed"])
def test_the_host_waits_for_the_buffers_stream(name):
    with pool_of(name) as pool:
        driver = pool.source.driver
        for export in (np.from_dlpack, memoryview, lambda one: one.__dlpack__(dl_device=HOST_DEVICE)):
            stream = driver.create_stream()
            buffer = pool.empty(1000, stream=stream)
            position = driver.queue_work(stream)
            number = driver.number_of(stream)
            assert not driver.finished(number, position)
            export(buffer)
            assert driver.finished(number, position)
            waits = waits_of(driver)
            export(pool.empty(1000, stream=HOST))
            assert waits_of(driver) == waits


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"stream": 0}, ValueError),
        ({"stream": -2}, ValueError),
        ({"stream": True}, TypeError),
        ({"stream": "current"}, TypeError),
        ({"stream": 2**64}, ValueError),
        ({"max_version": 1}, TypeError),
        ({"max_version": "ab"}, TypeError),
        ({"dl_device": 2}, TypeError),
        ({"dl_device": (2, 1)}, BufferError),
        ({"dl_device": (3, 0)}, BufferError),
        ({"copy": 1}, TypeError),
        ({"copy": True}, BufferError),
        ({"dl_device": HOST_DEVICE, "copy": False}, BufferError),
        ({"dl_device": HOST_DEVICE, "stream": 7}, ValueError),
    ],
)
def test_what_makes_no_sense_is_refused(cuda_pool, options, error):
    buffer = cuda_pool.empty(1000)
    with unchanged(cuda_pool), pytest.raises(error):
        buffer.__dlpack__(**options)
    buffer.close()
    assert_whole(cuda_pool)


def test_a_stream_that_is_none_is_refused(driver):
    with vpool.Pool(vpool.Dynamic(initial=MIB, limit=MIB), Source(driver, "cuda", 0)) as pool:
        stream = driver.create_stream()
        driver.destroy_stream(stream)
        buffer = pool.empty(1000)
        with unchanged(pool), pytest.raises(BufferError, match="consumer's stream"):
            buffer.__dlpack__(stream=stream)


def test_the_host_of_a_host_pool_has_no_stream():
    with host_pool() as pool, pytest.raises(ValueError, match="None"):
        pool.empty(1000).__dlpack__(stream=1)


def test_a_closed_buffer_gives_nothing(cuda_pool):
    buffer = cuda_pool.empty(1000)
    buffer.close()
    for call in (buffer.__dlpack__, buffer.__dlpack_device__, lambda: buffer.__cuda_array_interface__):
        with pytest.raises(BufferError, match="closed"):
            call()


def test_a_consumer_that_captures(cuda_pool, driver):
    """A graph cannot wait for work outside of it, so the host does."""
    own, other = Stream(driver), driver.create_stream()
    buffer = cuda_pool.empty(1000, stream=own)
    position = driver.queue_work(own.ptr)
    driver.begin_capture(other)
    Consumer(buffer.__dlpack__(stream=other)).drop()
    assert driver.finished(driver.number_of(own.ptr), position)
    assert driver.end_capture(other)
    buffer.close()


def test_what_is_captured_cannot_be_waited_for(cuda_pool, driver):
    own, other = Stream(driver), driver.create_stream()
    driver.begin_capture(own.ptr)
    buffer = cuda_pool.empty(1000, stream=own)
    for options in ({"stream": other}, {"dl_device": HOST_DEVICE}):
        with unchanged(cuda_pool), pytest.raises(BufferError, match="while a graph is captured"):
            buffer.__dlpack__(**options)
    assert driver.end_capture(own.ptr)
    buffer.close()


GIVE = [
    lambda buffer, stream: Consumer(buffer.__dlpack__(stream=stream)).drop(),
    lambda buffer, stream: buffer.__dlpack__(dl_device=HOST_DEVICE),
    lambda buffer, stream: buffer.__cuda_array_interface__,
]


@pytest.mark.parametrize("checks_handles", [True, False])
@pytest.mark.parametrize("inside", [True, False], ids=["captured memory", "captures without memory"])
@pytest.mark.parametrize("give", GIVE)
def test_memory_of_a_graph_waits_for_its_launches(driver, checks_handles, inside, give):
    """Those may be on any stream, so the device is waited for: not while something else is captured."""
    source = Source(driver, "cuda", 0, checks_handles=checks_handles)
    with vpool.Pool(vpool.Dynamic(initial=MIB, limit=4 * MIB), source) as pool:
        own, other, launched = Stream(driver), Stream(driver, blocking=False), driver.create_stream()
        driver.begin_capture(own.ptr)
        buffer = pool.empty(1000, stream=own)
        assert driver.end_capture(own.ptr)
        position = driver.queue_work(launched)
        kept = None if inside else pool.empty(1000, stream=other)
        driver.begin_capture(other.ptr)
        kept = pool.empty(1000, stream=other) if inside else kept
        with unchanged(pool), pytest.raises(BufferError, match="while a graph is captured"):
            give(buffer, driver.create_stream())
        assert driver.end_capture(other.ptr)
        assert not driver.finished(driver.number_of(launched), position)
        give(buffer, driver.create_stream())
        assert driver.finished(driver.number_of(launched), position)
        kept.close()
        buffer.close()
        pool.check()


def test_the_capture_that_has_the_memory_waits_for_nothing(cuda_pool, driver):
    own = Stream(driver)
    driver.begin_capture(own.ptr)
    buffer = cuda_pool.empty(1000, stream=own)
    waits = waits_of(driver)
    Consumer(buffer.__dlpack__(stream=own.ptr)).drop()
    assert waits_of(driver) == waits
    assert driver.end_capture(own.ptr)
    buffer.close()


@pytest.mark.parametrize("name", ["pinned", "managed"])
def test_the_host_gets_memory_of_a_graph_after_its_launches(name):
    with pool_of(name) as pool:
        driver = pool.source.driver
        own, launched = Stream(driver), driver.create_stream()
        driver.begin_capture(own.ptr)
        buffer = pool.empty(1000, stream=own)
        assert driver.end_capture(own.ptr)
        position = driver.queue_work(launched)
        memoryview(buffer).release()
        assert driver.finished(driver.number_of(launched), position)
        buffer.close()


# Copies for the host.


@pytest.mark.parametrize("copy", [None, True])
def test_the_host_gets_a_copy_of_what_it_cannot_reach(cuda_pool, copy):
    buffer = cuda_pool.empty(1000)
    ctypes.memset(buffer.ptr, 9, 1000)
    consumer = Consumer(buffer.__dlpack__(dl_device=HOST_DEVICE, copy=copy, max_version=(1, 0)), (1, 0))
    assert (consumer.tensor.device.kind, consumer.managed.flags) == (1, 2)
    assert consumer.tensor.data != buffer.ptr
    buffer.close()  # which the copy does not keep
    assert ctypes.string_at(consumer.tensor.data, 1000) == bytes([9]) * 1000
    consumer.drop()


def test_what_the_host_can_reach_is_copied_only_if_asked():
    with host_pool() as pool:
        buffer = pool.empty(1000)
        assert np.from_dlpack(buffer, device="cpu", copy=False).ctypes.data == buffer.ptr
        copied = np.from_dlpack(buffer, copy=True)
        assert copied.ctypes.data != buffer.ptr
        buffer.close()


# CUDA's array interface.


def test_the_array_interface(cuda_pool):
    buffer = cuda_pool.empty(1000)
    assert buffer.__cuda_array_interface__ == {
        "shape": (1000,),
        "typestr": "|u1",
        "data": (buffer.ptr, False),
        "version": 3,
        "strides": None,
        "stream": 1,
    }


def test_a_stream_that_is_kept_is_named(cuda_pool, driver):
    stream = Stream(driver)
    buffer = cuda_pool.empty(1000, stream=stream)
    driver.queue_work(stream.ptr)
    before = driver.calls()
    assert buffer.__cuda_array_interface__["stream"] == stream.ptr
    assert driver.calls() == before


@pytest.mark.parametrize("gone", [False, True])
def test_a_stream_that_may_be_gone_is_waited_for_and_not_named(cuda_pool, driver, gone):
    stream = driver.create_stream()
    buffer = cuda_pool.empty(1000, stream=stream)
    position = driver.queue_work(stream)
    number = driver.number_of(stream)
    if gone:
        driver.destroy_stream(stream)
    assert buffer.__cuda_array_interface__["stream"] is None
    assert driver.finished(number, position)
    assert driver.calls_on_dead_streams == 0


def test_the_hosts_blocks_need_no_stream(cuda_pool, driver):
    assert cuda_pool.empty(1000, stream=HOST).__cuda_array_interface__["stream"] is None
    assert waits_of(driver) == 0


def test_memory_of_the_host_has_no_array_interface():
    with host_pool() as pool:
        assert not hasattr(pool.empty(1000), "__cuda_array_interface__")

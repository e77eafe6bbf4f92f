"""A pool whose segments RMM gives, as far as that goes without a device."""

import sys
import threading
import types

import pytest

import vpool
from tests.helpers.pools import KIB, MIB, assert_whole, live_rows, unchanged
from vpool._interface.segments import bind
from vpool._storage.fake_cuda import FakeCudaDriver
from vpool.integrations import rmm as plugin


class Resource:
    """One of RMM's, over a driver: what was lent in the order of its stream is only good behind that."""

    def __init__(self, driver, capacity=64 * MIB):
        self.driver = driver
        self.capacity = capacity
        self.lent = {}
        self.waited = True
        self.error = None
        self.offset = 0
        self.pool = vpool.Pool(vpool.Dynamic(initial=0, limit="1GiB"), source="host")

    def allocate(self, nbytes, stream):
        if self.error:
            raise self.error
        if sum(self.lent.values()) + nbytes > self.capacity:
            raise MemoryError("std::bad_alloc: out_of_memory")
        address = self.pool.allocate(nbytes) + self.offset
        self.lent[address] = nbytes
        self.waited = False
        return address

    def deallocate(self, address, nbytes, stream):
        assert self.lent.pop(address) == nbytes
        self.pool.deallocate(address - self.offset)

    def synchronize(self):
        self.waited = True


@pytest.fixture
def driver():
    return FakeCudaDriver(256 * MIB)


@pytest.fixture
def resource(driver, monkeypatch):
    """RMM's current one; its streams are waited for where it is told."""
    resource = Resource(driver)
    monkeypatch.setattr(vpool.sources, "_cuda_driver", driver)
    rmm = types.ModuleType("rmm")
    rmm.mr = types.SimpleNamespace(get_current_device_resource=lambda: resource)
    stream = types.SimpleNamespace(synchronize=resource.synchronize)
    rmm.pylibrmm = types.SimpleNamespace(stream=types.SimpleNamespace(Stream=lambda: stream))
    monkeypatch.setitem(sys.modules, "rmm", rmm)
    return resource


@pytest.fixture
def pool(resource):
    with vpool.Pool(vpool.Dynamic(initial=MIB, limit=128 * MIB), source=plugin.source()) as pool:
        pool.deallocate(pool.allocate(KIB))
        yield pool
        for address in [row["address"] for row in live_rows(pool)]:
            pool.deallocate(int(address))
    assert resource.lent == {}


def test_segments_are_of_the_resource(pool, resource, driver):
    assert (pool.source.name, pool.device) == ("rmm", 0)
    assert (list(resource.lent.values()), resource.waited) == ([MIB], True)
    ptr = pool.allocate(5 * MIB)
    assert any(address <= ptr < address + nbytes for address, nbytes in resource.lent.items())
    assert sum(resource.lent.values()) == pool.stats.reserved_bytes
    assert driver.used(0) == 0
    calls, failures, _ = pool.source.driver.calls()["malloc"]
    assert (calls, failures) == (2, 0)
    pool.deallocate(ptr)
    pool.trim()
    assert resource.lent == {}
    assert_whole(pool)


def test_streams_are_those_of_the_device(pool, driver):
    first, second = driver.create_stream(blocking=False), driver.create_stream(blocking=False)
    ptr = pool.allocate(MIB, stream=first)
    position = driver.queue_work(first)
    pool.deallocate(ptr)
    pool.set_limit(pool.stats.reserved_bytes)
    assert pool.allocate(MIB, stream=second) == ptr
    assert driver.finished(driver.number_of(first), position) or driver.ordered(second, first, position)


def test_a_resource_without_memory(pool, resource):
    resource.capacity = 8 * MIB
    with unchanged(pool), pytest.raises(vpool.OutOfMemoryError):
        pool.allocate(16 * MIB)
    assert pool.allocate(4 * MIB)


def test_a_resource_that_fails(pool, resource, caplog):
    resource.error = RuntimeError("the device is lost")
    with unchanged(pool), pytest.raises(vpool.SourceError):
        pool.allocate(16 * MIB)
    assert "the device is lost" in caplog.text
    resource.error = None
    assert pool.allocate(16 * MIB)


@pytest.mark.parametrize(
    "call",
    [
        "allocate",
        "allocate at an alignment",
        "check",
        "maintain",
        "reserve",
        "trim",
        "inspect",
        "record",
        "resume",
        "coalesce",
    ],
)
def test_a_pool_that_is_called_while_it_asks_the_resource(resource, driver, call):
    """By what a collection runs there, or by a handler of what the resource logs: on the thread that grows the pool."""

    class Calls(Resource):
        def allocate(self, nbytes, stream):
            inside, self.inside = self.inside, None
            if inside:
                inside()
            return super().allocate(nbytes, stream)

    def allocate(alignment=256):
        pool.deallocate(pool.allocate(KIB))
        with pytest.raises(vpool.OutOfMemoryError) as caught:
            pool.allocate(MIB, alignment=alignment)
        assert "the device refused 1.00 MiB" in str(caught.value)

    def reserve():
        with pytest.raises(vpool.OutOfMemoryError, match=r"the device refused 1\.00 MiB"):
            pool.reserve(MIB)

    def record():
        with pool.record() as recording:
            pool.deallocate(pool.allocate(KIB))
        assert len(recording) == 3  # with the block that is live

    def grow():
        own.inside = calls[call]
        done.append(pool.allocate(16 * MIB))

    own, done = Calls(driver), []
    own.inside = None
    strategy = vpool.Hybrid(MIB, block=64 * KIB, watermark=0.01, dynamic=vpool.Dynamic(initial=MIB, limit=128 * MIB))
    pool = vpool.Pool(strategy, source=plugin.source(own))
    held = pool.empty(64 * KIB)
    calls = {
        "allocate": allocate, "allocate at an alignment": lambda: allocate(4 * KIB), "check": pool.check,
        "maintain": pool.maintain, "reserve": reserve, "trim": pool.trim, "inspect": pool.inspect, "record": record,
        "resume": pool.resume, "coalesce": pool.coalesce,
    }  # fmt: skip
    thread = threading.Thread(target=grow, daemon=True)
    thread.start()
    thread.join(60)
    assert done, "a deadlock"
    pool.deallocate(done[0])
    held.close()
    pool.check()
    pool.close()
    assert own.lent == {}


def test_an_address_that_is_not_aligned_goes_back(pool, resource, caplog):
    resource.offset = 8
    with unchanged(pool), pytest.raises(vpool.SourceError):
        pool.allocate(16 * MIB)
    assert "no multiple of 256" in caplog.text
    assert list(resource.lent.values()) == [MIB]
    resource.offset = 0


def test_a_resource_of_the_callers_own(resource, driver):
    own = Resource(driver)
    with vpool.Pool(vpool.Dynamic(initial=MIB, limit=8 * MIB), source=plugin.source(own)) as pool:
        pool.deallocate(pool.allocate(KIB))
        assert (list(own.lent.values()), resource.lent) == ([MIB], {})
    assert own.lent == {}


def test_pytorch_cannot_have_its_segments_from_there(pool):
    with pytest.raises(ValueError, match="needs the GIL"):
        bind(pool)


def test_without_cuda(resource, monkeypatch):
    def missing(again=False):
        raise vpool.SourceError("CUDA cannot be used here: no device", "cudaErrorNoDevice")

    monkeypatch.setattr(vpool.sources, "_load_cuda", missing)
    with pytest.raises(vpool.SourceError, match="no device"):
        plugin.source()

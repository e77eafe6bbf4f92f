"""RMM's plug-in against RMM itself, as far as that goes without a device."""

import pytest

import vpool
from tests.helpers.frameworks import fake_pool
from tests.helpers.pools import GIB, KIB, MIB, assert_whole, unchanged
from vpool.integrations import rmm as plugin

rmm = pytest.importorskip("rmm")


@pytest.fixture
def pool():
    with fake_pool() as pool:
        yield pool
        pool.check()


def test_a_device_buffer_has_a_block(pool):
    buffer = rmm.DeviceBuffer(size=1000, mr=plugin.resource(pool))
    assert buffer.ptr % 256 == 0
    assert pool.stats.requested_bytes >= 1000
    del buffer
    assert_whole(pool)


def test_no_bytes(pool):
    buffer = rmm.DeviceBuffer(size=0, mr=plugin.resource(pool))
    assert (buffer.size, pool.stats.allocations) == (0, 0)


def test_out_of_memory_is_rmms_own_error(pool):
    resource = plugin.resource(pool)
    with unchanged(pool), pytest.raises(MemoryError):
        rmm.DeviceBuffer(size=GIB, mr=resource)
    assert rmm.DeviceBuffer(size=KIB, mr=resource).size == KIB


def test_a_buffer_keeps_the_pool():
    buffer = rmm.DeviceBuffer(size=1000, mr=plugin.resource(fake_pool(name="cuda")))
    assert buffer.ptr
    del buffer


def test_streams_are_named_by_number(pool):
    """The stream object that RMM passes ends with the call: held weakly it would say that its stream is gone."""
    driver = pool.source.driver
    handle = driver.create_stream()
    seen = []

    class Stream:
        def __cuda_stream__(self):
            seen.append(handle)
            return 0, handle

    class OlderStream:
        def value(self):
            seen.append(handle)
            return handle

    for kind in (Stream, OlderStream):
        assert plugin._handle(kind()) == handle
    assert len(seen) == 2


def test_memory_goes_back_on_the_stream_that_rmm_names(pool):
    resource = plugin.resource(pool)
    buffers = [rmm.DeviceBuffer(size=MIB, mr=resource) for _ in range(3)]
    while buffers:
        buffers.pop()
    again = rmm.DeviceBuffer(size=MIB, mr=resource)
    assert pool.stats.reserved_bytes <= 4 * MIB
    del again
    assert_whole(pool)


def test_the_default_pool(no_default_pools, pool):
    vpool.set_default_pool(pool)
    buffer = rmm.DeviceBuffer(size=1000, mr=plugin.resource())
    assert pool.stats.requested_bytes >= 1000
    del buffer


def test_a_pool_of_another_device_is_refused(pool):
    with fake_pool(device=1, driver=pool.source.driver) as second, pytest.raises(ValueError, match="device 1"):
        plugin.install(second)

"""cuda.core's plug-in against cuda.core itself, as far as that goes without a device."""

import pickle

import pytest

import vpool
from tests.helpers.frameworks import fake_pool
from tests.helpers.pools import GIB, assert_whole, host_pool, simulated_pool, unchanged
from vpool.integrations import cuda_core as plugin

core = pytest.importorskip("cuda.core")


def host_stream():
    """Where only the host has the memory, cuda.core notes no stream; any object that is one will do."""
    return core.LEGACY_DEFAULT_STREAM


@pytest.mark.parametrize("close", [True, False])
def test_a_buffer_has_a_block(close):
    with host_pool() as pool:
        buffer = plugin.resource(pool).allocate(1000, stream=host_stream())
        assert (buffer.size, int(buffer.handle) % 256) == (1000, 0)
        assert pool.stats.requested_bytes == 1000
        assert buffer.memory_resource.pool is pool
        if close:
            buffer.close()
        del buffer
        assert_whole(pool)


def test_no_bytes():
    with host_pool() as pool:
        buffer = plugin.resource(pool).allocate(0, stream=host_stream())
        assert (buffer.size, pool.stats.allocations) == (0, 0)
        buffer.close()


def test_the_stream_has_to_be_named():
    with host_pool() as pool:
        for call in (
            lambda: plugin.resource(pool).allocate(10),
            lambda: plugin.resource(pool).allocate(10, stream=None),
        ):
            with unchanged(pool), pytest.raises(TypeError):
                call()


def test_out_of_memory():
    with host_pool() as pool, unchanged(pool), pytest.raises(vpool.OutOfMemoryError):
        plugin.resource(pool).allocate(GIB, stream=host_stream())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cuda", (True, False, False, 0)),
        ("cuda-vmm", (True, False, False, 0)),
        ("managed", (True, True, True, 0)),
        ("pinned", (True, True, False, -1)),
    ],
)
def test_what_a_resource_tells(name, expected):
    with fake_pool(name=name) as pool:
        resource = plugin.resource(pool)
        told = (resource.is_device_accessible, resource.is_host_accessible, resource.is_managed, resource.device_id)
        assert told == expected


def test_the_host_and_mere_addresses():
    with host_pool() as pool:
        resource = plugin.resource(pool)
        assert (resource.is_device_accessible, resource.is_host_accessible, resource.device_id) == (False, True, -1)
    with simulated_pool() as pool:
        resource = plugin.resource(pool)
        assert (resource.is_device_accessible, resource.is_host_accessible, resource.device_id) == (False, False, -1)


def test_a_resource_stays_where_it_is():
    with host_pool() as pool, pytest.raises(TypeError, match="pickled"):
        pickle.dumps(plugin.resource(pool))


def test_the_default_pool(no_default_pools):
    with host_pool() as pool:
        vpool.set_default_pool(pool)
        assert plugin.resource().pool is pool

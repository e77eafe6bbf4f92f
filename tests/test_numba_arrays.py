"""Numba's plug-in against Numba itself, as far as that goes without a device."""

import gc
import types

import pytest

import vpool
from tests.helpers.frameworks import fake_pool
from tests.helpers.pools import GIB, KIB, MIB, assert_whole, run_cleanly, unchanged
from vpool.integrations import numba as plugin

cuda = pytest.importorskip("numba.cuda")
driver = pytest.importorskip("numba.cuda.cudadrv.driver")


@pytest.fixture
def pool(monkeypatch):
    with fake_pool() as pool:
        monkeypatch.setattr(driver, "_memory_manager", None)
        monkeypatch.setattr(plugin, "_pool_of", plugin._pool_of)
        plugin.install(pool)
        yield pool
        pool.check()


class Context:
    """What a context is to its memory manager."""

    def __init__(self, device=0):
        self.device = types.SimpleNamespace(id=device)
        self.memory_manager = driver._memory_manager(context=self)
        self.memory_manager.initialize()


@pytest.fixture
def context(pool):
    return Context()


def test_numba_accepts_it(pool):
    assert issubclass(driver._memory_manager, cuda.BaseCUDAMemoryManager)
    assert driver._memory_manager(context=None).interface_version == 1


def test_the_environment_variable_names_the_module():
    assert isinstance(plugin._numba_memory_manager, type)
    code = """
import os
os.environ["NUMBA_CUDA_MEMORY_MANAGER"] = "vpool.integrations.numba"
from numba.cuda.cudadrv import driver
driver._ensure_memory_manager()
print(driver._memory_manager.__module__)
"""
    assert run_cleanly(code) == "vpool.integrations.numba\n"
    with pytest.raises(AttributeError, match="anything"):
        _ = plugin.anything


def test_a_block_is_numbas_memory(pool, context):
    memory = context.memory_manager.memalloc(1000)
    assert (memory.size, memory.device_pointer_value % 256) == (1000, 0)
    view = memory.own().view(100, 200)
    assert view.device_pointer_value == memory.device_pointer_value + 100
    assert pool.stats.requested_bytes == 1000
    del view
    memory.free()
    context.memory_manager._blocks.settle()
    assert_whole(pool)


def test_no_bytes(context):
    assert context.memory_manager.memalloc(0).device_pointer_value is None


def test_blocks_come_back_together_once_the_device_was_waited_for(pool, context):
    device = pool.source.driver
    stream = device.create_stream()
    taken = [context.memory_manager.memalloc(KIB) for _ in range(10)]
    position = device.queue_work(stream)
    number = device.number_of(stream)
    while len(taken) > 1:
        taken.pop()
    gc.collect()
    assert not device.finished(number, position)
    assert pool.stats.requested_bytes == 10 * KIB
    taken.pop()
    assert device.finished(number, position)
    assert pool.stats.requested_bytes == 0


def test_what_waits_is_had_before_memory_is_out(context):
    context.memory_manager.memalloc(3 * MIB)
    assert context.memory_manager.memalloc(3 * MIB).size == 3 * MIB


def test_cleanup_is_deferred(pool, context):
    with context.memory_manager.defer_cleanup(), context.memory_manager.defer_cleanup():
        for _ in range(30):
            context.memory_manager.memalloc(KIB)
        assert pool.stats.requested_bytes == 30 * KIB
        assert context.memory_manager.deallocations.is_disabled
    context.memory_manager.memalloc(KIB)
    assert pool.stats.requested_bytes == 0


def test_out_of_memory_is_numbas_own_error(pool, context):
    with unchanged(pool), pytest.raises(driver.CudaAPIError, match="Limit") as caught:
        context.memory_manager.memalloc(GIB)
    assert caught.value.code == driver.binding.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    assert isinstance(caught.value, vpool.OutOfMemoryError)
    context.memory_manager.memalloc(KIB)


def test_memory_info(pool, context):
    info = context.memory_manager.get_memory_info()
    assert (info.free, info.total) == (4 * MIB, 64 * MIB)


def test_a_reset_gives_up_what_the_context_had(context, no_default_pools):
    first = plugin._pool_of(0)
    live = context.memory_manager.memalloc(KIB)
    context.memory_manager.reset()
    assert first.closed
    frees = first.stats.frees
    del live  # its address may be somebody else's by now
    gc.collect()
    assert first.stats.frees == frees
    with pytest.raises(vpool.ClosedPoolError):
        context.memory_manager.memalloc(KIB)
    context.memory_manager.reset()


def test_a_reset_of_a_default_pool_makes_another_one(monkeypatch, no_default_pools):
    monkeypatch.setattr(driver, "_memory_manager", None)
    monkeypatch.setattr(plugin, "_pool_of", plugin._pool_of)
    plugin.install()
    vpool.set_default_pool(fake_pool(name="cuda"))
    context = Context()
    context.memory_manager.memalloc(KIB)
    first = context.memory_manager._blocks.pool
    context.memory_manager.reset()
    vpool.set_default_pool(fake_pool(name="cuda"))
    context.memory_manager.initialize()
    context.memory_manager.memalloc(KIB)
    assert context.memory_manager._blocks.pool is not first


def test_numba_plugin_contract(pool, monkeypatch):
    """In whatever order Numba calls, nothing is lost and only what the plug-in lent is given up."""
    pools = [fake_pool(driver=pool.source.driver) for _ in range(3)]
    monkeypatch.setattr(plugin, "_pool_of", lambda device: next(one for one in pools if not one.closed))
    others = [one.empty(KIB) for one in pools]  # of another framework
    context = type("Context", (), {"device": types.SimpleNamespace(id=0)})()
    manager = driver._memory_manager(context=context)
    for turn, serving in enumerate(pools[:2]):
        manager.reset()
        assert [one.closed for one in pools] == [number < turn for number in range(3)]
        manager.initialize()
        manager.initialize()
        assert manager.memalloc(0).size == 0
        kept = manager.memalloc(1000)
        info = manager.get_memory_info()
        assert (type(info.free), type(info.total)) == (int, int)
        assert 0 < info.free <= info.total == 64 * MIB
        with manager.defer_cleanup():
            manager.memalloc(2000).free()
            assert serving.stats.requested_bytes == KIB + 3000
        manager.initialize()
        assert serving.stats.requested_bytes >= KIB + 1000
        del kept
    manager.reset()
    assert manager.memalloc(1000).size == 1000
    assert [one.closed for one in pools] == [True, True, False]
    for other, owner in zip(others, pools, strict=True):
        assert other.pool is owner
        other.close()
    for one in pools:
        one.close()


def test_each_device_has_its_pool(pool, monkeypatch):
    with fake_pool(device=1, driver=pool.source.driver) as second:
        plugin.install(pool, second)
        memory = Context(1).memory_manager.memalloc(KIB)
        assert (pool.stats.requested_bytes, second.stats.requested_bytes) == (0, KIB)
        del memory


def test_the_end_of_the_interpreter():
    code = """
import types
from numba.cuda.cudadrv import driver
import vpool
from vpool.integrations import numba as plugin
from tests.helpers.frameworks import fake_pool
plugin.install(fake_pool())
context = types.SimpleNamespace(device=types.SimpleNamespace(id=0))
class Context: device = types.SimpleNamespace(id=0)
context = Context()
manager = driver._memory_manager(context=context)
manager.initialize()
kept = [manager.memalloc(1000) for _ in range(20)]
print("end")
"""
    assert run_cleanly(code) == "end\n"

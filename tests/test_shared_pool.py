"""Several frameworks with one pool: whose blocks are whose, and who gives way to whom."""

import contextlib
import ctypes
import sys
import threading
import types

import pytest

import vpool
from tests.helpers import torch_fake
from tests.helpers.frameworks import Stream, fake_pool
from tests.helpers.pools import KIB, MIB, host_pool, unchanged
from vpool._interface.captures import captures_go_on
from vpool.integrations import caches, cuda_core, numba, rmm
from vpool.integrations import cupy as cupy_plugin
from vpool.integrations import torch as torch_plugin
from vpool.integrations.packages import PoolOfDevice


@pytest.fixture
def pool():
    with fake_pool() as pool:
        yield pool
        pool.check()


# Each of these gives what lends a block by a framework's plug-in, and keeps it.


@contextlib.contextmanager
def by_cupy(pool, monkeypatch):
    cupy = pytest.importorskip("cupy")
    stream = Stream(pool.source.driver)
    monkeypatch.setattr(cupy.cuda.device, "get_device_id", lambda: 0)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: stream)
    yield cupy_plugin.allocator(pool)


@contextlib.contextmanager
def by_cupys_c_functions(pool, monkeypatch):
    cupy = pytest.importorskip("cupy")

    class Allocator:
        """What CuPy makes of the functions, but for its own question which device is current."""

        def __init__(self, *functions):
            self.functions = functions[:-1]

        def malloc(self, size):
            return cupy.cuda.memory.CFunctionAllocatorMemory(size, *self.functions, 0)

    monkeypatch.setattr(cupy.cuda.memory, "CFunctionAllocator", Allocator)
    with by_cupy(pool, monkeypatch):
        yield cupy_plugin.c_allocator(pool)


@contextlib.contextmanager
def by_numba(pool, monkeypatch):
    driver = pytest.importorskip("numba.cuda.cudadrv.driver")
    monkeypatch.setattr(driver, "_memory_manager", None)
    monkeypatch.setattr(numba, "_pool_of", numba._pool_of)
    numba.install(pool)
    context = type("Context", (), {"device": types.SimpleNamespace(id=0)})()
    manager = driver._memory_manager(context=context)
    manager.initialize()
    yield manager.memalloc


@contextlib.contextmanager
def by_rmm(pool, monkeypatch):
    package = pytest.importorskip("rmm")
    resource = rmm.resource(pool)
    yield lambda nbytes: package.DeviceBuffer(size=nbytes, mr=resource)


@contextlib.contextmanager
def by_cuda_core(pool, monkeypatch):
    core = pytest.importorskip("cuda.core")
    resource = cuda_core.resource(pool)
    yield lambda nbytes: resource.allocate(nbytes, stream=core.LEGACY_DEFAULT_STREAM)


WAYS = {
    "cupy": by_cupy,
    "cupy by C": by_cupys_c_functions,
    "numba": by_numba,
    "rmm": by_rmm,
    "cuda.core": by_cuda_core,
}


def requested(pool):
    return {row["tag"]: row["requested_bytes"] for row in pool.inspect().tags}


@pytest.mark.parametrize("way", WAYS)
class TestTags:
    @pytest.fixture
    def pool(self, way):
        # cuda.core alone takes memory of the host, and it alone asks the device about other memory.
        with host_pool(limit=4 * MIB) if way == "cuda.core" else fake_pool() as pool:
            yield pool
            pool.check()

    def test_a_frameworks_blocks_bear_its_name(self, pool, way, monkeypatch):
        name = way.partition(" ")[0]
        with WAYS[way](pool, monkeypatch) as lend:
            kept = [lend(1024)]
            with vpool.tag("mine"):
                kept.append(lend(2048))
            kept.append(lend(4096))
            assert vpool.tag.current() is None
            assert requested(pool) == {name: 5120, "mine": 2048}
            del kept

    def test_a_quota(self, pool, way, monkeypatch):
        """Beyond it the framework's own error is raised; others go on, and so does it."""
        name = way.partition(" ")[0]
        with WAYS[way](pool, monkeypatch) as lend:
            pool.limit(name, 4 * KIB)
            kept = [lend(3 * KIB)]
            with unchanged(pool), pytest.raises(Exception, match=r"(?i)tag|memory"):
                lend(2 * KIB)
            assert vpool.tag.current() is None
            others = pool.empty(MIB)
            kept.append(lend(KIB))
            pool.limit(name, None)
            kept.append(lend(2 * KIB))
            del kept, others


@pytest.mark.skipif(torch_fake.compiler() is None, reason="no C++ compiler")
def test_pytorchs_segments_bear_its_name(pool, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", torch_fake.torch_of(tmp_path))
    lend, take = torch_plugin.mem_pool(pool)[0].functions
    lend = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(lend)
    take = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(take)
    pool.limit("torch", 2 * MIB)
    first = lend(MIB, 0, None)
    with vpool.tag("mine"):
        second = lend(MIB, 0, None)
    assert requested(pool) == {"torch": MIB, "mine": MIB}
    assert lend(MIB + 256, 0, None) is None  # which PyTorch takes as out of memory
    for block in (first, second):
        take(block, 0, 0, None)
    assert requested(pool)["torch"] == 0


# Caches.


class Framework(types.ModuleType):
    """A module that has caches, as pools see it; `held` is what it gives back."""

    def __init__(self, name):
        super().__init__(name)
        self.asked = []
        self.held = []
        self.capturing = False
        self.error = None

    def give_back(self, what="memory"):
        self.asked.append(what)
        if self.error:
            raise self.error
        self.held.clear()


@pytest.fixture
def torch(monkeypatch):
    torch = Framework("torch")
    torch.used = True
    torch.cuda = types.SimpleNamespace(
        is_initialized=lambda: torch.used,
        is_current_stream_capturing=lambda: torch.capturing,
        empty_cache=torch.give_back,
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(caches.numbered, "all_served", list)
    return torch


@pytest.fixture
def cupy(monkeypatch):
    cupy = Framework("cupy")
    pool_of = {name: types.SimpleNamespace(free_all_blocks=lambda name=name: cupy.give_back(name)) for name in "dp"}
    cupy.cuda = types.SimpleNamespace(
        Device=lambda device: contextlib.nullcontext(cupy.asked.append(f"device {device}")),
        get_current_stream=lambda: types.SimpleNamespace(is_capturing=lambda: cupy.capturing),
    )
    cupy.fft = types.SimpleNamespace(
        config=types.SimpleNamespace(
            get_plan_cache=lambda: types.SimpleNamespace(clear=lambda: cupy.asked.append("plans"))
        )
    )
    cupy.get_default_memory_pool = lambda: pool_of["d"]
    cupy.get_default_pinned_memory_pool = lambda: pool_of["p"]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy


class TestCaches:
    @pytest.fixture
    def pool(self, pool):
        caches.ask_before_failing(pool)
        caches.ask_before_failing(pool)
        return pool

    def test_they_are_given_back_before_memory_is_out(self, pool, torch, cupy):
        torch.held.append(pool.empty(3 * MIB))
        pool.deallocate(pool.allocate(3 * MIB))
        assert (torch.asked, cupy.asked) == (["memory"], [])  # one was enough
        cupy.held.append(pool.empty(3 * MIB))
        pool.deallocate(pool.allocate(3 * MIB))
        assert (torch.asked, cupy.asked) == (["memory"] * 2, ["device 0", "plans", "d"])

    def test_before_callbacks_that_drop_what_is_wanted(self, pool, torch):
        torch.held.append(pool.empty(3 * MIB))
        pool.on_pressure(pytest.fail)
        pool.deallocate(pool.allocate(3 * MIB))

    def test_a_quota_asks_too(self, pool, torch):
        pool.limit("full", MIB)
        with vpool.tag("full"):
            torch.held.append(pool.empty(MIB))
            pool.deallocate(pool.allocate(MIB))
        assert torch.asked == ["memory"]

    def test_nothing_is_imported_for_it(self, pool, monkeypatch):
        for name in ("torch", "cupy"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        with pytest.raises(vpool.OutOfMemoryError):
            pool.allocate(5 * MIB)
        assert not {"torch", "cupy"} & set(sys.modules)

    def test_what_is_imported_and_not_used(self, pool, torch):
        torch.used = False
        with pytest.raises(vpool.OutOfMemoryError):
            pool.allocate(5 * MIB)
        assert torch.asked == []

    def test_a_pytorch_without_caches(self, pool, torch, monkeypatch):
        monkeypatch.setattr(caches.numbered, "all_served", lambda: [pool])
        with pytest.raises(vpool.OutOfMemoryError):
            pool.allocate(5 * MIB)
        assert torch.asked == []

    def test_not_while_a_stream_captures(self, pool, torch, cupy):
        torch.capturing = cupy.capturing = True
        with pytest.raises(vpool.OutOfMemoryError):
            pool.allocate(5 * MIB)
        assert (torch.asked, cupy.asked) == ([], ["device 0"])

    def test_not_while_any_capture_is_known(self, pool, torch, cupy):
        driver = pool.source.driver
        stream = driver.create_stream()
        driver.begin_capture(stream)
        pool.allocate(KIB, stream=stream)
        assert captures_go_on()
        with pytest.raises(vpool.OutOfMemoryError):
            pool.allocate(5 * MIB)
        assert (torch.asked, cupy.asked) == ([], [])
        driver.end_capture(stream)

    def test_one_that_fails_is_no_reason(self, pool, torch, cupy):
        torch.error = RuntimeError("of PyTorch")
        cupy.held.append(pool.empty(3 * MIB))
        pool.deallocate(pool.allocate(3 * MIB))
        assert len(torch.asked) == 1
        with pytest.raises(vpool.OutOfMemoryError) as caught:
            pool.allocate(5 * MIB)
        assert caught.value.__cause__ is None

    def test_whoever_gives_back_may_ask_for_memory_itself(self, pool, torch):
        def give_back():
            torch.asked.append("memory")
            torch.held.append(pool.empty(KIB))
            with pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(5 * MIB)

        torch.cuda.empty_cache = give_back
        with pytest.raises(vpool.OutOfMemoryError):
            pool.allocate(5 * MIB)
        assert torch.asked == ["memory"]

    def test_threads_that_fail_at_once(self, pool, torch, cupy):
        def work():
            for _ in range(50):
                with pytest.raises(vpool.OutOfMemoryError):
                    pool.allocate(5 * MIB)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(torch.asked) == 200

    def test_pinned_memory_asks_for_pinned_memory(self, torch, cupy):
        with fake_pool(name="pinned") as pinned:
            caches.ask_before_failing(pinned)
            with pytest.raises(vpool.OutOfMemoryError):
                pinned.allocate(5 * MIB)
        assert (torch.asked, cupy.asked) == ([], ["p"])


def test_a_default_pool_asks_once_it_serves(pool, no_default_pools, torch):
    vpool.set_default_pool(pool)
    pool_of = PoolOfDevice(())
    assert pool_of(0) is pool_of(0) is pool
    with pytest.raises(vpool.OutOfMemoryError):
        pool.allocate(5 * MIB)
    assert torch.asked == ["memory"]

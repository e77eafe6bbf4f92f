"""PyTorch with every tensor in a pool: its functions, compiled, and called as PyTorch calls them, but for PyTorch."""

import ctypes
import gc
import os
import sys
import threading

import pytest

import vpool
from tests.helpers import torch_fake
from tests.helpers.frameworks import fake_pool
from tests.helpers.pools import GIB, KIB, MIB, assert_whole, unchanged
from vpool._interface import numbered
from vpool.integrations import torch as plugin
from vpool.integrations import torch_shim

SIZES = ("all", "large_pool", "small_pool")

pytestmark = pytest.mark.skipif(torch_fake.compiler() is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torch")
    return folder, torch_fake.installed(folder)


@pytest.fixture
def torch(files, monkeypatch, tmp_path_factory):
    torch = torch_fake.torch_of(files[0])
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(files[0] / "cache"))
    monkeypatch.setattr(plugin, "_installed", False)
    return torch


class Calls:
    """What PyTorch does with the functions that it was given."""

    def __init__(self, torch, catcher):
        self.catcher = catcher
        self.alloc, self.free = torch.allocator.functions
        self.hooks = torch.allocator.hooks

    def lend(self, nbytes, stream=0, device=0):
        """0 and the block, or what was thrown and its text."""
        block = ctypes.c_void_p()
        text = ctypes.create_string_buffer(8192)
        function, size = ctypes.c_void_p(self.alloc), ctypes.c_size_t(nbytes)
        arguments = function, size, device, ctypes.c_void_p(stream), ctypes.byref(block), text
        status = self.catcher.catch_alloc(*arguments)
        return (status, text.value.decode()) if status else (0, block.value or 0)

    def take(self, block, stream=0, device=0):
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(self.free)
        function(block, 0, device, stream)

    def record(self, block, stream):
        hook = self.hooks["set_record_stream_fn"]
        ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(hook)(block, stream)

    def limit(self, fraction, device=0):
        hook = ctypes.c_void_p(self.hooks["set_memory_fraction_fn"])
        return self.catcher.catch_limit(hook, ctypes.c_double(fraction), device)


@pytest.fixture
def pool():
    with fake_pool() as pool:
        yield pool
        pool.check()


@pytest.fixture
def calls(torch, files, pool):
    plugin.install(pool, statistics=False)
    return Calls(torch, files[1])


def test_tensors_are_blocks(calls, pool):
    status, block = calls.lend(1000)
    assert (status, block % 256, pool.stats.requested_bytes) == (0, 0, 1000)
    calls.take(block)
    assert_whole(pool)
    assert calls.lend(0) == (0, 0)
    calls.take(0)


@pytest.mark.parametrize("nbytes", [GIB, 2**63 - 1])
def test_out_of_memory_is_thrown_with_the_diagnosis(calls, pool, nbytes):
    calls.lend(KIB)
    with unchanged(pool):
        status, text = calls.lend(nbytes)
    assert status == 1
    assert "Limit 4.00 MiB" in text
    assert "What would help" in text
    assert calls.lend(KIB)[0] == 0


@pytest.mark.parametrize(("nbytes", "device"), [(2**63, 0), (2**64 - 1, 0), (KIB, -1), (KIB, 64)])
def test_what_makes_no_sense_is_thrown_too(calls, pool, nbytes, device):
    with unchanged(pool):
        assert calls.lend(nbytes, device=device)[0] == 2


def test_garbage_and_callbacks_are_tried_before_memory_is_out(calls, pool):
    cycle = [pool.empty(3 * MIB)]
    cycle.append(cycle)
    del cycle
    status, block = calls.lend(3 * MIB)
    assert status == 0
    pool.on_pressure(lambda nbytes: calls.take(block))
    assert calls.lend(3 * MIB)[0] == 0


def test_a_pool_that_is_closed(torch, files):
    pool = fake_pool()
    plugin.install(pool, statistics=False)
    calls = Calls(torch, files[1])
    _, block = calls.lend(KIB)
    pool.close()
    assert calls.lend(KIB)[0] == 2
    calls.take(block)
    assert pool.stats.reserved_bytes == 0


def test_a_child_of_the_pools_process_calls_no_driver(calls, pool, torch):
    driver = pool.source.driver
    own = driver.create_stream(blocking=False)
    torch.current = (3, own)
    calls.take(calls.lend(KIB, own)[1], own)
    _, block = calls.lend(KIB, own)
    other = driver.create_stream(blocking=False)
    driver.begin_capture(other)  # from here on every stream is asked whether it captures
    before = {name: figures[0] for name, figures in driver.calls().items()}
    child = os.fork()
    if child == 0:
        status, text = calls.lend(KIB, own)
        calls.record(block, own)
        calls.record(block, 0)
        calls.take(block, own)
        after = {name: figures[0] for name, figures in driver.calls().items()}
        os._exit(0 if (status, "spawn" in text) == (2, True) and after == before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert driver.end_capture(other)
    calls.take(block, own)


def test_a_stream_of_pytorchs_own_is_waited_for_alone(calls, pool, torch):
    """It is never destroyed, so its number is good for as long as the pool, though no object holds it."""
    driver = pool.source.driver
    own, other = driver.create_stream(blocking=False), driver.create_stream(blocking=False)
    for number, handle in ((3, own), (5, other)):
        torch.current = (number, handle)
        calls.take(calls.lend(KIB, handle)[1], handle)
    _, block = calls.lend(4 * MIB, own)
    position = driver.queue_work(own)
    calls.take(block, own)
    assert calls.lend(4 * MIB, other) == (0, block)
    assert driver.ordered(other, own, position)
    assert pool.crossings["drains"] == 0


def test_a_stream_that_the_program_made_may_be_gone(calls, pool, torch):
    driver = pool.source.driver
    own = driver.create_stream(blocking=False)
    torch.current = (own, own)
    _, block = calls.lend(4 * MIB, own)
    position = driver.queue_work(own)
    number = driver.number_of(own)
    calls.take(block, own)
    driver.destroy_stream(own)
    torch.current = (0, 0)
    assert calls.lend(4 * MIB) == (0, block)
    assert driver.finished(number, position)
    assert driver.calls_on_dead_streams == 0


def test_a_number_that_came_back_is_another_stream(calls, pool, torch):
    driver = pool.source.driver
    own = driver.create_stream(blocking=False)
    torch.current = (own, own)
    _, block = calls.lend(4 * MIB, own)
    position = driver.queue_work(own)
    number = driver.number_of(own)
    calls.take(block, own)
    driver.destroy_stream(own)
    driver.create_stream(own, blocking=False)
    assert calls.lend(4 * MIB, own) == (0, block)
    assert driver.finished(number, position)


def test_a_hit_takes_neither_the_gil_nor_a_lock_of_python(calls, pool, torch):
    driver = pool.source.driver
    own = driver.create_stream()
    torch.current = (3, own)
    calls.take(calls.lend(KIB, own)[1], own)
    asked = []
    torch._C._cuda_getCurrentStream = lambda device: asked.append(device) or (3, device, 1)
    before = {name: figures[0] for name, figures in driver.calls().items()}
    for _ in range(100):
        calls.take(calls.lend(KIB, own)[1], own)
    after = {name: figures[0] for name, figures in driver.calls().items()}
    assert not asked
    assert {name for name in after if after[name] != before[name]} <= {"stream_captures"}


def test_a_stream_that_is_recorded_is_waited_for(calls, pool, torch):
    driver = pool.source.driver
    other = driver.create_stream(blocking=False)
    _, block = calls.lend(4 * MIB)
    calls.record(block, other)
    position = driver.queue_work(other)
    calls.take(block)
    assert pool.stats.pending_bytes == 4 * MIB
    assert calls.lend(4 * MIB) == (0, block)
    assert driver.ordered(0, other, position)


@pytest.mark.parametrize("address", [0, 12345, 2**63])
def test_others_memory_is_not_recorded(calls, pool, address):
    with unchanged(pool):
        calls.record(address, 0)
        calls.record(address, pool.source.driver.create_stream())
        calls.take(address)


def test_a_graph_has_memory_of_its_own(calls, pool, torch):
    driver = pool.source.driver
    own = driver.create_stream()
    torch.current = (3, own)
    calls.take(calls.lend(KIB, own)[1], own)
    id = driver.begin_capture(own)
    _, block = calls.lend(KIB, own)
    calls.take(block, own)
    assert calls.lend(KIB, own) == (0, block)
    calls.take(block, own)
    assert driver.end_capture(own)
    assert pool.captures == (id,)
    assert calls.lend(KIB, own)[1] != block
    driver.destroy_graph(id)
    assert pool.captures == ()


def test_recordings_and_tags_go_on(calls, pool):
    with pool.record() as trace, vpool.tag("torch"):
        calls.take(calls.lend(KIB)[1])
    assert len(trace.op) == 2


def test_tags_and_a_quota(calls, pool):
    """Tensors are tagged, known stream or not, unless the program has a tag of its own."""
    pool.limit("torch", 4 * KIB)
    blocks = [calls.lend(KIB)[1] for _ in range(3)]  # the first one meets the stream
    with vpool.tag("mine"):
        blocks.append(calls.lend(2 * KIB)[1])
    rows = {row["tag"]: row["requested_bytes"] for row in pool.inspect().tags}
    assert rows == {"torch": 3 * KIB, "mine": 2 * KIB}
    with unchanged(pool):
        status, text = calls.lend(2 * KIB)
        assert (status, "torch" in text) == (1, True)
    assert vpool.tag.current() is None
    pool.limit("torch", None)
    blocks.append(calls.lend(2 * KIB)[1])
    for block in blocks:
        calls.take(block)
    assert_whole(pool)


def test_debug_modes(torch, files):
    with fake_pool(debug=("guard", "sites")) as pool:
        plugin.install(pool, statistics=False)
        calls = Calls(torch, files[1])
        status, block = calls.lend(1000)
        assert status == 0
        calls.record(block, 0)
        ctypes.memset(block, 1, 1000)
        calls.take(block)
        assert pool.stats.requested_bytes == 0


def test_torch_allocator_already_initialised(torch, files, pool):
    """A program that used CUDA is told so and loses nothing; one call more is harmless, and other pools are not."""
    torch.cuda.is_initialized = lambda: True
    with pytest.raises(RuntimeError, match="call install\\(\\) before it does"):
        plugin.install(pool)
    assert (torch.allocator, hasattr(torch.cuda, "memory_stats")) == (None, False)
    torch.cuda.is_initialized = lambda: False
    plugin.install(pool)
    first = torch.allocator
    torch.cuda.is_initialized = lambda: True
    plugin.install(pool)
    plugin.install()
    with fake_pool() as other, pytest.raises(RuntimeError, match="other pools already"):
        plugin.install(other)
    assert torch.allocator is first
    calls = Calls(torch, files[1])
    calls.take(calls.lend(KIB)[1])
    assert pool.stats.frees == 1


def test_threads(calls, pool, torch):
    driver = pool.source.driver
    streams = [driver.create_stream() for _ in range(4)]
    torch.current = (0, 0)

    def work(stream):
        for _ in range(300):
            status, block = calls.lend(KIB, stream)
            assert status == 0
            calls.take(block, stream)

    threads = [threading.Thread(target=work, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (pool.stats.allocated_bytes, pool.stats.frees) == (0, 1200)


def test_emptying_the_cache_trims(calls, pool):
    block = calls.lend(MIB)[1]
    calls.take(block)
    reset = ctypes.CFUNCTYPE(None)(calls.hooks["set_reset_fn"])
    reset()
    assert pool.stats.reserved_bytes == 0
    pool.close()
    reset()


def test_a_fraction_is_a_limit(calls, pool):
    assert calls.limit(2 / 64) == 0
    assert pool.inspect().limit_bytes == 2 * MIB
    calls.lend(2 * MIB)
    with unchanged(pool):
        assert calls.limit(1 / 64) == 1


def test_a_device_without_a_pool_has_its_default_pool(calls, pool, no_default_pools):
    with fake_pool(device=1, driver=pool.source.driver) as second:
        vpool.set_default_pool(second)
        _, block = calls.lend(KIB, device=1)
        assert second.stats.requested_bytes == KIB
        calls.take(block, device=1)
        assert_whole(second)


def test_statistics(torch, files, pool):
    plugin.install(pool)
    calls = Calls(torch, files[1])
    block = calls.lend(1000)[1]
    for stats in (torch.cuda.memory_stats(), torch.cuda.memory.memory_stats(0)):
        assert stats["allocated_bytes.all.current"] == stats["allocated_bytes.all.peak"] == 1024
        assert (stats["requested_bytes.all.current"], stats["reserved_bytes.all.current"]) == (1000, MIB)
        assert (stats["allocation.all.current"], stats["num_ooms"]) == (1, 0)
        assert (stats["active_bytes.all.current"], stats["inactive_split_bytes.all.peak"]) == (1024, MIB - 1024)
        assert stats["segment.small_pool.freed"] == 0
    calls.take(block)
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0


def test_statistics_have_every_key_of_pytorchs_own(torch, pool):
    """``torch.cuda.memory_summary``, which needs a build of PyTorch for CUDA, takes each to be there."""
    plugin.install(pool)
    by_size = (
        "allocation segment active inactive_split allocated_bytes reserved_bytes active_bytes inactive_split_bytes"
    )
    counted = [f"{one}.{size}" for one in f"{by_size} requested_bytes".split() for size in SIZES]
    counted += ["oversize_allocations", "oversize_segments"]
    numbers = "num_alloc_retries num_ooms num_oom_rejections num_sync_all_streams num_device_alloc num_device_free"
    keys = {*numbers.split(), "max_split_size"}
    keys |= {f"{one}.{what}" for one in counted for what in ("current", "peak", "allocated", "freed")}
    stats = torch.cuda.memory_stats()
    assert set(stats) == keys
    assert all(type(figure) is int for figure in stats.values())


def test_it_can_be_installed_once_and_in_time(torch, pool):
    torch.cuda.is_initialized = lambda: True
    with pytest.raises(RuntimeError, match="has used CUDA already"):
        plugin.install(pool)
    torch.cuda.is_initialized = lambda: False
    plugin.install(pool, statistics=False)
    with fake_pool() as other, pytest.raises(RuntimeError, match="already"):
        plugin.install(other)
    with pytest.raises(RuntimeError, match="no memory pools"):
        plugin.mem_pool(pool)


def test_pools_that_are_served_stay(torch, files):
    plugin.install(fake_pool(), statistics=False)
    calls = Calls(torch, files[1])
    gc.collect()
    assert calls.lend(KIB)[0] == 0
    with pytest.raises(TypeError):
        numbered.serve(None, 0)
    # Not by a module, which the end of the interpreter clears while PyTorch still frees.
    kept = numbered.Numbered(numbered.served(0), None)
    before = sys.getrefcount(kept)
    numbered.serve(kept, 63)
    assert sys.getrefcount(kept) == before + 1


class TestCompiling:
    def test_once_for_each_version(self, torch, monkeypatch):
        torch_shim.load(torch)
        monkeypatch.setenv("CXX", "/no/such/compiler")
        torch_shim.load(torch)
        torch.__version__ = "0.1"
        with pytest.raises((RuntimeError, OSError)):
            torch_shim.load(torch)

    def test_no_compiler(self, torch, monkeypatch):
        torch.__version__ = "0.2"
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", "/nowhere")
        with pytest.raises(RuntimeError, match=r"no C\+\+ compiler: install one, or use .*mem_pool"):
            torch_shim.load(torch)

    def test_headers_that_do_not_compile(self, torch, tmp_path):
        torch.__file__ = str(tmp_path / "torch" / "__init__.py")
        with pytest.raises(RuntimeError, match="do not compile"):
            torch_shim.load(torch)

    def test_a_folder_that_cannot_be_written(self, torch, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr("tempfile.tempdir", None)
        assert torch_shim.load(torch)
        assert [name for name in os.listdir(tmp_path) if name.startswith("vpool-")]

"""CuPy, Numba, cuda.core and RMM in a pool, on a real device: the same results, from the pool's memory."""

import gc
import subprocess
import sys
import threading

import numpy as np
import pytest

import vpool
from tests.helpers.pools import GIB, MIB, run_cleanly
from vpool.errors import SourceError

pytestmark = pytest.mark.gpu

try:
    vpool.sources.Cuda()
except SourceError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(params=["cuda", "cuda-vmm"])
def pool(request):
    pool = vpool.Pool(vpool.Dynamic(initial="64MiB", limit="1GiB"), source=request.param)
    yield pool
    gc.collect()
    pool.check()
    assert pool.inspect().live_blocks == 0
    pool.close()


class TestCupy:
    @pytest.fixture(params=["allocator", "c_allocator"])
    def cupy(self, pool, request):
        cupy = pytest.importorskip("cupy")
        from vpool.integrations import cupy as plugin

        cupy.get_default_memory_pool().free_all_blocks()
        with cupy.cuda.using_allocator(getattr(plugin, request.param)(pool)):
            yield cupy
        cupy.cuda.Device().synchronize()

    @pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "u1", "c8"])
    @pytest.mark.parametrize("shape", [(1000,), (37, 53), (4, 5, 6), (1,), (0, 3)])
    def test_operations_are_those_of_numpy(self, cupy, pool, dtype, shape):
        rng = np.random.default_rng(len(shape) * 7 + ord(dtype[0]))
        left, right = ((rng.random(shape) * 100).astype(dtype) for _ in range(2))
        operations = [
            lambda xp, a, b: a + b,
            lambda xp, a, b: a * b - a,
            lambda xp, a, b: xp.where(a.real > b.real, a, b),
            lambda xp, a, b: xp.concatenate([a, b]),
            lambda xp, a, b: a[::2].copy(),
            lambda xp, a, b: a.T.reshape(-1),
            lambda xp, a, b: xp.stack([a, b]).sum(axis=0),
            lambda xp, a, b: xp.broadcast_to(a, (2, *a.shape)).copy(),
        ]
        for operation in operations:
            expected = operation(np, left, right)
            found = operation(cupy, cupy.asarray(left), cupy.asarray(right)).get()
            assert found.dtype == expected.dtype
            np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert (pool.stats.allocations > 0) == bool(left.size)  # no memory for no elements

    def test_sorting_and_grouping(self, cupy, pool):
        keys = np.random.default_rng(0).integers(0, 1000, 1_000_000)
        found, counts = cupy.unique(cupy.asarray(keys), return_counts=True)
        expected, expected_counts = np.unique(keys, return_counts=True)
        assert (found.get() == expected).all()
        assert (counts.get() == expected_counts).all()
        assert (cupy.sort(cupy.asarray(keys)).get() == np.sort(keys)).all()
        del found, counts

    def test_streams_and_threads(self, cupy, pool):
        from vpool.integrations import cupy as plugin

        wrong = []

        def work(seed):
            with cupy.cuda.using_allocator(plugin.allocator(pool)), cupy.cuda.Stream(non_blocking=True) as stream:
                for turn in range(200):
                    array = cupy.full(100_000 + turn, seed * 1000 + turn, "i8")
                    array = array + 1
                    if int(array.sum()) != (seed * 1000 + turn + 1) * len(array):
                        wrong.append((seed, turn))
                stream.synchronize()
                pool.forget_stream(stream)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_out_of_memory(self, cupy, pool):
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match="Limit") as caught:
            cupy.empty(2 * GIB, "u1")
        assert caught.value.requested == 2 * GIB
        caught = None
        assert int(cupy.ones(1000).sum()) == 1000

    def test_a_recorded_stream_is_waited_for(self, cupy, pool):
        from vpool.integrations import cupy as plugin

        side = cupy.cuda.Stream(non_blocking=True)
        for turn in range(100):
            array = cupy.full(MIB, turn % 100, "u1")
            cupy.cuda.get_current_stream().synchronize()
            with side:
                total = array.sum(dtype="i8")
                for _ in range(20):
                    total = total + array.sum(dtype="i8")
            plugin.record_stream(array, side)
            del array
            cupy.full(MIB, 255, "u1")
            side.synchronize()
            assert int(total) == 21 * MIB * (turn % 100)
            del total

    def test_pinned_memory(self, cupy):
        from vpool.integrations import cupy as plugin

        with vpool.Pool(vpool.Dynamic(initial="16MiB", limit="64MiB"), source="pinned") as pinned:
            try:
                cupy.cuda.set_pinned_memory_allocator(plugin.pinned_allocator(pinned))
                array = cupy.arange(1_000_000)
                assert (array.get() == np.arange(1_000_000)).all()
                assert (cupy.asarray(np.arange(3000)).get() == np.arange(3000)).all()
                assert pinned.stats.allocations > 0
            finally:
                cupy.cuda.set_pinned_memory_allocator(cupy.get_default_pinned_memory_pool().malloc)
            del array

    def test_a_graph(self, cupy, pool):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            source = cupy.arange(1000, dtype="f4")
            (source * 2).sum()  # kernels are compiled outside of the capture
            stream.synchronize()
            stream.begin_capture()
            doubled = source * 2
            graph = stream.end_capture()
            doubled.fill(0)
            others = [cupy.full(1000, 5, "f4") for _ in range(10)]
            graph.launch(stream)
            stream.synchronize()
            assert (doubled.get() == np.arange(1000, dtype="f4") * 2).all()
            assert all((other == 5).all() for other in others)
            del source, doubled, others, graph
            pool.forget_stream(stream)


NUMBA = """
import numpy as np
if not hasattr(np, "row_stack"):
    np.row_stack = np.vstack  # without it numba-cuda 0.30 compiles no kernel: NumPy 2.5 has it no more
import vpool
from vpool.integrations import numba as plugin
from tests.helpers.pools import GIB

import warnings
warnings.simplefilter("ignore")  # of grids that are small
pool = vpool.Pool(vpool.Dynamic(initial="64MiB", limit="1GiB"), source={source!r})
plugin.install(pool)
from numba import cuda

@cuda.jit
def add(left, right, result):
    at = cuda.grid(1)
    if at < result.size:
        result[at] = left[at] + right[at]

{body}
"""


@pytest.mark.parametrize("source", ["cuda", "cuda-vmm"])
class TestNumba:
    """In processes of their own: a context keeps the memory manager that it was made with."""

    def run(self, source, body):
        pytest.importorskip("numba.cuda")
        return run_cleanly(NUMBA.format(source=source, body=body), timeout=300)

    def test_a_loop_of_kernels(self, source):
        body = """
streams = [cuda.stream() for _ in range(3)]
for turn in range(300):
    stream = streams[turn % 3]
    size = 10_000 + 100 * (turn % 17)
    left = cuda.to_device(np.full(size, turn, "i8"), stream=stream)
    right = cuda.to_device(np.arange(size), stream=stream)
    result = cuda.device_array(size, "i8", stream=stream)
    add[-(-size // 256), 256, stream](left, right, result)
    stream.synchronize()
    assert (result.copy_to_host() == turn + np.arange(size)).all()
with cuda.defer_cleanup():
    for _ in range(20):
        cuda.device_array(1000)
assert pool.stats.allocations >= 900, pool.stats
del left, right, result
pool.check()
print("end")
"""
        assert self.run(source, body) == "end\n"

    def test_results_that_other_streams_would_spoil(self, source):
        """Each array is dropped while a kernel still reads it, on a stream that the pool does not know."""
        body = """
streams = [cuda.stream() for _ in range(4)]
size = 1_000_000
results = []
for turn in range(60):
    stream = streams[turn % 4]
    left = cuda.to_device(np.full(size, turn, "i8"), stream=stream)
    right = cuda.to_device(np.full(size, 1000, "i8"), stream=stream)
    result = cuda.device_array(size, "i8", stream=stream)
    add[-(-size // 256), 256, stream](left, right, result)
    results.append(result)
    del left, right
cuda.synchronize()
for turn, result in enumerate(results):
    assert (result.copy_to_host() == turn + 1000).all(), turn
print("end")
"""
        assert self.run(source, body) == "end\n"

    def test_out_of_memory_and_a_reset(self, source):
        body = """
from numba.cuda.cudadrv.driver import CudaAPIError
try:
    cuda.device_array(2 * GIB, "u1")
except CudaAPIError as error:
    print(error.code, isinstance(error, vpool.OutOfMemoryError), "Limit" in str(error))
print(cuda.device_array(1000).size, cuda.current_context().get_memory_info().total > GIB)
kept = cuda.device_array(1000)
cuda.close()
print(pool.closed)
plugin.install()
print((cuda.to_device(np.arange(10)).copy_to_host() == np.arange(10)).all())
"""
        assert self.run(source, body).split() == ["2", "True", "True", "1000", "True", "True", "True"]


class TestCudaCore:
    @pytest.fixture
    def device(self):
        core = pytest.importorskip("cuda.core")
        device = core.Device()
        device.set_current()
        return device

    def test_buffers(self, device, pool):
        from vpool.integrations import cuda_core

        resource = cuda_core.resource(pool)
        stream, other = device.create_stream(), device.create_stream()
        buffer = resource.allocate(MIB, stream=stream)
        buffer.fill(7, stream=stream)
        copy = resource.allocate(MIB, stream=stream)
        buffer.copy_to(copy, stream=stream)
        stream.sync()
        assert (_bytes_of(pool, copy) == 7).all()
        assert (buffer.is_device_accessible, buffer.is_host_accessible) == (True, False)
        copy.close(other)
        buffer.close()
        assert pool.stats.allocated_bytes == 0
        pool.forget_stream(stream)
        pool.forget_stream(other)

    def test_it_can_be_the_devices_own(self, device, pool):
        from vpool.integrations import cuda_core

        before = device.memory_resource
        try:
            device.memory_resource = cuda_core.resource(pool)
            buffer = device.allocate(1000, stream=device.default_stream)
            assert pool.stats.requested_bytes == 1000
            del buffer
            assert pool.stats.requested_bytes == 0
            with pytest.raises(vpool.OutOfMemoryError):
                device.allocate(2 * GIB, stream=device.default_stream)
        finally:
            device.memory_resource = before

    def test_a_graph_builder_gets_memory_of_its_graph(self, device, pool):
        from vpool.integrations import cuda_core

        builder = device.create_graph_builder().begin_building()
        buffer = cuda_core.resource(pool).allocate(1000, stream=builder)
        assert len(pool.captures) == 1
        buffer.fill(1, stream=builder)
        builder.end_building()
        buffer.close(device.default_stream)
        builder.close()


def _bytes_of(pool, other):
    """What cuda.core has, in memory that NumPy reads."""
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.UnownedMemory(int(other.handle), other.size, other, pool.device)
    return cupy.ndarray((other.size,), "u1", cupy.cuda.MemoryPointer(memory, 0)).get()


class TestRmm:
    @pytest.fixture
    def rmm(self):
        return pytest.importorskip("rmm")

    def test_buffers(self, rmm, pool):
        from vpool.integrations import rmm as plugin

        before = rmm.mr.get_current_device_resource()
        try:
            plugin.install(pool)
            buffer = rmm.DeviceBuffer.to_device(bytes(range(256)) * 1000)
            assert pool.stats.requested_bytes >= 256_000
            assert buffer.copy_to_host().tobytes() == bytes(range(256)) * 1000
            with pytest.raises(MemoryError):
                rmm.DeviceBuffer(size=2 * GIB)
            stream = rmm.pylibrmm.stream.Stream()
            side = rmm.DeviceBuffer(size=MIB, stream=stream)
            del side, buffer
            stream.synchronize()
            assert pool.stats.requested_bytes == 0
        finally:
            rmm.mr.set_current_device_resource(before)

    @pytest.mark.parametrize("kind", ["CudaMemoryResource", "CudaAsyncMemoryResource"])
    def test_it_gives_a_pool_its_segments(self, rmm, kind):
        from vpool.integrations import rmm as plugin

        upstream = rmm.mr.StatisticsResourceAdaptor(getattr(rmm.mr, kind)())
        strategy = vpool.Dynamic(initial="64MiB", limit="1GiB")
        with vpool.Pool(strategy, source=plugin.source(upstream)) as pool:
            buffers = [pool.empty(10 * MIB) for _ in range(20)]
            assert upstream.allocation_counts.current_bytes == pool.stats.reserved_bytes >= 200 * MIB
            pool.check()
            with pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(2 * GIB)
            del buffers
            pool.trim()
            assert upstream.allocation_counts.current_bytes == pool.stats.reserved_bytes == 0


def test_caches_of_others_are_given_back_before_memory_is_out():
    """What CuPy and PyTorch keep for later is had, where a pool that serves CuPy finds no memory on the device."""
    pytest.importorskip("torch")
    pytest.importorskip("cupy")
    code = """
import warnings
warnings.simplefilter("ignore")
import cupy, torch, vpool
from vpool.integrations import cupy as plugin
pool = vpool.Pool(vpool.Dynamic(initial=0, limit=0.95), source="cuda")
plugin.install(pool)
free = torch.cuda.mem_get_info()[0]
kept = torch.empty(int(free * 0.6), dtype=torch.uint8, device="cuda")
del kept
assert torch.cuda.memory_reserved() > free // 2
array = cupy.empty(int(free * 0.6), "u1")
assert torch.cuda.memory_reserved() < free // 10
assert [row["tag"] for row in pool.inspect().tags if row["live_bytes"]] == ["cupy"]
print("end")
"""
    assert run_cleanly(code, timeout=300) == "end\n"


def test_an_unmodified_program_under_vpool_run(tmp_path):
    pytest.importorskip("cupy")
    program = tmp_path / "program.py"
    program.write_text("import cupy; print(int(cupy.arange(1000).sum()))")
    command = [sys.executable, "-m", "vpool", "run", "--record", tmp_path / "out.npz", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "499500\n")
    assert vpool.Trace.load(tmp_path / "out.npz").allocations > 0

"""Blocks in the hands of CuPy and PyTorch, on a real device: the same bytes, in the right order."""

import numpy as np
import pytest

import vpool
from tests.helpers.pools import MIB
from vpool.errors import SourceError
from vpool.integrations import numpy as arrays
from vpool.streams import HOST

pytestmark = pytest.mark.gpu

try:
    vpool.sources.Cuda()
except SourceError as error:
    pytest.skip(str(error), allow_module_level=True)

cupy = pytest.importorskip("cupy")

SPIN = 200_000_000  # clock cycles: about 0.1 s
DELAYED = r"""
extern "C" __global__ void delayed(unsigned char* bytes, unsigned long long count, int value, long long cycles) {
    long long started = clock64();
    while (clock64() - started < cycles) {}
    for (unsigned long long i = threadIdx.x; i < count; i += blockDim.x) bytes[i] = value;
}
"""


@pytest.fixture(scope="module")
def fill():
    """Queue a fill that begins late."""
    kernel = cupy.RawKernel(DELAYED, "delayed")

    def queue(ptr, nbytes, value, stream, cycles=SPIN):
        with stream:
            kernel((1,), (256,), (np.uint64(ptr), np.uint64(nbytes), np.int32(value), np.int64(cycles)))

    scratch = cupy.zeros(16, "u1")
    queue(scratch.data.ptr, 16, 0, cupy.cuda.Stream.null, 0)  # code is loaded at the first launch
    cupy.cuda.Device().synchronize()
    return queue


@pytest.fixture(params=["cuda", "cuda-vmm", "cuda-async", "managed"])
def pool(request):
    with vpool.Pool(vpool.Dynamic(initial="64MiB", limit="512MiB"), source=request.param) as pool:
        yield pool
        cupy.cuda.Device().synchronize()
        pool.check()


@pytest.fixture
def streams():
    return [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]


def test_cupy_by_dlpack_sees_what_the_buffers_stream_wrote(pool, streams, fill):
    buffer = pool.empty(MIB, stream=streams[0])
    fill(buffer.ptr, MIB, 7, streams[0])
    with streams[1]:
        array = cupy.from_dlpack(buffer)
        assert array.data.ptr == buffer.ptr
        assert int((array != 7).sum()) == 0
    with pytest.raises(BufferError):
        buffer.close()
    del array
    buffer.close()


def test_cupy_by_the_array_interface_sees_what_the_buffers_stream_wrote(pool, streams, fill):
    buffer = pool.empty(MIB, stream=streams[0])
    fill(buffer.ptr, MIB, 9, streams[0])
    with streams[1]:
        array = cupy.asarray(buffer)
        assert int((array != 9).sum()) == 0
    assert array.data.ptr == buffer.ptr


def test_a_block_is_not_lent_while_its_consumer_uses_it(streams, fill):
    with vpool.Pool(vpool.Fixed(MIB), source="cuda") as pool:
        buffer = pool.empty(MIB, stream=streams[0])
        with streams[1]:
            array = cupy.from_dlpack(buffer)
        fill(array.data.ptr, MIB, 1, streams[1])
        del array, buffer
        again = pool.empty(MIB, stream=streams[0])
        fill(again.ptr, MIB, 2, streams[0], 0)
        cupy.cuda.Device().synchronize()
        assert np.from_dlpack(again, device="cpu").tolist() == [2] * MIB


def test_numpy_gets_a_copy_once_the_work_is_complete(pool, streams, fill):
    buffer = pool.empty(MIB, stream=streams[0])
    fill(buffer.ptr, MIB, 5, streams[0])
    assert (np.from_dlpack(buffer, device="cpu") == 5).all()


@pytest.mark.torch
def test_torch_by_dlpack_and_back(pool, streams, fill):
    torch = pytest.importorskip("torch")
    if pool.source.name == "managed":
        pytest.skip("PyTorch takes no managed memory by DLPack")
    buffer = pool.empty(MIB, stream=streams[0])
    fill(buffer.ptr, MIB, 3, streams[0])
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensor = torch.from_dlpack(buffer)
        assert tensor.data_ptr() == buffer.ptr
        assert int((tensor != 3).sum()) == 0
    torch.cuda.synchronize()
    assert torch.as_tensor(buffer, device="cuda").data_ptr() == buffer.ptr
    del buffer
    assert int((tensor != 3).sum()) == 0
    del tensor


def test_a_pinned_array_is_complete_before_the_host_has_it(streams):
    with vpool.Pool(vpool.Fixed(MIB), source="pinned") as pool:
        for value in range(20):
            array = arrays.full(MIB, value, "u1", pool=pool)
            with streams[value % 2]:
                copy = cupy.empty(MIB, "u1")
                copy.set(array, stream=streams[value % 2])
                arrays.record_stream(array, streams[value % 2])
                del array
                assert int((copy != value).sum()) == 0
        pool.check()


def test_a_capture_is_not_invalidated_by_a_block_for_the_host(streams, fill):
    with vpool.Pool(vpool.Dynamic(initial=0, limit="64MiB"), source="cuda") as pool:
        other = pool.empty(MIB, stream=streams[1])
        fill(other.ptr, MIB, 1, streams[1])
        other.close()
        with streams[0]:
            streams[0].begin_capture()
            inside = pool.empty(MIB, stream=streams[0])
            fill(inside.ptr, MIB, 4, streams[0], 0)
            blocks = [pool.empty(MIB, stream=HOST) for _ in range(3)]
            assert all(len(np.asarray([one.ptr])) for one in blocks)
            graph = streams[0].end_capture()
        graph.launch(streams[0])
        streams[0].synchronize()
        assert (np.from_dlpack(inside, device="cpu") == 4).all()
        inside.close()
        for one in blocks:
            one.close()


@pytest.mark.parametrize(
    "give", [cupy.from_dlpack, cupy.asarray, lambda buffer: cupy.asarray(np.from_dlpack(buffer, device="cpu"))]
)
def test_memory_of_a_graph_holds_what_its_last_launch_wrote(pool, streams, fill, give):
    scratch = cupy.empty(MIB, "u1")
    with streams[0]:
        streams[0].begin_capture()
        inside = pool.empty(MIB, stream=streams[0])
        fill(inside.ptr, MIB, 4, streams[0])
        graph = streams[0].end_capture()
    graph.launch(streams[1])
    with cupy.cuda.Stream(non_blocking=True) as reader:
        array = give(inside)
        cupy.copyto(scratch, array)
        reader.synchronize()
        assert (scratch.get() == 4).all()
        del array
    inside.close()
    cupy.cuda.Device().synchronize()
    del graph

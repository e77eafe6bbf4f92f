"""The CUDA source on a real device, end to end."""

import ctypes

import pytest

import vpool
from tests.helpers.device import assert_follows, held
from tests.helpers.pools import GIB, MIB, assert_whole, run_cleanly, unchanged
from tests.helpers.traces import ALL, recorded
from vpool.errors import SourceError

pytestmark = pytest.mark.gpu

try:
    vpool.sources.Cuda()
except SourceError as error:
    pytest.skip(str(error), allow_module_level=True)

cudart = pytest.importorskip("cuda.bindings.runtime")


def checked(answer):
    status, *values = answer
    assert status == cudart.cudaError_t.cudaSuccess
    return values[0] if len(values) == 1 else values


def free_on_device():
    return checked(cudart.cudaMemGetInfo())[0]


def device_count():
    return checked(cudart.cudaGetDeviceCount())


def cuda_pool(**arguments):
    return vpool.Pool(vpool.Dynamic(**{"initial": "64MiB", **arguments}), source="cuda", device=0)


def write(ptr, content):
    host = (ctypes.c_char * len(content)).from_buffer_copy(content)
    kind = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
    checked(cudart.cudaMemcpy(ptr, ctypes.addressof(host), len(content), kind))


def read(ptr, nbytes):
    host = (ctypes.c_char * nbytes)()
    checked(cudart.cudaMemcpy(ctypes.addressof(host), ptr, nbytes, cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost))
    return bytes(host)


def test_the_default_source_is_cuda():
    with vpool.Pool() as pool:
        assert pool.source.name == "cuda"
        assert pool.inspect().limit_bytes > GIB


@pytest.mark.parametrize("nbytes", [1, 256, 5000, MIB + 1, 100 * MIB])
def test_blocks_are_device_memory_that_keeps_what_is_written(nbytes):
    with cuda_pool() as pool:
        pattern = bytes(range(251)) * (nbytes // 251 + 1)
        blocks = [pool.allocate(nbytes) for _ in range(3)]
        for number, ptr in enumerate(blocks):
            assert ptr % 256 == 0
            write(ptr, pattern[number : number + nbytes])
        for number, ptr in enumerate(blocks):
            assert read(ptr, nbytes) == pattern[number : number + nbytes]
            pool.deallocate(ptr)
        assert_whole(pool)


def test_close_gives_memory_back_to_the_device():
    kept = []

    def take():
        pool = cuda_pool(initial=0)
        kept.extend([pool.empty(GIB), pool])

    def give():
        kept.pop(0).close()
        kept.pop().close()

    before = held(vpool.sources.Cuda().driver)
    assert_follows(free_on_device, take, give, -GIB)
    assert held(vpool.sources.Cuda().driver) == before


def test_the_limit_is_out_of_memory_with_figures():
    with cuda_pool(initial=0, limit="64MiB") as pool:
        pool.allocate(60 * MIB)
        with unchanged(pool), pytest.raises(vpool.OutOfMemoryError, match=r"Limit 64\.0 MiB") as caught:
            pool.allocate(10 * MIB)
        assert caught.value.requested == 10 * MIB
        pool.allocate(4 * MIB)


def test_a_refusal_of_the_device_leaves_no_error_behind():
    """A failed cudaMalloc must not show up in the next, unrelated call."""
    total = checked(cudart.cudaMemGetInfo())[1]
    with cuda_pool(initial=0, limit=2**50) as pool:
        with unchanged(pool), pytest.raises(vpool.OutOfMemoryError, match="refused"):
            pool.allocate(2 * total)
        assert cudart.cudaGetLastError()[0] == cudart.cudaError_t.cudaSuccess
        pool.allocate(MIB)


def test_the_current_device_stays_as_it_was():
    current = checked(cudart.cudaGetDevice())
    for device in range(device_count()):
        with vpool.Pool(source="cuda", device=device) as pool:
            ptr = pool.allocate(MIB)
            assert checked(cudart.cudaPointerGetAttributes(ptr)).device == device
            pool.inspect()
            pool.deallocate(ptr)
            assert checked(cudart.cudaGetDevice()) == current
        assert checked(cudart.cudaGetDevice()) == current


@pytest.mark.parametrize("beyond", [0, 1, 999])
def test_a_device_that_is_not_there(beyond):
    with pytest.raises(ValueError, match=f"has {device_count()}"):
        vpool.Pool(source="cuda", device=device_count() + beyond)


def test_a_block_of_one_stream_freed_on_another_is_pending_until_its_work_is_complete():
    stream = checked(cudart.cudaStreamCreate())
    with cuda_pool() as pool:
        ptr = pool.allocate(64 * MIB, stream=int(stream))
        checked(cudart.cudaMemsetAsync(ptr, 1, 64 * MIB, stream))
        pool.deallocate(ptr, stream=0)
        assert pool.stats.pending_bytes == 64 * MIB
        pool.trim()  # waits for the device
        assert pool.stats.pending_bytes == 0
        assert cudart.cudaStreamQuery(stream)[0] == cudart.cudaError_t.cudaSuccess
    checked(cudart.cudaStreamDestroy(stream))


@pytest.mark.parametrize("name", ["two_streams", "resnet_train"])
def test_a_replay_keeps_every_byte(name):
    trace = recorded(name).scaled(512 * MIB)
    result = vpool.replay(trace, source="cuda", capacity="2GiB", patterns=True)
    assert result.oom is None
    assert result.verified_bytes == int(trace.bytes[trace.op == 0].sum())


@pytest.mark.parametrize("name", ALL)
def test_every_recorded_trace_replays(name):
    trace = recorded(name).scaled(int(free_on_device() * 0.4))
    result = vpool.replay(trace, source="cuda")
    assert result.oom is None
    assert result.peak_reserved_bytes >= result.peak_live_bytes


@pytest.mark.parametrize(
    "ending",
    [
        "buffer = vpool.empty(1 << 20); ptr = vpool.allocate(100)",
        "pool = vpool.Pool(source='cuda'); buffers = [pool.empty(1000) for _ in range(99)]; pool.close()",
        "pool = vpool.Pool(source='cuda'); cycle = [pool, pool.empty(1000)]; cycle.append(cycle); del pool, cycle",
        "from cuda.bindings import runtime; buffer = vpool.empty(1000); runtime.cudaDeviceReset()",
    ],
)
def test_the_interpreter_ends_quietly(ending):
    assert run_cleanly(f"import vpool\n{ending}\nprint('end')") == "end\n"

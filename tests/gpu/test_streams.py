"""Stream order on a real device: what is reused, what waits, and streams that are destroyed."""

import threading

import numpy as np
import pytest

import vpool
from tests.helpers.pools import KIB, MIB, assert_whole, run_python
from vpool.errors import SourceError

pytestmark = pytest.mark.gpu

try:
    vpool.sources.Cuda()
except SourceError as error:
    pytest.skip(str(error), allow_module_level=True)

cudart = pytest.importorskip("cuda.bindings.runtime")
cupy = pytest.importorskip("cupy")

SPIN = 200_000_000  # clock cycles: about 0.1 s
WORDS = MIB // 4
KERNELS = r"""
extern "C" __global__ void spin_and_fill(unsigned* words, unsigned long long count, unsigned value, long long cycles) {
    long long started = clock64();
    while (clock64() - started < cycles) {}
    for (unsigned long long i = threadIdx.x; i < count; i += blockDim.x) words[i] = value;
}
extern "C" __global__ void count_others(const unsigned* words, unsigned long long count, unsigned value,
                                        unsigned long long* others, long long cycles) {
    long long started = clock64();
    while (clock64() - started < cycles) {}
    for (unsigned long long i = threadIdx.x; i < count; i += blockDim.x)
        if (words[i] != value) atomicAdd(others, 1ull);
}
"""


@pytest.fixture(scope="module")
def kernels():
    module = cupy.RawModule(code=KERNELS)
    kernels = module.get_function("spin_and_fill"), module.get_function("count_others")
    # Code is loaded at the first launch, which waits for the device.
    scratch = cupy.zeros(4, cupy.uint64)
    kernels[0]((1,), (32,), (scratch, np.uint64(1), np.uint32(0), np.int64(0)))
    kernels[1]((1,), (32,), (scratch, np.uint64(1), np.uint32(0), scratch, np.int64(0)))
    cupy.cuda.Device().synchronize()
    return kernels


@pytest.fixture
def fill(kernels):
    """Queue a fill of a block, which begins after some clock cycles."""

    def queue(ptr, value, stream, cycles=0):
        with stream:
            kernels[0]((1,), (256,), (np.uint64(ptr), np.uint64(WORDS), np.uint32(value), np.int64(cycles)))

    return queue


@pytest.fixture
def others(kernels):
    """Queue a count of the words that differ; the counter, to be read once the device is done."""

    def queue(ptr, value, stream, cycles=0):
        counter = cupy.zeros(1, cupy.uint64)
        cupy.cuda.get_current_stream().synchronize()
        with stream:
            arguments = np.uint64(ptr), np.uint64(WORDS), np.uint32(value), counter, np.int64(cycles)
            kernels[1]((1,), (256,), arguments)
        return counter

    return queue


@pytest.fixture
def pool():
    """A pool of one segment that cannot grow: what two streams use, they have to share."""
    pool = vpool.Pool(vpool.Dynamic(initial=MIB, limit=MIB), source="cuda")
    yield pool
    cupy.cuda.Device().synchronize()
    pool.check()
    pool.close()


@pytest.fixture
def streams():
    return [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]


def made_calls(pool):
    """Driver calls so far, but for the question whether a stream captures."""
    return sum(figures[0] for name, figures in pool.source.driver.calls().items() if name != "stream_captures")


def questions(pool):
    """How often the driver was asked whether a stream captures: nothing else tells of a capture."""
    return pool.source.driver.calls()["stream_captures"][0]


def is_idle(stream):
    return cudart.cudaStreamQuery(stream.ptr)[0] == cudart.cudaError_t.cudaSuccess


def test_what_cuda_says_of_a_destroyed_handle():
    """An error at best: the driver crashed where this was first run, so vpool never touches such a handle."""
    found = run_python(
        """
from cuda.bindings import runtime
_, stream = runtime.cudaStreamCreate()
_, before = runtime.cudaStreamGetId(stream)
handle = int(stream)
runtime.cudaStreamDestroy(stream)
status, after = runtime.cudaStreamGetId(handle)
print(before, status.name, after, runtime.cudaGetLastError()[0].name)
_, again = runtime.cudaStreamCreate()
print("the next stream has", "the same" if int(again) == handle else "another", "handle and id",
      runtime.cudaStreamGetId(again)[1])
"""
    )
    print(found.returncode, found.stdout, found.stderr)
    assert (
        found.returncode < 0
        or "cudaErrorInvalidResourceHandle" in found.stdout
        or ("cudaErrorContextIsDestroyed" in found.stdout)
    )


@pytest.mark.parametrize("captures", [True, False])
def test_reuse_on_the_same_stream_makes_no_driver_call(streams, captures):
    own = streams[0]
    with vpool.Pool(vpool.Dynamic(initial="4MiB"), captures=captures) as pool:
        pool.empty(KIB).close()
        first = pool.allocate(MIB, stream=own)
        pool.deallocate(first)
        before, asked = made_calls(pool), questions(pool)
        for _ in range(1000):
            assert pool.allocate(MIB, stream=own) == first
            pool.deallocate(first)
            with pool.empty(MIB, stream=own) as buffer:
                assert buffer.ptr == first
        assert made_calls(pool) == before
        assert questions(pool) - asked == (2000 if captures else 0)
        for _ in range(1000):
            pool.empty(KIB).close()
        assert questions(pool) - asked == (2000 if captures else 0), "the default stream never captures"


def test_a_free_on_another_stream_and_a_record_make_no_driver_call(pool, streams):
    own, other = streams
    pool.deallocate(pool.allocate(KIB, stream=own))
    pool.deallocate(pool.allocate(KIB, stream=other))
    kept = pool.allocate(KIB, stream=own)
    used = pool.allocate(KIB, stream=own)
    before = made_calls(pool)
    pool.record_stream(used, other)
    pool.deallocate(used)
    asked = questions(pool)
    pool.deallocate(kept, stream=other)
    assert made_calls(pool) == before
    assert questions(pool) == asked + 1
    assert pool.stats.pending_bytes == 2 * KIB


def test_reuse_from_another_stream_comes_after_the_first_one_s_work(pool, streams, fill, others):
    own, other = streams
    ptr = pool.allocate(MIB, stream=own)
    fill(ptr, 1, own, cycles=SPIN)
    pool.deallocate(ptr)
    assert pool.allocate(MIB, stream=other) == ptr
    assert not is_idle(own), "the block was waited for on the host"
    fill(ptr, 2, other)
    wrong = others(ptr, 2, other)
    cupy.cuda.Device().synchronize()
    assert int(wrong[0]) == 0, "the first stream wrote after the second"
    assert pool.crossings["waits"] == 1
    assert pool.crossings["drains"] == 0
    pool.deallocate(ptr)


def test_a_block_freed_on_another_stream_is_that_one_s_at_once(pool, streams, fill, others):
    own, other = streams
    ptr = pool.allocate(MIB, stream=own)
    fill(ptr, 1, own)
    other.wait_event(own.record())
    wrong = others(ptr, 1, other, cycles=SPIN)
    own.synchronize()  # proved complete by then also under a tool that slows kernels
    # As under a tool that runs one kernel at a time; then the block may go home at once.
    done = other.done
    pool.deallocate(ptr, stream=other)
    assert pool.allocate(MIB, stream=other) == ptr
    assert pool.crossings["waits"] == 0 or done
    pool.deallocate(ptr)
    # Back on the first stream it comes after the reader's work.
    assert pool.allocate(MIB, stream=own) == ptr
    fill(ptr, 2, own)
    cupy.cuda.Device().synchronize()
    assert int(wrong[0]) == 0
    pool.deallocate(ptr)


@pytest.mark.parametrize("by_buffer", [False, True])
def test_record_stream_protects_a_reader(pool, streams, fill, others, by_buffer):
    own, other = streams
    buffer = pool.empty(MIB, stream=own)
    ptr = buffer.ptr
    fill(ptr, 1, own)
    other.wait_event(own.record())
    wrong = others(ptr, 1, other, cycles=SPIN)
    if by_buffer:
        buffer.record_stream(other)
        del buffer
    else:
        pool.record_stream(ptr, other.ptr)
        buffer.close()
    assert pool.stats.pending_bytes == MIB
    # The only memory there is: the owner's stream has to wait for the reader.
    assert pool.allocate(MIB, stream=own) == ptr
    fill(ptr, 2, own)
    cupy.cuda.Device().synchronize()
    assert int(wrong[0]) == 0, "the block was written while another stream read it"
    pool.deallocate(ptr)


def test_pending_memory_is_reused_without_a_wait_once_it_is_ready(pool, streams, fill):
    own, other = streams
    ptr = pool.allocate(MIB, stream=own)
    fill(ptr, 1, other)
    pool.record_stream(ptr, other)
    pool.deallocate(ptr)
    other.synchronize()
    assert pool.coalesce() in (0, MIB)
    other.synchronize()
    assert pool.allocate(MIB, stream=own) == ptr
    assert (pool.crossings["waits"], pool.crossings["drains"]) == (0, 0)
    pool.deallocate(ptr)


def test_a_stream_destroyed_before_the_free(pool, fill, others):
    own, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    ptr = pool.allocate(MIB, stream=own)
    fill(ptr, 1, own, cycles=SPIN)
    del own  # CUDA lets its work go on
    pool.deallocate(ptr)
    assert pool.allocate(MIB, stream=other) == ptr
    fill(ptr, 2, other)
    wrong = others(ptr, 2, other)
    cupy.cuda.Device().synchronize()
    assert int(wrong[0]) == 0
    pool.deallocate(ptr)


def test_a_stream_destroyed_after_the_free(pool, fill, others):
    own, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    ptr = pool.allocate(MIB, stream=own)
    fill(ptr, 1, own, cycles=SPIN)
    pool.deallocate(ptr)
    del own
    assert pool.allocate(MIB, stream=other) == ptr
    fill(ptr, 2, other)
    wrong = others(ptr, 2, other)
    cupy.cuda.Device().synchronize()
    assert int(wrong[0]) == 0
    pool.deallocate(ptr)


def test_a_stream_forgotten_before_it_is_destroyed_costs_no_wait_for_the_device(pool, fill, others):
    own, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    ptr = pool.allocate(MIB, stream=own)
    fill(ptr, 1, own, cycles=SPIN)
    pool.deallocate(ptr)
    pool.forget_stream(own)
    del own
    assert pool.allocate(MIB, stream=other) == ptr
    fill(ptr, 2, other)
    wrong = others(ptr, 2, other)
    cupy.cuda.Device().synchronize()
    assert int(wrong[0]) == 0
    assert pool.crossings["drains"] == 0
    pool.deallocate(ptr)


@pytest.mark.filterwarnings("ignore:ExternalStream is deprecated:DeprecationWarning")
def test_a_handle_that_comes_back_inherits_nothing(pool, fill, others):
    """Streams are made and destroyed until one gets the handle of an earlier one."""
    handles = set()
    for value in range(1, 200):
        status, raw = cudart.cudaStreamCreateWithFlags(cudart.cudaStreamNonBlocking)
        assert status == cudart.cudaError_t.cudaSuccess
        handle = int(raw)
        again = handle in handles
        handles.add(handle)
        ptr = pool.allocate(MIB, stream=handle)
        stream = cupy.cuda.ExternalStream(handle)
        fill(ptr, value, stream, cycles=SPIN // 200)
        wrong = others(ptr, value, stream)
        pool.deallocate(ptr)
        del stream
        assert cudart.cudaStreamDestroy(raw)[0] == cudart.cudaError_t.cudaSuccess
        if again:
            cupy.cuda.Device().synchronize()
            assert int(wrong[0]) == 0
            return
    pytest.skip(f"no handle came back among {len(handles)}")


def test_per_thread_default_streams_of_two_threads_are_two(pool, fill):
    """Handle 2 means another stream in each thread, so one thread's free is not at once the other's."""
    ptrs = []
    work = threading.Event()

    def first():
        ptr = pool.allocate(MIB, stream=2)
        fill(ptr, 1, cupy.cuda.Stream.ptds, cycles=SPIN)
        pool.deallocate(ptr)
        assert pool.allocate(MIB, stream=2) == ptr  # its own stream, at once
        pool.deallocate(ptr)
        ptrs.append(ptr)
        work.wait(30)

    def second():
        ptr = pool.allocate(MIB, stream=2)
        fill(ptr, 2, cupy.cuda.Stream.ptds)
        ptrs.append(ptr)
        cupy.cuda.Stream.ptds.synchronize()
        pool.deallocate(ptr)
        work.set()

    threads = [threading.Thread(target=target) for target in (first, second)]
    threads[0].start()
    while not ptrs and threads[0].is_alive():
        pass
    before = dict(pool.crossings)
    threads[1].start()
    for thread in threads:
        thread.join(30)
    assert len(ptrs) == 2
    after = pool.crossings
    # Another thread cannot name that stream, so the device was waited for, or an event.
    assert after["waits"] + after["drains"] > before["waits"] + before["drains"]
    assert after["crossings"] == before["crossings"] + 1
    content = cupy.empty(WORDS, cupy.uint32)
    cupy.cuda.runtime.memcpy(content.data.ptr, ptrs[0], MIB, cupy.cuda.runtime.memcpyDeviceToDevice)
    assert bool((content == 2).all()), "the first thread's work came after the second's"


def test_current_is_cupy_s_stream(pool, streams):
    for stream in streams:
        with stream:
            buffer = pool.empty(KIB, stream="current")
            assert buffer.stream == stream.ptr
            buffer.close(stream="current")
    buffer = pool.empty(KIB, stream="current")
    assert buffer.stream == 0
    buffer.close()


@pytest.mark.torch
def test_current_is_torch_s_stream():
    """In a process of its own: PyTorch, once imported, is asked before CuPy."""
    pytest.importorskip("torch")
    found = run_python(
        """
import warnings
warnings.simplefilter("ignore")
import torch, vpool
torch.zeros(1, device="cuda")
pool = vpool.Pool(source="cuda")
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    buffer = pool.empty(1000, stream="current")
    assert buffer.stream == stream.cuda_stream != 0, buffer.stream
assert pool.empty(1000, stream="current").stream == 0
assert pool.empty(1000, stream=stream).stream == stream.cuda_stream
with vpool.stream(stream):
    assert pool.empty(1000).stream == stream.cuda_stream
del buffer
pool.check()
print("end")
""",
        timeout=180,
    )
    assert found.stdout == "end\n", found.stderr


def test_a_free_in_a_host_function_makes_no_cuda_call(streams):
    """CUDA forbids any there; the function runs on a thread of the driver."""
    own, other = streams
    with vpool.Pool(vpool.Dynamic(initial="4MiB"), source="cuda") as pool:
        pool.deallocate(pool.allocate(KIB, stream=other))
        ptr, recorded = pool.allocate(KIB, stream=own), pool.allocate(KIB, stream=own)
        pool.record_stream(recorded, other)
        closed, dropped = pool.empty(KIB, stream=own), [pool.empty(KIB, stream=own)]
        seen = []

        def free(_):
            try:
                before = pool.source.driver.calls()
                pool.deallocate(ptr)
                pool.deallocate(recorded)
                closed.close()
                dropped.clear()
                seen.extend([threading.get_ident(), before, pool.source.driver.calls()])
            except BaseException as error:
                seen.append(error)

        own.launch_host_func(free, None)
        own.synchronize()
        assert len(seen) == 3, seen
        assert seen[0] != threading.get_ident()
        assert seen[1] == seen[2]
        assert pool.stats.allocated_bytes == 0
        cupy.cuda.Device().synchronize()
        pool.coalesce()
        assert_whole(pool)


@pytest.mark.filterwarnings("ignore:ExternalStream is deprecated:DeprecationWarning")
@pytest.mark.parametrize("on", ["legacy", "own", "per thread"])
def test_a_hit_is_the_first_that_a_thread_does_with_cuda(streams, kernels, on):
    """Then launches by the driver API work there: CuPy's, and bare ones once there is a context as without vpool."""
    cudriver = pytest.importorskip("cuda.bindings.driver")
    stream = {"legacy": None, "own": streams[0], "per thread": 2}[on]
    handle = {"legacy": 1, "own": streams[0].ptr, "per thread": 2}[on]
    with vpool.Pool(vpool.Dynamic(initial="16MiB"), source="cuda") as pool:
        pool.empty(MIB, stream=stream).close()
        grown = pool.stats.source_calls
        found, errors = {}, []

        def work(kind):
            try:
                ptr = pool.allocate(MIB, stream=stream)
                if kind == "bare":
                    assert cudart.cudaSetDevice(0)[0] == 0
                    status = cudriver.cuMemsetD32Async(ptr, 7, WORDS, handle)[0]
                    assert int(status) == 0, status
                else:
                    with cupy.cuda.ExternalStream(handle):
                        arguments = np.uint64(ptr), np.uint64(WORDS), np.uint32(7), np.int64(0)
                        kernels[0]((1,), (256,), arguments)
                assert cudart.cudaStreamSynchronize(handle)[0] == 0
                words = np.empty(WORDS, np.uint32)
                kind_of_copy = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
                assert cudart.cudaMemcpy(words.ctypes.data, ptr, MIB, kind_of_copy)[0] == 0
                found[kind] = set(words.tolist())
                pool.deallocate(ptr)
            except BaseException as error:
                errors.append(error)

        for kind in ("bare", "cupy"):
            thread = threading.Thread(target=work, args=(kind,))
            thread.start()
            thread.join(60)
        assert errors == []
        assert found == {"bare": {7}, "cupy": {7}}
        assert pool.stats.source_calls == grown, "they were hits"


def test_whole_again_after_all_streams_used_it(streams, fill, others):
    with vpool.Pool(vpool.Dynamic(initial="4MiB", limit="64MiB"), source="cuda") as pool:
        counters = []
        for round_number in range(20):
            for own, other in (streams, streams[::-1]):
                ptr = pool.allocate(MIB, stream=own)
                fill(ptr, round_number, own, cycles=SPIN // 1000)
                other.wait_event(own.record())
                counters.append(others(ptr, round_number, other))
                pool.record_stream(ptr, other)
                pool.deallocate(ptr)
        cupy.cuda.Device().synchronize()
        assert sum(int(counter[0]) for counter in counters) == 0
        pool.coalesce()
        pool.coalesce()
        assert_whole(pool)


def test_streams_that_come_and_go_do_not_use_up_the_slots(pool):
    """CUDA gives their handles again, so a program may make any number, one after another."""
    for _ in range(6000):
        stream = cupy.cuda.Stream(non_blocking=True)
        pool.deallocate(pool.allocate(256, stream))
        del stream
    pool.allocate(MIB)

"""Graph capture on a real device: captures stay valid, and graphs and eager work never share memory."""

import gc
import itertools
import threading
import time

import numpy as np
import pytest

import vpool
from tests.helpers.graphs import MODES, NON_BLOCKING, Graph, Stream, ok
from tests.helpers.pools import MIB, live_figures
from tests.helpers.processes import handle_of_another_process
from tests.test_capture_calls import short_trace
from tests.test_captures import disjoint
from vpool._storage.driver import CALL_NAMES
from vpool.errors import SourceError

pytestmark = pytest.mark.gpu

try:
    vpool.sources.Cuda()
except SourceError as error:
    pytest.skip(str(error), allow_module_level=True)

cudart = pytest.importorskip("cuda.bindings.runtime")

D2D = cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice
D2H = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost


def fill(ptr, nbytes, byte, stream):
    ok(cudart.cudaMemsetAsync(ptr, byte, nbytes, stream.handle if stream else 1))


def content(ptr, nbytes):
    host = np.empty(nbytes, np.uint8)
    ok(cudart.cudaMemcpy(host.ctypes.data, ptr, nbytes, D2H))
    return set(np.unique(host).tolist())


@pytest.fixture
def pool():
    with vpool.Pool(vpool.Dynamic(initial="4MiB", limit="512MiB")) as pool:
        yield pool
        pool.check()


@pytest.mark.parametrize("mode", MODES)
def test_replays_and_eager_work_never_share_memory(pool, mode):
    result = pool.empty(MIB)
    with Graph(mode=mode) as graph:
        for value in (1, 2, 3):
            temporary = pool.empty(MIB, stream=graph.stream)
            fill(temporary.ptr, MIB, value, graph.stream)
            ok(cudart.cudaMemcpyAsync(result.ptr, temporary.ptr, MIB, D2D, graph.stream.handle))
            temporary.close()
        late = pool.empty(MIB, stream=graph.stream)
        fill(late.ptr, MIB, 4, graph.stream)
    late.close()  # memory of the graph all the same
    eager = [(pool.empty(MIB, stream=stream), stream) for stream in (None, graph.stream, Stream()) for _ in range(20)]
    for number in range(3):
        for buffer, stream in eager:
            fill(buffer.ptr, MIB, 100 + number, stream)
        graph.launch()
        ok(cudart.cudaDeviceSynchronize())
        assert content(result.ptr, MIB) == {3}
        assert all(content(buffer.ptr, MIB) == {100 + number} for buffer, _ in eager)
    graph.destroy()
    assert pool.captures == ()
    for buffer, _ in eager:
        buffer.close()
    result.close()
    pool.trim()
    assert pool.stats.reserved_bytes == 0


def everything(pool, stream, other):
    """Every public call, with growth, trims, and want of memory."""
    buffers = [pool.empty(n, stream=s) for n in (100, MIB, 30 * MIB) for s in (stream, other, None)]
    for buffer in buffers[::2]:
        buffer.record_stream(other)
        buffer.record_stream(stream)
    for buffer, freer in zip(buffers, itertools.cycle([None, stream, other]), strict=False):
        buffer.close(freer)
    ptr = pool.allocate(MIB, stream=other.handle, alignment=4096)
    pool.record_stream(ptr, stream.handle)
    pool.deallocate(ptr, stream=stream)
    grows = pool.empty(1000, stream=other)
    for nbytes in (MIB, 2 * MIB):
        pool.resize(grows, nbytes, stream)
    grows.close()
    with vpool.stream(stream):
        pool.deallocate(pool.allocate(2 * MIB))
    for s in (stream, other, None, 2):
        with pytest.raises(vpool.OutOfMemoryError):
            pool.allocate(1 << 40, stream=s)
    pool.stats, pool.ladder, pool.crossings, pool.captures, pool.core_share  # noqa: B018
    str(pool.inspect())
    pool.coalesce()
    pool.reserve(pool.inspect().largest_free_bytes + 1)
    pool.trim()
    pool.trim(keep="1MiB")
    pool.maintain()
    pool.check()
    pool.set_limit(pool.inspect().limit_bytes)
    pool.reset_peaks()
    pool.forget_stream(other)
    gc.collect()
    with vpool.Pool(vpool.Dynamic(initial="2MiB")) as another:
        another.empty(100, stream=stream)
        another.empty(100)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("flags", [0, NON_BLOCKING], ids=["blocking", "non-blocking"])
@pytest.mark.parametrize("where", ["same thread", "another thread"])
def test_every_call_is_safe_in_a_capture(pool, mode, flags, where):
    other = Stream(0)
    for stream in (None, other):
        pool.deallocate(pool.allocate(3 * MIB, stream=stream))
    with Graph(Stream(flags), mode) as graph:
        before = pool.empty(MIB, stream=graph.stream)
        fill(before.ptr, MIB, 7, graph.stream)
        if where == "same thread":
            everything(pool, graph.stream, other)
        else:
            errors = []

            def work():
                try:
                    everything(pool, graph.stream, other)
                except BaseException as error:
                    errors.append(error)

            worker = threading.Thread(target=work)
            worker.start()
            worker.join(60)
            assert errors == []
    for _ in range(3):
        graph.launch()
        ok(cudart.cudaDeviceSynchronize())
        assert content(before.ptr, MIB) == {7}
    before.close()
    graph.destroy()
    pool.trim()
    assert pool.captures == ()
    assert (pool.stats.reserved_bytes, pool.stats.pending_bytes) == (0, 0)


LENDER = 'pool = vpool.Pool(vpool.Dynamic(initial="4MiB"), source="cuda", device=0)'


@pytest.fixture(scope="module")
def foreign():
    """The handle of a block in another process."""
    with handle_of_another_process(LENDER) as handle:
        yield handle


def cross(pool, one, other):
    """Between streams that do not capture: what crosses needs an event and a wait."""
    large = pool.allocate(300 * MIB, stream=one)
    for _ in range(100):
        fill(large, 300 * MIB, 1, one)
    pool.deallocate(large)
    pool.deallocate(pool.allocate(300 * MIB, stream=other))


@pytest.mark.parametrize("mode", MODES)
def test_every_driver_call_is_made_in_a_capture(foreign, mode):
    """Or for a reason never: a new call has to be made here, or needs one."""
    devices = int(ok(cudart.cudaGetDeviceCount()))
    strategy = vpool.Dynamic(initial="4MiB", limit="512MiB")
    pool = vpool.Pool(strategy, source="cuda", device=0)
    short_lived = vpool.Pool(strategy, source="cuda", device=0)
    vpool.Pool(strategy, source="cuda-vmm", device=0).close()  # where the device has no virtual memory, that is said
    watched = vpool.Pool(strategy, source="cuda", device=0, debug="guard,poison")
    source, driver = pool.source, pool.source.driver
    stream, other = Stream(), Stream()
    for s in (stream, other, None):
        pool.deallocate(pool.allocate(MIB, stream=s))
        short_lived.deallocate(short_lived.allocate(MIB, stream=s))
    exported, seen = pool.allocate(MIB), watched.allocate(1000, stream)
    vpool.replay(short_trace(), vpool.Dynamic(initial="4MiB"), source, patterns=True)  # loads what it launches
    for device in range(min(devices, 2) - 1, -1, -1):
        ok(cudart.cudaSetDevice(device))
        ok(cudart.cudaFree(0))  # makes the device's context
    with Graph(mode=mode) as graph:
        before = driver.calls()
        everything(pool, graph.stream, other)
        pool.deallocate(pool.allocate(MIB, stream=stream.handle))
        cross(pool, stream, other)
        cross(short_lived, stream, other)
        assert short_lived.crossings["waits"] > 0
        short_lived.close()
        del short_lived  # its events go
        # Guards are read and memory is filled, on streams that do not capture.
        watched.deallocate(seen)
        driver.destroy_stream(driver.create_stream())
        driver.devices()
        with vpool.Pool(vpool.Dynamic(initial=0, limit="128MiB"), "cuda-vmm", 0) as mapped:
            mapped.deallocate(mapped.allocate(50 * MIB, stream=stream))
            assert mapped.trim() > 0
        pool.ipc_handle(exported)
        assert source.close_shared(source.open_shared(foreign.handle)) is None
        # Of a device that is not the current one; with one device there is none, so what that call does is seen alone.
        if devices > 1:
            ok(cudart.cudaSetDevice(1))
            pool.trim()
            source.memory()
        ok(cudart.cudaSetDevice(0))
        vpool.replay(short_trace(), vpool.Dynamic(initial="4MiB"), source, patterns=True)
        after = driver.calls()
    pool.deallocate(exported)
    graph.destroy()
    made = {name for name in CALL_NAMES if after[name][0] > before[name][0]}
    # What waits for the whole device no mode allows; and nothing of vpool writes to a device what the host has.
    assert set(CALL_NAMES) - made == {"synchronize", "write"} | ({"set_device"} if devices == 1 else set())
    for each in (pool, watched):
        each.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_copy_of_a_resize_is_made_by_each_launch(pool, mode):
    stream = Stream()
    buffer = pool.empty(MIB, stream=stream)
    old = buffer.ptr
    fill(old, MIB, 9, stream)
    with Graph(stream, mode) as graph:
        pool.resize(buffer, 3 * MIB, stream)
    assert buffer.ptr != old
    eager = [(pool.empty(MIB, stream=s), s) for s in (None, stream) for _ in range(10)]
    for other, s in eager:
        fill(other.ptr, MIB, 50, s)
    for value in (9, 1, 2):  # nobody else has the old block
        if value != 9:
            fill(old, MIB, value, stream)
        graph.launch()
        ok(cudart.cudaDeviceSynchronize())
        assert content(buffer.ptr, MIB) == {value}
    assert all(content(other.ptr, MIB) == {50} for other, _ in eager)
    buffer.close()
    for other, _ in eager:
        other.close()
    graph.destroy()


@pytest.mark.parametrize("mode", MODES)
def test_a_capture_is_not_invalidated_by_a_resize_on_the_default_stream(pool, mode):
    buffer, wall = pool.empty(MIB), pool.empty(256)
    fill(buffer.ptr, MIB, 3, None)
    with Graph(Stream(0), mode) as graph, pytest.raises(vpool.Error, match="while a capture goes on"):
        pool.resize(buffer, 2 * MIB)
    graph.destroy()
    pool.resize(buffer, 2 * MIB)
    ok(cudart.cudaDeviceSynchronize())
    assert content(buffer.ptr, MIB) == {3}
    wall.close()
    buffer.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_replay_while_a_blocking_stream_captures_is_refused(pool, mode):
    with Graph(Stream(0), mode) as graph:
        pool.empty(MIB, stream=graph.stream).close()
        with pytest.raises(SourceError, match="cudaErrorStreamCaptureImplicit"):
            vpool.replay(short_trace(), vpool.Dynamic(initial="4MiB"), pool.source, patterns=True)
    graph.destroy()


@pytest.mark.parametrize("mode", MODES)
def test_growth_and_want_of_memory_in_a_capture(mode):
    with vpool.Pool(vpool.Dynamic(initial=0, limit="64MiB")) as pool:
        with Graph(mode=mode) as graph:
            blocks = [pool.empty(4 * MIB, stream=graph.stream) for _ in range(12)]
            for number, buffer in enumerate(blocks):
                fill(buffer.ptr, buffer.nbytes, number, graph.stream)
            figures = live_figures(pool)
            with pytest.raises(vpool.OutOfMemoryError, match="capture"):
                pool.empty(32 * MIB, stream=graph.stream)
            assert live_figures(pool) == figures
        for _ in range(3):
            graph.launch()
            ok(cudart.cudaDeviceSynchronize())
            assert [content(buffer.ptr, buffer.nbytes) for buffer in blocks] == [{n} for n in range(12)]
        graph.destroy()
        blocks.clear()
        assert pool.empty(32 * MIB).ptr


def test_a_forked_stream_has_memory_of_the_graph(pool):
    other = Stream()
    event = ok(cudart.cudaEventCreateWithFlags(2))
    with Graph() as graph:
        mine = pool.empty(MIB, stream=graph.stream)
        ok(cudart.cudaEventRecord(event, graph.stream.handle))
        ok(cudart.cudaStreamWaitEvent(other.handle, event, 0))
        its = pool.empty(MIB, stream=other)
        fill(its.ptr, MIB, 9, other)
        ok(cudart.cudaEventRecord(event, other.handle))
        ok(cudart.cudaStreamWaitEvent(graph.stream.handle, event, 0))
        used = [(mine.ptr, MIB), (its.ptr, MIB)]
        mine.close()
        its.close()
    eager = [pool.empty(MIB, stream=stream) for stream in (None, other, graph.stream) for _ in range(10)]
    assert disjoint(used, [(buffer.ptr, MIB) for buffer in eager])
    assert pool.captures == (graph.id,)
    graph.destroy()


def test_two_graphs_that_share_memory(pool):
    stream = Stream()
    outputs = [pool.empty(MIB) for _ in range(2)]
    graphs = []
    for number, output in enumerate(outputs):
        with Graph(stream) as graph:
            if graphs:
                pool.share_capture(graph.id, graphs[0].id)
            temporary = pool.empty(8 * MIB, stream=stream)
            fill(temporary.ptr, 8 * MIB, 1 + number, stream)
            ok(cudart.cudaMemcpyAsync(output.ptr, temporary.ptr, MIB, D2D, stream.handle))
            address = temporary.ptr
            temporary.close()
        graph.address = address
        graphs.append(graph)
    assert graphs[0].address == graphs[1].address
    eager = [pool.empty(8 * MIB) for _ in range(4)]
    for buffer in eager:
        fill(buffer.ptr, buffer.nbytes, 50, None)
    for _ in range(3):
        for graph in graphs:
            graph.launch()
        ok(cudart.cudaDeviceSynchronize())
        assert [content(output.ptr, MIB) for output in outputs] == [{1}, {2}]
    graphs[0].destroy()
    eager += [pool.empty(8 * MIB) for _ in range(4)]
    for buffer in eager:
        fill(buffer.ptr, buffer.nbytes, 60, None)
    for _ in range(3):
        graphs[1].launch()
    ok(cudart.cudaDeviceSynchronize())
    assert content(outputs[1].ptr, MIB) == {2}
    assert all(content(buffer.ptr, buffer.nbytes) == {60} for buffer in eager)
    graphs[1].destroy()
    assert pool.captures == ()


@pytest.mark.parametrize("ending", ["by itself", "release"])
def test_an_aborted_capture_gives_its_memory_back(pool, ending):
    with Graph(spoil=True) as graph:
        pool.empty(20 * MIB, stream=graph.stream).close()
    time.sleep(0.2)
    if ending == "release":
        pool.release_capture(graph.id)
    assert pool.captures == ()
    pool.trim()
    assert pool.stats.reserved_bytes == 0


def test_memory_of_a_graph_that_still_runs_is_waited_for(pool):
    """A graph is destroyed while it runs: whoever gets its memory next finds it at rest."""
    cupy = pytest.importorskip("cupy")
    kernel = cupy.RawKernel(
        'extern "C" __global__ void late(unsigned char* p, long long n, long long cycles) {'
        "long long s = clock64(); while (clock64() - s < cycles) {}"
        "for (long long i = threadIdx.x; i < n; i += blockDim.x) p[i] = 9; }",
        "late",
    )
    scratch = pool.empty(MIB)
    kernel((1,), (32,), (np.uint64(scratch.ptr), np.int64(1), np.int64(0)))
    ok(cudart.cudaDeviceSynchronize())
    with Graph() as graph:
        temporary = pool.empty(64 * MIB, stream=graph.stream)
        with cupy.cuda.Stream.from_external(graph.stream):
            kernel((1,), (32,), (np.uint64(temporary.ptr), np.int64(MIB), np.int64(400_000_000)))
        address = temporary.ptr
        temporary.close()
    graph.launch(Stream())
    ok(cudart.cudaGraphExecDestroy(graph.launchable))
    ok(cudart.cudaGraphDestroy(graph.graph))
    pool.release_capture(graph.id)
    pool.set_limit("128MiB")
    held = []
    while True:
        try:
            held.append(pool.empty(32 * MIB))
        except vpool.OutOfMemoryError:
            break
    reused = next(buffer for buffer in held if buffer.ptr <= address < buffer.ptr + buffer.nbytes)
    fill(reused.ptr, reused.nbytes, 5, None)
    ok(cudart.cudaDeviceSynchronize())
    assert content(reused.ptr, MIB) == {5}


def test_a_stream_object_is_asked_once_and_the_default_stream_never(pool):
    """What a hit costs of driver calls: one question on a stream that could capture, none on the legacy default one."""
    stream = Stream()
    for s in (None, stream):
        pool.empty(MIB, stream=s).close()
    before = pool.source.driver.calls()
    for _ in range(100):
        pool.empty(MIB).close()
    assert {name: pool.source.driver.calls()[name][0] - before[name][0] for name in CALL_NAMES} == dict.fromkeys(
        CALL_NAMES, 0
    )
    for _ in range(100):
        pool.empty(MIB, stream=stream).close()
    after = pool.source.driver.calls()
    asked = {name: after[name][0] - before[name][0] for name in CALL_NAMES if after[name][0] != before[name][0]}
    assert asked == {"stream_captures": 100}
    with vpool.Pool(vpool.Dynamic(initial="4MiB"), captures=False) as pool:
        pool.empty(MIB, stream=stream).close()
        before = pool.source.driver.calls()
        for _ in range(100):
            pool.empty(MIB, stream=stream).close()
        assert pool.source.driver.calls() == before

"""Every driver call that vpool makes, in a capture: the capture stays valid, or the call is never made there."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import vpool
from tests.helpers.pools import MIB
from tests.helpers.processes import handle_of_another_process
from tests.test_captures import MODES, Graph, fake_pool
from vpool._storage.driver import CALL_NAMES
from vpool._storage.fake_cuda import FakeCudaDriver
from vpool._storage.mapped_source import MappedSource

# Of another process, as CUDA wants it.
LENDER = """
from vpool._storage.fake_cuda import FakeCudaDriver
pool = vpool.Pool(vpool.Dynamic(initial="1MiB"), vpool.sources.Source(FakeCudaDriver(1 << 30, 2), "cuda", 1))
"""


@pytest.fixture(scope="module")
def foreign():
    """The handle of a block in another process."""
    with handle_of_another_process(LENDER) as handle:
        yield handle


def short_trace():
    """Two streams, and blocks enough that they grow and cross."""
    ops = np.array([0, 0, 0, 1, 0, 1, 1, 1], np.uint8)
    ids = np.array([0, 1, 2, 0, 3, 1, 3, 2], np.uint32)
    sizes = np.array([5000, 3 * MIB, 700, 900], np.uint64)[ids]
    return vpool.Trace(ops, ids, sizes, np.array([0, 1, 2, 0, 1, 1, 1, 2], np.uint16), np.arange(8))


def cross(pool, driver, one, other):
    """Memory of a stream that still works serves another one, behind an event."""
    ptr = pool.allocate(2 * MIB, stream=one)
    driver.queue_work(one)
    pool.deallocate(ptr)
    held = []
    with contextlib.suppress(vpool.OutOfMemoryError):
        while True:
            held.append(pool.allocate(2 * MIB, stream=other))
    for ptr in held:
        pool.deallocate(ptr)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("blocking", [True, False])
def test_every_driver_call_is_made_in_a_capture(foreign, mode, blocking):
    """Or for a reason never: a new call has to be made here, or needs one."""
    # The source's device is not the current one.
    driver = FakeCudaDriver(64 * MIB, devices=2)
    source = vpool.sources.Source(driver, "cuda", 1)
    pool = vpool.Pool(vpool.Dynamic(initial="4MiB", limit="16MiB"), source)
    watched = vpool.Pool(vpool.Dynamic(initial="4MiB", limit="16MiB"), source, debug="guard,poison")
    short_lived = vpool.Pool(vpool.Dynamic(initial="4MiB", limit="4MiB"), source)
    one, other = driver.create_stream(blocking=False), driver.create_stream(blocking=False)
    for stream in (one, other):
        pool.deallocate(pool.allocate(MIB, stream=stream))
    exported, grows = pool.allocate(MIB), pool.empty(MIB, stream=one)
    seen = watched.allocate(1000, one)
    with Graph(driver, mode, blocking=blocking) as graph:
        before = driver.calls()
        inside = pool.allocate(MIB, stream=graph.stream)
        cross(pool, driver, one, other)
        cross(short_lived, driver, one, other)
        assert short_lived.crossings["waits"] > 0
        short_lived.close()
        del short_lived  # its events go
        pool.reserve(3 * MIB)
        pool.trim()
        pool.inspect()
        pool.resize(grows, 2 * MIB, graph.stream)  # copied, since it was another stream's
        watched.deallocate(seen)  # guards are read and memory is filled, on streams that do not capture
        driver.devices()
        driver.current()
        with vpool.Pool(vpool.Dynamic(initial=0, limit="16MiB"), MappedSource(driver, "cuda-vmm", 1)) as mapped:
            mapped.deallocate(mapped.allocate(5 * MIB))
            # What nobody lends is the legacy default stream's there, and nothing tells when its work is complete.
            assert (mapped.trim() > 0) == (not blocking)
        driver.destroy_stream(driver.create_stream())
        pool.ipc_handle(exported)
        assert source.close_shared(source.open_shared(foreign.handle)) is None
        # A replay moves bytes on the legacy default stream, which a blocking stream that captures forbids.
        with (
            pytest.raises(vpool.SourceError, match="cudaErrorStreamCaptureImplicit")
            if blocking
            else (contextlib.nullcontext())
        ):
            vpool.replay(short_trace(), vpool.Dynamic(initial="4MiB"), source, patterns=True)
        after = driver.calls()
        pool.deallocate(inside)
        grows.close()
    graph.destroy()
    made = {name for name in CALL_NAMES if after[name][0] > before[name][0]}
    # What waits for the whole device no mode allows, nor does anybody suspend a pool meanwhile, or resume it.
    never = {"synchronize", "write"}
    of_the_legacy_stream = {"read", "handle_unmap", "handle_release", "address_free"}
    assert set(CALL_NAMES) - made == never | (of_the_legacy_stream if blocking else set())
    pool.deallocate(exported)
    mapped.trim()
    for each in (pool, watched):
        each.close()
    assert driver.used(1) == 0


def test_growth_leaves_the_thread_its_mode():
    """Else what the program calls later on this thread would not be refused in a capture that it spoils."""

    def calls_of_growth():
        pool, driver = fake_pool(initial=0)
        with Graph(driver) as graph:
            before = driver.calls()
            pool.allocate(MIB, stream=graph.stream)
            return {name: driver.calls()[name][0] - before[name][0] for name in ("malloc", "capture_mode")}

    with ThreadPoolExecutor(1) as fresh:  # this thread may be relaxed, where a test had that call fail
        assert fresh.submit(calls_of_growth).result() == {"malloc": 1, "capture_mode": 2}, "relaxed, and as it was"

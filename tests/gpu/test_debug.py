"""Debug modes on a real device: a byte beside a block, a use after free, and captures that stay valid."""

import random
import threading

import numpy as np
import pytest

import vpool
from tests.helpers.debug import line_above, unraised
from tests.helpers.graphs import Graph, Stream, ok
from tests.helpers.pools import MIB, live_figures
from vpool.errors import SourceError

pytestmark = pytest.mark.gpu

try:
    vpool.sources.Cuda()
except SourceError as error:
    pytest.skip(str(error), allow_module_level=True)

cudart = pytest.importorskip("cuda.bindings.runtime")

D2H = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
ALL = "guard,poison,quarantine=8MiB,sites"


def cuda_pool(debug=ALL, **options):
    strategy = vpool.Dynamic(initial="64MiB", limit="256MiB")
    return vpool.Pool(strategy, "cuda", 0, "watched", debug=debug, **options)


def write(address, byte=0x41, nbytes=1, stream=None):
    if stream is None:
        ok(cudart.cudaDeviceSynchronize())  # after whatever was queued before, on any stream
        ok(cudart.cudaMemset(address, byte, nbytes))
        ok(cudart.cudaDeviceSynchronize())
    else:
        ok(cudart.cudaMemsetAsync(address, byte, nbytes, stream.handle))


def read(address, nbytes):
    host = np.empty(nbytes, np.uint8)
    ok(cudart.cudaDeviceSynchronize())
    ok(cudart.cudaMemcpy(host.ctypes.data, address, nbytes, D2H))
    return host.tobytes()


@pytest.mark.parametrize("nbytes", [1, 255, 256, 1000, 5 * MIB + 3])
@pytest.mark.parametrize("alignment", [256, 2 * MIB])
def test_one_byte_before_and_after_a_block_is_found_and_the_site_named(nbytes, alignment):
    with cuda_pool() as pool:
        for stream in (None, Stream()):
            for offset in (-1, nbytes):
                ptr = pool.allocate(nbytes, stream, alignment)
                allocated = line_above()
                assert ptr % alignment == 0
                write(ptr + offset)
                figures = live_figures(pool)
                with pytest.raises(vpool.GuardError) as caught:
                    pool.deallocate(ptr)
                error = caught.value
                assert (error.address, error.requested, error.offset, error.found) == (ptr, nbytes, offset, 0x41)
                assert f"Allocated at {allocated}" in str(error)
                assert live_figures(pool) == figures
                pool.deallocate(ptr)
        pool.check()


def test_a_free_waits_for_the_write_that_is_still_to_come():
    """The guard is read behind what the stream has queued, and behind the work of another that used the block."""
    with cuda_pool("guard") as pool:
        own, user, freer = Stream(), Stream(), Stream()
        for late, freed_on in ((own, None), (user, None), (own, freer)):
            ptr = pool.allocate(16 * MIB, own)
            if late is user:
                pool.record_stream(ptr, user)
            for _ in range(300):
                write(ptr, 0, 16 * MIB, late)
            write(ptr + 16 * MIB, stream=late)
            with pytest.raises(vpool.GuardError, match="1 byte after the end"):
                pool.deallocate(ptr, freed_on)
            pool.deallocate(ptr, freed_on)


def test_a_use_after_free_reads_poison():
    with cuda_pool("poison") as pool:
        stream = Stream()
        ptr = pool.allocate(MIB, stream)
        stream.synchronize()
        assert read(ptr, MIB) == b"\xcd" * MIB
        write(ptr, 0x11, MIB, stream)
        pool.deallocate(ptr)
        stream.synchronize()
        assert read(ptr, MIB) == b"\xdd" * MIB


def test_poison_overtakes_no_work_and_touches_nothing_that_is_lent_again():
    with cuda_pool("poison") as pool:
        stream = Stream()
        for byte in range(1, 50):
            ptr = pool.allocate(4 * MIB, stream)
            for _ in range(5):
                write(ptr, byte, 4 * MIB, stream)
            before = read_on(stream, ptr, 4 * MIB) if byte % 10 == 0 else None
            pool.deallocate(ptr)
            if before is not None:
                assert before == bytes([byte]) * (4 * MIB)


def read_on(stream, address, nbytes):
    host = np.empty(nbytes, np.uint8)
    ok(cudart.cudaMemcpyAsync(host.ctypes.data, address, nbytes, D2H, stream.handle))
    stream.synchronize()
    return host.tobytes()


def test_a_write_after_free_is_reported_with_its_sites():
    with cuda_pool() as pool:
        ptr = pool.allocate(MIB, Stream())
        allocated = line_above()
        pool.deallocate(ptr)
        freed = line_above()
        write(ptr + 1000, 0x42)
        with pytest.raises(vpool.GuardError, match="after it was freed"):
            pool.check()
        with unraised() as caught:
            pool.trim()
        assert (caught[0].address, caught[0].offset, caught[0].found) == (ptr, 1000, 0x42)
        assert f"Allocated at {allocated}, freed at {freed}." in str(caught[0])


def test_a_stream_that_was_destroyed_is_not_touched():
    """CUDA's driver crashes on its handle: the device is waited for instead."""
    with cuda_pool() as pool, unraised(0):
        handle = int(ok(cudart.cudaStreamCreate()))
        blocks = [pool.allocate(MIB, handle) for _ in range(3)]
        pool.deallocate(blocks.pop(), handle)
        ok(cudart.cudaStreamDestroy(handle))
        pool.check()
        for ptr in blocks:
            pool.deallocate(ptr)
        pool.trim()
        pool.check()


def test_the_per_thread_stream():
    with cuda_pool() as pool:
        ptr = pool.allocate(1000, 2)
        write(ptr - 1)
        with pytest.raises(vpool.GuardError):
            pool.deallocate(ptr, 2)
        pool.deallocate(ptr)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_capture_stays_valid(mode):
    pool = cuda_pool()
    other = Stream()
    kept = pool.allocate(1000, other)
    before = pool.allocate(1000)
    with Graph(mode=mode) as graph:
        for stream in (None, other, graph.stream):
            for nbytes in (1000, MIB, 9 * MIB):
                pool.deallocate(pool.allocate(nbytes, stream), stream)
        pool.deallocate(before)
        pool.check()
    write(kept + 1000)
    with pytest.raises(vpool.GuardError):
        pool.deallocate(kept)
    pool.deallocate(kept)
    pool.check()


def test_an_array_that_is_too_long_is_found():
    cupy = pytest.importorskip("cupy")
    with cuda_pool("guard,sites") as pool:
        buffer = pool.empty(4 * 1000)
        memory = cupy.cuda.UnownedMemory(buffer.ptr, 4 * 1001, buffer)
        array = cupy.ndarray((1001,), cupy.float32, cupy.cuda.MemoryPointer(memory, 0))
        array.fill(1.0)
        with pytest.raises(vpool.GuardError, match=r"1 byte after the end .*and 3 more"):
            buffer.close()
        del array, memory
        buffer.close()


def test_threads_and_streams_keep_every_byte():
    errors = []

    def work(seed):
        rng, stream, mine = random.Random(seed), Stream(), []
        try:
            for step in range(200):
                if len(mine) < 5 or rng.random() < 0.5:
                    nbytes = rng.randint(1, MIB)
                    ptr = pool.allocate(nbytes, stream)
                    write(ptr, step % 251, nbytes, stream)
                    mine.append((ptr, nbytes, step % 251))
                else:
                    ptr, nbytes, byte = mine.pop(rng.randrange(len(mine)))
                    assert read_on(stream, ptr, nbytes) == bytes([byte]) * nbytes
                    pool.deallocate(ptr)
            for ptr, _, _ in mine:
                pool.deallocate(ptr)
            del stream  # it is destroyed by its finaliser, while the others use the pool
        except BaseException as error:
            errors.append(error)

    with cuda_pool() as pool, unraised(0):
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        pool.check()
        assert pool.stats.requested_bytes == 0

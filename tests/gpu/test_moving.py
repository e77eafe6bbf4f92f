"""Blocks without memory, of other sizes and at other places, on a real device."""

import random
import time

import pytest

import vpool
from tests.helpers.device import assert_follows, held, made
from tests.helpers.pools import GIB, MIB
from vpool.errors import SourceError

pytestmark = pytest.mark.gpu

try:
    vpool.sources.CudaVmm()
except SourceError as error:
    pytest.skip(str(error), allow_module_level=True)

from tests.gpu.test_cuda import read, write  # noqa: E402 (skips itself without a device)

SOURCES = pytest.mark.parametrize("source", ["cuda", "cuda-vmm"])
PART = 4096


def filled(ptr, nbytes, byte):
    write(ptr, bytes([byte]) * min(nbytes, PART))
    write(ptr + nbytes - min(nbytes, PART), bytes([byte]) * min(nbytes, PART))


def holds(ptr, nbytes, byte):
    part = min(nbytes, PART)
    return read(ptr, part) == read(ptr + nbytes - part, part) == bytes([byte]) * part


class TestSuspend:
    @pytest.mark.parametrize("options", [{}, {"tight": True}], ids=str)
    def test_the_device_has_the_memory_meanwhile_and_contents_come_back(self, options):
        source = vpool.sources.CudaVmm(0, **options)
        with vpool.Pool(vpool.Dynamic(limit="8GiB"), source=source) as pool:
            sizes = [100, 3 * MIB, 70 * MIB + 256, 500 * MIB, GIB]
            with vpool.tag("cache"):
                blocks = [(pool.allocate(nbytes), nbytes, byte) for byte, nbytes in enumerate(sizes, 1)]
            for one in blocks:
                filled(*one)
            held_before = held(source.driver)
            started = time.perf_counter()
            suspended = pool.suspend("cache", offload=True)
            away = time.perf_counter()
            assert suspended >= sum(sizes)
            assert held(source.driver)["handle_create"] < held_before["handle_create"]
            other = pool.allocate(GIB)
            filled(other, GIB, 99)
            pool.deallocate(other)
            pool.trim()
            began = time.perf_counter()
            pool.resume()
            back = time.perf_counter() - began
            print(f"{suspended / GIB:.2f} GiB: away in {away - started:.3f} s, back in {back:.3f} s")
            assert all(holds(*one) for one in blocks)
            again = pool.suspend()
            pool.resume()
            assert again >= sum(sizes)
            assert_follows(lambda: source.memory()[0], pool.suspend, pool.resume, again)
            pool.check()

    def test_without_contents_it_takes_little_time(self):
        with vpool.Pool(vpool.Dynamic(limit="16GiB"), source="cuda-vmm") as pool:
            ptr = pool.allocate(8 * GIB)
            for _ in range(3):
                started = time.perf_counter()
                pool.suspend()
                away = time.perf_counter()
                pool.resume()
                print(f"8 GiB: away in {away - started:.3f} s, back in {time.perf_counter() - away:.3f} s")
            filled(ptr, 8 * GIB, 7)
            assert holds(ptr, 8 * GIB, 7)

    def test_blocks_of_streams_that_are_at_work(self):
        source = vpool.sources.CudaVmm(0)
        with vpool.Pool(vpool.Dynamic(limit="8GiB"), source=source) as pool:
            streams = [source.driver.create_stream() for _ in range(3)]
            blocks = [pool.empty(256 * MIB, stream) for stream in streams]
            for number, buffer in enumerate(blocks, 1):
                filled(buffer.ptr, 256 * MIB, number)
            for number, buffer in enumerate(blocks):
                # A copy is queued and not waited for: the memory goes when it is done.
                pool.resize(buffer, buffer.requested, streams[(number + 1) % 3])
            pool.suspend(offload=True)
            pool.resume()
            for number, buffer in enumerate(blocks, 1):
                assert holds(buffer.ptr, 256 * MIB, number)
            pool.check()
            for buffer in blocks:
                buffer.close()
            for stream in streams:
                pool.forget_stream(stream)
                source.driver.destroy_stream(stream)

    def test_other_handles_stay_usable(self):
        with vpool.Pool(vpool.Dynamic(limit="8GiB"), source="cuda-vmm") as pool:
            pool.deallocate(pool.allocate(GIB))
            blocks = []
            for number in range(64):
                with vpool.tag("ab"[number % 2]):
                    blocks.append((pool.allocate(15 * MIB), 15 * MIB, number + 1))
                filled(*blocks[-1])
            pool.suspend("a", offload=True)
            assert all(holds(*one) for one in blocks[1::2])
            pool.resume()
            assert all(holds(*one) for one in blocks)

    def test_five_hundred_cycles_leak_nothing(self):
        source = vpool.sources.CudaVmm(0)
        with vpool.Pool(vpool.Dynamic(limit="4GiB"), source=source) as pool:
            blocks = [pool.allocate(40 * MIB) for _ in range(10)]
            pool.suspend()
            pool.resume()
            before = held(source.driver)
            for _ in range(500):
                pool.suspend()
                pool.resume()
            assert held(source.driver) == before
            pool.check()
            for ptr in blocks:
                pool.deallocate(ptr)


class TestResize:
    @SOURCES
    def test_contents_stay(self, source):
        rng = random.Random(3)
        with vpool.Pool(vpool.Dynamic(limit="8GiB"), source=source) as pool:
            live = []
            for turn in range(300):
                if len(live) < 10:
                    live.append([pool.empty(0), 0, 0])
                row = rng.choice(live)
                nbytes = int(2 ** rng.uniform(8, 28))
                pool.resize(row[0], nbytes)
                kept = min(nbytes, row[1], PART)
                assert read(row[0].ptr, kept) == bytes([row[2]]) * kept
                row[1:] = nbytes, turn % 250 + 1
                filled(row[0].ptr, *row[1:])
            pool.check()

    def test_memory_is_mapped_behind(self):
        with vpool.Pool(vpool.Dynamic(limit="8GiB"), source="cuda-vmm") as pool:
            buffer = pool.empty(100 * MIB)
            filled(buffer.ptr, 100 * MIB, 5)
            ptr = buffer.ptr
            copies = made(pool.source.driver, "copy_on")  # the driver is the process's own
            pool.resize(buffer, 3 * GIB)
            assert buffer.ptr == ptr
            assert made(pool.source.driver, "copy_on") == copies
            assert holds(ptr, 100 * MIB, 5)
            filled(ptr, 3 * GIB, 6)
            assert pool.stats.reserved_bytes <= 3 * GIB + 64 * MIB
            pool.check()


@SOURCES
def test_blocks_are_moved(source):
    strategy = vpool.Dynamic(initial="1GiB", limit="1GiB")
    with vpool.Pool(strategy, source=source) as pool:
        buffers = [pool.empty(32 * MIB) for _ in range(32)]
        del buffers[::2]
        for number, buffer in enumerate(buffers, 1):
            filled(buffer.ptr, 32 * MIB, number)
            pool.movable(buffer, lambda old, new: None)
        assert pool.coalesce() > 0
        for number, buffer in enumerate(buffers, 1):
            assert holds(buffer.ptr, 32 * MIB, number)
        pool.check()

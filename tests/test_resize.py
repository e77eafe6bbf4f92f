"""Buffers of another size: in place where that can be, else copied in stream order; after an error all is as before."""

import ctypes
import random

import pytest

import vpool
from tests.helpers.pools import GIB, MIB, unchanged
from tests.test_mapped import fake, pool_on, simulated
from vpool._storage.fake_cuda import FakeCudaDriver
from vpool._storage.source import Source

SMALL = vpool.Dynamic(initial="4MiB", growth="4MiB", limit="64MiB")
MAKERS = {
    "host": vpool.sources.Host,
    "fake cuda": lambda: Source(FakeCudaDriver(GIB), "cuda"),
    "fake cuda-vmm": fake,
    "simulated": lambda: vpool.sources.Simulated(GIB),
    "simulated-vmm": simulated,
}
EVERYWHERE = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
WITH_MEMORY = pytest.mark.parametrize("make", list(MAKERS.values())[:3], ids=list(MAKERS)[:3])


def copies(pool):
    return pool.source.driver.calls()["copy_on"][0]


class TestInPlace:
    @EVERYWHERE
    def test_grow_into_what_is_free_behind(self, make):
        with vpool.Pool(SMALL, source=make()) as pool:
            buffer = pool.empty(1000)
            ptr = buffer.ptr
            pool.resize(buffer, 5000)
            pool.check()
            assert (buffer.ptr, buffer.requested, buffer.nbytes) == (ptr, 5000, 5120)
            assert copies(pool) == 0
            assert pool.stats.allocated_bytes == pool.stats.peak_allocated_bytes == 5120
            assert pool.stats.requested_bytes == 5000
            assert pool.stats.allocations == 1
            buffer.close()
            pool.check()
            assert pool.stats.allocated_bytes == 0

    @EVERYWHERE
    def test_shrink_and_lend_the_rest(self, make):
        with vpool.Pool(SMALL, source=make()) as pool:
            buffer = pool.empty(8192)
            wall = pool.allocate(4 * MIB - 8192)
            ptr = buffer.ptr
            pool.resize(buffer, 1000)
            pool.check()
            assert (buffer.ptr, buffer.requested, buffer.nbytes) == (ptr, 1000, 1024)
            assert pool.allocate(7168) == ptr + 1024
            pool.deallocate(wall)

    @EVERYWHERE
    def test_all_of_the_neighbour_and_not_a_byte_more(self, make):
        with vpool.Pool(SMALL, source=make()) as pool:
            buffer, other, wall = pool.empty(1024), pool.allocate(1024), pool.allocate(1024)
            pool.deallocate(other)
            pool.resize(buffer, 2048)
            pool.check()
            assert copies(pool) == 0
            assert buffer.ptr + 2048 == wall
            pool.resize(buffer, 2049)
            pool.check()
            assert buffer.ptr + 2048 != wall

    def test_within_its_rounding_only_the_figure_changes(self):
        with vpool.Pool(SMALL, source="simulated") as pool:
            buffer = pool.empty(1000)
            for nbytes in (1024, 999, 769):
                pool.resize(buffer, nbytes)
                assert (buffer.requested, buffer.nbytes) == (nbytes, 1024)
                pool.check()

    def test_what_is_left_stays_where_it_is_too_small(self):
        with vpool.Pool(SMALL, source="simulated", minimum_remainder=4096) as pool:
            buffer = pool.empty(5000)
            pool.resize(buffer, 3000)
            assert buffer.nbytes == 5120
            pool.resize(buffer, 1000)
            assert buffer.nbytes == 1024
            pool.check()

    def test_a_block_that_others_use_is_not_cut(self):
        """Its rest would be free before their work is complete."""
        source = vpool.sources.Simulated()
        with vpool.Pool(SMALL, source=source) as pool:
            stream = source.driver.create_stream()
            buffer = pool.empty(8192)
            buffer.record_stream(stream)
            pool.resize(buffer, 1000)
            pool.check()
            assert (buffer.requested, buffer.nbytes) == (1000, 8192)

    def test_the_rest_is_free_in_the_order_of_its_stream(self):
        source = vpool.sources.Simulated()
        with vpool.Pool(SMALL, source=source, on_pressure="raise") as pool:
            stream = source.driver.create_stream()
            buffer = pool.empty(4 * MIB)
            source.driver.queue_work(0)
            pool.resize(buffer, 256)
            waits = pool.crossings["waits"]
            pool.allocate(3 * MIB, stream)
            assert pool.crossings["waits"] == waits + 1, "another stream waits for the first one's work"

    @pytest.mark.parametrize("make", [fake, simulated])
    def test_memory_is_mapped_behind_the_block(self, make):
        with pool_on(make()) as pool:
            buffer = pool.empty(10 * MIB)
            ptr = buffer.ptr
            for nbytes in (30 * MIB, 31 * MIB, 200 * MIB):
                pool.resize(buffer, nbytes)
                pool.check()
                assert buffer.ptr == ptr
                assert pool.stats.reserved_bytes == nbytes + nbytes % (2 * MIB)
            assert copies(pool) == 0
            with unchanged(pool), pytest.raises(vpool.OutOfMemoryError):
                pool.resize(buffer, 300 * MIB)
            assert (buffer.ptr, buffer.requested) == (ptr, 200 * MIB)
            buffer.close()
            pool.trim()
            assert pool.stats.reserved_bytes == 0

    def test_into_a_hole_between_live_blocks(self):
        with pool_on(simulated(80 * MIB)) as pool:
            buffer, gap, wall = pool.empty(10 * MIB), pool.allocate(20 * MIB), pool.allocate(10 * MIB)
            ptr = buffer.ptr
            pool.deallocate(gap)
            pool.trim()
            assert pool.stats.reserved_bytes == 20 * MIB
            pool.resize(buffer, 30 * MIB)
            pool.check()
            assert (buffer.ptr, copies(pool), pool.stats.reserved_bytes) == (ptr, 0, 40 * MIB)
            pool.resize(buffer, 30 * MIB + 1)
            pool.check()
            assert buffer.ptr != ptr, "the wall is in the way"
            pool.deallocate(wall)

    def test_equal_blocks(self):
        with vpool.Pool(vpool.Fixed("1MiB", "64KiB", oversize="direct", limit="8MiB"), source="host") as pool:
            buffer = pool.empty(1000)
            ptr = buffer.ptr
            pool.resize(buffer, 65536)
            assert (buffer.ptr, buffer.requested) == (ptr, 65536)
            pool.resize(buffer, 65537)
            pool.check()
            assert buffer.ptr != ptr
            buffer.close()
            pool.check()
            assert pool.stats.allocated_bytes == 0


class TestElsewhere:
    @WITH_MEMORY
    def test_content_is_copied_and_the_old_block_freed(self, make):
        with vpool.Pool(SMALL, source=make()) as pool:
            buffer = pool.empty(1000)
            ctypes.memset(buffer.ptr, 7, 1000)
            ptr, wall = buffer.ptr, pool.allocate(1000)
            same = buffer
            pool.resize(buffer, 50_000)
            pool.check()
            assert same is buffer
            assert buffer.ptr != ptr
            assert ctypes.string_at(buffer.ptr, 1000) == b"\7" * 1000
            assert copies(pool) == 1
            assert pool.allocate(1000) == ptr
            pool.deallocate(wall)

    @WITH_MEMORY
    def test_a_model_of_many(self, make):
        """Sizes at random, with and without room behind: what a buffer holds is always what was written."""
        rng = random.Random(4)
        with vpool.Pool(vpool.Dynamic(initial="4MiB", growth="4MiB", limit="200MiB"), source=make()) as pool:
            live = []
            for turn in range(400):
                if len(live) < 12 and rng.random() < 0.3:
                    live.append((pool.empty(0), b""))
                if live:
                    buffer, content = live.pop(rng.randrange(len(live)))
                    if rng.random() < 0.1:
                        del buffer
                        continue
                    nbytes = rng.choice([0, 100, 3000, 70_000, 2 * MIB, int(2 ** rng.uniform(4, 21))])
                    pool.resize(buffer, nbytes)
                    assert ctypes.string_at(buffer.ptr, min(nbytes, len(content))) == content[:nbytes]
                    content = bytes([turn % 256]) * nbytes
                    ctypes.memmove(buffer.ptr, content, nbytes)
                    live.append((buffer, content))
                if turn % 20 == 0:
                    pool.check()
            del live, buffer
            pool.check()
            assert pool.stats.allocated_bytes == 0

    @EVERYWHERE
    def test_to_nothing_and_back(self, make):
        with vpool.Pool(SMALL, source=make()) as pool:
            buffer = pool.empty(1000)
            pool.resize(buffer, 0)
            assert (buffer.ptr, buffer.nbytes, buffer.closed) == (0, 0, False)
            assert pool.stats.allocated_bytes == 0
            pool.resize(buffer, 0)
            pool.resize(buffer, 1000)
            assert buffer.ptr
            assert buffer.nbytes == 1024
            pool.check()

    @WITH_MEMORY
    def test_on_another_stream_it_is_copied_there_and_is_that_stream_s(self, make):
        source = make()
        with vpool.Pool(SMALL, source=source) as pool:
            stream = source.driver.create_stream()
            buffer = pool.empty(1000)
            ctypes.memset(buffer.ptr, 9, 1000)
            pool.resize(buffer, 500, stream)
            pool.check()
            assert buffer.stream == stream
            assert copies(pool) == 1
            assert ctypes.string_at(buffer.ptr, 500) == b"\x09" * 500
            pool.resize(buffer, 700)
            assert buffer.stream == stream
            buffer.close()
            pool.check()

    @pytest.mark.parametrize("debug", [(), "guard", "poison", "guard,poison,quarantine,sites"])
    @pytest.mark.parametrize("checks_handles", [False, True])
    def test_of_a_stream_that_is_gone(self, debug, checks_handles):
        source = Source(FakeCudaDriver(GIB), "cuda", checks_handles=checks_handles)
        with vpool.Pool(SMALL, source=source, debug=debug) as pool:
            stream = source.driver.create_stream()
            buffer = pool.empty(1000, stream)
            ctypes.memset(buffer.ptr, 9, 1000)
            source.driver.destroy_stream(stream)
            pool.resize(buffer, 5 * MIB)
            pool.check()
            assert ctypes.string_at(buffer.ptr, 1000) == b"\x09" * 1000
        assert source.driver.calls_on_dead_streams == 0

    def test_guards(self):
        with vpool.Pool(SMALL, source="host", debug="guard") as pool:
            buffer = pool.empty(1000)
            ctypes.memset(buffer.ptr, 9, 1000)
            pool.resize(buffer, 2000)
            pool.check()
            assert ctypes.string_at(buffer.ptr, 1000) == b"\x09" * 1000
            ptr = buffer.ptr
            ctypes.memset(buffer.ptr, 9, 2001)
            with pytest.raises(vpool.GuardError):
                pool.resize(buffer, 3000)
            assert (buffer.ptr, buffer.requested) == (ptr, 2000)
            assert pool.stats.allocated_bytes == pool.inspect().allocated_bytes
            buffer.close()
            assert not pool.leaks()


class TestNoted:
    def test_is_recorded_as_a_free_and_an_allocation(self):
        with vpool.Pool(SMALL, source="host") as pool:
            with pool.record() as recording:
                buffer = pool.empty(1000)
                pool.resize(buffer, 5000)  # in place
                wall = pool.allocate(100)
                pool.resize(buffer, 50_000)  # elsewhere
                pool.resize(buffer, 40_000)
                buffer.close()
                pool.deallocate(wall)
            assert sorted(recording.bytes[recording.op == 0].tolist()) == [100, 1000, 5000, 40_000, 50_000]
            assert (recording.op == 1).sum() == 5
            assert recording.peak_live_bytes <= 56_000
            vpool.replay(recording)

    def test_the_limit_of_a_tag(self):
        with vpool.Pool(SMALL, source="host") as pool:
            pool.limit("resized", 6000)
            with vpool.tag("resized"):
                buffer = pool.empty(1000)
                pool.resize(buffer, 5000)
                with unchanged(pool), pytest.raises(vpool.OutOfMemoryError):
                    pool.resize(buffer, 7000)
                pool.resize(buffer, 500)
                pool.resize(buffer, 6000)
                with pytest.raises(vpool.OutOfMemoryError):
                    pool.empty(1)
                row = next(row for row in pool.inspect().tags if row["tag"] == "resized")
                assert row["requested_bytes"] == 6000
            buffer.close()
            with vpool.tag("resized"):
                pool.empty(6000)
            pool.check()


class TestFailures:
    def test_a_copy_that_fails_changes_nothing(self):
        with vpool.Pool(SMALL, source=Source(FakeCudaDriver(GIB), "cuda")) as pool:
            buffer, wall = pool.empty(1000), pool.allocate(100)
            ctypes.memset(buffer.ptr, 3, 1000)
            ptr = buffer.ptr
            pool.source.driver.fail("copy_on", 700)
            live = pool.stats.allocated_bytes, pool.stats.requested_bytes
            with pytest.raises(vpool.SourceError, match="cudaErrorIllegalAddress"):
                pool.resize(buffer, 50_000)
            pool.check()
            assert (buffer.ptr, buffer.requested) == (ptr, 1000)
            assert live == (pool.stats.allocated_bytes, pool.stats.requested_bytes)
            pool.resize(buffer, 50_000)
            assert ctypes.string_at(buffer.ptr, 1000) == b"\3" * 1000
            pool.deallocate(wall)

    def test_no_memory_for_both(self):
        with vpool.Pool(SMALL, source="simulated") as pool:
            buffer = pool.empty(40 * MIB)
            ptr = buffer.ptr
            wall = pool.allocate(100)
            with unchanged(pool), pytest.raises(vpool.OutOfMemoryError):
                pool.resize(buffer, 50 * MIB)
            assert (buffer.ptr, buffer.requested) == (ptr, 40 * MIB)
            pool.deallocate(wall)

    @pytest.mark.parametrize(
        ("nbytes", "error"),
        [(-1, ValueError), (1.5, TypeError), ("8", TypeError), (True, TypeError), (2**63, OverflowError)],
    )
    def test_sizes_that_are_none(self, nbytes, error):
        with vpool.Pool(SMALL, source="host") as pool:
            buffer = pool.empty(1000)
            with unchanged(pool), pytest.raises(error):
                pool.resize(buffer, nbytes)

    def test_what_is_no_open_buffer_of_this_pool(self):
        with vpool.Pool(SMALL, source="host") as pool, vpool.Pool(SMALL, source="host") as other:
            buffer, closed, freed, strange = pool.empty(10), pool.empty(10), pool.empty(10), other.empty(10)
            closed.close()
            pool.deallocate(freed.ptr)
            for what, error in (
                (buffer.ptr, TypeError),
                (None, TypeError),
                (closed, vpool.DoubleFreeError),
                (freed, vpool.DoubleFreeError),
                (strange, vpool.ForeignPointerError),
            ):
                with unchanged(pool), pytest.raises(error):
                    pool.resize(what, 20)

    def test_a_buffer_that_is_closed_by_what_makes_room(self):
        with vpool.Pool(SMALL, source="simulated") as pool:
            buffer, wall = pool.empty(40 * MIB), pool.allocate(100)
            pool.on_pressure(lambda nbytes: buffer.close())
            with pytest.raises(vpool.InvalidPointerError):
                pool.resize(buffer, 50 * MIB)
            pool.check()
            assert pool.stats.allocated_bytes == 256
            pool.deallocate(wall)

    def test_closed_pools(self):
        pool = vpool.Pool(SMALL, source="host")
        buffer = pool.empty(100)
        pool.close()
        with pytest.raises(vpool.ClosedPoolError):
            pool.resize(buffer, 50)

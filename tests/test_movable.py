"""Blocks that their owners let move: free memory becomes whole, contents stay, and owners learn the new address."""

import ctypes
import gc
import random

import pytest

import vpool
from tests.helpers.pools import GIB, KIB, MIB, unchanged
from tests.test_mapped import fake, pool_on
from vpool._storage.fake_cuda import FakeCudaDriver
from vpool._storage.source import Source

ONE = vpool.Dynamic(initial="16MiB", limit="16MiB")
MAKERS = {
    "host": vpool.sources.Host,
    "fake cuda": lambda: Source(FakeCudaDriver(GIB), "cuda"),
    "simulated": lambda: vpool.sources.Simulated(GIB),
}
EVERYWHERE = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def in_pieces(pool, count=16, nbytes=MIB):
    """A full segment of which every second block is free; the rest, by address."""
    blocks = [pool.allocate(nbytes) for _ in range(count)]
    for ptr in blocks[::2]:
        pool.deallocate(ptr)
    return blocks[1::2]


class Owner:
    """Who has blocks that may move, and what is in them."""

    def __init__(self, pool, blocks, nbytes=MIB):
        self.pool, self.nbytes = pool, nbytes
        self.content = {}
        self.moves = []
        for number, ptr in enumerate(blocks, 1):
            self.content[ptr] = number
            if pool.source.has_memory:
                ctypes.memset(ptr, number, nbytes)
            pool.movable(ptr, self.moved)

    def moved(self, old, new):
        self.moves.append((old, new))
        self.content[new] = self.content.pop(old)

    def check(self):
        self.pool.check()
        for ptr, number in self.content.items() if self.pool.source.has_memory else ():
            assert ctypes.string_at(ptr, self.nbytes) == bytes([number]) * self.nbytes
        blocks = self.pool.inspect().blocks
        assert set(self.content) <= set(blocks["address"][blocks["state"] == "live"].tolist())


class TestMoves:
    @EVERYWHERE
    def test_what_is_free_becomes_whole(self, make):
        with vpool.Pool(ONE, source=make()) as pool:
            owner = Owner(pool, in_pieces(pool))
            with pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(3 * MIB)
            found = vpool.defrag.report(pool.snapshot())
            assert pool.coalesce() == found.joins[-1].gained_bytes > 2 * MIB
            assert owner.moves
            owner.check()
            assert pool.inspect().largest_free_bytes == found.joins[-1].largest_free_bytes
            pool.allocate(found.joins[-1].largest_free_bytes)
            owner.check()

    def test_again_and_again(self):
        """Blocks that were moved may be moved once more."""
        rng = random.Random(2)
        with vpool.Pool(ONE, source="host") as pool:
            owner = Owner(pool, [])
            for turn in range(120):
                while len(owner.content) < 12:
                    ptr = pool.allocate(MIB)
                    owner.content[ptr] = turn % 250 + 1
                    ctypes.memset(ptr, turn % 250 + 1, MIB)
                    pool.movable(ptr, owner.moved)
                for ptr in rng.sample(sorted(owner.content), 6):
                    del owner.content[ptr]
                    pool.deallocate(ptr)
                pool.coalesce()
                owner.check()
            assert len(owner.moves) > 100
            assert pool.stats.allocated_bytes == 6 * MIB

    def test_only_what_may_move_moves(self):
        with vpool.Pool(ONE, source="host") as pool:
            kept = in_pieces(pool)
            assert pool.coalesce() == 0
            owner = Owner(pool, kept[:3])
            assert pool.coalesce() > 0
            owner.check()
            blocks = pool.inspect().blocks
            assert set(kept[3:]) <= set(blocks["address"][blocks["state"] == "live"].tolist())

    def test_buffers_follow(self):
        with vpool.Pool(ONE, source="host") as pool:
            buffers = [pool.empty(MIB) for _ in range(16)]
            del buffers[::2]
            seen = []
            for number, buffer in enumerate(buffers):
                ctypes.memset(buffer.ptr, number, MIB)
                pool.movable(buffer, lambda old, new, buffer=number: seen.append((buffers[buffer].ptr, new)))
            assert pool.coalesce() > 0
            pool.check()
            assert seen
            assert all(ptr == new for ptr, new in seen), "the buffer has its new address by then"
            for number, buffer in enumerate(buffers):
                assert ctypes.string_at(buffer.ptr, MIB) == bytes([number]) * MIB
            del buffer
            buffers.clear()
            gc.collect()
            pool.check()
            assert pool.stats.allocated_bytes == 0, "nothing keeps a buffer"

    def test_the_leave_ends_with_the_block(self):
        with vpool.Pool(ONE, source="simulated") as pool:
            kept = in_pieces(pool)
            owner = Owner(pool, kept)
            for ptr in kept:
                pool.deallocate(ptr)
            again = [pool.allocate(MIB) for _ in range(16)]
            for ptr in again[::2]:
                pool.deallocate(ptr)
            assert pool.coalesce() == 0
            assert owner.moves == []

    def test_the_leave_can_be_taken_back(self):
        with vpool.Pool(ONE, source="simulated") as pool:
            kept = in_pieces(pool)
            owner = Owner(pool, kept)
            for ptr in kept:
                pool.movable(ptr, None)
            assert pool.coalesce() == 0
            assert owner.moves == []

    def test_memory_that_moves(self):
        with pool_on(fake(64 * MIB)) as pool:
            owner = Owner(pool, in_pieces(pool, 32))
            assert pool.coalesce() > 0
            owner.check()
            pool.trim()
            owner.check()


class TestOrder:
    def test_the_copy_and_the_free_are_in_the_order_of_the_block_s_stream(self):
        source = Source(FakeCudaDriver(GIB), "cuda")
        with vpool.Pool(ONE, source=source, on_pressure="raise") as pool:
            other = source.driver.create_stream()
            owner = Owner(pool, in_pieces(pool))
            source.driver.queue_work(0)
            copies = source.driver.calls()["copy_on"][0]
            pool.coalesce()
            assert source.driver.calls()["copy_on"][0] == copies + len(owner.moves)
            waits = pool.crossings["waits"]
            pool.allocate(3 * MIB, other)
            assert pool.crossings["waits"] > waits, "what a block left is not another stream's at once"
            owner.check()

    def test_a_block_that_other_streams_use_stays(self):
        source = vpool.sources.Simulated()
        with vpool.Pool(ONE, source=source) as pool:
            kept = in_pieces(pool)
            owner = Owner(pool, kept)
            stream = source.driver.create_stream()
            for ptr in kept:
                pool.record_stream(ptr, stream)
            assert pool.coalesce() == 0
            assert owner.moves == []

    def test_nothing_moves_while_its_stream_captures(self):
        source = Source(FakeCudaDriver(GIB), "cuda")
        with vpool.Pool(ONE, source=source) as pool:
            stream = source.driver.create_stream()
            blocks = [pool.allocate(MIB, stream) for _ in range(16)]
            for ptr in blocks[::2]:
                pool.deallocate(ptr)
            owner = Owner(pool, blocks[1::2])
            source.driver.begin_capture(stream)
            pool.coalesce()
            assert owner.moves == []
            assert source.driver.end_capture(stream)
            pool.coalesce()
            assert owner.moves
            owner.check()

    def test_what_was_exported_stays(self):
        with vpool.Pool(ONE, source=Source(FakeCudaDriver(GIB), "cuda")) as pool:
            kept = in_pieces(pool)
            owner = Owner(pool, kept)
            pool.ipc_handle(kept[0])
            assert pool.coalesce() == 0
            assert owner.moves == []


class TestNoted:
    def test_is_recorded(self):
        with vpool.Pool(ONE, source="host") as pool, pool.record() as recording:
            owner = Owner(pool, in_pieces(pool))
            pool.coalesce()
            for ptr in owner.content:
                pool.deallocate(ptr)
        assert (recording.op == 0).sum() == (recording.op == 1).sum() == 16 + len(owner.moves)

    def test_the_limit_of_a_tag_holds(self):
        with vpool.Pool(ONE, source="host") as pool:
            with vpool.tag("moved"):
                owner = Owner(pool, in_pieces(pool))
            pool.limit("moved", 8 * MIB)
            assert pool.coalesce() == 0, "both places would count for a moment"
            pool.limit("moved", 9 * MIB)
            assert pool.coalesce() > 0
            owner.check()
            row = next(row for row in pool.inspect().tags if row["tag"] == "moved")
            assert row["requested_bytes"] == 8 * MIB


class TestFailures:
    def test_a_copy_that_fails(self):
        with vpool.Pool(ONE, source=Source(FakeCudaDriver(GIB), "cuda")) as pool:
            owner = Owner(pool, in_pieces(pool))
            pool.source.driver.fail("copy_on", 700, after=1)
            with pytest.raises(vpool.SourceError, match="cudaErrorIllegalAddress"):
                pool.coalesce()
            assert len(owner.moves) == 1
            owner.check()
            assert pool.stats.allocated_bytes == 8 * MIB
            assert pool.coalesce() > 0
            owner.check()

    @pytest.mark.parametrize("buffers", [False, True])
    def test_an_owner_that_refuses(self, buffers):
        def refuse(old, new):
            raise KeyError(new)

        with vpool.Pool(ONE, source="host") as pool:
            kept = [pool.empty(MIB) for _ in range(16)]
            del kept[::2]
            before = [one.ptr for one in kept]
            for one in kept:
                pool.movable(one if buffers else one.ptr, refuse)
            with pytest.raises(KeyError):
                pool.coalesce()
            pool.check()
            assert [one.ptr for one in kept] == before
            assert pool.stats.allocated_bytes == 8 * MIB

    def test_an_owner_that_frees_its_block_meanwhile(self):
        with vpool.Pool(ONE, source="host") as pool:
            kept = in_pieces(pool)
            for ptr in kept:
                pool.movable(ptr, lambda old, new: (pool.deallocate(old), pool.deallocate(new)))
            pool.coalesce()
            pool.check()
            assert pool.stats.allocated_bytes < 8 * MIB
            assert pool.stats.allocated_bytes % MIB == 0

    def test_what_is_no_live_block(self):
        with vpool.Pool(ONE, source="host") as pool:
            live, ptr, buffer = pool.allocate(100), pool.allocate(100), pool.empty(100)
            pool.deallocate(ptr)
            buffer.close()
            for what, on_move, error in (
                (ptr, print, vpool.DoubleFreeError),
                (buffer, print, vpool.DoubleFreeError),
                (live, 3, TypeError),
                (1 << 40, print, vpool.ForeignPointerError),
            ):
                with unchanged(pool), pytest.raises(error):
                    pool.movable(what, on_move)

    def test_debug_modes(self):
        with vpool.Pool(vpool.Dynamic(initial="1MiB"), source="host", debug="guard") as pool:
            blocks = [pool.allocate(60 * KIB) for _ in range(16)]
            for ptr in blocks[::2]:
                pool.deallocate(ptr)
            for ptr in blocks[1::2]:
                with pytest.raises(vpool.Error, match="debug modes"):
                    pool.movable(ptr, print)
            pool.coalesce()
            pool.check()

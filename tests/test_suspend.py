"""Suspended blocks: their memory is given up, their addresses stay, and what was offloaded comes back."""

import ctypes
import json
import random
import threading

import pytest

import vpool
from tests.helpers.pools import GIB, MIB, run_cleanly, unchanged
from tests.test_mapped import SOURCES, UNIT, fake, pool_on, simulated, virtual
from vpool import trimming
from vpool._storage.fake_cuda import FakeCudaDriver
from vpool._storage.mapped_source import MappedSource

OTHER = [FakeCudaDriver, vpool.sources.Host, vpool.sources.Simulated]


def fill(ptr, nbytes, byte):
    ctypes.memset(ptr, byte, nbytes)


def holds(ptr, nbytes, byte):
    return ctypes.string_at(ptr, nbytes) == bytes([byte]) * nbytes


def tagged(pool, tag, nbytes, stream=None):
    with vpool.tag(tag):
        return pool.allocate(nbytes, stream)


def states(pool):
    """Bytes by state, without the addresses that are nobody's."""
    blocks = pool.inspect().blocks
    found = {}
    for state, nbytes in zip(blocks["state"].tolist(), blocks["nbytes"].tolist(), strict=True):
        found[state] = found.get(state, 0) + nbytes
    found.pop("unmapped", None)
    return found


def test_loans_inside_loans_need_no_deep_stack():
    """Two streams take turns with what is left of a handle, so each block lies in a loan of the one before."""
    run_cleanly("""
import vpool
from tests.helpers.pools import GRANULE, MIB, on_a_small_stack
depth, streams = 8000, (0x7010, 0x7020)
pool = vpool.Pool(vpool.Dynamic(initial=0), vpool.sources.SimulatedVmm(64 * MIB, handle="2MiB"))
kept = pool.allocate(8 * MIB, streams[0])  # where the default stream has most, free memory goes home first
blocks = [pool.allocate(GRANULE, streams[number % 2]) for number in range(depth)]
assert pool.crossings["crossings"] >= depth - 1

def go_and_come():
    suspended = pool.suspend()
    pool.check()
    return suspended, pool.resume()

assert on_a_small_stack(go_and_come) == (10 * MIB, 10 * MIB)
pool.check()
for ptr in (kept, *blocks):
    pool.deallocate(ptr)
pool.check()
""")


class TestAll:
    @SOURCES
    def test_memory_goes_and_comes_back_at_the_same_addresses(self, make):
        with pool_on(make()) as pool:
            blocks = [pool.allocate(nbytes) for nbytes in (100, 3 * MIB, 30 * MIB, 70_000)]
            pool.deallocate(pool.allocate(20 * MIB))
            before = pool.inspect()
            suspended = pool.suspend()
            pool.check()
            assert suspended == before.reserved_bytes
            assert suspended.kept == ()
            assert pool.stats.reserved_bytes == pool.stats.allocated_bytes == 0
            assert virtual(pool)[1:] == (0, 0)
            assert set(states(pool)) == {"suspended"}
            assert states(pool)["suspended"] == before.allocated_bytes
            brought = pool.resume()
            pool.check()
            after = pool.inspect()
            assert brought == after.reserved_bytes
            assert after.allocated_bytes == before.allocated_bytes
            assert after.requested_bytes == before.requested_bytes
            live = after.blocks[after.blocks["state"] == "live"]
            assert live["address"].tolist() == sorted(blocks)
            for ptr in blocks:
                pool.deallocate(ptr)
            pool.check()

    def test_contents_come_back_where_they_were_offloaded(self):
        with pool_on(fake()) as pool:
            blocks = [(pool.allocate(nbytes), nbytes, byte) for byte, nbytes in enumerate((100, 5 * MIB, 33 * MIB), 1)]
            for one in blocks:
                fill(*one)
            pool.suspend(offload=True)
            # Others have the memory meanwhile.
            other = pool.allocate(200 * MIB)
            fill(other, 200 * MIB, 99)
            pool.deallocate(other)
            pool.resume()
            assert all(holds(*one) for one in blocks)

    def test_nobody_touches_what_is_suspended(self):
        """A read of it would end this process."""
        with pool_on(fake()) as pool:
            buffer = pool.empty(5 * MIB)
            pool.suspend(offload=True)
            pool.check()
            pool.inspect()
            pool.snapshot()
            pool.trim()
            pool.coalesce()
            str(pool.inspect())
            assert buffer.nbytes == 5 * MIB
            assert not buffer.closed
            pool.resume()

    def test_twice(self):
        with pool_on(fake()) as pool:
            ptr = pool.allocate(MIB)
            fill(ptr, MIB, 7)
            for _ in range(3):
                pool.suspend(offload=True)
                assert pool.suspend(offload=True) == 0
                pool.resume()
                assert pool.resume() == 0
                assert holds(ptr, MIB, 7)
                pool.check()

    def test_an_empty_pool(self):
        with pool_on(simulated()) as pool:
            assert pool.suspend() == pool.resume() == 0
            pool.allocate(100)

    def test_a_thousand_cycles_leak_nothing(self):
        with pool_on(simulated()) as pool:
            blocks = [pool.allocate(3 * MIB + 256) for _ in range(20)]
            for ptr in blocks[::3]:
                pool.deallocate(ptr)
            pool.trim()
            had = virtual(pool)
            for _ in range(1000):
                pool.suspend()
                pool.resume()
            pool.check()
            assert virtual(pool) == had

    @SOURCES
    def test_pool_goes_on_meanwhile(self, make):
        rng = random.Random(5)
        with pool_on(make(), 1.0) as pool:
            kept = [pool.allocate(2 * MIB) for _ in range(30)]
            pool.suspend(offload=True)
            live = []
            for turn in range(300):
                if len(live) < 12 and rng.random() < 0.6:
                    live.append(pool.allocate(int(2 ** rng.uniform(10, 23))))
                elif live:
                    pool.deallocate(live.pop(rng.randrange(len(live))))
                if turn % 50 == 0:
                    pool.check()
            for ptr in live:
                pool.deallocate(ptr)
            pool.resume()
            pool.check()
            for ptr in kept:
                pool.deallocate(ptr)

    def test_frees_figures_and_peaks(self):
        with pool_on(simulated()) as pool:
            ptr = pool.allocate(10 * MIB)
            pool.deallocate(pool.allocate(100))
            frees, peak = pool.stats.frees, pool.stats.peak_allocated_bytes
            pool.suspend()
            assert pool.stats.frees == frees
            pool.allocate(3 * MIB)
            pool.resume()
            pool.check()
            assert pool.stats.peak_allocated_bytes == 13 * MIB > peak
            pool.deallocate(ptr)
            assert pool.stats.frees == frees + 1


class TestTags:
    @SOURCES
    def test_only_blocks_of_a_tag(self, make):
        with pool_on(make()) as pool:
            cache = tagged(pool, "kv-cache", 40 * MIB)
            weights = tagged(pool, "weights", 40 * MIB)
            assert pool.suspend("kv-cache") == 40 * MIB
            assert states(pool) == {"suspended": 40 * MIB, "live": 40 * MIB}
            pool.check()
            pool.resume()
            assert states(pool) == {"live": 80 * MIB}
            pool.deallocate(cache)
            pool.deallocate(weights)

    def test_a_handle_that_others_share_stays_and_is_told(self):
        with pool_on(fake(handle=8 * MIB)) as pool:
            pool.deallocate(pool.allocate(96 * MIB))
            blocks = [tagged(pool, "ab"[i % 2], 6 * MIB) for i in range(16)]
            for i, ptr in enumerate(blocks):
                fill(ptr, 6 * MIB, i + 1)
            reserved = pool.stats.reserved_bytes
            suspended = pool.suspend("a", offload=True)
            pool.check()
            assert 0 <= suspended == reserved - pool.stats.reserved_bytes
            kept = {reason: nbytes for nbytes, reason in suspended.kept}
            assert kept[trimming.SHARED] > 0
            assert sum(kept.values()) == pool.stats.reserved_bytes
            for i, ptr in enumerate(blocks[1::2]):
                assert holds(ptr, 6 * MIB, 2 * i + 2), "what stays is untouched"
            pool.resume()
            pool.check()
            assert all(holds(ptr, 6 * MIB, i + 1) for i, ptr in enumerate(blocks))

    def test_a_block_across_the_edge_loses_nothing(self):
        """Its first handle goes, the second one stays; both parts are there again, also after a second suspension."""
        with pool_on(fake(handle=8 * MIB)) as pool:
            pool.deallocate(pool.allocate(24 * MIB))
            cache = tagged(pool, "cache", 12 * MIB)
            other = tagged(pool, "other", 12 * MIB)
            fill(cache, 12 * MIB, 1)
            fill(other, 12 * MIB, 2)
            assert 0 < pool.suspend("cache", offload=True) < 12 * MIB
            pool.suspend("other", offload=True)
            pool.check()
            pool.resume()
            pool.check()
            assert holds(cache, 12 * MIB, 1)
            assert holds(other, 12 * MIB, 2)

    def test_limits_count_what_is_suspended(self):
        with pool_on(simulated()) as pool:
            pool.limit("limited-cache", 10 * MIB)
            ptr = tagged(pool, "limited-cache", 8 * MIB)
            pool.suspend("limited-cache")
            with pytest.raises(vpool.OutOfMemoryError):
                tagged(pool, "limited-cache", 4 * MIB)
            pool.deallocate(ptr)
            tagged(pool, "limited-cache", 4 * MIB)

    @pytest.mark.parametrize(("tag", "error"), [(3, TypeError), ("", ValueError), (b"a", TypeError)])
    def test_what_is_no_tag(self, tag, error):
        with pool_on(simulated()) as pool, unchanged(pool), pytest.raises(error):
            pool.suspend(tag)


class TestFrees:
    @SOURCES
    def test_a_suspended_block_may_be_freed(self, make):
        with pool_on(make()) as pool:
            first, second = pool.allocate(10 * MIB), pool.allocate(10 * MIB)
            pool.suspend()
            pool.deallocate(first)
            pool.check()
            with pytest.raises(vpool.DoubleFreeError):
                pool.deallocate(first)
            pool.resume()
            pool.check()
            assert states(pool)["live"] == 10 * MIB
            pool.deallocate(second)
            pool.trim()
            assert pool.stats.reserved_bytes == 0

    @pytest.mark.parametrize("how", ["drop", "close", "stream", "address", "other stream"])
    def test_in_every_way(self, how):
        source = simulated()
        with pool_on(source) as pool:
            stream = source.driver.create_stream()
            buffer, rest = pool.empty(10 * MIB), pool.empty(MIB)
            pool.record_stream(buffer, stream)
            pool.suspend()
            match how:
                case "drop":
                    del buffer
                case "close":
                    buffer.close()
                    assert buffer.closed
                case "stream":
                    buffer.close(stream)
                case "address":
                    pool.deallocate(buffer.ptr)
                    assert buffer.closed
                    with pytest.raises(vpool.DoubleFreeError):
                        buffer.close()
                case "other stream":
                    pool.deallocate(buffer.ptr, stream)
            pool.check()
            assert states(pool) == {"suspended": MIB}
            assert pool.stats.frees == 1
            pool.resume()
            pool.check()
            assert states(pool)["live"] == MIB
            assert not rest.closed

    def test_all_freed_leaves_nothing_to_bring_back(self):
        with pool_on(fake()) as pool:
            blocks = [pool.allocate(5 * MIB) for _ in range(8)]
            pool.suspend(offload=True)
            for ptr in blocks:
                pool.deallocate(ptr)
            pool.check()
            assert pool.resume() == 0
            pool.check()
            assert pool.inspect().blocks["state"].tolist() == ["unmapped"], "the addresses are one hole again"

    def test_a_trim_lets_go_of_them_too(self):
        with pool_on(simulated()) as pool:
            ptr = pool.allocate(5 * MIB)
            pool.suspend()
            pool.deallocate(ptr)
            pool.trim()
            assert pool.inspect().blocks["state"].tolist() == ["unmapped"]

    def test_holes_of_what_a_stream_has_back_from_another_are_whole(self):
        """The default stream borrows a part of what it lent: no hole is left there that handles cannot fill."""
        source = vpool.sources.SimulatedVmm(GIB)
        one, other = source.driver.create_stream(), source.driver.create_stream()
        with vpool.Pool(vpool.Dynamic(initial=0, limit="32MiB"), source) as pool:
            lent = pool.allocate(MIB, one)
            with vpool.tag("goes"):
                back = pool.allocate(MIB)
            pool.deallocate(lent)
            pool.suspend(tag="goes")
            pool.deallocate(back)
            pool.resume()
            pool.check()
            pool.deallocate(pool.allocate(100_000, other))

    def test_holes_of_loans_inside_what_a_stream_has_back_are_whole(self):
        source = vpool.sources.SimulatedVmm(GIB)
        one, other = source.driver.create_stream(), source.driver.create_stream()
        pool = vpool.Pool(vpool.Dynamic(initial=0, limit="32MiB"), source)
        blocks = [pool.allocate(100_000, stream) for stream in (one, 0, other)]
        pool.suspend()
        for ptr in blocks:
            pool.deallocate(ptr)
        pool.trim()
        pool.check()
        pool.deallocate(pool.allocate(MIB))
        pool.close()
        pool.check()

    def test_is_recorded(self):
        with pool_on(simulated()) as pool, pool.record() as recording:
            blocks = [pool.allocate(5 * MIB) for _ in range(3)]
            pool.suspend()
            pool.deallocate(blocks[1])
            pool.resume()
            pool.deallocate(blocks[0])
            pool.deallocate(blocks[2])
            pool.check()
        assert (recording.op == 0).sum() == (recording.op == 1).sum() == 3


class TestOrder:
    def test_work_on_the_blocks_is_waited_for(self):
        source = simulated()
        with pool_on(source) as pool:
            stream = source.driver.create_stream()
            pool.allocate(10 * MIB)
            theirs = pool.allocate(10 * MIB, stream)
            source.driver.queue_work(stream)
            source.driver.queue_work(0)
            pending = pool.allocate(10 * MIB)
            pool.record_stream(pending, stream)
            pool.deallocate(pending)
            before = source.driver.calls()["synchronize"][0]
            pool.suspend()
            assert source.driver.calls()["synchronize"][0] == before + 1
            assert pool.stats.reserved_bytes == pool.stats.pending_bytes == 0
            pool.check()
            pool.resume()
            pool.check()
            pool.deallocate(theirs)

    def test_blocks_of_every_stream(self):
        source = fake()
        with pool_on(source) as pool:
            streams = [0, *(source.driver.create_stream() for _ in range(3))]
            rng = random.Random(3)
            live = {}
            for turn in range(200):
                stream = rng.choice(streams)
                if len(live) < 25 and rng.random() < 0.7:
                    nbytes = int(2 ** rng.uniform(10, 22))
                    ptr = pool.allocate(nbytes, stream)
                    live[ptr] = nbytes, turn % 250 + 1
                    fill(ptr, *live[ptr])
                elif live:
                    ptr = rng.choice(list(live))
                    del live[ptr]
                    pool.deallocate(ptr, rng.choice([None, stream]))
                if turn % 20 == 0:
                    pool.suspend(offload=True)
                    pool.check()
                    if live and turn % 40 == 0:
                        ptr = rng.choice(list(live))
                        del live[ptr]
                        pool.deallocate(ptr)
                    pool.resume()
                    pool.check()
                    assert all(holds(ptr, *what) for ptr, what in live.items())
            for ptr in live:
                pool.deallocate(ptr)
            pool.check()
            pool.trim()
            assert pool.stats.reserved_bytes == 0

    def test_not_while_something_captures(self):
        source = fake()
        with pool_on(source) as pool:
            stream = source.driver.create_stream()
            pool.allocate(10 * MIB)
            source.driver.begin_capture(stream)
            pool.allocate(MIB, stream)
            with unchanged(pool), pytest.raises(vpool.SourceError, match="while a capture goes on"):
                pool.suspend()
            assert source.driver.end_capture(stream), "the capture is still valid"

    def test_what_a_graph_may_use_stays(self):
        source = fake()
        with pool_on(source) as pool:
            stream = source.driver.create_stream()
            capture = source.driver.begin_capture(stream)
            pool.allocate(10 * MIB, stream)
            source.driver.end_capture(stream)
            mine = pool.allocate(20 * MIB)
            suspended = pool.suspend()
            assert suspended == 20 * MIB
            assert [reason for _, reason in suspended.kept] == [trimming.OTHERS]
            pool.resume()
            pool.deallocate(mine)
            source.driver.destroy_graph(capture)

    def test_threads_go_on(self):
        source = simulated(GIB, handle=4 * MIB)
        failures = []

        def work(seed):
            rng, live = random.Random(seed), []
            try:
                for _ in range(1500):
                    if rng.random() < 0.55 and len(live) < 20:
                        live.append(pool.allocate(int(2 ** rng.uniform(8, 22))))
                    elif live:
                        pool.deallocate(live.pop(rng.randrange(len(live))))
                for ptr in live:
                    pool.deallocate(ptr)
            except BaseException as error:
                failures.append(error)
                raise

        with pool_on(source) as pool:
            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                pool.suspend()
                pool.check()
                pool.resume()
            for thread in threads:
                thread.join()
            assert not failures
            pool.check()
            assert pool.stats.allocated_bytes == 0


class TestWhereItIsRefused:
    @pytest.mark.parametrize("source", ["host", "simulated"])
    def test_sources_that_keep_no_addresses(self, source):
        with vpool.Pool(vpool.Dynamic(initial="1MiB"), source=source) as pool:
            ptr = pool.allocate(1000)
            with unchanged(pool), pytest.raises(vpool.SourceError, match="trim") as caught:
                pool.suspend()
            assert caught.value.name == "cudaErrorNotSupported"
            assert pool.resume() == 0
            pool.deallocate(ptr)

    def test_debug_modes(self):
        with pool_on(fake(), debug="guard") as pool:
            pool.allocate(100)
            with unchanged(pool), pytest.raises(vpool.Error, match="debug modes"):
                pool.suspend()

    def test_a_fixed_core_stays(self):
        with vpool.Pool(vpool.Hybrid("4MiB", largest="64KiB"), source=simulated()) as pool:
            pool.allocate(1000)
            pool.allocate(10 * MIB)
            suspended = pool.suspend()
            assert suspended == 10 * MIB
            assert suspended.kept == ((4 * MIB, trimming.CORE),)
            pool.resume()
            pool.check()

    def test_what_a_suspended_block_cannot_do(self):
        source = simulated()
        with pool_on(source) as pool:
            buffer = pool.empty(MIB)
            pool.suspend()
            for call in (
                lambda: pool.record_stream(buffer, source.driver.create_stream()),
                lambda: pool.resize(buffer, 2 * MIB),
                lambda: pool.ipc_handle(buffer),
            ):
                with pytest.raises(vpool.InvalidPointerError, match=r"is suspended: resume\(\)"):
                    call()
            pool.resume()
            pool.record_stream(buffer, source.driver.create_stream())


class TestEnd:
    def test_close_and_bring_back(self):
        pool = pool_on(fake())
        ptr = pool.allocate(9 * MIB)
        fill(ptr, 9 * MIB, 5)
        pool.suspend(offload=True)
        pool.close()
        pool.resume()
        assert holds(ptr, 9 * MIB, 5)
        pool.deallocate(ptr)
        assert virtual(pool) == (0, 0, 0)

    def test_close_and_free(self):
        pool = pool_on(fake())
        first, second = pool.allocate(9 * MIB), pool.empty(MIB)
        pool.suspend(offload=True)
        pool.close()
        pool.deallocate(first)
        second.close()
        pool.trim()
        assert virtual(pool) == (0, 0, 0)

    def test_closed_pools_are_not_suspended(self):
        pool = pool_on(simulated())
        pool.close()
        with pytest.raises(vpool.ClosedPoolError):
            pool.suspend()

    def test_a_dropped_pool_gives_back_everything(self):
        source = fake()
        pool = pool_on(source)
        pool.allocate(9 * MIB)
        pool.suspend(offload=True)
        host = vpool.sources.host_beside(source)
        assert host.name == "host"
        del pool
        assert source.driver.virtual() == (0, 0, 0)

    def test_pinned_memory_of_cuda(self, monkeypatch):
        cuda, pinned = FakeCudaDriver(GIB), FakeCudaDriver(GIB, pins=True)
        monkeypatch.setattr(vpool.sources, "_cuda_driver", cuda)
        monkeypatch.setattr(vpool.sources, "_other_drivers", {("pinned",): pinned})
        source = MappedSource(cuda, "cuda-vmm", handle_bytes=UNIT)
        with pool_on(source) as pool:
            ptr = pool.allocate(9 * MIB)
            fill(ptr, 9 * MIB, 5)
            pool.suspend(offload=True)
            assert pinned.pinned == 10 * MIB
            pool.resume()
            assert pinned.pinned == 0
            assert holds(ptr, 9 * MIB, 5)
            pinned.fail("malloc", after=2)
            with unchanged(pool), pytest.raises(vpool.OutOfMemoryError, match="host has no memory"):
                pool.suspend(offload=True)
            assert pinned.pinned == 0
            assert holds(ptr, 9 * MIB, 5)


def test_reports_and_files(tmp_path):
    with pool_on(simulated()) as pool:
        ptr = tagged(pool, "cache", 9 * MIB)
        pool.allocate(MIB)
        pool.suspend("cache")
        report = pool.inspect()
        assert report.suspended_bytes == 9 * MIB
        assert json.loads(report.to_json())["suspended_bytes"] == 9 * MIB
        assert "suspended" in str(report)
        report.largest_allocatable()
        assert vpool.explain(ptr).state == "suspended"
        snapshot = pool.snapshot()
        snapshot.save(tmp_path / "snapshot.npz")
        loaded = vpool.Snapshot.load(tmp_path / "snapshot.npz")
        assert loaded.blocks["state"].tolist() == snapshot.blocks["state"].tolist()
        assert vpool.defrag.report(loaded).live_bytes == MIB
        assert (pool.leaks().blocks, pool.leaks().allocated_bytes) == (2, 10 * MIB)

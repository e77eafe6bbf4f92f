"""The Hybrid rule: a fixed core for common requests, and an area that grows for the rest."""

import contextlib
import functools
import random

import numpy as np
import pytest

import vpool
from tests.helpers.pools import GIB, KIB, MIB, assert_whole, live_rows, unchanged
from tests.helpers.serving import blocks_for, hammer, serving_trace
from tests.helpers.traces import EIGHT, made, recorded

ILLEGAL_ADDRESS = 700
CORE = 4 * MIB


def hybrid_pool(core=CORE, block=None, *, base_offset=0, device=GIB, dynamic=None, **arguments):
    dynamic = vpool.Dynamic(**{"initial": MIB, "growth": "1MiB", "limit": 1.0, **(dynamic or {})})
    source = vpool.sources.Simulated(device, base_offset=base_offset)
    return vpool.Pool(vpool.Hybrid(core, block, dynamic=dynamic, **arguments), source)


def in_core(pool, ptr):
    first = pool.inspect().segment_table[0]
    return bool(first["address"] <= ptr < first["address"] + first["nbytes"])


def fill(pool, share):
    """Blocks of the core until so much of it is live."""
    return [pool.allocate(KIB) for _ in range(int(CORE * share) // KIB)]


def use_up(pool, nbytes):
    with contextlib.suppress(vpool.OutOfMemoryError):
        while True:
            pool.allocate(nbytes)


class TestBand:
    """Which requests the core serves."""

    @pytest.mark.parametrize("block", [None, 4 * KIB, [KIB, 4 * KIB]])
    @pytest.mark.parametrize("stream", [None, 7])
    @pytest.mark.parametrize("alignment", [256, 512])
    def test_those_from_smallest_to_largest_and_no_others(self, block, stream, alignment):
        with hybrid_pool(block=block, smallest=300, largest=4000) as pool:
            for nbytes in (1, 299, 300, 301, 1000, 3999, 4000, 4001, 4096, 5000, MIB):
                for _ in range(3):
                    assert in_core(pool, pool.allocate(nbytes, stream, alignment)) == (300 <= nbytes <= 4000), nbytes
            pool.check()

    def test_by_default_all_that_a_block_holds(self):
        with hybrid_pool(block=4 * KIB) as pool:
            assert [in_core(pool, pool.allocate(nbytes)) for nbytes in (1, 4096, 4097)] == [True, True, False]
        with hybrid_pool() as pool:
            assert [in_core(pool, pool.allocate(nbytes)) for nbytes in (1, 3 * MIB, 2 * MIB)] == [True, True, False]

    @pytest.mark.parametrize("block", [None, 1024, [512, 1024]])
    def test_they_overflow_only_while_the_core_is_full(self, block):
        rng = random.Random(0)
        with hybrid_pool(64 * KIB, block, largest=1024) as pool:
            live, outside = [], 0
            for _ in range(3000):
                room = pool.inspect().blocks
                room = room["nbytes"][(room["segment"] == 0) & (room["state"] != "live")].max(initial=0)
                if rng.random() < 0.52:
                    live.append(pool.allocate(1024, rng.choice([None, 7])))
                    assert in_core(pool, live[-1]) == (room >= 1024)
                    outside += room < 1024
                elif live:
                    pool.deallocate(live.pop(rng.randrange(len(live))), rng.choice([None, 7]))
            assert outside > 100
            pool.check()

    def test_an_uncommon_request_fails_though_the_core_has_room(self):
        with hybrid_pool(largest=4096, dynamic={"limit": CORE + 8192, "initial": 0}) as pool:
            pool.allocate(8192)
            with unchanged(pool), pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(8192)
            assert in_core(pool, pool.allocate(4096))

    def test_a_band_without_a_size_is_refused(self):
        with pytest.raises(ValueError, match="smallest"):
            vpool.Hybrid(CORE, 4096, smallest=4097)


class TestMaintain:
    """Above the watermark the dynamic area grows ahead of need."""

    @pytest.mark.parametrize(
        ("watermark", "share", "grows"), [(0.8, 0.79, 0), (0.8, 0.81, 1), (0.5, 0.5, 0), (1.0, 1.0, 0)]
    )
    def test_by_its_first_segment_once_more_of_the_core_is_live(self, watermark, share, grows):
        with hybrid_pool(watermark=watermark) as pool:
            fill(pool, share)
            for _ in range(3):
                pool.maintain()
            assert pool.stats.source_calls == 1 + grows
            assert pool.stats.reserved_bytes == CORE + grows * MIB

    def test_the_next_overflow_calls_no_source(self):
        for maintained in (True, False):
            with hybrid_pool() as pool:
                fill(pool, 1.0)
                if maintained:
                    pool.maintain()
                calls = pool.stats.source_calls
                assert not in_core(pool, pool.allocate(KIB))
                assert pool.stats.source_calls - calls == (not maintained)
                assert pool.stats.allocations - pool.stats.hits == (not maintained)

    @pytest.mark.parametrize("headroom", [64 * KIB, None])
    def test_room_is_kept_ready_while_more_becomes_live_than_ever(self, headroom):
        """By default only once the pool had to grow for a request of that size."""
        with hybrid_pool(headroom=headroom, dynamic={"growth": "128KiB"}) as pool:
            fill(pool, 1.0)
            for _ in range(200):
                pool.maintain()
                pool.allocate(64 * KIB)
            assert pool.stats.allocations - pool.stats.hits == (headroom is None)
            assert pool.stats.reserved_bytes <= pool.stats.allocated_bytes + 256 * KIB

    @pytest.mark.parametrize("status", [2, ILLEGAL_ADDRESS])
    def test_want_of_memory_is_no_error_and_another_failure_is(self, status):
        with hybrid_pool() as pool:
            fill(pool, 0.9)
            pool.source.driver.fail("malloc", status, times=100)
            if status == 2:
                pool.maintain()
            else:
                with pytest.raises(vpool.SourceError, match="ahead of need"):
                    pool.maintain()
            pool.source.driver.fail("malloc", times=0)
            assert pool.stats.reserved_bytes == pool.source.driver.used == CORE
            pool.check()
            pool.maintain()
            assert pool.stats.reserved_bytes == CORE + MIB

    def test_it_never_passes_the_limit(self):
        with hybrid_pool(headroom=MIB, dynamic={"limit": CORE + MIB // 2}) as pool:
            fill(pool, 1.0)
            pool.maintain()
            assert pool.stats.reserved_bytes <= CORE + MIB // 2


class TestTwoAreas:
    """The core and what grows stay apart."""

    @pytest.mark.parametrize("block", [None, 1024])
    @pytest.mark.parametrize("base_offset", [0, 256])
    def test_the_limit_is_of_the_whole_pool(self, block, base_offset):
        with hybrid_pool(MIB, block, base_offset=base_offset, dynamic={"limit": 3 * MIB + 77}) as pool:
            use_up(pool, 1024)
            assert pool.stats.allocated_bytes == 3 * MIB
            assert pool.stats.peak_reserved_bytes <= pool.inspect().limit_bytes == 3 * MIB + 77
            pool.check()

    @pytest.mark.parametrize("initial", [0, MIB])
    def test_the_limit_holds_on_a_misaligned_device(self, initial):
        with hybrid_pool(MIB, base_offset=100, dynamic={"limit": 3 * MIB, "initial": initial}) as pool:
            use_up(pool, 256)
            assert pool.stats.peak_reserved_bytes <= 3 * MIB

    def test_a_core_as_large_as_the_limit_leaves_nothing_to_grow(self):
        with hybrid_pool(MIB, dynamic={"limit": MIB}) as pool:
            pool.allocate(MIB)
            with unchanged(pool), pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(1)

    def test_a_core_above_the_limit_is_refused(self):
        with pytest.raises(ValueError, match="core"):
            hybrid_pool(2 * MIB, dynamic={"limit": MIB, "initial": 0})

    @pytest.mark.parametrize("block", [None, 1024])
    @pytest.mark.parametrize("keep", [0, CORE, CORE + 1, CORE + MIB, 100 * MIB])
    def test_trim_gives_back_what_grew_and_counts_the_core_as_kept(self, block, keep):
        with hybrid_pool(block=block) as pool:
            for ptr in [pool.allocate(MIB, stream) for stream in (None, 7, None, 7, None, None)]:
                pool.deallocate(ptr)
            before = pool.stats.reserved_bytes
            released = pool.trim(keep)
            after = pool.stats.reserved_bytes
            assert before - released == after == max(CORE, min(before, -(-keep // MIB) * MIB))
            pool.check()

    @pytest.mark.parametrize("block", [None, 1024])
    def test_no_block_crosses_from_one_to_the_other(self, block):
        """Not even where their segments touch, and whatever streams free."""
        rng = random.Random(0)
        with hybrid_pool(64 * KIB, block, largest=1024, dynamic={"initial": 0, "growth": "64KiB"}) as pool:
            live = []
            for _ in range(2000):
                if rng.random() < 0.5:
                    live.append(pool.allocate(rng.choice([100, 1024, 2000, 9000]), rng.choice([None, 7, 9])))
                elif live:
                    pool.deallocate(live.pop(rng.randrange(len(live))), rng.choice([None, 7, 9]))
                pool.check()
            report = pool.inspect()
            for row in report.blocks:
                segment = report.segment_table[row["segment"]]
                assert segment["address"] <= row["address"]
                assert row["address"] + row["nbytes"] <= segment["address"] + segment["nbytes"]
            assert sorted(live) == sorted(live_rows(pool)["address"].tolist())

    def test_the_report_tells_of_the_core_and_of_all(self):
        with hybrid_pool(largest=4096) as pool:
            pool.allocate(1000)
            pool.allocate(5000)
            pool.allocate(300, 7)
            report = pool.inspect()
            core = report.core
            assert (core["reserved_bytes"], core["allocated_bytes"], core["allocations"]) == (CORE, 1024 + 512, 2)
            assert core["share"] == pool.core_share == 2 / 3
            assert (core["smallest"], core["largest"], core["block_sizes"]) == (1, 4096, ())
            assert report.reserved_bytes == CORE + MIB == report.allocated_bytes + report.free_bytes
            assert report.allocated_bytes == 1024 + 512 + 5120
            assert (report.segment_table["nbytes"] == [CORE, MIB]).all()

    def test_the_report_tells_of_each_kind_of_block(self):
        with hybrid_pool(MIB, [(256, 4), (4096, 2)]) as pool:
            pool.allocate(100)
            pool.allocate(4000, 7)
            core = pool.inspect().core
            assert core["block_sizes"] == ((256, 4), (4096, 2))
            assert (core["reserved_bytes"], core["allocated_bytes"]) == (4 * 256 + 2 * 4096, 256 + 4096)
            assert (core["allocations"], core["share"], core["oversize"]) == (2, 1.0, 0)
            assert (core["smallest"], core["largest"]) == (1, 4096)
            assert "fixed core" in str(pool.inspect())

    @pytest.mark.parametrize("block", [None, 1024])
    def test_close_gives_both_back(self, block):
        pool = hybrid_pool(block=block)
        common, rare = pool.allocate(1000), pool.allocate(5 * MIB)
        pool.close()
        assert pool.source.driver.used > 0
        pool.deallocate(common)
        pool.deallocate(rare)
        assert pool.source.driver.used == pool.stats.reserved_bytes == 0
        pool.check()

    def test_a_core_that_is_not_to_be_had_leaves_nothing(self):
        source = vpool.sources.Simulated(GIB)
        source.driver.set_free(CORE - 1)
        with pytest.raises(vpool.OutOfMemoryError):
            vpool.Pool(vpool.Hybrid(CORE), source)
        assert source.driver.used == 0

    @pytest.mark.parametrize(("block", "adaptive"), [(None, False), (1024, False), ([256, 1024], True)])
    def test_eight_threads_that_free_one_anothers_blocks_lose_nothing(self, block, adaptive):
        dynamic = vpool.Dynamic(initial=64 * KIB, growth="64KiB", limit=64 * MIB, adaptive=adaptive)
        with vpool.Pool(vpool.Hybrid(64 * KIB, block, dynamic=dynamic), "host") as pool:
            lent, freed, refused = hammer(pool)
            pool.check()
            assert lent == freed == pool.stats.allocations == pool.stats.frees > 1000
            assert refused == pool.stats.allocated_bytes == pool.stats.requested_bytes == 0
            assert 0 < pool.core_share < 1
            pool.trim()
            assert pool.stats.reserved_bytes == 64 * KIB
            if block is None:
                assert_whole(pool)


@functools.cache
def trace_of(name):
    return recorded(name)


@functools.cache
def made_for(name):
    return vpool.Hybrid.from_trace(trace_of(name))


def share_of_reserved(result):
    return result.peak_live_bytes / result.peak_reserved_bytes


def halves(trace):
    """The events before the middle mark; and those behind it, after what is live there was allocated."""
    middle = np.searchsorted(trace.t_us, trace.marks_us[len(trace.marks_us) // 2])
    first = np.arange(len(trace)) < middle
    freed = np.zeros(trace.allocations, bool)
    freed[trace.number[first & (trace.op == 1)]] = True
    carried = first & (trace.op == 0) & ~freed[trace.number]
    return tuple(
        vpool.Trace(trace.op[part], trace.id[part], trace.bytes[part], trace.stream[part], trace.t_us[part])
        for part in (first, ~first | carried)
    )


class TestFromTrace:
    """Hybrids made for recorded traces."""

    @pytest.mark.parametrize("name", EIGHT)
    def test_the_core_serves_nine_of_ten_requests_and_little_is_reserved_in_vain(self, name):
        assert made_for(name).watermark < 1
        result = vpool.replay(trace_of(name), made_for(name), maintain=True)
        assert result.oom is None
        assert result.core_share >= 0.9
        assert share_of_reserved(result) >= 0.93
        assert result.waited <= 1

    def test_on_average_19_of_20_reserved_bytes_are_needed(self):
        shares = [share_of_reserved(vpool.replay(trace_of(name), made_for(name), maintain=True)) for name in EIGHT]
        assert sum(shares) / len(shares) >= 0.95

    @pytest.mark.parametrize("name", EIGHT)
    def test_one_made_from_the_first_half_serves_the_second(self, name):
        first, second = halves(trace_of(name))
        result = vpool.replay(second, vpool.Hybrid.from_trace(first), maintain=True)
        assert result.oom is None
        assert result.core_share >= 0.85
        assert share_of_reserved(result) >= 0.85

    @pytest.mark.parametrize("name", EIGHT)
    def test_after_the_first_pass_at_most_one_request_in_ten_thousand_waits(self, name):
        waited = [vpool.replay(trace_of(name), made_for(name), passes=n, maintain=True).waited for n in (1, 3)]
        assert waited[1] - waited[0] <= 2 * trace_of(name).allocations / 10_000

    @pytest.mark.parametrize("coverage", [0.5, 1.0])
    def test_more_coverage_serves_more_from_the_core(self, coverage):
        strategy = vpool.Hybrid.from_trace(trace_of("bert_finetune"), coverage)
        assert vpool.replay(trace_of("bert_finetune"), strategy, maintain=True).core_share >= coverage

    def test_few_sizes_get_equal_blocks(self):
        trace = serving_trace()
        strategy = vpool.Hybrid.from_trace(trace)
        wanted = dict(blocks_for(trace))
        assert strategy.block
        assert all(wanted[size] == count for size, count in strategy.block)
        result = vpool.replay(trace, strategy, maintain=True)
        assert result.core_share >= 0.9
        assert (result.oom, result.waited) == (None, 1)
        assert result.reserved_over_live < 1.02

    def test_blocks_made_for_fixed_shapes_serve_every_request(self):
        trace = serving_trace()
        blocks = blocks_for(trace)
        capacity = sum(size * count for size, count in blocks)
        result = vpool.replay(trace, vpool.Fixed(capacity, blocks, limit=1.0), passes=2)
        assert result.oom is None
        assert (result.waited, result.core_share, result.source_calls) == (0, 1.0, 1)
        assert result.reserved_over_live < 1.001

    def test_one_block_less_is_not_enough(self):
        trace = serving_trace(requests=50)
        blocks = blocks_for(trace)
        blocks[-1] = (blocks[-1][0], blocks[-1][1] - 1)
        result = vpool.replay(trace, vpool.Fixed(GIB, blocks, limit=1.0))
        assert result.oom["requested"] == trace.bytes.max()

    @pytest.mark.parametrize("events", [[(1, 1)], [(1, 1), -1], [(1, 10 * MIB), (2, 1), -1, -2], [(1, 0), (2, 300)]])
    def test_the_smallest_traces_work(self, events):
        trace = made(*events)
        result = vpool.replay(trace, vpool.Hybrid.from_trace(trace), maintain=True)
        assert (result.oom, result.core_share) == (None, 1.0)

    def test_a_trace_that_allocates_nothing_says_nothing(self):
        for trace in (made(), made((1, 0), -1)):
            with pytest.raises(ValueError, match="without an allocation"):
                vpool.Hybrid.from_trace(trace)

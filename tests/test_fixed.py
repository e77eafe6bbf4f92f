"""The Fixed rule: all memory is taken at construction, and the source is never called again."""

import contextlib
import gc
import itertools
import random

import pytest

import vpool
from tests.helpers.order import Checker
from tests.helpers.pools import GIB, GRANULE, KIB, MIB, assert_whole, live_rows, round_up, unchanged
from tests.helpers.serving import hammer

OUT_OF_MEMORY = 2
ILLEGAL_ADDRESS = 700
BLOCKS = (None, 256, 4 * KIB, 5000, "64KiB", MIB, [256, 4 * KIB], [(300, 9), (5000, 3), 64 * KIB])


def fixed_pool(capacity=MIB, block=None, *, base_offset=0, device=GIB, options=None, **arguments):
    source = vpool.sources.Simulated(device, base_offset=base_offset)
    return vpool.Pool(vpool.Fixed(capacity, block, **{"limit": 1.0, **arguments}), source, **options or {})


def take_all(pool, nbytes, stream=None):
    """Blocks until there is none left."""
    taken = []
    with contextlib.suppress(vpool.OutOfMemoryError):
        while True:
            taken.append(pool.allocate(nbytes, stream))
    return taken


def malloc_calls(pool):
    return pool.source.driver.calls()["malloc"][0]


class TestConstruction:
    """All of it, or nothing."""

    @pytest.mark.parametrize("base_offset", [0, 256])
    @pytest.mark.parametrize("block", BLOCKS)
    def test_all_memory_is_taken_in_one_source_call(self, block, base_offset):
        with fixed_pool(MIB, block, base_offset=base_offset) as pool:
            assert pool.stats.source_calls == malloc_calls(pool) == 1
            held = sum(size * count for size, count in pool.strategy.blocks()) or MIB
            assert pool.stats.reserved_bytes == pool.source.driver.used == held
            pool.check()

    @pytest.mark.parametrize("block", [None, 256, 5000, [256, 4 * KIB]])
    def test_a_base_that_does_not_suit_costs_nothing_of_the_capacity(self, block):
        with fixed_pool(MIB, block, base_offset=100) as pool:
            lent = sum(live_rows(pool)["nbytes"]) if take_all(pool, 1) else 0
            assert lent == (sum(size * count for size, count in pool.strategy.blocks()) or MIB)
            assert all(ptr % GRANULE == 0 for ptr in live_rows(pool)["address"].tolist())
            pool.check()

    @pytest.mark.parametrize("capacity", [300, 1000, 100_000])
    @pytest.mark.parametrize(
        "base_offset",
        [0, 100],
    )
    def test_a_capacity_needs_no_whole_granules(self, capacity, base_offset):
        with fixed_pool(capacity, base_offset=base_offset) as pool:
            assert len(take_all(pool, 1)) >= capacity // GRANULE

    @pytest.mark.parametrize("strategy", [vpool.Fixed(MIB, limit=MIB), vpool.Fixed(MIB, 4096, "direct", limit=MIB)])
    def test_not_even_a_misaligned_base_passes_the_limit(self, strategy):
        try:
            pool = vpool.Pool(strategy, vpool.sources.Simulated(GIB, base_offset=100))
        except vpool.OutOfMemoryError:
            return
        assert pool.stats.reserved_bytes <= MIB

    @pytest.mark.parametrize("block", [None, 4 * KIB])
    @pytest.mark.parametrize("status", [OUT_OF_MEMORY, ILLEGAL_ADDRESS])
    @pytest.mark.parametrize(("base_offset", "after"), [(0, 0), (100, 0), (100, 1)])
    def test_where_the_source_fails_nothing_is_kept(self, block, status, base_offset, after):
        source = vpool.sources.Simulated(GIB, base_offset=base_offset)
        source.driver.fail("malloc", status, after=after)
        expected = vpool.OutOfMemoryError if status == OUT_OF_MEMORY else vpool.SourceError
        with pytest.raises(expected, match="at construction"):
            vpool.Pool(vpool.Fixed(MIB, block), source)
        gc.collect()
        assert source.driver.used == 0

    @pytest.mark.parametrize("left", [0, MIB - 1])
    def test_a_full_device_is_an_error_that_says_how_much_is_missing(self, left):
        source = vpool.sources.Simulated(GIB)
        source.driver.set_free(left)
        with pytest.raises(vpool.OutOfMemoryError, match=r"1,048,576 bytes") as caught:
            vpool.Pool(vpool.Fixed(MIB), source)
        assert caught.value.requested == MIB
        assert source.driver.used == 0

    def test_out_of_memory_stays_out_of_memory_when_the_device_does_not_answer(self):
        source = vpool.sources.Simulated(GIB)
        source.driver.set_free(0)
        source.driver.fail("memory_info", ILLEGAL_ADDRESS, after=1)
        with pytest.raises(vpool.OutOfMemoryError):
            vpool.Pool(vpool.Fixed(MIB), source)

    def test_a_capacity_above_the_device_is_refused(self):
        with pytest.raises(ValueError, match="capacity"):
            fixed_pool("2GiB", device=GIB)

    @pytest.mark.parametrize("block", [None, 4 * KIB, [256, 4 * KIB]])
    def test_the_source_is_never_called_again(self, block):
        rng = random.Random(0)
        with fixed_pool(256 * KIB, block) as pool:
            live, refused = [], 0
            for _ in range(4000):
                try:
                    if rng.random() < 0.55:
                        live.append(pool.allocate(int(2 ** rng.uniform(0, 14)), rng.choice([None, 7, 9])))
                    elif live:
                        pool.deallocate(live.pop(rng.randrange(len(live))), rng.choice([None, 7, 9]))
                except vpool.OutOfMemoryError:
                    refused += 1
                if rng.random() < 0.01:
                    pool.trim()
                    pool.maintain()
            assert refused > 10
            assert pool.stats.source_calls == malloc_calls(pool) == 1


class TestBlocks:
    """What equal blocks hold."""

    @pytest.mark.parametrize("block", [256, 257, 1000, 5000, 4 * KIB, 64 * KIB, MIB])
    def test_every_block_can_be_lent_and_is_whole_granules(self, block):
        with fixed_pool(MIB, block) as pool:
            size = round_up(block)
            for _ in range(2):
                taken = take_all(pool, block)
                assert len(set(taken)) == len(taken) == MIB // size
                assert (live_rows(pool)["nbytes"] == size).all()
                pool.check()
                for ptr in taken:
                    pool.deallocate(ptr)
            assert pool.stats.allocated_bytes == 0

    def test_the_smallest_block_that_fits_serves_and_then_a_larger_one(self):
        with fixed_pool(MIB, [(256, 2), (1000, 2), (5000, 1)]) as pool:
            for nbytes in (100, 300, 1000, 256, 1):
                pool.allocate(nbytes)
            sizes = sorted(live_rows(pool)["nbytes"].tolist())
            assert sizes == [256, 256, 1024, 1024, 5120]
            with unchanged(pool), pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(1)

    @pytest.mark.parametrize("block", [256, 4 * KIB, [4 * KIB, 64 * KIB]])
    @pytest.mark.parametrize("base_offset", [0, 256])
    def test_an_alignment_that_the_blocks_have_is_honoured_and_another_is_an_error(self, block, base_offset):
        with fixed_pool(MIB, block, base_offset=base_offset) as pool:
            for alignment in (2**power for power in range(22)):
                try:
                    ptr = pool.allocate(100, alignment=alignment)
                except vpool.OutOfMemoryError:
                    assert alignment > (GRANULE if base_offset or block == 256 else 4 * KIB)
                else:
                    assert ptr % max(alignment, GRANULE) == 0
            pool.check()

    def test_peaks_count_whole_blocks(self):
        with fixed_pool(MIB, 4096) as pool:
            for ptr in [pool.allocate(100, stream) for stream in (None, 7, None)]:
                pool.deallocate(ptr)
            assert pool.stats.peak_allocated_bytes == 3 * 4096

    def test_no_bytes_take_no_block(self):
        with fixed_pool(MIB, MIB) as pool:
            assert pool.allocate(0) == pool.allocate(0, 7) == 0
            pool.deallocate(0)
            assert pool.stats.allocations == 0

    @pytest.mark.parametrize("capacity", [256, 512, 4096])
    @pytest.mark.parametrize("stream", [None, 7])
    def test_a_pool_of_a_single_block_works(self, capacity, stream):
        with fixed_pool(capacity, capacity) as pool:
            for _ in range(50):
                ptr = pool.allocate(1, stream)
                with unchanged(pool), pytest.raises(vpool.OutOfMemoryError):
                    pool.allocate(1, stream)
                pool.deallocate(ptr, stream)

    @pytest.mark.parametrize("block", [4 * KIB, [256, 4 * KIB]])
    def test_blocks_serve_whatever_the_pool_rounds_to(self, block):
        with fixed_pool(MIB, block, options={"rounding": 64 * KIB}) as pool:
            for stream in (None, 7):
                for alignment in (256, 1024):
                    pool.deallocate(pool.allocate(100, stream, alignment), stream)


class TestOversize:
    """A request that is larger than every block."""

    @pytest.mark.parametrize("nbytes", [4097, 5000, MIB, 2 * GIB])
    @pytest.mark.parametrize("stream", [None, 7])
    def test_it_is_an_error_that_names_both_sizes(self, nbytes, stream):
        with fixed_pool(MIB, [256, 4 * KIB]) as pool:
            with unchanged(pool), pytest.raises(vpool.OutOfMemoryError) as caught:
                pool.allocate(nbytes, stream)
            assert f"{nbytes:,} bytes" in str(caught.value)
            assert "largest blocks are 4,096 bytes" in str(caught.value)
            assert f"a block of {round_up(nbytes):,} bytes" in str(caught.value)

    def test_the_report_says_which_block_is_needed(self):
        with fixed_pool(MIB, 4 * KIB) as pool:
            for nbytes in (5000, 9000, 6000):
                with pytest.raises(vpool.OutOfMemoryError):
                    pool.allocate(nbytes)
            pool.allocate(4096)
            report = pool.inspect()
            assert (report.core["oversize"], report.core["largest_oversize"]) == (3, 9000)
            assert any("3 requests" in sentence and "9,000 bytes" in sentence for sentence in report.advice)

    @pytest.mark.parametrize("stream", [None, 7])
    def test_direct_gives_it_a_segment_of_its_own_which_is_a_miss(self, stream):
        with fixed_pool(MIB, 4 * KIB, oversize="direct") as pool:
            core = int(pool.inspect().segment_table["address"][0])
            for number, nbytes in enumerate((4097, MIB, 3 * MIB + 1), 1):
                reserved = pool.stats.reserved_bytes
                ptr = pool.allocate(nbytes, stream)
                assert not core <= ptr < core + MIB
                assert pool.stats.reserved_bytes == reserved + round_up(nbytes)
                assert pool.stats.allocations - pool.stats.hits == number
                assert core <= pool.allocate(4096, stream) < core + MIB
            assert pool.core_share == 0.5
            assert any("3 requests" in sentence for sentence in pool.inspect().advice)
            pool.check()

    @pytest.mark.parametrize("stream", [None, 7])
    def test_a_slab_stays_though_it_cannot_serve_a_request(self, stream):
        with fixed_pool(MIB) as pool:
            with unchanged(pool), pytest.raises(vpool.OutOfMemoryError, match="2,097,152 bytes"):
                pool.allocate(2 * MIB, stream)
            assert pool.stats.reserved_bytes == pool.source.driver.used == MIB
            pool.allocate(MIB, stream)

    def test_direct_stays_within_the_limit(self):
        with fixed_pool(MIB, 4 * KIB, oversize="direct", limit=3 * MIB) as pool:
            taken = take_all(pool, 5000)
            assert len(taken) == 2 * MIB // 5120
            assert pool.stats.peak_reserved_bytes <= pool.inspect().limit_bytes == 3 * MIB
            for ptr in taken:
                pool.deallocate(ptr)
            assert pool.trim() > 0
            assert pool.stats.reserved_bytes == MIB
            pool.allocate(2 * MIB)


class TestErrors:
    """Addresses that are no live block."""

    @pytest.mark.parametrize("block", [None, 256, 4 * KIB, 5000, [256, 4 * KIB]])
    @pytest.mark.parametrize("stream", [None, 7])
    def test_each_is_found(self, block, stream):
        with fixed_pool(MIB, block) as pool, fixed_pool(base_offset=4 * GIB) as other:
            kept = pool.allocate(200, stream)
            freed = pool.allocate(200, stream)
            pool.deallocate(freed, stream)
            end = int(pool.inspect().segment_table["nbytes"][0]) + min(kept, freed)
            for ptr, error in (
                (freed, vpool.DoubleFreeError),
                (kept + 1, vpool.ForeignPointerError),
                (kept + 128, vpool.ForeignPointerError),
                (kept - MIB * 8, vpool.ForeignPointerError),
                (end, vpool.ForeignPointerError),
                (other.allocate(1), vpool.ForeignPointerError),
            ):
                for freer in (None, 7, 9):
                    with unchanged(pool), pytest.raises(error):
                        pool.deallocate(ptr, freer)
            with unchanged(pool), pytest.raises(vpool.InvalidPointerError):
                pool.record_stream(freed, 9)


class TestGivingBack:
    """The core goes back when the pool is closed, and never before."""

    @pytest.mark.parametrize("block", [None, 4 * KIB, [256, 4 * KIB]])
    def test_trim_gives_nothing_of_the_core_back(self, block):
        with fixed_pool(MIB, block) as pool:
            held = pool.stats.reserved_bytes
            pool.deallocate(pool.allocate(100, 7), 9)
            assert pool.trim() == pool.trim(keep=0) == 0
            assert pool.stats.reserved_bytes == held
            assert len(take_all(pool, 256)) > 100

    @pytest.mark.parametrize("block", [None, 4 * KIB, [256, 4 * KIB]])
    def test_close_gives_all_of_it_back(self, block):
        pool = fixed_pool(MIB, block)
        for stream, freer in itertools.product((None, 7), (None, 9)):
            pool.deallocate(pool.allocate(100, stream), freer)
        pool.close()
        assert pool.source.driver.used == pool.stats.reserved_bytes == 0
        pool.check()
        with pytest.raises(vpool.ClosedPoolError):
            pool.allocate(1)

    @pytest.mark.parametrize("block", [None, 4 * KIB, [256, 4 * KIB]])
    def test_what_is_live_at_close_goes_back_with_the_last_block(self, block):
        pool = fixed_pool(MIB, block)
        kept = [pool.allocate(200, stream) for stream in (None, 7, None)]
        buffer = pool.empty(200, 9)
        buffer.record_stream(7)
        pool.close()
        for ptr in kept:
            pool.deallocate(ptr)
            assert pool.source.driver.used > 0
        del buffer
        assert pool.source.driver.used == pool.stats.reserved_bytes == 0
        pool.check()

    def test_a_refusal_at_close_is_told_and_may_be_tried_again(self):
        pool = fixed_pool(MIB, 4 * KIB)
        pool.source.driver.fail("free", ILLEGAL_ADDRESS)
        with pytest.raises(vpool.SourceError):
            pool.close()
        assert pool.source.driver.used == pool.stats.reserved_bytes == MIB
        pool.check()
        pool.close()
        assert pool.source.driver.used == pool.stats.reserved_bytes == 0


class TestPressure:
    def test_a_callback_may_free_a_block(self):
        with fixed_pool(2 * 4096, 4096) as pool:
            kept = [pool.allocate(1), pool.allocate(1)]
            pool.on_pressure(lambda nbytes: pool.deallocate(kept.pop()))
            pool.allocate(1)
            assert len(kept) == 1

    @pytest.mark.parametrize("on_pressure", ["wait", "raise"])
    def test_a_pending_block_is_waited_for_if_that_is_allowed(self, on_pressure):
        with fixed_pool(4096, 4096, options={"on_pressure": on_pressure}) as pool:
            driver = pool.source.driver
            ptr = pool.allocate(1)
            pool.record_stream(ptr, 7)
            driver.queue_work(7)
            pool.deallocate(ptr)
            driver.fail("stream_wait_event", ILLEGAL_ADDRESS, times=100)
            if on_pressure == "wait":
                assert pool.allocate(1) == ptr
            else:
                with pytest.raises(vpool.Error):
                    pool.allocate(1)


HANDOVERS = [
    (10 * 256, None, (7, 9, 11)),
    (10 * 256, None, (None, 7, 9)),
    (10 * 4096, 4096, (7, 9, 11)),
    (10 * 4096, 4096, (None, 7, 9)),
    (10 * 5120, 5000, (None, 7, 9)),
    (MIB, [(256, 5), (4096, 5)], (None, 7, 9)),
]


class TestStreams:
    """Equal blocks go from stream to stream as other memory does."""

    @pytest.mark.parametrize("block", [None, 4 * KIB, 5000, [256, 4 * KIB]])
    def test_a_block_that_comes_back_is_lent_and_freed_like_any_other(self, block):
        with fixed_pool(10 * KIB, block) as pool:
            for stream in (7, None, None, 9, None, None):
                pool.deallocate(pool.allocate(1, stream), stream)
                pool.check()

    @pytest.mark.parametrize(("capacity", "block", "streams"), HANDOVERS)
    def test_thousands_of_handovers_lose_nothing(self, capacity, block, streams):
        rng = random.Random(0)
        with fixed_pool(capacity, block) as pool:
            live = []
            for _ in range(3000):
                if live and (len(live) > 8 or rng.random() < 0.4):
                    ptr = live.pop(rng.randrange(len(live)))
                    if rng.random() < 0.2:
                        pool.record_stream(ptr, rng.choice(streams))
                    pool.deallocate(ptr, rng.choice(streams))
                else:
                    live.append(pool.allocate(200, rng.choice(streams)))
                pool.check()
                assert sorted(live) == live_rows(pool)["address"].tolist()
            assert pool.crossings["crossings"] > 300
            for ptr in live:
                pool.deallocate(ptr)
            assert len(take_all(pool, 200)) == 10

    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("block", [None, 512, [(256, 8), (512, 4)]])
    def test_nobody_gets_memory_before_its_last_use_is_complete(self, block, seed):
        rng = random.Random(seed)
        on_pressure = rng.choice(["wait", "raise"])
        with fixed_pool(4096, block, options={"on_pressure": on_pressure}) as pool:
            checker = Checker(pool)
            streams = [pool.source.driver.create_stream() for _ in range(4)]
            for _ in range(400):
                stream = rng.choice(streams)
                way = rng.random()
                ptr = rng.choice(list(checker.live)) if checker.live else None
                if way < 0.45 or ptr is None:
                    try:
                        ptr = checker.allocate(rng.choice([1, 256, 300, 512]), stream)
                    except vpool.OutOfMemoryError:
                        continue
                    checker.use(ptr, stream)
                elif way < 0.55:
                    checker.record_stream(ptr, stream)
                    checker.use(ptr, stream)
                elif way < 0.9:
                    freer = rng.choice([None, stream])
                    if checker.may_free(ptr, freer):
                        checker.free(ptr, freer)
                else:
                    pool.source.driver.complete(stream)
                checker.check()
            checker.finish()


class TestThreads:
    @pytest.mark.parametrize(
        ("block", "largest"),
        [(None, 16 * KIB), (5000, 4096), ([256, 4 * KIB, 16 * KIB], 16 * KIB)],
        ids=["slab", "equal", "several"],
    )
    def test_eight_threads_that_free_one_anothers_blocks_lose_nothing(self, block, largest):
        with vpool.Pool(vpool.Fixed("512KiB", block), "host") as pool:
            lent, freed, _ = hammer(pool, largest=largest)
            pool.check()
            assert lent == freed == pool.stats.allocations == pool.stats.frees > 1000
            assert pool.stats.allocated_bytes == pool.stats.requested_bytes == 0
            assert pool.stats.source_calls == 1
            pool.trim()
            if block is None:
                assert_whole(pool)
            else:
                assert (pool.inspect().blocks["state"] == "free").all()

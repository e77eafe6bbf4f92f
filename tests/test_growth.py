"""The Dynamic rule: when the pool asks its source, for how much, and what happens where there is no more."""

import contextlib
import gc
import itertools
import logging
import math
import random
import weakref
from pathlib import Path

import pytest

import vpool
from tests.helpers.pools import GIB, GRANULE, KIB, MIB, assert_whole, round_up, simulated_pool, unchanged
from tests.helpers.traces import ALL, recorded

FIRST_SEGMENT = 256 * MIB
# What a pool without pressure callbacks tries before it fails.
LADDER = (
    "search the whole size class",
    "pending blocks that are ready",
    "other streams' free blocks",
    "merge across streams",
    "grow",
    "give idle segments back and grow",
    "collect Python's garbage",
    "wait for pending work",
)
STEP_ROUNDING = 2 * MIB


def default_pool(capacity=None, **arguments):
    return vpool.Pool(vpool.Dynamic(**{"limit": 1.0, **arguments}), source=vpool.sources.Simulated(capacity))


def grow(pool, count):
    """Totals after each of so many segments, each filled before the next is asked for."""
    totals = []
    while len(totals) < count:
        free = pool.inspect().largest_free_bytes
        pool.allocate(free or GRANULE)
        if pool.stats.reserved_bytes != (totals[-1] if totals else 0):
            totals.append(pool.stats.reserved_bytes)
    return totals


class TestRule:
    """What a pool asks for while nobody stands in its way."""

    def test_nothing_is_taken_before_the_first_request(self):
        with default_pool() as pool:
            assert pool.stats.reserved_bytes == pool.stats.source_calls == 0

    def test_the_first_segment_has_256_mib(self):
        with default_pool() as pool:
            pool.allocate(1)
            assert pool.stats.reserved_bytes == FIRST_SEGMENT

    def test_each_growth_brings_the_total_to_one_and_a_half_times_what_it_was(self):
        with default_pool() as pool:
            totals = grow(pool, 12)
            for before, after in itertools.pairwise(totals):
                assert 0 <= after - before * 1.5 < STEP_ROUNDING
            assert pool.stats.source_calls == 12

    @pytest.mark.parametrize("factor", [1.01, 1.25, 2.0, 16.0])
    def test_other_factors(self, factor):
        with default_pool(growth=factor) as pool:
            totals = grow(pool, 4)
            for before, after in itertools.pairwise(totals):
                assert 0 <= after - before * factor < STEP_ROUNDING + 1

    @pytest.mark.parametrize("step", ["64MiB", 64 * MIB, "4KiB", 5000, "1MB", 2 * MIB + 1])
    def test_a_size_is_a_linear_step(self, step):
        nbytes = {"64MiB": 64 * MIB, "4KiB": 4096, "1MB": 10**6}.get(step, step)
        nbytes = round_up(nbytes, STEP_ROUNDING if nbytes >= STEP_ROUNDING else GRANULE)
        with default_pool(initial="1MiB", growth=step) as pool:
            totals = grow(pool, 5)
            assert totals == [MIB + nbytes * number for number in range(5)]

    @pytest.mark.parametrize("initial", [0, 1000, 5000, "3MiB", 10**6 + 1])
    def test_nothing_of_a_segment_is_lost(self, initial):
        """Whatever numbers a strategy has: a segment is whole granules, and all of it can be lent."""
        with default_pool(initial=initial) as pool:
            for nbytes in (1, 300, 700, 5000, 100, 10**6, MIB, 300):
                pool.allocate(nbytes)
                report = pool.inspect()
                assert report.reserved_bytes == report.allocated_bytes + report.free_bytes
                assert pool.stats.source_calls == report.segments

    @pytest.mark.parametrize("nbytes", [1, 1000, MIB, 5 * MIB, 3 * GIB + 1])
    def test_initial_0_takes_what_the_first_request_needs(self, nbytes):
        with default_pool(initial=0) as pool:
            pool.allocate(nbytes)
            need = round_up(nbytes)
            assert pool.stats.reserved_bytes == need

    @pytest.mark.parametrize("initial", [MIB, 256 * MIB])
    def test_a_request_larger_than_its_step_gets_what_it_needs(self, initial):
        with default_pool(initial=initial) as pool:
            pool.allocate(initial * 3)
            assert pool.stats.reserved_bytes == initial * 3
            pool.allocate(initial * 9)
            assert pool.stats.source_calls == 2

    def test_an_empty_pool_that_gave_all_back_begins_again(self):
        with default_pool(initial=MIB) as pool:
            pool.deallocate(pool.allocate(100))
            assert pool.stats.reserved_bytes == MIB
            assert_whole(pool)

    @pytest.mark.parametrize("seed", range(3))
    def test_source_calls_are_few(self, seed):
        """At most 1 + ceil(log 1.5 (peak / 256 MiB)), plus one for each request larger than its step."""
        rng = random.Random(seed)
        larger = 0
        with default_pool() as pool:
            for _ in range(400):
                nbytes = int(2 ** rng.uniform(8, 33))
                reserved = pool.stats.reserved_bytes
                step = reserved // 2 if reserved else FIRST_SEGMENT
                larger += nbytes > step
                pool.allocate(nbytes)
            stats = pool.stats
            bound = 1 + math.ceil(math.log(stats.peak_reserved_bytes / FIRST_SEGMENT, 1.5)) + larger
            assert stats.source_calls <= bound


class TestLimit:
    """The pool never holds more than it may, and uses all of that."""

    @pytest.mark.parametrize("capacity", [GIB, 10 * GIB, 80 * GIB + 12345])
    def test_the_default_is_80_percent_of_the_device(self, capacity):
        with vpool.Pool(source=vpool.sources.Simulated(capacity)) as pool:
            limit = pool.inspect().limit_bytes
            assert limit == int(capacity * 0.8)
            with pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(limit + 1)
            pool.allocate(limit // GRANULE * GRANULE)
            assert pool.stats.reserved_bytes == limit // GRANULE * GRANULE

    @pytest.mark.parametrize("limit", [256, 1000, MIB - 1, MIB, 3 * MIB + 77, "100MB", FIRST_SEGMENT, GIB + 1])
    def test_it_is_never_passed_and_used_to_the_last_granule(self, limit):
        """Also one that is no multiple of anything."""
        most = int(1e8) if limit == "100MB" else limit
        with default_pool(limit=limit) as pool:
            block = max(GRANULE, round_up(most // 50))
            lent = 0
            for nbytes in (block, GRANULE):
                with contextlib.suppress(vpool.OutOfMemoryError):
                    while True:
                        pool.allocate(nbytes)
                        lent += nbytes
                        assert pool.stats.reserved_bytes <= most
            assert pool.stats.peak_reserved_bytes <= most
            assert lent == most // GRANULE * GRANULE
            pool.check()

    @pytest.mark.parametrize("limit", [1, 100, 255])
    def test_less_than_a_block_lends_nothing(self, limit):
        with default_pool(limit=limit) as pool, unchanged(pool), pytest.raises(vpool.OutOfMemoryError):
            pool.allocate(1)

    def test_initial_equal_to_the_limit_works(self):
        with default_pool(initial="4MiB", limit="4MiB") as pool:
            pool.allocate(4 * MIB)
            assert pool.stats.source_calls == 1

    def test_initial_above_the_limit_is_refused(self):
        with pytest.raises(ValueError, match="initial"):
            default_pool(initial="5MiB", limit="4MiB")

    def test_the_default_initial_gives_way_to_a_small_limit(self):
        with default_pool(limit="4MiB") as pool:
            pool.allocate(1)
            assert pool.stats.reserved_bytes == 4 * MIB

    def test_near_the_limit_a_step_becomes_smaller(self):
        with default_pool(initial="1MiB", growth="8MiB", limit="12MiB") as pool:
            assert grow(pool, 3) == [MIB, 9 * MIB, 12 * MIB]

    def test_freeing_makes_room_again(self):
        with default_pool(initial="1MiB", limit="1MiB") as pool:
            ptr = pool.allocate(MIB)
            with unchanged(pool), pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(1)
            pool.deallocate(ptr)
            assert pool.allocate(MIB) == ptr


class TestRefusals:
    """The device itself says no."""

    @pytest.mark.parametrize("left", [MIB, 5 * MIB, 100 * MIB, 200 * MIB + 12345])
    def test_the_pool_asks_for_less(self, left):
        with default_pool("8GiB") as pool:
            pool.source.driver.set_free(left)
            ptr = pool.allocate(MIB)
            assert MIB <= pool.stats.reserved_bytes <= left
            pool.check()
            pool.deallocate(ptr)

    @pytest.mark.parametrize("nbytes", [GRANULE, MIB, MIB + 1, 77 * MIB])
    def test_down_to_exactly_what_the_request_needs(self, nbytes):
        with default_pool("8GiB") as pool:
            pool.source.driver.set_free(round_up(nbytes))
            pool.allocate(nbytes)
            assert pool.stats.reserved_bytes == round_up(nbytes)
            pool.check()

    def test_and_fails_if_that_is_refused_too(self):
        with default_pool("8GiB") as pool:
            pool.source.driver.set_free(MIB - 1)
            with unchanged(pool), pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(MIB)
            assert pool.stats.reserved_bytes == pool.source.driver.used == 0
            assert pool.stats.ooms == 1

    def test_in_a_few_calls(self):
        """Halving what is above the need: about log2(step / 2 MiB) refusals."""
        with default_pool("8GiB") as pool:
            pool.source.driver.set_free(MIB)
            pool.allocate(MIB)
            assert pool.stats.source_calls <= 2 + math.log2(FIRST_SEGMENT / STEP_ROUNDING)

    def test_refused_once_and_then_served(self):
        with default_pool() as pool:
            pool.source.driver.fail("malloc")
            pool.allocate(MIB)
            assert 0 < pool.stats.reserved_bytes < FIRST_SEGMENT
            assert pool.stats.source_calls == 2
            pool.check()

    def test_what_is_free_in_the_pool_serves_though_the_device_is_full(self):
        with default_pool("1GiB") as pool:
            ptr = pool.allocate(200 * MIB)
            pool.source.driver.set_free(0)
            pool.deallocate(ptr)
            assert pool.allocate(256 * MIB) == ptr

    def test_a_refusal_takes_nothing_off_the_limit(self):
        with default_pool("8GiB", limit="1GiB") as pool:
            pool.source.driver.set_free(0)
            for _ in range(20):
                with pytest.raises(vpool.OutOfMemoryError):
                    pool.allocate(MIB)
            pool.source.driver.set_free(8 * GIB)
            pool.allocate(GIB)
            pool.check()

    def test_it_is_logged(self, caplog):
        with caplog.at_level(logging.DEBUG, "vpool"), default_pool("1GiB") as pool:
            pool.source.driver.set_free(10 * MIB)
            pool.allocate(MIB)
            with pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(100 * MIB)
        assert "grew" in caplog.text
        assert "refused" in caplog.text
        assert "cudaErrorMemoryAllocation" in caplog.text
        assert "cannot lend" in caplog.text


class TestOutOfMemory:
    """The error is a diagnosis."""

    @pytest.fixture
    def error(self):
        with simulated_pool(8 * MIB, initial=8 * MIB, name="the full one") as pool:
            blocks = [pool.allocate(1000 * KIB) for _ in range(8)]
            for ptr in blocks[::2]:
                pool.deallocate(ptr)
            with unchanged(pool), pytest.raises(vpool.OutOfMemoryError) as caught:
                pool.allocate(3 * MIB)
            return caught.value

    def test_it_has_the_request_the_report_and_the_steps(self, error):
        assert error.requested == 3 * MIB
        assert error.report.allocated_bytes == 4 * 1000 * KIB
        assert error.report.largest_free_bytes == 1000 * KIB
        assert error.steps == LADDER

    def test_its_message_has_the_figures(self, error):
        message = str(error)
        assert "the full one" in message
        assert f"{3 * MIB:,}" in message
        assert "Limit 8.00 MiB" in message
        assert "reserved 8.00 MiB" in message
        assert "live 3.91 MiB" in message
        assert "free 4.09 MiB" in message
        assert "of which 0.98 MiB in the largest" in message
        for step in error.steps:
            assert step in message

    def test_it_keeps_no_buffer_alive(self):
        """A report holds figures alone: neither the pool nor its memory."""
        source = vpool.sources.Simulated("1MiB")
        pool = vpool.Pool(source=source)
        buffer = pool.empty(1000)
        try:
            pool.allocate(MIB)
        except vpool.OutOfMemoryError as caught:
            error = caught.with_traceback(None)
        gone = weakref.ref(pool)
        del buffer, pool
        gc.collect()
        assert gone() is None
        assert source.driver.used == 0
        assert error.report.live_blocks == 1

    def test_it_is_a_memory_error(self):
        with simulated_pool("1MiB") as pool, pytest.raises(MemoryError):
            pool.allocate(GIB)


class TestMisalignedDevice:
    """A device whose addresses are no multiples of 256."""

    @pytest.mark.parametrize("offset", [1, 8, 64, 255, 257, 4096 + 16, MIB + 1])
    def test_every_address_is_aligned_and_inside_its_segment(self, offset):
        with simulated_pool("64MiB", base_offset=offset, initial=MIB, growth="1MiB") as pool:
            for nbytes in (1, 256, 1000, MIB, MIB - 255, 3 * MIB):
                assert pool.allocate(nbytes) % GRANULE == 0
            report = pool.inspect()
            for block in report.blocks:
                segment = report.segment_table[block["segment"]]
                assert block["address"] % GRANULE == 0
                assert block["address"] >= segment["address"]
                assert block["address"] + block["nbytes"] <= segment["address"] + segment["nbytes"]
            assert pool.source.driver.used == report.reserved_bytes
            assert report.reserved_bytes - report.allocated_bytes - report.free_bytes == GRANULE * report.segments
            pool.check()

    @pytest.mark.parametrize("offset", [256, 512, 4096])
    def test_multiples_of_the_granule_lose_nothing(self, offset):
        with simulated_pool("64MiB", base_offset=offset, initial=0) as pool:
            pool.allocate(1000)
            assert pool.stats.reserved_bytes == 1024

    def test_it_never_takes_more_than_it_may(self):
        with simulated_pool(base_offset=1, initial=0, limit=MIB) as pool:
            with unchanged(pool), pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(MIB)
            pool.allocate(MIB - GRANULE)
            assert pool.stats.peak_reserved_bytes <= MIB

    def test_the_report_promises_no_more_than_can_be_had(self):
        with simulated_pool("64MiB", base_offset=1, initial=0) as pool:
            pool.allocate(1000)
            pool.allocate(pool.inspect().largest_allocatable())


class TestArguments:
    """Numbers that make no sense, refused with the parameter's name."""

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ({"initial": -1}, ValueError),
            ({"initial": 1.5}, TypeError),
            ({"initial": True}, TypeError),
            ({"initial": None}, TypeError),
            ({"initial": "much"}, ValueError),
            ({"initial": "-5MiB"}, ValueError),
            ({"initial": "256mib"}, ValueError),
            ({"initial": ""}, ValueError),
            ({"initial": 2**63}, OverflowError),
            ({"initial": "9000000PiB"}, OverflowError),
            ({"growth": 1.0}, ValueError),
            ({"growth": 0.5}, ValueError),
            ({"growth": -1.5}, ValueError),
            ({"growth": 100.0}, ValueError),
            ({"growth": math.nan}, ValueError),
            ({"growth": math.inf}, ValueError),
            ({"growth": 0}, ValueError),
            ({"growth": 2}, ValueError),
            ({"growth": "1KiB"}, ValueError),
            ({"growth": True}, TypeError),
            ({"growth": None}, TypeError),
            ({"growth": 2**63}, OverflowError),
            ({"limit": 0.0}, ValueError),
            ({"limit": -0.5}, ValueError),
            ({"limit": 1.01}, ValueError),
            ({"limit": math.nan}, ValueError),
            ({"limit": 0}, ValueError),
            ({"limit": -5}, ValueError),
            ({"limit": "0MiB"}, ValueError),
            ({"limit": True}, TypeError),
            ({"limit": None}, TypeError),
            ({"limit": 2**63}, OverflowError),
        ],
    )
    def test_is_refused(self, arguments, error):
        (parameter,) = arguments
        with pytest.raises(error, match=parameter):
            vpool.Dynamic(**arguments)

    @pytest.mark.parametrize(
        ("text", "nbytes"),
        [("4096", 4096), ("4096B", 4096), ("4KiB", 4096), ("4K", 4096), ("4KB", 4000), ("1.5 MiB", 3 * MIB // 2),
         ("  2GiB ", 2 * GIB), ("2G", 2 * GIB), ("2GB", 2 * 10**9), ("1TiB", 1 << 40), ("0.1GB", 10**8)],
    )  # fmt: skip
    def test_sizes_may_be_written_with_units(self, text, nbytes):
        with default_pool(limit=text, initial=0) as pool:
            assert pool.inspect().limit_bytes == nbytes

    def test_a_strategy_may_be_shared_and_compared(self):
        strategy = vpool.Dynamic(initial="1MiB")
        with vpool.Pool(strategy, source="simulated") as first, vpool.Pool(strategy, source="simulated") as second:
            first.allocate(1)
            assert second.stats.reserved_bytes == 0
        assert strategy == vpool.Dynamic(initial="1MiB") != vpool.Dynamic()
        assert eval(repr(strategy), {"Dynamic": vpool.Dynamic}) == strategy


@pytest.mark.parametrize("size", ["1.5", "1.0", "0.5B", " 2.25 "])
def test_a_fraction_of_a_byte_is_no_size(size):
    with pytest.raises(ValueError, match="must be bytes or a size"):
        vpool.Dynamic(initial=size)


class TestIdleSegmentsGoFirst:
    """`Dynamic(adaptive="growth")`."""

    def test_only_where_the_pool_would_pass_what_it_ever_had(self):
        with default_pool(initial=0, adaptive="growth") as pool:
            small, large = pool.allocate(200 * MIB), pool.allocate(300 * MIB)
            pool.deallocate(small)
            pool.allocate(290 * MIB)
            assert pool.stats.reserved_bytes == 590 * MIB, "the idle one went first"
            calls = pool.stats.source_calls
            pool.deallocate(large)
            pool.allocate(300 * MIB)
            assert pool.stats.source_calls == calls
            pool.check()

    def test_without_an_idle_segment_nobody_asks_for_one(self):
        with default_pool(initial="1MiB", growth=2.0, adaptive="growth") as pool:
            totals = grow(pool, 8)
            assert totals == [MIB << number for number in range(8)]
            assert pool.stats.source_calls == 8
            assert pool.source.driver.calls()["event_record"][0] == 0

    def test_steps_are_bounded_and_large_requests_have_their_own_size(self):
        with default_pool(initial=2 * GIB, growth=2.0, adaptive="growth") as pool:
            pool.allocate(2 * GIB)
            pool.allocate(MIB)
            assert pool.stats.reserved_bytes == 2 * GIB + 640 * MIB
            pool.allocate(639 * MIB)
            pool.allocate(128 * MIB)
            assert pool.stats.reserved_bytes == 2 * GIB + 768 * MIB

    def test_what_work_may_touch_stays(self):
        source = vpool.sources.Simulated()
        strategy = vpool.Dynamic(initial=0, limit=1.0, adaptive="growth")
        with vpool.Pool(strategy, source=source) as pool:
            ptr = pool.allocate(200 * MIB)
            source.driver.queue_work(0)
            pool.deallocate(ptr)
            pool.allocate(300 * MIB)
            assert pool.stats.reserved_bytes == 500 * MIB
            source.driver.complete()
            pool.allocate(400 * MIB)
            assert pool.stats.reserved_bytes == 700 * MIB

    @pytest.mark.parametrize("adaptive", ["", "idle", "Growth"])
    def test_other_words_are_refused(self, adaptive):
        with pytest.raises(ValueError, match="growth"):
            vpool.Dynamic(adaptive=adaptive)

    def test_a_running_pool_can_begin_to(self):
        with default_pool(initial=0) as pool:
            pool.apply(vpool.Dynamic(initial=0, limit=1.0, adaptive="growth"))
            pool.deallocate(pool.allocate(200 * MIB))
            pool.allocate(300 * MIB)
            assert pool.stats.reserved_bytes == 300 * MIB

    def test_recorded_runs_need_less_and_few_calls_more(self):
        """Three passes each, as `docs/strategies.rst` has it."""
        ratios, calls = {}, 0
        for name in ALL:
            result = vpool.replay(recorded(name), vpool.Dynamic(adaptive="growth"), passes=3)
            ratios[name] = result.reserved_over_live
            calls += result.source_calls
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        text = (Path(__file__).parents[1] / "docs" / "strategies.rst").read_text()
        others = max(ratio for name, ratio in ratios.items() if name != "fsdp_train")
        assert f"what is live in the geometric mean, {ratios['fsdp_train']:.3f} at most" in text
        assert f"reserve {mean:.3f} times" in text
        assert f"and {others:.3f} on each other one" in text
        assert f"It takes {calls} source calls in all" in text
        assert mean <= 1.12


@pytest.mark.parametrize("refused", ["allocate", "reserve", None])
def test_a_request_that_fails_leaves_no_room_for_itself(refused):
    """Memory of others moves to make room for the next ones, as if it had not been."""
    with vpool.Pool(vpool.Dynamic(initial=0), vpool.sources.SimulatedVmm(GIB, handle="2MiB")) as pool:
        if refused:
            with pytest.raises(vpool.OutOfMemoryError):
                getattr(pool, refused)(2 * GIB)
        blocks = [pool.allocate(10 * MIB) for _ in range(8)]
        for ptr in blocks[::2]:
            pool.deallocate(ptr)
        large = pool.allocate(40 * MIB)
        assert pool.stats.peak_reserved_bytes <= 82 * MIB
        for ptr in (large, *blocks[1::2]):
            pool.deallocate(ptr)

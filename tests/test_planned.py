"""Pools that serve from a plan."""

import contextlib
import itertools
import random

import numpy as np
import pytest

import vpool
from tests.helpers.pools import GIB, MIB, assert_whole
from tests.helpers.traces import made, recorded
from vpool._interface.replay import Replayer

# Births with their sizes, and frees.
EVENTS = ((1, 1000), (2, 5000), -1, (3, 300), (4, 70_000), -3, (5, 256), -4, -2, (6, 12_345), -5, -6)


@pytest.fixture(scope="module")
def plan():
    return vpool.plan(made(*EVENTS))


def planned_pool(plan, **options):
    strategy = options.pop("strategy", vpool.Dynamic(initial=0, limit=1.0))
    source = options.pop("source", None) or vpool.sources.Simulated(GIB)
    return vpool.Pool(strategy, source, plan=plan, **{"debug": (), **options})


def run_step(pool, events=EVENTS, stream=None):
    """One step; the address of each block, by its number."""
    live, seen = {}, {}
    for event in events:
        if isinstance(event, tuple):
            live[event[0]] = seen[event[0]] = pool.allocate(event[1], stream)
        else:
            pool.deallocate(live.pop(-event))
    return seen


def base_of(pool):
    return int(pool.inspect().blocks["address"].min())


class TestServing:
    """What comes as recorded lies where it was planned."""

    def test_every_block_of_every_step_has_its_place(self, plan):
        with planned_pool(plan) as pool:
            places = [int(one) for one in plan.offset]
            for step in range(1, 4):
                base = base_of(pool)
                assert [ptr - base for ptr in run_step(pool).values()] == places
                pool.check()
                assert pool.planned == {"served": 6 * step, "taken": 0, "strange": 0}
            assert pool.stats.reserved_bytes == plan.peak_bytes
            assert pool.stats.source_calls == 1
            assert pool.core_share == 1.0

    def test_buffers_and_compiled_callers_are_served_too(self, plan):
        trace = made(*EVENTS)
        with planned_pool(plan) as pool:
            replayer = Replayer(pool, trace, {0: 0})
            for _ in range(2):
                assert replayer.run(0, len(trace)) == len(trace)
            assert pool.planned["served"] == 12
            buffer = pool.empty(1000)
            assert buffer.ptr - base_of(pool) == plan.offset[0]
            buffer.close()
            assert_whole(pool)
            assert pool.planned["served"] == 13

    @pytest.mark.parametrize("name", ["two_streams", "resnet_train"])
    def test_a_recorded_step_that_repeats_takes_what_was_planned(self, name):
        trace = recorded(name)
        plan = vpool.plan(trace, stream=0, seconds=20)
        begin, end = int(plan.born[0]), int(plan.freed.max()) + 1
        kept = np.isin(trace.number[begin:end], trace.number[plan.born])
        op, number = trace.op[begin:end][kept], trace.number[begin:end][kept]
        _, number = np.unique(number, return_inverse=True)
        step = vpool.Trace(op, number, trace.bytes[begin:end][kept], np.zeros(len(op), int), np.arange(len(op)))
        with planned_pool(plan, source=vpool.sources.Simulated()) as pool:
            replayer = Replayer(pool, step, {0: 0})
            for _ in range(3):
                assert replayer.run(0, len(step)) == len(step)
                pool.check()
                assert replayer.finish()  # what outlives the step
            assert pool.planned["served"] == 3 * plan.planned
            assert pool.planned["taken"] == 0
            assert pool.inspect().core["reserved_bytes"] == plan.peak_bytes

    def test_a_request_that_is_left_out_or_put_in_is_no_harm(self, plan):
        with planned_pool(plan) as pool:
            for _ in range(5):
                run_step(pool)
            run_step(pool, [event for event in EVENTS if event not in ((3, 300), -3)])
            assert pool.planned["served"] == 35
            run_step(pool, [*EVENTS[:4], (9, 999_999), *EVENTS[4:]])
            assert pool.planned == {"served": 41, "taken": 0, "strange": 1}
            pool.check()

    def test_a_step_that_ends_early_is_followed_by_a_whole_one(self, plan):
        with planned_pool(plan) as pool:
            for _ in range(10):
                run_step(pool)
            run_step(pool, EVENTS[:3])
            pool.deallocate(int(pool.inspect().blocks[pool.inspect().blocks["state"] == "live"]["address"][0]))
            before = pool.planned["served"]
            run_step(pool)
            run_step(pool)
            assert pool.planned["served"] >= before + 6
            before = pool.planned["served"]
            run_step(pool)
            assert pool.planned["served"] == before + 6

    def test_another_program_is_served_as_usual(self, plan):
        with planned_pool(plan) as pool:
            sizes = random.Random(1).choices(range(1, 100_000), k=500)
            live = [pool.allocate(nbytes) for nbytes in sizes]
            assert len(set(live)) == 500
            assert pool.planned["served"] == 0
            pool.check()
            for ptr in live:
                pool.deallocate(ptr)
            assert_whole(pool)

    def test_a_place_that_is_taken_costs_only_the_plan(self, plan):
        with planned_pool(plan) as pool:
            held = pool.allocate(1000)
            for _ in range(10):
                run_step(pool)
            assert pool.planned["taken"] > 0
            pool.check()
            pool.deallocate(held)
            run_step(pool)
            taken = pool.planned["taken"]
            run_step(pool)
            assert pool.planned["taken"] == taken

    def test_other_streams_are_served_as_usual(self, plan):
        with planned_pool(plan) as pool:
            stream = pool.source.driver.create_stream()
            run_step(pool, stream=stream)
            assert pool.planned == {"served": 0, "taken": 0, "strange": 0}
            run_step(pool)
            assert pool.planned["served"] == 6
            pool.check()

    def test_a_block_that_another_stream_uses_keeps_its_place_until_that_is_done(self, plan):
        with planned_pool(plan) as pool:
            driver = pool.source.driver
            stream = driver.create_stream()
            ptr = pool.allocate(1000)
            driver.queue_work(stream)
            pool.record_stream(ptr, stream)
            pool.deallocate(ptr)
            assert pool.stats.pending_bytes == 1024
            for _ in range(3):
                run_step(pool)
            assert pool.planned["taken"] > 0
            pool.check()
            driver.complete()
            pool.coalesce()
            assert pool.stats.pending_bytes == 0
            served = pool.planned["served"]
            for _ in range(3):
                run_step(pool)
            assert pool.planned["served"] >= served + 12
            pool.check()

    def test_alignment_that_a_place_has_not_is_found_elsewhere(self, plan):
        with planned_pool(plan) as pool:
            for nbytes, alignment in ((1000, 2 * MIB), (5000, 2 * MIB)):
                ptr = pool.allocate(nbytes, alignment=alignment)
                assert ptr % alignment == 0
            pool.check()

    @pytest.mark.parametrize("seed", range(3))
    def test_random_deviations_never_break_an_invariant(self, plan, seed):
        choose = random.Random(seed)
        with planned_pool(plan) as pool:
            live = {}
            for round in range(60):
                for event in EVENTS:
                    if choose.random() < 0.15:
                        continue
                    key = (round, abs(event) if isinstance(event, int) else event[0])
                    if isinstance(event, tuple):
                        live[key] = (pool.allocate(event[1]), event[1])
                    elif key in live:
                        pool.deallocate(live.pop(key)[0])
                ranges = sorted(live.values())
                assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ranges))
                pool.check()
                if choose.random() < 0.3:
                    for key in list(live):
                        pool.deallocate(live.pop(key)[0])
            for ptr, _ in live.values():
                pool.deallocate(ptr)
            assert pool.planned["served"] > 30
            assert_whole(pool)


class TestPool:
    """A pool with a plan is a pool."""

    def test_a_plan_may_be_a_file(self, plan, tmp_path):
        plan.save(tmp_path / "plan.npz")
        with planned_pool(tmp_path / "plan.npz") as pool:
            run_step(pool)
            assert pool.planned["served"] == 6
            assert pool.plan.peak_bytes == plan.peak_bytes

    def test_what_is_wrong_with_a_free_is_told(self, plan):
        with planned_pool(plan) as pool:
            ptr = pool.allocate(1000)
            with pytest.raises(vpool.ForeignPointerError):
                pool.deallocate(ptr + 256)
            pool.deallocate(ptr)
            with pytest.raises(vpool.DoubleFreeError):
                pool.deallocate(ptr)
            pool.check()

    def test_planned_memory_stays_until_the_pool_is_closed(self, plan):
        pool = planned_pool(plan)
        run_step(pool)
        assert pool.trim() == 0
        assert pool.stats.reserved_bytes == plan.peak_bytes
        ptr = pool.allocate(1000)
        pool.close()
        assert pool.stats.reserved_bytes == plan.peak_bytes
        with pytest.raises(vpool.ClosedPoolError):
            pool.allocate(5000)
        pool.deallocate(ptr)
        assert pool.stats.reserved_bytes == 0
        assert pool.source.driver.used == 0

    def test_reports_and_limits_count_it(self, plan):
        with planned_pool(plan) as pool:
            report = pool.inspect()
            assert report.reserved_bytes == plan.peak_bytes
            assert "fixed core" in str(report)
            with pytest.raises(ValueError, match="fixed core"):
                pool.set_limit(plan.peak_bytes - 256)
            pool.apply(vpool.Dynamic(limit="512MiB"))
            with pytest.raises(ValueError, match="fixed core"):
                pool.apply(vpool.Fixed("1MiB"))
            run_step(pool)
            assert pool.planned["served"] == 6
        limited = planned_pool(plan, strategy=vpool.Dynamic(initial=0, limit=plan.peak_bytes + 4096))
        with limited as pool, pytest.raises(vpool.OutOfMemoryError):
            pool.allocate(8192)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"strategy": vpool.Fixed("1MiB")}, "no fixed core of its own"),
            ({"strategy": vpool.Dynamic(initial=0, limit="64KiB")}, "the plan takes"),
            ({"rounding": 512}, "plan with rounding=512"),
        ],
    )
    def test_plans_that_do_not_suit_a_pool(self, plan, options, message):
        with pytest.raises(ValueError, match=message):
            planned_pool(plan, **options)

    def test_what_is_no_plan(self, tmp_path):
        with pytest.raises(TypeError, match="plan must be"):
            planned_pool(3)
        with pytest.raises(FileNotFoundError):
            planned_pool(tmp_path / "none.npz")

    def test_a_source_that_has_not_enough_says_so(self, plan):
        with pytest.raises(vpool.OutOfMemoryError, match="at construction"):
            planned_pool(
                plan, source=vpool.sources.Simulated(plan.peak_bytes // 2), strategy=vpool.Dynamic(limit=1 << 30)
            )

    @pytest.mark.parametrize("debug", ["quarantine", "sites", "leaks"])
    def test_debug_modes_do_without_the_plan(self, plan, debug):
        with planned_pool(plan, debug=debug) as pool:
            run_step(pool)
            assert pool.planned is None
            assert pool.plan is None
            assert pool.stats.allocations == 6

    def test_a_pool_that_is_recorded_follows_its_plan(self, plan):
        with planned_pool(plan) as pool:
            with pool.record() as trace:
                run_step(pool)
                replayer = Replayer(pool, made(*EVENTS), {0: 0})
                assert replayer.run(0, len(EVENTS)) == len(EVENTS)
            assert pool.planned == {"served": 12, "taken": 0, "strange": 0}
            assert trace.allocations == 12
            assert vpool.plan(trace).peak_bytes == plan.peak_bytes
            run_step(pool)
            assert pool.planned["served"] == 18
            pool.check()

    def test_without_a_plan_there_is_none(self, pool):
        assert pool.planned is None
        assert pool.plan is None

    def test_an_empty_plan_plans_nothing(self):
        with planned_pool(vpool.plan(made())) as pool:
            assert pool.planned is None
            pool.deallocate(pool.allocate(1000))

    def test_memory_is_written_where_it_was_planned(self, plan):
        with planned_pool(plan, source="host", strategy=vpool.Dynamic(initial=0, limit="64MiB")) as pool:
            trace = made(*EVENTS)
            replayer = Replayer(pool, trace, {0: 0}, patterns=True)
            for _ in range(3):
                assert replayer.run(0, len(trace)) == len(trace)
            assert replayer.finish()
            assert pool.planned["served"] == 18
            with contextlib.closing(pool.empty(1000)) as buffer:
                assert buffer.ptr

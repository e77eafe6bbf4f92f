"""Replay: recorded workloads through a real pool."""

import ctypes
import json
import math

import numpy as np
import pytest

import vpool
from tests.helpers.pools import GIB, MIB, host_pool, round_up
from tests.helpers.traces import ALL, EIGHT, FOLDER, SMALL, arrays_of, made, recorded
from vpool._interface.replay import Replayer
from vpool.errors import PatternError

FIRST_SEGMENT = 256 * MIB
# A plain exact best-fit simulation of the Dynamic rule gives 1.52 at worst and 1.20 in the mean.
WORST_RATIO = 1.55
MEAN_RATIO = 1.24
EVENTS = 60_000  # of a long trace, where writing patterns into all of it would take too long


@pytest.fixture(scope="module")
def results():
    """Each recorded trace replayed once with the defaults."""
    return {name: vpool.replay(recorded(name)) for name in ALL}


def part(trace, events):
    """The first events of a trace."""
    arrays = (trace.op, trace.id, trace.bytes, trace.stream, trace.t_us)
    return vpool.Trace(*(array[:events] for array in arrays))


def by_hand(trace):
    """The trace through a pool call by call: its stats, and how many requests needed more than their step."""
    larger = 0
    with vpool.Pool(vpool.Dynamic(limit=1.0), source="simulated") as pool:
        address = {}
        for op, number, nbytes in zip(trace.op.tolist(), trace.id.tolist(), trace.bytes.tolist(), strict=True):
            if op == 0 and nbytes > FIRST_SEGMENT // 2:
                before = pool.stats
                address[number] = pool.allocate(nbytes)
                step = before.reserved_bytes // 2 or FIRST_SEGMENT
                larger += pool.stats.source_calls > before.source_calls and nbytes > step
            elif op == 0:
                address[number] = pool.allocate(nbytes)
            else:
                pool.deallocate(address.pop(number))
        pool.check()
        return pool.stats, larger


class TestRecordedTraces:
    """The nine recorded workloads with the default strategy on a simulated device."""

    @pytest.mark.parametrize("name", ALL)
    def test_completes_with_the_figures_of_the_trace(self, results, name):
        trace, result = recorded(name), results[name]
        assert result.oom is None
        assert result.events == len(trace)
        assert result.allocations == trace.allocations
        assert result.peak_live_bytes == trace.peak_live_bytes
        assert result.peak_live_bytes <= result.peak_allocated_bytes <= result.peak_reserved_bytes
        assert result.reserved_over_live == result.peak_reserved_bytes / result.peak_live_bytes
        assert 0 < result.utilization <= 1
        assert 0 <= result.external_fragmentation <= 1
        assert 0 <= result.internal_fragmentation < 0.05
        assert result.ns_per_event > 0

    @pytest.mark.parametrize("name", EIGHT)
    def test_reserves_little_more_than_is_live(self, results, name):
        assert results[name].reserved_over_live <= WORST_RATIO

    def test_reserves_less_in_the_mean(self, results):
        logs = [math.log(results[name].reserved_over_live) for name in EIGHT]
        assert math.exp(sum(logs) / len(logs)) <= MEAN_RATIO

    @pytest.mark.parametrize("name", ALL)
    def test_asks_the_source_rarely(self, results, name):
        """At most 1 + ceil(log 1.5 (peak / 256 MiB)), plus one for each request larger than its step."""
        result = results[name]
        stats, larger = by_hand(recorded(name))
        growths = 1 + math.ceil(math.log(max(1, result.peak_reserved_bytes / FIRST_SEGMENT), 1.5))
        assert result.source_calls <= growths + larger
        # The compiled loop and Python's calls are the same program to the pool.
        assert stats.source_calls == result.source_calls
        assert stats.peak_reserved_bytes == result.peak_reserved_bytes
        assert stats.peak_allocated_bytes == result.peak_allocated_bytes

    def test_a_path_is_as_good_as_a_trace(self):
        by_path = vpool.replay(FOLDER / "two_streams.npz", "dynamic")
        by_trace = vpool.replay(recorded("two_streams"))
        assert by_path.peak_reserved_bytes == by_trace.peak_reserved_bytes


class TestPatterns:
    """Every block holds at its end what was written at its start."""

    @pytest.mark.parametrize(("name", "peak"), [("two_streams", 256 * MIB), ("llm_generate", 96 * MIB)])
    def test_on_host_memory(self, name, peak):
        trace = part(recorded(name), EVENTS).scaled(peak)
        result = vpool.replay(trace, source="host", capacity="1GiB", patterns=True)
        assert result.oom is None
        assert result.ns_per_event is None
        assert result.verified_bytes == int(trace.bytes[trace.op == 0].sum())

    @pytest.mark.long
    @pytest.mark.parametrize("name", ["two_streams", "llm_generate"])
    def test_on_host_memory_in_full_length(self, name):
        trace = recorded(name).scaled(512 * MIB)
        assert vpool.replay(trace, source="host", capacity="2GiB", patterns=True).oom is None

    @pytest.mark.parametrize("size", [1, 8, 255, 256, 257, 5000])
    def test_every_granule_counts(self, size):
        """One byte changed anywhere in the first word of any granule is found when the block is freed."""
        trace = made((1, size), -1)
        for granule in range(round_up(size) // 256):
            with host_pool() as pool:
                replayer = Replayer(pool, trace, {0: 0}, patterns=True)
                assert replayer.run(0, 1) == 1
                (block,) = [row for row in pool.inspect().blocks if row["state"] == "live"]
                ctypes.memset(int(block["address"]) + 256 * granule, 0xA5, 1)
                assert replayer.run(1, 2) == 1
                assert replayer.mismatch == 1
                assert pool.stats.frees == 0

    def test_an_overlap_is_found(self):
        """What a second owner writes into a block in the middle of a replay ends it, with the event's number."""
        trace = part(recorded("two_streams"), 5000).scaled(32 * MIB)
        pool_before = set(vpool.pools())

        def overwrite(done, of):
            (pool,) = set(vpool.pools()) - pool_before
            for block in pool.inspect().blocks:
                if block["state"] == "live":
                    ctypes.memset(int(block["address"]), 0, 8)

        with pytest.raises(PatternError, match="pattern"):
            vpool.replay(trace, source="host", capacity="256MiB", patterns=True, progress=overwrite)

    def test_a_source_without_memory_has_none_to_write_to(self):
        with pytest.raises(ValueError, match="simulated"):
            vpool.replay(made(*SMALL), patterns=True)

    def test_the_bytes_verified_are_those_of_blocks_that_were_served(self):
        trace = made((1, 1000), (2, 2000), -1, (3, 8 * MIB), -2)
        result = vpool.replay(trace, source="host", capacity=4 * MIB, patterns=True)
        assert result.oom["event"] == 3
        assert result.verified_bytes == 3000


class _Slow(Replayer):
    """One whose events take a second in each run."""

    nanoseconds = 0

    def run(self, begin, end):
        self.nanoseconds += 1_000_000_000
        return super().run(begin, end)


class TestOutOfMemory:
    """A capacity that does not suffice."""

    def test_the_event_is_told(self):
        trace = made((1, 3 * MIB), (2, MIB), -2, (3, 2 * MIB), -1, -3)
        result = vpool.replay(trace, capacity=4 * MIB)
        assert result.oom == {"event": 3, "requested": 2 * MIB, "live_bytes": 3 * MIB}
        assert result.peak_reserved_bytes <= 4 * MIB

    def test_in_the_first_event(self):
        result = vpool.replay(made((1, 5 * MIB)), capacity=MIB)
        assert result.oom == {"event": 0, "requested": 5 * MIB, "live_bytes": 0}

    def test_times_are_of_the_events_that_came(self, monkeypatch):
        monkeypatch.setattr("vpool.runs.Replayer", _Slow)
        events = [(1, 2 * MIB), *(event for one in range(2, 500) for event in ((one, 8 * MIB), -one))]
        result = vpool.replay(made(*events), capacity=4 * MIB)
        assert result.oom["event"] == 1
        assert result.ns_per_event == result.warm_ns_per_event[0]
        assert result.ns_per_event > 400_000_000  # of two events, and not of all 997

    def test_source_calls_are_those_up_to_there(self):
        """An adaptive pool gives segments back for what the replay frees in the end."""
        strategy = vpool.Dynamic(initial=0, growth=1.5, adaptive=True)
        failed = 0
        for seed in range(12):
            random = np.random.default_rng(seed)
            events, live = [], []
            for one in range(1, 200):
                events.append((one, int(2 ** random.uniform(10, 30))))
                live.append(one)
                while live and random.random() < 0.49:
                    events.append(-live.pop(int(random.integers(len(live)))))
            trace = made(*events)
            capacity = trace.peak_live_bytes * 9 // 8
            result = vpool.replay(trace, strategy, capacity=capacity)
            if result.oom is None:
                continue
            failed += 1
            with vpool.Pool(strategy.within(capacity), source=vpool.sources.Simulated(capacity), debug=()) as pool:
                address = {}
                for event in events[: result.oom["event"]]:
                    if isinstance(event, tuple):
                        address[event[0]] = pool.allocate(event[1])
                    else:
                        pool.deallocate(address.pop(-event))
                with pytest.raises(vpool.OutOfMemoryError):
                    pool.allocate(result.oom["requested"])
                assert result.source_calls == pool.stats.source_calls
                for left in address.values():
                    pool.deallocate(left)
        assert failed > 2

    @pytest.mark.parametrize("share", [0.5, 0.9])
    def test_of_a_recorded_trace(self, share):
        trace = recorded("resnet_train")
        capacity = int(trace.peak_live_bytes * share)
        result = vpool.replay(trace, capacity=capacity)
        event, live = result.oom["event"], result.oom["live_bytes"]
        assert trace.op[event] == 0
        assert result.oom["requested"] == trace.bytes[event]
        assert live == trace.live_bytes[event - 1] <= capacity
        assert result.peak_reserved_bytes <= capacity

    def test_the_capacity_is_what_the_pool_may_take(self):
        """All of it, not 80 percent."""
        assert vpool.replay(made((1, 4 * MIB)), capacity="4MiB").oom is None
        assert vpool.replay(made((1, 4 * MIB)), source="host", capacity="4MiB").oom is None

    @pytest.mark.parametrize("strategy", ["fixed", vpool.Hybrid("5MB", dynamic=vpool.Dynamic(initial=0)), "dynamic"])
    @pytest.mark.parametrize("source", ["simulated", "simulated-vmm"])
    def test_it_need_not_be_a_multiple_of_what_a_source_maps(self, strategy, source):
        result = vpool.replay(made((1, 4 * MIB)), strategy, source=source, capacity="5MB")
        assert result.oom is None
        assert result.peak_reserved_bytes <= 6 * MIB

    def test_without_one_a_simulated_device_is_unbounded(self):
        assert vpool.replay(made((1, 2**50), (2, 2**50))).oom is None

    def test_no_further_pass_is_made(self):
        result = vpool.replay(made((1, 5 * MIB)), capacity=MIB, passes=3)
        assert len(result.warm_ns_per_event) == 1

    def test_a_failing_source_is_no_want_of_memory(self):
        """Another status than out of memory is a SourceError, never an `oom`."""
        source = vpool.sources.Simulated()
        source.driver.fail("malloc", 700, times=5)
        with pytest.raises(vpool.SourceError):
            vpool.replay(made(*SMALL), source=source)


class TestPasses:
    """The same trace again, into the pool as it is."""

    def test_each_has_its_figures(self):
        result = vpool.replay(recorded("two_streams"), passes=3)
        assert len(result.warm_ns_per_event) == len(result.driver_calls) == len(result.driver_ns) == 3
        assert result.ns_per_event == result.warm_ns_per_event[0]
        assert result.driver_calls[0] > result.driver_calls[2] == 0
        assert result.driver_ns[0] > result.driver_ns[2] == 0

    def test_what_is_left_at_the_end_is_freed_between(self):
        result = vpool.replay(made((1, 3 * MIB)), capacity=4 * MIB, passes=5)
        assert result.oom is None
        assert result.source_calls == 1

    @pytest.mark.parametrize("passes", [0, -1])
    def test_at_least_one(self, passes):
        with pytest.raises(ValueError, match="passes"):
            vpool.replay(made(*SMALL), passes=passes)


def test_with_a_lag_work_is_complete_some_events_later():
    """What one stream freed serves another: behind an event as long as it is not complete, `between` events later."""
    waits = {}
    for lag, between in ((0, 0), (2, 0), (2, 1), (3, 1)):
        events = ((1, 1 << 20), -1, *[(2, 0)] * between, (3, 1 << 20))
        streams = np.array([1, 1, *[0] * between, 0], np.uint16)
        source = vpool.sources.Simulated("1MiB")
        trace = vpool.Trace(**arrays_of(*events, stream=streams))
        assert vpool.replay(trace, vpool.Dynamic(initial="1MiB", limit="1MiB"), source, lag=lag).oom is None
        waits[lag, between] = source.driver.calls()["stream_wait_event"][0]
    assert waits == {(0, 0): 0, (2, 0): 1, (2, 1): 0, (3, 1): 1}


class TestArguments:
    """What replay is told."""

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ({"strategy": "best"}, ValueError),
            ({"strategy": 5}, TypeError),
            ({"source": "nowhere"}, ValueError),
            ({"capacity": -1}, ValueError),
            ({"capacity": 0}, ValueError),
            ({"capacity": 1.5}, TypeError),
            ({"capacity": "lots"}, ValueError),
            ({"passes": "two"}, TypeError),
            ({"lag": -1}, ValueError),
        ],
    )
    def test_is_refused(self, arguments, error):
        with pytest.raises(error):
            vpool.replay(made(*SMALL), **arguments)

    def test_a_strategy_object(self):
        result = vpool.replay(made(*SMALL), vpool.Dynamic(initial=0, growth="64KiB"))
        assert result.peak_reserved_bytes < 4 * MIB

    def test_an_empty_trace(self):
        result = vpool.replay(made(), passes=2)
        assert (result.events, result.reserved_over_live, result.oom) == (0, 0.0, None)

    def test_zero_bytes(self):
        assert vpool.replay(made((1, 0), (2, 0), -1)).peak_reserved_bytes == 0

    def test_the_result_is_plain_and_fits_json(self):
        result = vpool.replay(made(*SMALL))
        figures = result.to_dict()
        assert json.loads(json.dumps(figures)) == figures
        assert {"events", "source_calls", "oom", "reserved_over_live", "driver_ns"} <= figures.keys()

    def test_progress_is_told_to_the_end(self):
        seen = []
        trace = recorded("llm_generate")
        vpool.replay(trace, passes=2, progress=lambda done, of: seen.append((done, of)))
        assert seen == sorted(seen)
        assert seen[-1] == (2 * len(trace), 2 * len(trace))
        assert len(seen) > 10

    def test_no_pool_is_left_open(self):
        before = set(vpool.pools())
        vpool.replay(made(*SMALL))
        with pytest.raises(vpool.SourceError):
            self.fail_in_the_middle()
        assert set(vpool.pools()) == before

    @staticmethod
    def fail_in_the_middle():
        source = vpool.sources.Simulated(GIB)
        source.driver.fail("malloc", 700, after=1, times=9)
        vpool.replay(made((1, MIB), (2, 500 * MIB)), source=source)


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (2, 1), (0, 99)])
def test_events_that_are_not_there_cannot_be_replayed(begin, end):
    trace = made(*SMALL)
    with host_pool() as pool:
        replayer = Replayer(pool, trace, {0: 0})
        with pytest.raises(ValueError, match="events"):
            replayer.run(begin, end)
        assert replayer.run(2, 2) == 2
        assert np.array_equal(trace.op, made(*SMALL).op)


def test_a_mark_comes_where_the_step_begins_although_the_clock_goes_back():
    """What the first step freed is complete for the second's stream, which need not wait for it."""

    def driver_calls(t_us, marks_us):
        trace = vpool.Trace([0, 1] * 3, [0, 0, 1, 1, 2, 2], [MIB] * 6, [0, 0, 1, 1, 1, 1], t_us, marks_us)
        return vpool.replay(trace, vpool.Dynamic(initial=0, growth=4096), pessimistic=True).driver_calls

    back = driver_calls([0, 1, 10, 2, 3, 4], [0, 10])
    assert back == driver_calls([0, 1, 10, 10, 10, 10], [0, 10])
    assert back < driver_calls([0, 1, 10, 10, 10, 10], [0])


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_streams_are_looked_through_as_by_a_pool_that_met_them_in_that_order(order):
    """A request takes other streams' free blocks in the order in which the pool got to know them."""
    random = np.random.default_rng(3)
    sizes = (2 ** random.uniform(0, 30, 400)).astype(np.int64).tolist()
    homes = [*order, *random.integers(3, size=397).tolist()]
    events, live = [], []
    for one in range(400):
        events.append((0, one))
        live.append(one)
        while live and random.random() < 0.49:
            events.append((1, live.pop(int(random.integers(len(live))))))
    op, number = zip(*events, strict=True)
    nbytes, stream = [sizes[one] for one in number], [homes[one] for one in number]
    trace = vpool.Trace(op, number, nbytes, stream, range(len(op)))
    found = vpool.replay(trace, vpool.Dynamic(initial=0))
    with vpool.Pool(vpool.Dynamic(initial=0, limit=1.0), source="simulated", debug=()) as pool:
        handle = [0] + [pool.source.driver.create_stream() for _ in range(2)]
        address = {}
        for free, one, size, index in zip(op, number, nbytes, stream, strict=True):
            if free:
                pool.deallocate(address.pop(one), stream=handle[index])
            else:
                address[one] = pool.allocate(size, stream=handle[index])
        for left in address.values():
            pool.deallocate(left)
        stats = pool.stats
    assert (found.peak_reserved_bytes, found.source_calls) == (stats.peak_reserved_bytes, stats.source_calls)

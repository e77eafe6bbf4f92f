"""vpool bench: its loops, its rounds, what it makes of them, and what it says of the goals."""

import dataclasses
import json
import threading

import numpy as np
import pytest

import vpool
from tests.helpers.pools import MIB, assert_whole, simulated_pool
from vpool._interface import bench as loops
from vpool.bench import GROUPS, Results, Row, bench, ratio
from vpool.bench.calls import dropped, in_parts, pairs
from vpool.bench.cases import Case, cases_of, checked_groups
from vpool.bench.goals import goals
from vpool.bench.own import Own, OwnTrace, own_subjects, percentiles
from vpool.bench.peers import PEERS
from vpool.bench.resident import main as resident
from vpool.bench.runner import rows_of
from vpool.data import bundled_trace
from vpool.errors import Error, FormatError

SIZES = np.array([512, 1000, 70_000, 3 * MIB], np.uint64)


@pytest.fixture(scope="module")
def results():
    """A run of everything without peers, as short as it can be."""
    return bench(rounds=2, scale=0.01, peers=False)


class TestLoops:
    def test_replacements_keep_as_many_blocks_live(self, pool):
        replacements = loops.Replacements(pool, SIZES, 50, 3)
        assert pool.inspect().live_blocks == 50
        assert replacements.run(1000) > 0
        assert pool.inspect().live_blocks == 50
        each = np.zeros(100, np.uint64)
        assert replacements.latencies(each) == each.sum()
        assert (each > 0).all()
        # 50 at first; the warming is half of each run.
        assert pool.stats.allocations == 50 + 1500 + 150
        replacements.free()
        replacements.free()
        assert_whole(pool)

    @pytest.mark.parametrize(("sizes", "live"), [(SIZES[:3], 5), (SIZES[:0], 5), (SIZES, 0), (SIZES, -1)])
    def test_replacements_that_make_no_sense(self, pool, sizes, live):
        with pytest.raises(ValueError, match=r"sizes|live"):
            loops.Replacements(pool, sizes, live, 1)
        assert_whole(pool)

    def test_a_measurement_that_ran_out_of_memory_is_an_error(self):
        with simulated_pool(initial=0, limit="2MiB") as pool:
            with pytest.raises(vpool.OutOfMemoryError, match=r"^10 requests of a measurement were not served"):
                loops.pair(pool, 3 * MIB, 10)
            with pytest.raises(vpool.OutOfMemoryError):
                loops.pair_latencies(pool, 3 * MIB, np.zeros(10, np.uint64))
            addresses = np.zeros(3, np.uint64)
            with pytest.raises(vpool.OutOfMemoryError, match=r"^1 requests"):
                loops.fill(pool, MIB, addresses)
            loops.drop(pool, addresses)
            replacements = loops.Replacements(pool, np.array([MIB], np.uint64), 3, 1)
            with pytest.raises(vpool.OutOfMemoryError):
                replacements.run(10)
            replacements.free()
            assert_whole(pool)

    def test_blocks_are_dropped_by_steps(self, pool):
        addresses = np.zeros(10, np.uint64)
        loops.fill(pool, 512, addresses)
        assert pool.inspect().live_blocks == 10
        loops.drop(pool, addresses, 3)
        assert addresses.astype(bool).tolist() == [False, True, True] * 3 + [False]
        loops.drop(pool, addresses)
        assert_whole(pool)
        with pytest.raises(ValueError, match="step"):
            loops.drop(pool, addresses, 0)

    def test_what_one_thread_allocates_another_one_frees(self, pool):
        start, channel = loops.Start(2), loops.Channel()
        many = 5000  # more than a channel holds
        turns = (
            lambda: loops.produce(pool, channel, 4096, many, 7, start),
            lambda: loops.consume(pool, channel, many, 7, start),
        )
        threads = [threading.Thread(target=turn) for turn in turns]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pool.stats.allocations == many
        assert len(start.spans) == 2
        assert max(begin for begin, _ in start.spans) <= min(end for _, end in start.spans)
        assert_whole(pool)

    def test_empty_calls_return_something_fresh(self):
        calls = loops.EmptyCalls()
        one, other = calls.allocate(512), calls.allocate(512, None, 256)
        assert one == other
        assert one is not other
        assert 2**46 <= one < 2**47
        assert calls.deallocate(one) is None
        assert calls.empty(512) is not calls.empty(512)

    def test_the_floors_take_time(self):
        assert loops.lock_and_unlock(10_000) > 0
        assert loops.clock_reads(10_000) > 0
        pairs_ns = in_parts(lambda count: pairs(len, bool, (), count), 90)
        assert set(pairs_ns) == {"elapsed", "ns"}
        assert dropped(str, 1, 10) > 0


class TestOwn:
    def test_every_case_is_measured(self):
        subjects = own_subjects(vpool.sources.Simulated(), ["simulated"])
        for case in cases_of(list(GROUPS), True, [("two_streams", None, "")]):
            assert any(one.who.startswith("vpool") and one.supports(case) for one in subjects), case

    def test_each_peer_has_only_cases_that_are_there(self):
        names = {case.name for case in cases_of(list(GROUPS), True, [("x", None, "")])}
        for peer in PEERS:
            assert peer.cases <= names - {"resident"}

    def test_a_thread_that_fails_keeps_nobody_waiting(self):
        own = Own(vpool.sources.Simulated(MIB), strategy=vpool.Dynamic(initial=0))
        with pytest.raises(vpool.OutOfMemoryError):
            own.one_random(64, 4, 20)
        with pytest.raises(vpool.OutOfMemoryError):
            own.handoff(2 * MIB, 2, 20)

    def test_streams_are_destroyed(self):
        source = vpool.sources.Simulated()
        Own(source).own_same(4096, 3, 50)
        Own(source).handoff(4096, 2, 50)
        calls = source.driver.calls()
        assert calls["stream_create"][0] == calls["stream_destroy"][0] == 5

    def test_a_trace_that_does_not_fit_is_an_error(self):
        case = Case("traces", "trace", "two_streams", (), 2, subject=(bundled_trace(), ""))
        with pytest.raises(Error, match=r"out of memory at event .* of two_streams"):
            OwnTrace(vpool.sources.Simulated(64 * MIB)).measure(case, 2)

    def test_percentiles(self):
        figures = percentiles(np.arange(1000, dtype=np.uint64)[::-1].copy(), 5)
        assert figures == {"elapsed": 5, "p50_ns": 500.0, "p99_ns": 990.0, "p999_ns": 999.0}

    def test_memory_of_blocks(self):
        whole, halved = resident(50_000)
        assert 16 * 50_000 < whole < 512 * 50_000
        assert halved < 512 * 50_000


class Subject:
    """One that takes turns and says how often."""

    kind = "own"

    def __init__(self, who, log, fails_at=None):
        self.who = who
        self.log = log
        self.fails_at = fails_at

    def supports(self, case):
        return case.name == "pair"

    def measure(self, case, count):
        self.log.append((self.who, count))
        if len([who for who, _ in self.log if who == self.who]) == self.fails_at:
            raise Error("it\n broke")
        return {"elapsed": 100 * count, "ns": 100.0, "per_us": 10.0}


class TestRounds:
    CASE = Case("pair", "pair", 512, (512, 0))

    def test_all_take_turns_and_nobody_is_always_last(self):
        log, notes = [], []
        subjects = [Subject(name, log) for name in "abc"]
        rows, floors = rows_of(self.CASE, subjects, 3, 1e6, notes)
        counts = {count for _, count in log[-9:]}
        assert counts == {10_000}
        assert "".join(who for who, _ in log[-9:]) == "abcbcacab"
        assert [(row.who, row.figure) for row in rows] == [(name, what) for name in "abc" for what in ("ns", "per_us")]
        assert len(floors) == 3
        assert rows[0].samples == [100.0] * 3
        assert rows[0].floors == pytest.approx(100.0 / np.median(floors))
        assert rows[1].floors is None
        assert not notes

    @pytest.mark.parametrize("turn", [1, 2, 4])
    def test_who_fails_is_noted_and_the_others_go_on(self, turn):
        log, notes = [], []
        rows, _ = rows_of(self.CASE, [Subject("bad", log, turn), Subject("good", log)], 3, 1e4, notes)
        assert notes == ["bad, pair at 512: it broke"]
        assert {row.who for row in rows} == {"good"}
        assert [len(row.samples) for row in rows] == [3, 3]

    def test_a_case_may_want_fewer_rounds_and_say_the_count(self):
        log = []
        case = dataclasses.replace(self.CASE, count=7, rounds=2)
        rows, _ = rows_of(case, [Subject("a", log)], 9, 1e6, [])
        assert log == [("a", 7)] * 2
        assert len(rows[0].samples) == 2


class TestResults:
    def test_everything_is_measured_without_a_device(self, results):
        assert [note for note in results.notes if "device" not in note] == []
        assert {row.group for row in results.rows} == set(GROUPS)
        assert results.settings["source"] == "simulated" or results.machine["devices"]
        for row in results.rows:
            assert row.samples
            assert min(row.samples) <= row.median <= max(row.samples)
            assert row.best in (min(row.samples), max(row.samples))
            assert (row.floors is None) == (not row.figure.endswith("ns"))

    def test_a_group_alone(self):
        found = bench(only=["random"], rounds=1, scale=0.01, peers=False)
        assert {row.case for row in found.rows} == {"random"}
        assert found.settings["groups"] == ["random"]

    @pytest.mark.parametrize(
        "arguments", [{"only": ["pears"]}, {"rounds": 0}, {"scale": 0}, {"scale": float("nan")}, {"source": "moon"}]
    )
    def test_bad_arguments(self, arguments):
        with pytest.raises(ValueError, match=r"group|rounds|scale|source"):
            bench(**arguments)

    def test_other_traces_are_replayed_too(self, tmp_path):
        path = tmp_path / "mine.npz"
        bundled_trace().save(path)
        found = bench(only=["traces"], rounds=1, traces=[path], peers=False)
        assert found.places("trace") == ["two_streams", "mine"]
        with pytest.raises(OSError, match="nowhere"):
            bench(only=["traces"], traces=[tmp_path / "nowhere.npz"], peers=False)

    def test_a_file_keeps_everything(self, results, tmp_path):
        path = tmp_path / "run.json"
        results.save(path)
        loaded = Results.load(path)
        assert dataclasses.replace(loaded, rows=[]) == dataclasses.replace(results, rows=[])
        assert len(loaded.rows) == len(results.rows)
        for one, other in zip(loaded.rows, results.rows, strict=True):
            assert (one.case, one.at, one.who, one.figure) == (other.case, other.at, other.who, other.figure)
            assert one.median == pytest.approx(other.median, rel=1e-3)
        loaded.save(path)
        assert Results.load(path) == loaded

    @pytest.mark.parametrize("damage", ["{", "[]", "{}", "null", '{"version": 9}', "version", "rows", "row", "samples"])
    def test_a_file_that_holds_no_results(self, results, tmp_path, damage):
        path = tmp_path / "run.json"
        data = results.to_dict()
        if damage == "row":
            data["rows"][0] = {"group": "pair"}
        elif damage == "samples":
            data["rows"][0]["samples"] = ["many"]
        elif damage in data:
            del data[damage]
        else:
            data = json.loads(damage) if damage != "{" else None
        path.write_text("{" if data is None and damage == "{" else json.dumps(data))
        with pytest.raises(FormatError, match="holds no results of vpool bench"):
            Results.load(path)

    def test_ratios_are_of_the_same_rounds(self):
        def row(*samples):
            return Row("pair", "pair", 512, "vpool", "own", "ns", float(np.median(samples)), min(samples), 1.0, samples)

        assert ratio(row(10, 100, 20), row(1, 10, 2)) == 10
        assert ratio(row(10, 30), row(10, 5, 20)) == 2
        assert ratio(None, row(1)) is None
        assert ratio(row(1), None) is None

    def test_groups(self):
        assert checked_groups(None) == list(GROUPS)
        assert checked_groups(["traces", "pair"]) == ["pair", "traces"]


def made_run(factor, cores=16):
    """A run on a device in which every goal just holds, times a factor."""
    peer = 1000.0

    def row(case, at, who, figure, value, kind=None):
        kind = kind or ("own" if who.startswith("vpool") else "peer")
        floors = value / 10.0 if figure.endswith("ns") else None
        return Row("", case, at, who, kind, figure, value, value, floors, [value] * 3)

    own = [
        *(row("pair", at, "vpool", "ns", 35.0 * factor) for at in (512, 1 << 30)),
        row("pair_among", 4096, "vpool, fixed pool", "ns", 23.0 * factor),
        row("random", 512, "vpool", "ns", 60.0 * factor),
        row("python_pair", 512, "vpool", "ns", 60.0 * factor),
        row("python_pair", 512, "empty calls", "ns", 40.0, "floor"),
        row("buffer", 512, "vpool", "ns", 66.0 * factor),
        row("buffer", 512, "empty calls", "ns", 30.0, "floor"),
        row("blocks", 1000, "vpool", "ns", 20.0),
        row("blocks", 1_000_000, "vpool", "ns", 30.0 * factor),
        row("resident", 1_000_000, "vpool", "bytes_whole", 64.0 * factor),
        row("resident", 1_000_000, "vpool", "bytes_halved", 96.0 * factor),
        row("trace", "x", "vpool on cuda", "warm_ns", 35.0 * factor),
        row("trace", "x", "vpool on cuda", "cold_ns", 1500.0 * factor),
        row("trace", "x", "vpool on cuda-vmm", "warm_own_ns", 35.0 * factor),
        row("trace", "x", "vpool on cuda-vmm", "cold_ns", 1500.0 * factor),
        *(row(case, 1, "vpool", "ns", 100.0) for case in ("own_same", "own_random")),
        *(row(case, 16, "vpool", "ns", 150.0 * factor) for case in ("own_same", "own_random")),
        row("one_same", 1, "vpool", "per_us", 10.0),
        row("one_same", 16, "vpool", "per_us", 80.0 / factor),
        row("one_random", 16, "vpool", "per_us", 5.0 / factor),
    ]
    peers = [
        *(row("pair", at, "RMM pool", "ns", peer) for at in (512, 1 << 30)),
        row("pair", 512, "malloc", "ns", 1.0),
        row("random", 512, "PyTorch", "ns", 600.0),
        row("python_pair", 512, "CuPy pool", "ns", 480.0),
        row("buffer", 512, "CuPy pool", "ns", 660.0),
        row("trace", "x", "RMM pool", "warm_ns", 245.0),
        row("trace", "x", "RMM pool", "cold_ns", 9000.0),
        *(row("trace", "x", who, "cold_ns", 1500.0) for who in ("PyTorch expandable", "cudaMallocAsync")),
        row("one_random", 16, "RMM arena", "per_us", 0.5),
    ]
    return Results(
        machine={"cores": cores, "devices": [], "processor": "some", "load": 0.0},
        packages={},
        settings={"rounds": 3},
        floor_ns=10.0,
        clock_ns=20.0,
        rows=own + peers,
    )


class TestGoals:
    def test_all_hold_in_a_run_that_just_reaches_them(self):
        found = goals(made_run(1.0))
        assert [goal.text for goal in found if goal.holds is False] == []
        assert [goal.why for goal in found if goal.holds is None] == ["there is no such front"]

    def test_none_holds_in_a_run_that_just_misses_them(self):
        found = goals(made_run(1.01))
        holding = [goal.text for goal in found if goal.holds]
        # 35 locks against 1,000 ns of a peer leaves room.
        assert holding == ["compiled pair, times faster than the best peer"]
        assert not [goal for goal in goals(made_run(3.0)) if goal.holds]

    def test_the_worst_place_decides(self):
        run = made_run(1.0)
        slow = dataclasses.replace(run.rows[1], median=90.0, samples=[90.0] * 3, floors=9.0)
        run.rows[1] = slow
        goal = goals(run)[0]
        assert (goal.figure, goal.where, goal.holds) == (9.0, "1.00 GiB", False)

    def test_what_was_not_measured_is_not_judged(self):
        run = made_run(1.0)
        run.rows = []
        assert {goal.holds for goal in goals(run)} == {None}
        assert all(goal.why for goal in goals(run))
        run = made_run(1.0, cores=2)
        assert [goal.why for goal in goals(run)[-3:]] == ["16 threads take turns on 2 cores"] * 3

    def test_a_run_without_a_device(self, results):
        found = goals(results)
        assert len(found) == len(goals(made_run(1.0)))
        for goal in found:
            assert (goal.figure is None) == bool(goal.why)
            assert json.dumps(goal.to_dict())

"""Tuning: the search for a policy, its study, its report and its command."""

import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import vpool
from tests.helpers.pools import GIB, MIB
from tests.helpers.traces import ALL, EIGHT, FOLDER, SMALL, arrays_of, made, recorded
from tests.tune_grid import PATH, least_of, row_of, tuned
from vpool.commands import main
from vpool.runs import measure
from vpool.search import Point, Space, search
from vpool.trials import Study, Workload, halves, on_threads

PAGE = Path(__file__).parents[1] / "docs" / "tune.rst"
TRACE = str(FOLDER / "two_streams.npz")
FEW = 320  # trials that take a second


def swinging(steps=6, size=10 * MIB):
    """A trace of steps that each hold three blocks, with a mark before each."""
    events = []
    for step in range(steps):
        ids = [4 * step + place for place in (1, 2, 3)]
        events += [(number, size * place) for place, number in enumerate(ids, start=1)] + [-number for number in ids]
    return vpool.Trace(**arrays_of(*events, marks_us=np.arange(0, 6 * steps, 6)))


def checked(name):
    """The row of a trace in the page's table, once the figures are what they have to be."""
    found, whole, second, default = tuned(name)
    assert whole.oom is None
    assert whole.peak_reserved_bytes == found.expected[0].peak_reserved_bytes <= 1.01 * least_of(name)
    assert second.oom is None
    assert second.peak_reserved_bytes <= default.peak_reserved_bytes
    return row_of(name, found, whole, second, default)


@pytest.fixture(scope="module")
def grid():
    return json.loads(PATH.read_text())


@pytest.fixture(scope="module")
def found():
    """A small search on the smallest recorded trace."""
    return vpool.tune(TRACE, trials=FEW)


class TestAgainstTheGrid:
    """Recorded traces, and the best of some 14,000 policies each (`tests/tune_grid.py`)."""

    def test_is_at_most_1_percent_above_its_best_and_generalises(self):
        assert checked("two_streams") in PAGE.read_text()

    @pytest.mark.long
    @pytest.mark.timeout(1800)
    @pytest.mark.parametrize("name", ALL)
    def test_so_is_every_trace(self, name):
        """`pytest -m long tests/test_tune.py`; some minutes."""
        assert checked(name) in PAGE.read_text()

    @pytest.mark.long
    @pytest.mark.timeout(1800)
    @pytest.mark.parametrize("name", ALL)
    def test_so_is_the_prediction_for_a_pool_of_ordinary_memory(self, name, tmp_path):
        """In full size, where the machine has the address space; nothing is written into it."""
        found = vpool.tune(recorded(name))
        if found.expected[0].peak_reserved_bytes > 0.8 * vpool.sources.Host().memory()[1]:
            pytest.skip("more than 80 % of this machine's memory")
        found.save(tmp_path / "policy.toml")
        result = vpool.replay(recorded(name), tmp_path / "policy.toml", source="host")
        assert result.peak_reserved_bytes == pytest.approx(found.expected[0].peak_reserved_bytes, rel=0.01)

    def test_second_halves_take_less_than_by_default(self):
        """On none worse, less on six of eight at least; by the page, whose rows are tested above."""
        text = PAGE.read_text().partition(".. tuned")[2].partition(".. end of tuned")[0]
        cells = [line.split() for line in text.splitlines()]
        rows = {row[0]: (float(row[-2]), float(row[-1])) for row in cells if row and row[0] in ALL}
        assert {*EIGHT} <= rows.keys()
        assert all(tuned <= default for tuned, default in (rows[name] for name in EIGHT))
        assert sum(tuned < default for tuned, default in (rows[name] for name in EIGHT)) >= 6

    @pytest.mark.parametrize("name", ALL)
    def test_the_grid_is_of_this_allocator(self, name, grid):
        """Else `python -m tests.tune_grid` has to run again."""
        kinds = grid[name]["kinds"]
        for kind in list(kinds)[:1]:
            figures = measure(recorded(name), vpool.Policy.loads(kinds[kind]["policy"]))
            assert figures.reserved_bytes == kinds[kind]["peak_reserved_bytes"]
            assert figures.source_calls == kinds[kind]["source_calls"]


class TestPrediction:
    """The policy's file in a real pool."""

    @pytest.mark.parametrize("name", ["two_streams", "resnet_train"])
    def test_a_pool_of_ordinary_memory_reserves_what_was_predicted(self, name, tmp_path):
        # So much address space is there anywhere; nothing is written into it.
        trace = recorded(name).scaled(2 * GIB)
        found = vpool.tune(trace, trials=FEW)
        found.save(tmp_path / "policy.toml")
        with vpool.Pool.from_policy(tmp_path / "policy.toml", source="host") as pool:
            address = {}
            for op, number, nbytes in zip(trace.op.tolist(), trace.id.tolist(), trace.bytes.tolist(), strict=True):
                if op == 0:
                    address[number] = pool.allocate(nbytes, stream=None)
                else:
                    pool.deallocate(address.pop(number))
            by_hand = pool.stats.peak_reserved_bytes
        replayed = vpool.replay(trace, tmp_path / "policy.toml", source="host").peak_reserved_bytes
        assert replayed == pytest.approx(found.expected[0].peak_reserved_bytes, rel=0.01)
        if len(np.unique(trace.stream)) == 1:
            assert by_hand == replayed

    def test_the_file_has_the_figures_in_comments(self, found, tmp_path):
        found.save(tmp_path / "policy.toml")
        text = (tmp_path / "policy.toml").read_text()
        assert vpool.Policy.load(tmp_path / "policy.toml") == found.policy
        row = next(line for line in text.splitlines() if line.startswith("#   two_streams"))
        assert f"{found.expected[0].reserved_over_live:.4f}" in row
        assert "on the second half" in text


class TestObjectives:
    """What is to be least."""

    def test_fewest_source_calls(self):
        found = vpool.tune(TRACE, objective="calls", trials=FEW)
        assert found.expected[0].source_calls == 1
        # One call serves all with no more than a slab needs.
        assert found.expected[0].reserved_over_live < 1.08

    def test_a_mix_lies_between(self, found):
        mixed = vpool.tune(TRACE, objective="mix", call_bytes="4MiB", trials=FEW).expected[0]

        def cost(row):
            return row.peak_reserved_bytes + row.source_calls * 4 * MIB

        assert cost(mixed) < cost(found.expected[0])
        assert 1 <= mixed.source_calls < found.expected[0].source_calls

    def test_within_a_capacity(self):
        trace = recorded("two_streams")
        capacity = int(trace.peak_live_bytes * 1.06)
        assert vpool.replay(trace, capacity=capacity).oom is not None
        for objective in ("reserved", "fits"):
            found = vpool.tune(trace, capacity, objective, trials=FEW)
            assert found.policy.strategy.limit_of() == capacity
            assert vpool.replay(trace, found.policy, capacity=capacity).oom is None
            assert found.expected[0].default_reserved_bytes is None
            assert "6" in str(found)

    def test_what_cannot_fit_is_said(self):
        trace = recorded("two_streams")
        with pytest.raises(ValueError, match=r"none of .* completes within .*event [\d,]+ of 7,887"):
            vpool.tune(trace, trace.peak_live_bytes // 2, trials=64)
        with pytest.raises(ValueError, match=r"none of .* completes within 1 B"):
            vpool.tune(trace, 1, trials=5)

    def test_the_watermark_is_searched_where_it_matters(self):
        workload = Workload({"one": swinging()}, maintain=True)
        assert "watermark" in Space(workload).knobs(Point("hybrid"))
        assert "watermark" not in Space(Workload({"one": swinging()})).knobs(Point("hybrid"))
        found = vpool.tune(swinging(), trials=64, maintain=True)
        again = vpool.replay(swinging(), found.policy, maintain=True)
        assert again.peak_reserved_bytes == found.expected[0].peak_reserved_bytes


class TestSeveralTraces:
    """The worst case is guarded against."""

    def test_no_trace_is_worse_off_than_by_default(self):
        small, large = recorded("two_streams").scaled(512 * MIB), recorded("two_streams")
        found = vpool.tune([small, large], trials=FEW)
        assert len(found.expected) == 2
        for trace, row in zip((small, large), found.expected, strict=True):
            result = vpool.replay(trace, found.policy)
            assert result.peak_reserved_bytes == row.peak_reserved_bytes <= row.default_reserved_bytes

    def test_two_of_a_name(self):
        names = [row.trace for row in vpool.tune([TRACE, TRACE], trials=8, holdout=False).expected]
        assert len(set(names)) == 2

    def test_one_that_has_the_name_which_another_would_get(self, tmp_path):
        paths = [tmp_path / name for name in ("a.npz", "a (3).npz", "b/a.npz")]
        paths[2].parent.mkdir()
        for steps, path in enumerate(paths, start=2):
            swinging(steps).save(path)
        found = vpool.tune(paths, trials=4, holdout=False).expected
        assert [row.trace for row in found] == ["a", "a (3)", "a (3) (3)"]


class TestHeldOut:
    """Halves of steps."""

    def test_the_second_half_begins_with_what_is_live(self):
        trace = vpool.Trace(**arrays_of((1, 100), (2, 200), -1, (3, 300), -2, -3, marks_us=[0, 3]))
        first, second = halves(trace)
        assert (first.op.tolist(), first.id.tolist()) == ([0, 0, 1], [1, 2, 1])
        assert (second.op.tolist(), second.id.tolist()) == ([0, 0, 1, 1], [2, 3, 2, 3])
        assert (first.marks_us.tolist(), second.marks_us.tolist()) == ([0], [3])

    @pytest.mark.parametrize("name", ALL)
    def test_the_peak_is_in_one_of_them(self, name):
        trace = recorded(name)
        assert max(half.peak_live_bytes for half in halves(trace)) == trace.peak_live_bytes

    def test_without_steps_it_is_half_of_the_events(self):
        assert [len(half) for half in halves(made((1, 5), -1, (2, 5), -2))] == [2, 2]

    def test_a_clock_that_goes_back_leaves_the_steps_as_they_are(self):
        arrays = arrays_of((1, 5), -1, (2, 5), -2, (3, 5), -3, marks_us=[0, 10])
        trace = vpool.Trace(**{**arrays, "t_us": [0, 1, 10, 2, 3, 4]})
        assert trace.steps == [(0, 2), (2, 6)]
        first, second = halves(trace)
        assert (len(first), len(second)) == (2, 4)
        assert (first.marks_us.tolist(), second.marks_us.tolist()) == ([0], [10])

    def test_a_step_that_begins_between_two_events_is_of_the_half_that_it_opens(self):
        arrays = arrays_of((1, 5), -1, (2, 5), -2, marks_us=[0, 15])
        first, second = halves(vpool.Trace(**{**arrays, "t_us": [0, 10, 20, 30]}))
        assert (first.marks_us.tolist(), second.marks_us.tolist()) == ([0], [15])
        assert second.steps == [(0, 2)]

    def test_what_has_no_halves_is_tuned_all_the_same(self):
        assert halves(made((1, 5), -1)) is None
        assert vpool.tune(made((1, 5 * MIB)), trials=16).holdout is None

    @pytest.mark.parametrize("early", [True, False])
    def test_a_half_that_asks_for_no_bytes_is_none(self, early):
        sizes = [0] * 8 + [5 * MIB] * 8 if early else [5 * MIB] * 8 + [0] * 8
        trace = made(*(event for one, size in enumerate(sizes, start=1) for event in ((one, size), -one)))
        assert halves(trace) is None
        assert vpool.tune(trace, trials=16).holdout is None

    def test_a_slab_for_what_was_seen_is_no_choice(self):
        growing = vpool.Trace(
            **arrays_of((1, 10 * MIB), -1, (2, 11 * MIB), -2, (3, 30 * MIB), -3, marks_us=np.arange(0, 6, 2))
        )
        found = vpool.tune(growing, trials=120)
        assert found.holdout[0].completes
        assert "out of memory" in found.refused["fixed"]
        assert not isinstance(found.policy.strategy, vpool.Fixed)
        assert vpool.replay(made((1, 99 * MIB)), found.policy).oom is None

    def test_is_not_done_where_that_was_said(self):
        found = vpool.tune(swinging(), trials=32, holdout=False)
        assert found.holdout is None
        assert "second half" not in found.dumps()


class TestDeterminism:
    """The same seed, the same result."""

    def test_on_any_number_of_workers(self, found):
        for workers in (1, 3):
            assert vpool.tune(TRACE, trials=FEW, workers=workers).to_dict() == found.to_dict()

    def test_another_seed_searches_elsewhere(self):
        # The grid is everybody's; what comes after it is not.
        one, other = (vpool.tune(TRACE, trials=700, seed=seed, holdout=False) for seed in (0, 7))
        assert one.pareto != other.pareto

    def test_several_at_once(self, found):
        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(lambda seed: vpool.tune(TRACE, trials=FEW, seed=seed), (0, 0)))
        assert both[0].to_dict() == both[1].to_dict() == found.to_dict()

    def test_progress_is_told_to_the_end(self):
        seen = []
        vpool.tune(swinging(), trials=100, progress=lambda done, of: seen.append((done, of)))
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert seen[-1] == (100, 100)


class TestStudy:
    """What was measured is kept."""

    def test_a_run_that_was_killed_goes_on(self, found, tmp_path):
        path = tmp_path / "study"
        code = f"import vpool; vpool.tune({TRACE!r}, trials={FEW}, study={str(path)!r}, progress=stop)"
        stop = "import os\ndef stop(done, of):\n    if done > 150: os._exit(9)\n"
        done = subprocess.run([sys.executable, "-c", stop + code], cwd=FOLDER.parents[1], stdin=subprocess.DEVNULL)
        assert done.returncode == 9
        lines = path.read_text().count("\n")
        assert lines > 150
        with open(path, "a") as file:
            file.write('{"workload": "whole", "pol')  # a line that was cut
        assert vpool.tune(TRACE, trials=FEW, study=path).to_dict() == found.to_dict()
        records = [json.loads(line) for line in path.read_text().splitlines()]
        keys = [(record["workload"], record["policy"]) for record in records[1:]]
        assert len(keys) == len(set(keys)) > lines

    def test_nothing_is_measured_twice(self, tmp_path):
        trace, path = swinging(), tmp_path / "study"
        first = vpool.tune(trace, trials=64, study=path)
        size = path.stat().st_size
        assert vpool.tune(trace, trials=64, study=path) == first
        assert path.stat().st_size == size
        # Figures are of policies, whatever is to be least.
        vpool.tune(trace, objective="calls", trials=16, study=path, holdout=True)

    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ("precious\n", "line 1"),
            ("no line end", "line 1"),
            ("[1]\n", "line 1"),
            ('{"kind": "vpool study", "format_version": 2}\n', "version 2; this vpool reads up to version 1"),
            ('{"kind": "vpool study", "format_version": 1, "vpool": "0.0"}\n', r"vpool 0\.0"),
        ],
    )
    def test_another_file_is_refused_and_stays(self, text, match, tmp_path):
        path = tmp_path / "study"
        path.write_text(text)
        with pytest.raises(vpool.FormatError, match=match):
            vpool.tune(swinging(), trials=8, study=path)
        assert path.read_text() == text

    @pytest.mark.parametrize("line", ["{}", "[]", '{"workload": "none", "policy": "", "figures": []}', "\\x00"])
    def test_a_damaged_line_is_named(self, line, tmp_path):
        path = tmp_path / "study"
        vpool.tune(swinging(), trials=8, study=path)
        text = path.read_text()
        path.write_text(text + line + "\n")
        with pytest.raises(vpool.FormatError, match=f"line {text.count(chr(10)) + 1}"):
            vpool.tune(swinging(), trials=8, study=path)

    def test_of_another_trace_is_refused(self, tmp_path):
        vpool.tune(swinging(), trials=8, study=tmp_path / "study")
        for changes in (
            {"traces": swinging(7)},
            {"holdout": False},
            {"capacity": GIB},
            {"passes": 2},
            {"maintain": True},
        ):
            with pytest.raises(vpool.FormatError, match="of other traces, held-out halves, capacity, number of passes"):
                vpool.tune(**{"traces": swinging(), "trials": 8, "study": tmp_path / "study", **changes})

    def test_a_workload_travels(self):
        workload = Workload({"one": swinging()}, capacity=GIB)
        again = Workload.unpack(workload.pack())
        assert again.fingerprint == workload.fingerprint
        assert again.measure(vpool.Policy()) == workload.measure(vpool.Policy())
        assert pickle.loads(pickle.dumps(workload)).events == workload.events


class TestSearch:
    """The search itself, on values made by hand."""

    def test_finds_the_bottom_of_a_bowl(self):
        space = Space(Workload({"one": recorded("two_streams")}))
        target = space.size(0.6321)

        def value(policy):
            initial = getattr(policy.strategy, "initial", None)
            return (abs(initial - target) if initial is not None else 2**60,)

        ranked = search(space, lambda policies: policies, value, 800)
        assert ranked[0][0][0] <= 2 * space.unit
        assert [one[0] for one in ranked] == sorted(one[0] for one in ranked)

    def test_what_is_not_allowed_is_not_tried(self):
        space = Space(Workload({"one": swinging()}))
        ranked = search(space, lambda policies: policies, lambda policy: (0,), 500, allowed=lambda p: not p.adaptive)
        assert len(ranked) == 500
        assert not any(point.adaptive for _, point, _ in ranked)

    def test_ends_where_there_is_nothing_new(self):
        space = Space(Workload({"one": swinging()}))
        ranked = search(
            space,
            lambda policies: policies,
            lambda policy: (0,),
            10**6,
            allowed=lambda p: p == Point("dynamic", 0, 1.5),
        )
        assert len(ranked) == 1

    def test_what_cannot_grow_is_where_the_search_begins_and_not_where_it_goes(self):
        import random

        space, rng = Space(Workload({"one": swinging()})), random.Random(1)
        fixed = [point for point in space.grid() if not point.grows]
        assert {bool(point.blocks) for point in fixed} == {True, False}
        assert all(space.neighbour(point, rng).grows for point in fixed for _ in range(20))

    def test_equal_blocks_are_tried_where_few_sizes_occur(self):
        kinds = {(point.kind, bool(point.blocks)) for point in Space(Workload({"one": swinging()})).grid()}
        assert {("fixed", True), ("hybrid", True), ("fixed", False)} <= kinds

    def test_every_neighbour_is_a_policy(self):
        import random

        rng = random.Random(1)
        for capacity in (None, 64 * MIB):
            space = Space(Workload({"one": swinging()}, capacity))
            for point in space.grid():
                for _ in range(3):
                    point = space.neighbour(point, rng)
                    assert vpool.Policy.loads(space.policy(point).dumps()) == space.policy(point)

    def test_figures_are_those_of_a_replay(self):
        trace = recorded("two_streams")
        for strategy in (vpool.Dynamic(), vpool.Dynamic(adaptive=True), vpool.Fixed("7GiB")):
            figures, result = measure(trace, vpool.Policy(strategy), passes=2), vpool.replay(trace, strategy, passes=2)
            assert figures.reserved_bytes == result.peak_reserved_bytes
            assert figures.source_calls == result.source_calls
            assert figures.waited == result.waited
            assert figures.completes == (result.oom is None)
            if result.oom:
                assert figures.served % len(trace) == result.oom["event"]

    def test_an_exception_of_a_thread_arrives(self):
        with pytest.raises(vpool.FormatError), on_threads(2) as evaluate:
            evaluate(Workload({"one": made(*SMALL)}), ["no policy"])

    def test_a_study_asks_once(self):
        asked = []

        def evaluate(workload, texts):
            asked.extend(texts)
            return [workload.measure_text(text) for text in texts]

        with Study({"whole": Workload({"one": made(*SMALL)})}) as study:
            policies = [vpool.Policy(), vpool.Policy(), replace(vpool.Policy(), rounding=512)]
            first = study.measure(evaluate, "whole", policies)
            assert first[0] == first[1]
            assert study.measure(evaluate, "whole", policies) == first
        assert len(asked) == 2


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ({"objective": "best"}, ValueError),
            ({"objective": "fits"}, ValueError),
            ({"capacity": 0}, ValueError),
            ({"capacity": "lots"}, ValueError),
            ({"trials": 0}, ValueError),
            ({"trials": 1.5}, TypeError),
            ({"trials": True}, TypeError),
            ({"passes": 0}, ValueError),
            ({"workers": 0}, ValueError),
            ({"seed": "a"}, TypeError),
            ({"call_bytes": -1}, ValueError),
            ({"scheduler": 5}, TypeError),
            ({"traces": []}, ValueError),
            ({"traces": made()}, ValueError),
        ],
    )
    def test_are_checked(self, arguments, error):
        with pytest.raises(error):
            vpool.tune(**{"traces": made(*SMALL), **arguments})

    @pytest.mark.parametrize("trials", [1, 2, 3])
    def test_few_trials_are_enough_for_an_answer(self, trials):
        assert vpool.tune(swinging(), trials=trials).expected[0].completes


class TestReport:
    def test_says_why(self, found):
        knobs = {row["knob"] for row in found.sensitivity}
        assert {"initial", "growth", "adaptive", "rounding"} <= knobs
        for knob in knobs:
            assert sum(row["chosen"] for row in found.sensitivity if row["knob"] == knob) == 1
        ratios = [one["reserved_over_live"] for one in found.pareto]
        calls = [one["source_calls"] for one in found.pareto]
        assert ratios == sorted(ratios)
        assert calls == sorted(calls, reverse=True)
        assert calls[-1] == 1
        front = vpool.Policy.loads(found.pareto[0]["policy"])
        assert measure(recorded("two_streams"), front).source_calls == calls[0]

    def test_as_text(self, found):
        text = str(found)
        assert "Pareto" in text
        assert "best where it is worst" in text  # else the front, which may have a better one, is a riddle
        assert found.policy.dumps().rstrip() in text
        assert json.loads(json.dumps(found.to_dict())) == found.to_dict()

    def test_as_a_picture(self, found, tmp_path):
        figure = found.plot()
        figure.savefig(tmp_path / "why.svg")
        drawn = [axes for part in figure.subfigs for axes in part.axes if axes.axison]
        assert len(drawn) == 1 + len({row["knob"] for row in found.sensitivity})
        assert drawn[0].get_ylabel() == "peak reserved / peak live"
        assert (tmp_path / "why.svg").stat().st_size > 1000


class TestCommand:
    def test_writes_the_policy(self, tmp_path, capsys):
        path = tmp_path / "policy.toml"
        assert main(["tune", TRACE, "--trials", "64", "-o", str(path), "--plot", str(tmp_path / "why.png")]) == 0
        shown = capsys.readouterr().out
        assert "Pareto" in shown
        assert vpool.Policy.load(path).dumps() in shown
        assert (tmp_path / "why.png").exists()
        assert main(["replay", TRACE, "--strategy", str(path)]) == 0

    def test_options_arrive(self, tmp_path, capsys):
        options = ["--objective", "mix", "--call-bytes", "8MiB", "--trials", "40", "--seed", "3", "--workers", "1"]
        more = ["--capacity", "8GiB", "--passes", "2", "--no-holdout", "--study", str(tmp_path / "study"), "--json"]
        assert main(["tune", TRACE, *options, *more]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["objective"], shown["seed"], shown["capacity"], shown["holdout"]) == ("mix", 3, 8 * GIB, None)
        same = vpool.tune(TRACE, "8GiB", "mix", call_bytes="8MiB", trials=40, seed=3, passes=2, holdout=False)
        assert same.to_dict() == shown

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--capacity", "1GiB", "--trials", "8"], "completes within"),
            (["--objective", "fits"], "needs a capacity"),
            (["-o", "/nowhere/policy.toml", "--trials", "8"], "/nowhere/policy.toml"),
        ],
    )
    def test_a_failure_is_one_line(self, arguments, message, capsys):
        assert main(["tune", TRACE, *arguments]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1

    def test_without_matplotlib(self, found, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(vpool.Error, match=r"vpool\[plot\]"):
            found.plot()
        assert main(["tune", TRACE, "--plot", "why.png"]) == 1
        assert "vpool[plot]" in capsys.readouterr().err

    @pytest.mark.parametrize("rich", [True, False])
    def test_on_a_terminal(self, rich, monkeypatch, capsys):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        if not rich:
            monkeypatch.setitem(sys.modules, "rich.console", None)
        else:
            pytest.importorskip("rich")
        assert main(["tune", TRACE, "--trials", "16"]) == 0
        shown = capsys.readouterr().out
        assert ("━" in shown) == rich
        assert "two_streams" in shown
        assert os.linesep in shown


def test_a_replay_that_runs_out_of_memory_is_a_failure(capsys):
    """Whose figures are printed all the same."""
    assert main(["replay", TRACE, "--capacity", "5GiB", "--json"]) == 1
    out, error = capsys.readouterr()
    assert json.loads(out)["oom"]["event"] == 45
    assert error == "vpool replay: out of memory at event 45 of 7,887: 224 MiB more were asked for with 4.26 GiB live\n"
    assert main(["replay", TRACE, "--capacity", "9GiB", "--json"]) == 0

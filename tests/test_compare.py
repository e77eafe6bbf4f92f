"""Comparison of strategies and models, and traces that run at once."""

import builtins
import json
import re
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vpool
from tests.helpers.pools import GIB, MIB
from tests.helpers.traces import FOLDER, SMALL, arrays_of, made, recorded
from vpool.commands import main
from vpool.compare import PRECISION, STRATEGIES, TOGETHER, smallest_capacity
from vpool.peers import PEERS, simulate

SHORT = FOLDER / "two_streams.npz"
MARKS = ("reserved", "/ live", "utilization", "external", "internal", "source calls", "waited", "completes in")


@pytest.fixture(scope="module")
def result():
    """Everything on one recorded trace."""
    return vpool.compare(SHORT)


@pytest.fixture(scope="module")
def several():
    """One strategy and the models on two small traces."""
    return vpool.compare([made(*SMALL), made((1, 40 * MIB), (2, 3 * MIB), -1)], ["dynamic"])


class TestMerge:
    """Several traces at once."""

    def test_events_are_interleaved_by_time(self):
        one = vpool.Trace(**arrays_of((1, 10), (2, 20), -1, t_us=np.array([0, 10, 30])))
        other = vpool.Trace(**arrays_of((1, 7), -1, t_us=np.array([5, 20])))
        both = vpool.Trace.merge(one, other)
        assert both.t_us.tolist() == [0, 0, 10, 15, 30]
        assert both.bytes.tolist() == [10, 7, 20, 7, 10]
        assert both.op.tolist() == [0, 0, 0, 1, 1]
        assert both.number.tolist() == [0, 1, 2, 1, 0]

    def test_streams_and_ids_stay_apart(self):
        one = vpool.Trace(**arrays_of((5, 1), (6, 1), stream=np.array([0, 9])))
        both = vpool.Trace.merge(one, one, one)
        assert sorted(set(both.stream.tolist())) == [0, 1, 2, 3, 4, 5]
        assert len(set(both.id.tolist())) == 6

    def test_marks_and_notes(self):
        one = vpool.Trace(**arrays_of((1, 1), (2, 1), t_us=np.array([100, 160])), marks_us=[90, 150], notes=["odd"])
        other = vpool.Trace(**arrays_of((1, 1)), marks_us=[3], notes=["odd", "strange"])
        both = vpool.Trace.merge(one, other)
        assert both.marks_us.tolist() == [-10, 3, 50]
        assert both.notes == ["odd", "strange"]

    def test_a_clock_that_goes_back_does_not_reorder_its_trace(self):
        one = vpool.Trace(**arrays_of((1, 1), -1, (2, 2), t_us=np.array([10, 4, 12])))
        both = vpool.Trace.merge(one, made((1, 9)))
        assert both.bytes.tolist() == [1, 1, 9, 2]
        assert both.t_us.tolist() == [0, 0, 0, 2]

    def test_one_and_empty_ones(self):
        alone = vpool.Trace.merge(made(*SMALL))
        assert np.array_equal(alone.bytes, made(*SMALL).bytes)
        assert len(vpool.Trace.merge(made(), made(*SMALL), made())) == len(SMALL)
        assert len(vpool.Trace.merge(made())) == 0

    def test_recorded(self):
        traces = [recorded("two_streams"), recorded("moe_train")]
        both = vpool.Trace.merge(*traces)
        assert len(both) == sum(len(trace) for trace in traces)
        assert both.peak_live_bytes <= sum(trace.peak_live_bytes for trace in traces)
        assert max(trace.peak_live_bytes for trace in traces) < both.peak_live_bytes
        assert (np.diff(both.t_us) >= 0).all()
        for first, trace in zip((0, traces[0].allocations), traces, strict=True):
            mine = (both.id >= first) & (both.id < first + trace.allocations)
            assert np.array_equal(both.bytes[mine], trace.bytes)
            assert np.array_equal(both.op[mine], trace.op)

    @given(st.lists(st.lists(st.integers(-100, 100), max_size=8), min_size=1, max_size=4))
    @settings(max_examples=50, deadline=None)
    def test_each_trace_keeps_its_order(self, clocks):
        traces = [
            vpool.Trace(
                **arrays_of(*((i + 1, 1000 * k + i) for i in range(len(times))), t_us=np.array(times, np.int64))
            )
            for k, times in enumerate(clocks)
        ]
        both = vpool.Trace.merge(*traces)
        for k, trace in enumerate(traces):
            mine = [nbytes for nbytes in both.bytes.tolist() if nbytes // 1000 == k]
            assert mine == trace.bytes.tolist()
        assert both.t_us.tolist() == sorted(both.t_us.tolist())

    def test_wrong_arguments(self):
        with pytest.raises(ValueError, match="at least one"):
            vpool.Trace.merge()
        with pytest.raises(TypeError, match="takes traces, not str"):
            vpool.Trace.merge(made(*SMALL), "trace.npz")
        with pytest.raises(TypeError, match="not list"):
            vpool.Trace.merge([made(*SMALL)])

    def test_more_streams_than_a_trace_can_have(self):
        events = [(number, 1) for number in range(1, 40_001)]
        wide = vpool.Trace(**arrays_of(*events, stream=np.arange(40_000, dtype=np.uint16)))
        with pytest.raises(ValueError, match="80,000 streams together"):
            vpool.Trace.merge(wide, wide)

    def test_more_than_63_bits(self):
        large = made((1, 2**62))
        with pytest.raises(vpool.FormatError, match="63 bits"):
            vpool.Trace.merge(large, large)
        old = vpool.Trace(**arrays_of((1, 1), (2, 1), t_us=np.array([-(2**63), 2**63 - 1])))
        with pytest.raises(vpool.FormatError, match="clock"):
            vpool.Trace.merge(old)


class TestSmallestCapacity:
    """Bisection."""

    @pytest.mark.parametrize("needed", [100_000, 100_001, 123_456, 199_999, 200_000, 5_000_000])
    def test_finds_it_to_half_a_percent(self, needed):
        tried = []

        def completes(nbytes):
            tried.append(nbytes)
            return nbytes >= needed

        found = smallest_capacity(completes, 100_000, 200_000)
        assert needed <= found <= needed * (1 + PRECISION) + 1
        assert len(tried) < 20

    def test_nothing_is_enough(self):
        assert smallest_capacity(lambda nbytes: False, 1000, 2000) is None

    def test_everything_is_enough(self):
        assert smallest_capacity(lambda nbytes: True, 0, 0) == 1


class TestRows:
    """What a comparison says."""

    def test_every_strategy_and_model(self, result):
        assert [row.name for row in result.rows] == [*STRATEGIES, *PEERS]
        assert [row.modelled for row in result.rows] == [False] * len(STRATEGIES) + [True] * len(PEERS)
        assert {row.trace for row in result.rows} == {"two_streams"}
        assert list(result.traces) == ["two_streams"]

    def test_figures_are_those_of_replay(self, result):
        (row,) = [row for row in result.rows if row.name == "dynamic"]
        alone = vpool.replay(SHORT, "dynamic", passes=2)
        assert row.peak_reserved_bytes == alone.peak_reserved_bytes
        assert row.utilization == alone.utilization
        assert row.external_fragmentation == alone.external_fragmentation
        assert row.source_calls == alone.source_calls
        assert 0 < row.waited == alone.waited <= row.source_calls
        assert row.ns_per_event > 0

    @pytest.mark.parametrize("peer", PEERS)
    def test_figures_are_those_of_the_model(self, result, peer):
        (row,) = [row for row in result.rows if row.name == peer]
        alone = simulate(recorded("two_streams"), peer, passes=2)
        assert row.peak_reserved_bytes == alone.peak_reserved_bytes
        assert row.waited == alone.waited
        assert row.ns_per_event is None

    def test_the_smallest_capacity_completes_and_little_less_does_not(self, result):
        trace = recorded("two_streams")
        for row in result.rows:
            least = row.smallest_capacity
            assert trace.peak_live_bytes <= least
            if row.modelled:
                assert simulate(trace, row.name, least, passes=2).oom is None
            else:
                assert vpool.replay(trace, STRATEGIES[row.name](trace), capacity=least, passes=2).oom is None
                less = int(least * (1 - 2 * PRECISION))
                assert vpool.replay(trace, STRATEGIES[row.name](trace), capacity=less, passes=2).oom is not None

    def test_several_traces_and_all_of_them(self, several):
        assert list(several.traces) == ["trace 1", "trace 2", TOGETHER]
        assert [row.trace for row in several.rows] == [name for name in several.traces for _ in range(5)]
        assert several.traces[TOGETHER] == {"events": 11, "peak_live_bytes": 43 * MIB + 6000}

    def test_a_file_that_is_called_as_all_of_them(self, tmp_path):
        path = tmp_path / f"{TOGETHER}.npz"
        made(*SMALL).save(path)
        found = vpool.compare([path, made(*SMALL)], ["dynamic"], peers=False)
        assert list(found.traces) == [f"{TOGETHER} (1)", "trace 2", TOGETHER]

    def test_files_of_one_name(self, tmp_path):
        made(*SMALL).save(tmp_path / "two_streams.npz")
        found = vpool.compare([SHORT, tmp_path / "two_streams.npz"], ["dynamic"], peers=False)
        assert list(found.traces) == ["two_streams", "two_streams (2)", TOGETHER]

    def test_a_capacity_that_is_too_small(self):
        found = vpool.compare(made((1, 5 * MIB), (2, 900 * MIB)), ["dynamic"], capacity="100MiB")
        assert all(row.oom == {"event": 1, "requested": 900 * MIB, "live_bytes": 5 * MIB} for row in found.rows)
        assert found.suits is None
        assert "none completes; dynamic would in 1.13 GiB" in found.why
        assert "out of memory at event 1, 900 MiB more were asked for with 5.00 MiB live" in str(found)
        assert all(row.smallest_capacity >= 905 * MIB for row in found.rows)

    def test_strategies_of_the_users_own(self):
        mine = vpool.Dynamic(initial="1GiB")
        found = vpool.compare(made(*SMALL), ["dynamic", mine], peers=False)
        assert [row.name for row in found.rows] == ["dynamic", repr(mine)]
        assert found.rows[1].peak_reserved_bytes == GIB

    def test_a_policy_file(self, tmp_path):
        path = tmp_path / "mine.toml"
        vpool.Policy(vpool.Dynamic(initial="2GiB")).save(path)
        found = vpool.compare(made(*SMALL), ["dynamic", path], peers=False)
        assert [row.name for row in found.rows] == ["dynamic", str(path)]
        assert found.rows[1].peak_reserved_bytes == 2 * GIB

    def test_a_wrong_strategy_is_told_before_anything_is_replayed(self):
        seen = []
        with pytest.raises(ValueError, match="buddy"):
            vpool.compare(made(*SMALL), ["dynamic", "buddy"], progress=lambda done, of: seen.append(done))
        assert not seen

    def test_a_strategy_that_cannot_begin_with_the_capacity(self):
        found = vpool.compare(made((1, MIB)), ["dynamic", vpool.Fixed("1GiB")], capacity="512MiB", peers=False)
        assert [row.completes for row in found.rows] == [True, False]
        assert found.rows[1].refused in str(found)
        assert "1.00 GiB" in found.rows[1].refused
        assert found.rows[1].smallest_capacity == pytest.approx(GIB, rel=0.01)
        assert found.suits == "dynamic"

    def test_progress_counts_to_the_end(self):
        seen = []
        traces = [made(*SMALL), made((1, 9))]
        vpool.compare(traces, ["dynamic"], progress=lambda done, of: seen.append((done, of)))
        assert seen == [(done, 15) for done in range(1, 16)]

    def test_an_empty_trace(self):
        found = vpool.compare(made())
        assert all(row.reserved_over_live == 0 for row in found.rows)
        assert found.suits in STRATEGIES

    def test_to_dict_is_plain(self, several):
        figures = several.to_dict()
        assert json.loads(json.dumps(figures)) == figures
        assert list(figures) == ["traces", "rows", "suits", "why"]
        assert len(figures["rows"]) == len(several.rows)

    def test_long_traces_have_no_smallest_capacity_of_models(self, monkeypatch):
        monkeypatch.setattr(sys.modules["vpool.compare"], "_MOST_EVENTS", 7)
        found = vpool.compare(made(*SMALL), ["dynamic"])
        assert [row.smallest_capacity is None for row in found.rows] == [False] + [True] * len(PEERS)

    @pytest.mark.parametrize(
        ("arguments", "error", "words"),
        [
            ({"traces": []}, ValueError, "no trace"),
            ({"traces": 5}, TypeError, "int"),
            ({"traces": [5]}, TypeError, "int"),
            ({"strategies": []}, ValueError, "no strategy"),
            ({"strategies": "dynamic"}, TypeError, "list"),
            ({"strategies": ["buddy"]}, ValueError, "buddy"),
            ({"strategies": [7]}, TypeError, "int"),
            ({"capacity": "much"}, ValueError, "capacity"),
            ({"capacity": 0}, ValueError, "0"),
            ({"passes": 0}, ValueError, "passes"),
        ],
    )
    def test_wrong_arguments(self, arguments, error, words):
        with pytest.raises(error, match=words):
            vpool.compare(**{"traces": made(*SMALL), **arguments})


class TestChoice:
    """The last line."""

    def test_it_tells_the_figures_of_its_choice(self, result):
        (row,) = [row for row in result.rows if row.name == result.suits]
        assert result.why.startswith(f"{row.name} suits: it reserves {row.reserved_over_live:.3f} times")
        assert f"{row.waited:,} of its requests waited" in result.why
        assert str(result).splitlines()[-1] == result.why
        for other in result.rows:
            assert f"{other.reserved_over_live:.3f}" in result.why

    def test_less_memory_decides(self):
        wasteful = vpool.Dynamic(initial="4GiB")
        found = vpool.compare(made(*SMALL), [wasteful, "dynamic"], peers=False)
        assert found.suits == "dynamic"

    def test_among_equals_fewer_waits_decide(self):
        trace = made(*((number, MIB) for number in range(1, 257)))
        small = vpool.Dynamic(initial="2MiB", growth="2MiB")
        found = vpool.compare(trace, [small, "dynamic"], peers=False)
        assert found.rows[0].reserved_over_live == found.rows[1].reserved_over_live
        assert found.rows[0].waited > found.rows[1].waited == 1
        assert found.suits == "dynamic"


class TestCommand:
    """``vpool compare``."""

    def test_a_table_and_the_choice(self, capsys):
        assert main(["compare", str(SHORT)]) == 0
        shown = capsys.readouterr().out
        assert all(mark in shown for mark in MARKS)
        assert "PyTorch expandable (model)" in shown
        assert re.search(r" suits: it reserves \d", shown.splitlines()[-1])

    def test_several_traces(self, capsys, tmp_path):
        made(*SMALL).save(tmp_path / "small.npz")
        arguments = [
            "compare",
            str(SHORT),
            str(tmp_path / "small.npz"),
            "--no-peers",
            "--strategy",
            "dynamic",
            "--json",
        ]
        assert main(arguments) == 0
        figures = json.loads(capsys.readouterr().out)
        assert list(figures["traces"]) == ["two_streams", "small", TOGETHER]
        assert {row["name"] for row in figures["rows"]} == {"dynamic"}

    def test_capacity(self, capsys):
        assert main(["compare", str(SHORT), "--capacity", "1GiB", "--strategy", "dynamic"]) == 0
        assert "out of memory at event" in capsys.readouterr().out

    @pytest.mark.parametrize("kind", ["png", "svg"])
    def test_plot(self, capsys, tmp_path, kind):
        pytest.importorskip("matplotlib")
        chart = tmp_path / f"chart.{kind}"
        assert main(["compare", str(SHORT), "--plot", str(chart)]) == 0
        assert chart.stat().st_size > 1000
        if kind == "svg":
            assert chart.read_text().lstrip().startswith("<?xml")

    def test_plot_without_matplotlib(self, capsys, tmp_path, monkeypatch):
        real = builtins.__import__

        def absent(name, *arguments, **keywords):
            if name.partition(".")[0] == "matplotlib":
                raise ImportError(name)
            return real(name, *arguments, **keywords)

        monkeypatch.setattr(builtins, "__import__", absent)
        assert main(["compare", str(SHORT), "--plot", str(tmp_path / "chart.png")]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert 'pip install "vpool[plot]"' in error

    @pytest.mark.parametrize(
        ("arguments", "status"),
        [
            ([], 2),
            ([str(SHORT), "--capacity", "much"], 2),
            (["nothing.npz"], 1),
            ([str(SHORT), "--strategy", "buddy", "--no-peers"], 1),
        ],
    )
    def test_wrong_usage_is_one_line(self, capsys, arguments, status):
        try:
            code = main(["compare", *arguments])
        except SystemExit as left:
            code = left.code
        assert code == status
        assert capsys.readouterr().err.count("\n") == 1

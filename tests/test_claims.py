"""The claims: each command runs, its figures point where the pages say, and the pages show what it gives."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import vpool
from tests.helpers.traces import ALL
from vpool import claims
from vpool._storage.fake_cuda import FakeCudaDriver
from vpool._storage.source import Source

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = {name: "strategies" if name == "growth" else "claims" for name in claims._CLAIMS}
TIMED = ("malloc", "tree")
GIB = 1 << 30


def shown(name):
    """What a page shows as the output of a command, without the margin."""
    text = (DOCS / f"{PAGES[name]}.rst").read_text()
    (block,) = re.findall(rf"^\.\. output of {name}\n(.*?)^\.\. end of output", text, re.MULTILINE | re.DOTALL)
    lines = block.split(".. code-block:: text")[1].strip("\n").splitlines()
    return "\n".join(line.removeprefix("   ") for line in lines) + "\n"


def rows_of(capsys, *arguments):
    assert claims.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def first_columns(text):
    """Header and first column of a table."""
    lines = text.splitlines()
    return lines[0].split(), [line.split()[0] for line in lines[1:]]


@pytest.mark.parametrize("name", sorted(PAGES.keys() - TIMED))
def test_pages_show_what_the_command_gives(name, capsys):
    assert claims.main([name]) == 0
    assert capsys.readouterr().out == shown(name)


def test_pages_show_the_timed_tables(capsys):
    for name, arguments in (("malloc", ["--source", "host"]), ("tree", [])):
        assert claims.main([name, *arguments, "--quick"]) == 0
        assert first_columns(capsys.readouterr().out) == first_columns(shown(name))


def test_every_claim_has_its_command_on_the_page():
    text = (DOCS / "claims.rst").read_text()
    assert sorted(set(re.findall(r"python -m vpool\.claims (\w+)", text))) == sorted(PAGES)


def test_a_source_call_costs_more_than_an_allocation():
    rows = claims.malloc("host", scale=0.01)
    assert [row["bytes"] >> 20 for row in rows] == [2, 20, 64, 512]
    assert all(row["times"] > 2 for row in rows)
    assert all(row["times"] == (row["take_ns"] + row["give_ns"]) / row["pair_ns"] for row in rows)


def test_source_calls_of_cuda():
    """On the CUDA source's code, without a device."""
    rows = claims.malloc(Source(FakeCudaDriver(8 * GIB, devices=1), "cuda", 0), scale=0.001)
    assert {row["source"] for row in rows} == {"cuda"}
    assert all(row["take_ns"] > 0 and row["give_ns"] > 0 and row["pair_ns"] > 0 for row in rows)


def test_a_step_shares_60_to_80_percent(capsys):
    for row in rows_of(capsys, "sharing"):
        assert 0.6 <= row["median"] <= 0.8
        assert row["least"] <= row["median"] <= row["most"] < 1
        assert row["sharing"] > row["median"]


def test_a_hybrid_that_gives_back_is_used_more_than_a_slab(capsys):
    rows = {row["strategy"]: row for row in rows_of(capsys, "utilization")}
    assert rows["fixed"]["mean"] < 0.65
    assert rows["hybrid, adaptive"]["mean"] > 0.92
    assert rows["hybrid"]["mean"] < rows["fixed"]["mean"]
    assert rows["hybrid, adaptive"]["source_calls"] < rows["adaptive"]["source_calls"] / 4
    assert rows["fixed"]["source_calls"] == 1


@pytest.mark.parametrize("seed", [1, 2])
def test_utilization_of_other_runs(seed):
    rows = {row["strategy"]: row["mean"] for row in claims.utilization(steps=30, seed=seed)}
    assert rows["hybrid, adaptive"] > 0.9 > 0.8 > rows["fixed"]


def test_whole_2_mib_waste(capsys):
    for row in rows_of(capsys, "alignment"):
        assert row["internal"] < 0.001 < row["internal_2mib"] < 0.15
        assert row["reserved_over_live"] <= row["reserved_over_live_2mib"]
        if row["trace"] == "llm_generate":
            assert row["requests_2mib"] > 0.4


def test_a_tree_is_slower():
    rows = claims.tree(scale=0.1, counts=(1_000, 20_000))
    assert all(row["times"] > 1.5 for row in rows)


def test_tree_and_pool_have_the_same_free_blocks():
    """As many as are wanted, and one at the end."""
    rng = np.random.default_rng(1)
    holes = rng.integers(1, 1 << 20, 100).astype(np.uint64)
    with claims._populated(holes, rng.permutation(100)) as pool:
        assert pool.inspect().free_blocks == 101
        assert pool.inspect().live_blocks == 100


def test_a_compiler_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert claims.main(["tree"]) == 1
    assert re.fullmatch(r"tree: .*/nowhere/c\+\+.*\n", capsys.readouterr().err)


def test_a_compiler_that_fails(capsys, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    assert claims.main(["tree"]) == 1
    assert "did not compile" in capsys.readouterr().err


def test_without_merging_more_is_reserved_with_each_pass():
    """In the table of the page, which is what the command gives."""
    for line in shown("merging").splitlines()[1:]:
        merged, first, second, third = map(float, line.split()[1:])
        assert 2 * merged < first < second <= third


def test_pieces_are_refused_and_neighbours_are_not(capsys):
    apart, together = rows_of(capsys, "pieces")
    assert apart["free_bytes"] == together["free_bytes"] == 4 * GIB
    assert (apart["outcome"], together["outcome"]) == ("refused", "served")
    assert "free 4.00 GiB of which 512 MiB in the largest block" in apart["message"]


def test_growth(capsys):
    *rows, together = rows_of(capsys, "growth")
    assert {row["trace"] for row in rows} == set(ALL)
    for rule, strategy in claims.GROWTH_RULES.items():
        ratios = [row["rules"][rule]["reserved_over_live"] for row in rows]
        assert together["rules"][rule]["reserved_over_live"] == pytest.approx(np.exp(np.mean(np.log(ratios))))
        assert together["rules"][rule]["source_calls"] == sum(row["rules"][rule]["source_calls"] for row in rows)
        assert strategy.limit_of() == 0.8
    ratio, calls = (
        {rule: one[key] for rule, one in together["rules"].items()} for key in next(iter(together["rules"].values()))
    )
    assert claims.GROWTH_RULES["1.5"] == vpool.Dynamic()
    assert ratio["adaptive"] < ratio["1.25"] < ratio["1.5"] < ratio["512 MiB"] < ratio["2.0"]
    assert ratio["1.5"] < 1.05 * ratio["1.25"]
    assert calls["2.0"] < calls["1.5"] < 0.65 * calls["1.25"]
    assert calls["adaptive"] > 50 * calls["1.5"]


def test_traces_that_are_not_there(capsys, tmp_path):
    assert claims.main(["growth", "--traces", str(tmp_path)]) == 1
    assert re.fullmatch(r"growth: .*No such file.*bert_finetune\.npz.*\n", capsys.readouterr().err)


def test_a_source_that_is_not_there(capsys):
    assert claims.main(["malloc", "--source", "nowhere"]) == 1
    assert capsys.readouterr().err.startswith("malloc: no source 'nowhere'")

"""vpool bench as a command, and the page of results that is made from a file of it."""

import builtins
import json
import os
from pathlib import Path

import pytest

from vpool.bench import GROUPS, Results
from vpool.bench.page import page
from vpool.bench.shown import number, tables_of
from vpool.commands import main

DOCS = Path(__file__).resolve().parent.parent / "docs"
KEPT = DOCS / "data" / "performance.json"


@pytest.fixture(scope="module")
def kept():
    """The run that the page of results is made from."""
    return Results.load(KEPT)


def told(capsys, *arguments, status=0):
    assert main(["bench", *map(str, arguments)]) == status
    return capsys.readouterr()


def test_the_page_is_made_from_the_run_that_is_kept(kept):
    assert (DOCS / "performance.rst").read_text() == page(kept), (
        "vpool bench --from docs/data/performance.json --page docs/performance.rst"
    )


def test_the_kept_run_has_every_group(kept):
    assert kept.settings["groups"] == list(GROUPS)
    assert {row.group for row in kept.rows} == set(GROUPS)


def test_groups_of_a_run(capsys, tmp_path):
    path = tmp_path / "run.json"
    out = told(capsys, "--only", "random, python", "--no-peers", "--json", path).out
    assert "Compiled: a free and an allocation of a random size, ns" in out
    found = Results.load(path)
    assert {row.group for row in found.rows} == {"random", "python"}
    data = json.loads(told(capsys, "--from", path, "--json").out)
    assert list(data) == ["version", "machine", "packages", "settings", "floor_ns", "clock_ns", "notes", "rows"]


def test_an_earlier_run_is_shown_drawn_and_checked(capsys, tmp_path, kept):
    pytest.importorskip("matplotlib")
    drawing, text = tmp_path / "run.svg", tmp_path / "page.rst"
    done = told(capsys, "--from", KEPT, "--plot", drawing, "--page", text)
    assert drawing.read_text().count("<svg") == 1
    assert text.read_text() == page(kept)
    for shown in tables_of(kept):
        assert shown.title in done.out
        assert all(len(row) == len(shown.header) for row in shown.rows)
    assert "Goals" not in done.out


def test_goals_that_do_not_hold_are_a_failure(capsys, tmp_path, kept):
    run = Results.load(KEPT)
    run.rows = [row for row in run.rows if row.case == "resident"]
    path = tmp_path / "run.json"
    run.save(path)
    done = told(capsys, "--from", path, "--check")
    assert "memory of a million blocks, bytes each" in done.out
    assert done.err == ""
    text = path.read_text()
    for row in run.rows:
        row.samples[:] = [1000.0]
        object.__setattr__(row, "median", 1000.0)
    run.save(path)
    assert path.read_text() != text
    done = told(capsys, "--from", path, "--check", "--json", status=1)
    assert done.err == "vpool bench: 2 of 23 goals do not hold\n"
    goals = json.loads(done.out)["goals"]
    assert [goal["holds"] for goal in goals].count(False) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "pears"], "no group 'pears'"),
        (["--from", "nowhere.json"], "nowhere.json"),
        (["--from", __file__], "holds no results of vpool bench"),
        (["--json", "/nowhere/run.json"], "/nowhere/run.json"),
        (["--page", "/nowhere/page.rst"], "/nowhere/page.rst"),
        (["--from", str(KEPT), "--json", str(KEPT)], "name another one to write"),
        (["--traces", "nowhere.npz"], "nowhere.npz"),
        (["--source", "moon"], "moon"),
    ],
)
def test_what_cannot_be_done_is_one_line(capsys, arguments, words):
    done = told(capsys, *arguments, "--no-peers", status=1)
    assert words in done.err
    assert done.err.count("\n") == 1
    assert done.out == ""


def test_without_matplotlib_nothing_is_measured(capsys, monkeypatch, tmp_path):
    imports = builtins.__import__

    def without(name, *arguments, **more):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return imports(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    done = told(capsys, "--plot", tmp_path / "run.png", status=1)
    assert done.err == 'vpool bench: --plot needs matplotlib: pip install "vpool[plot]"\n'
    assert os.listdir(tmp_path) == []


def test_names_in_a_page_are_no_markup(kept):
    run = Results.load(KEPT)
    run.notes.append("a *peer* with `quotes`, pipes | and names_ of_ its own")
    run.machine["devices"] = [{"name": "Some_Device*", "driver": "1"}]
    text = page(run)
    assert r"a \*peer\* with \`quotes\`, pipes \| and names\_ of\_ its own" in text
    assert r"Some\_Device\*" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (0.5, "0.50"), (9.994, "9.99"), (12.34, "12.3"), (1234.5, "1,234"), (99.96, "100.0")],
)
def test_numbers_have_no_digits_that_are_noise(value, text):
    assert number(value) == text

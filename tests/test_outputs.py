"""What commands write: never over what they read, and never refused only after the work."""

import os
import resource
import shutil
import subprocess
import sys

import pytest

import vpool
from tests.helpers.pools import host_pool
from tests.helpers.traces import FOLDER, SMALL, made
from vpool.bench import Results
from vpool.commands import main
from vpool.commands.console import save_plot
from vpool.recommendation import Recommendation

# Each with its option for a file to write.
WRITERS = [
    ["convert"],
    ["view", "-o"],
    ["plan", "-o"],
    ["tune", "-o"],
    ["tune", "--plot"],
    ["inspect", "--plot"],
    ["compare", "--plot"],
]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.npz"
    shutil.copy(FOLDER / "two_streams.npz", path)
    return path


@pytest.fixture
def no_work(monkeypatch):
    """Reading a trace, which comes before all that takes time, fails."""

    def load(*arguments):
        raise AssertionError("it was read first")

    monkeypatch.setattr(vpool.Trace, "load", load)


@pytest.mark.parametrize("writer", WRITERS, ids=" ".join)
class TestWriters:
    def test_what_is_read_stays(self, writer, trace, tmp_path, no_work, capsys):
        content = trace.read_bytes()
        link = tmp_path / "link.npz"
        link.symlink_to(trace)
        for out in (trace, link):
            assert main([writer[0], str(trace), *writer[1:], str(out)]) == 1
            assert capsys.readouterr().err == (
                f"vpool {writer[0]}: {out} is the file to read: name another one to write\n"
            )
        assert trace.read_bytes() == content

    def test_where_nothing_can_be_written(self, writer, trace, tmp_path, no_work, capsys):
        folder = tmp_path / "folder.npz"
        folder.mkdir()
        for out, word in ((tmp_path / "none" / "out.npz", "No such file or directory"), (folder, "Is a directory")):
            assert main([writer[0], str(trace), *writer[1:], str(out)]) == 1
            error = capsys.readouterr().err
            assert word in error
            assert str(out) in error
            assert error.count("\n") == 1

    @pytest.mark.skipif(os.geteuid() == 0, reason="to root everything is permitted")
    def test_without_permission(self, writer, trace, tmp_path, no_work, capsys):
        folder = tmp_path / "locked"
        folder.mkdir(mode=0o500)
        assert main([writer[0], str(trace), *writer[1:], str(folder / "out.npz")]) == 1
        assert "Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["tune", "inspect", "compare"])
def test_a_picture_of_no_known_kind(command, trace, tmp_path, no_work, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "why.txt"
    assert main([command, str(trace), "--plot", str(out)]) == 1
    error = capsys.readouterr().err
    assert f"{out} is of no kind of picture: name one of" in error
    assert "png" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["tune", "TRACE", "-o", "OUT", "--study", "OUT"],
        ["tune", "TRACE", "-o", "OUT", "--plot", "OUT"],
        ["tune", "TRACE", "--study", "OUT", "--plot", "OUT"],
        ["bench", "--json", "OUT", "--page", "OUT"],
        ["bench", "--json", "OUT", "--plot", "OUT"],
    ],
    ids=" ".join,
)
def test_no_file_is_written_twice(arguments, trace, tmp_path, no_work, capsys):
    out = tmp_path / "out.svg"
    (tmp_path / "link").symlink_to(tmp_path)
    words = [str(trace) if word == "TRACE" else str(out) if word == "OUT" else word for word in arguments]
    words[words.index(str(out))] = str(tmp_path / "link" / "out.svg")
    assert main(words) == 1
    assert "out.svg is to be written twice: name another file" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("arguments", [["view", "-o"], ["convert", "--to", "torch-json"], ["compare", "--plot"]])
def test_a_policy_that_is_read_stays(arguments, trace, tmp_path, no_work, capsys):
    policy = tmp_path / "policy.svg"
    vpool.Policy(vpool.Dynamic()).save(policy)
    content = policy.read_bytes()
    assert main([arguments[0], str(trace), *arguments[1:], str(policy), "--strategy", str(policy)]) == 1
    assert "policy.svg is the file to read" in capsys.readouterr().err
    assert policy.read_bytes() == content


def test_a_study_is_no_trace(trace, no_work, capsys):
    content = trace.read_bytes()
    assert main(["tune", str(trace), "--study", str(trace)]) == 1
    assert "is the file to read" in capsys.readouterr().err
    assert trace.read_bytes() == content


def test_a_picture_of_a_bench_is_checked_first(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["bench", "--from", str(tmp_path / "none.json"), "--plot", str(tmp_path / "out.txt")]) == 1
    assert "is of no kind of picture" in capsys.readouterr().err


def test_a_page_of_one_event(tmp_path, capsys):
    made((1, 5)).save(tmp_path / "one.npz")
    assert main(["view", str(tmp_path / "one.npz"), "-o", str(tmp_path / "one.html")]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'one.html'}: 1 event, ")


def _snapshot():
    with host_pool() as pool:
        return pool.snapshot()


def _recommendation():
    return Recommendation(vpool.Policy(vpool.Dynamic()), "reserved", None, 0, 1, [], None, {})


def _results():
    return Results(machine={}, packages={}, settings={}, floor_ns=1.0, clock_ns=1.0)


def _page(path):
    if main(["view", str(FOLDER / "two_streams.npz"), "-o", str(path)]):
        raise OSError("the command failed")


def _plot(path):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    save_plot(figure, str(path))


SAVERS = {
    "trace": lambda path: made(*SMALL).save(path),
    "snapshot": lambda path: _snapshot().save(path),
    "policy": lambda path: vpool.Policy(vpool.Dynamic()).save(path),
    "recommendation": lambda path: _recommendation().save(path),
    "plan": lambda path: vpool.plan(made(*SMALL)).save(path),
    "page": _page,
    "plot": _plot,
    "results": lambda path: _results().save(path),
}


@pytest.mark.parametrize("saver", SAVERS)
class TestWholeFiles:
    """A file is written whole or stays as it was."""

    def test_a_write_that_fails(self, saver, tmp_path):
        out = tmp_path / "out"
        out.write_bytes(b"before")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
        try:
            with pytest.raises(OSError, match=r"too large|command failed"):
                SAVERS[saver](out)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert out.read_bytes() == b"before"
        assert list(tmp_path.iterdir()) == [out]

    def test_permissions_and_links_stay(self, saver, tmp_path):
        out, link = tmp_path / "out", tmp_path / "link"
        out.write_bytes(b"before")
        out.chmod(0o600)
        link.symlink_to(out)
        SAVERS[saver](link)
        assert link.is_symlink()
        assert out.stat().st_mode & 0o777 == 0o600
        assert out.read_bytes() != b"before"

    def test_a_name_as_long_as_names_can_be(self, saver, tmp_path):
        SAVERS[saver](tmp_path / ("x" * 255))


@pytest.mark.parametrize("saver", sorted(SAVERS.keys() - {"page"}))  # a command, which looks beforehand
def test_an_error_names_the_file_that_was_meant(saver, tmp_path):
    loop, missing = tmp_path / "loop", tmp_path / "none" / "out"
    loop.symlink_to(loop)
    for out in (loop, missing):
        with pytest.raises(OSError, match=rf"^\[Errno \d+\] [\w ]+: '{out}'$"):
            SAVERS[saver](out)
    assert list(tmp_path.iterdir()) == [loop]


@pytest.mark.parametrize("command", [["replay", "{}"], ["replay", "{}.npz"], ["tune", "{}", "--trials", "4"]])
def test_a_closed_standard_error_gets_nothing_onto_standard_output(command, trace):
    """An error is lost then, and progress too; what asks for it does not stand in the way."""
    command = [one.format(trace) for one in command]
    shell = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-m", "vpool", *command, "--json"]
    done = subprocess.run(shell, stdout=subprocess.PIPE, text=True, timeout=120)
    missing = command[1].endswith(".npz.npz")
    assert done.returncode == int(missing)
    assert missing == (done.stdout == "")

"""What commands write: never over what they read, and never refused only after the work."""

import os
import shutil

import pytest

import vpool
from tests.helpers.traces import FOLDER
from vpool.commands import main

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

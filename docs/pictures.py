"""The pictures of the pages, drawn by vpool itself, and what commands print there.

The build of the pages calls `make`.  ``python docs/pictures.py`` draws the README's picture anew.
"""

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from unittest import mock

from matplotlib import rc_context

import vpool
import vpool.data
from vpool.commands import main

HERE = Path(__file__).resolve().parent
TRACE = Path(vpool.data.__file__).with_name("two_streams.npz")  # the recorded run that vpool brings
README_PICTURE = HERE / "two_streams.svg"
# Text stays text, so that it can be read and searched; and the same run gives the same file.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "vpool", "font.family": "sans-serif"}


def make(folder):
    """Write every picture of the pages into a folder."""
    folder = folder.resolve()
    folder.mkdir(exist_ok=True)
    with rc_context(STYLE):
        report(folder)
        defrag(folder)
        commands(folder)
    top(folder)


def readme_picture(path):
    """The picture of the README: the fullest moment of the recorded run, and how it came to it."""
    with rc_context(STYLE):
        run("inspect", TRACE.name, "--plot", path)
    path.write_text(re.sub(r"\n *<dc:date>.*</dc:date>", "", path.read_text()))


def run(*arguments):
    """What a command prints, called where the recorded run lies."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.chdir(TRACE.parent):
        status = main([str(argument) for argument in arguments])
    assert status == 0, arguments
    return out.getvalue()


def save(figure, path):
    figure.savefig(path, metadata={"Date": None})


def report(folder):
    """A recorded pool with two tags, and its report."""
    pool = vpool.Pool(vpool.Dynamic(initial="64MiB", limit="256MiB"), source="simulated", name="train")
    with pool.record() as recording:
        with vpool.tag("weights"):
            weights = [pool.allocate(4 << 20) for _ in range(8)]
        for _ in range(4):
            recording.mark()
            with vpool.tag("activations"):
                blocks = [pool.allocate(size << 20) for size in (2, 6, 10, 18, 3)]
            for block in reversed(blocks):
                pool.deallocate(block)
        for block in weights[::2]:
            pool.deallocate(block)
    found = pool.inspect()
    save(found.plot(recording), folder / "report.svg")
    (folder / "report.txt").write_text(str(found))
    pool.close()


def defrag(folder):
    """Free memory in pieces, and the same pool when blocks were moved."""
    pool = vpool.Pool(vpool.Dynamic(initial="64MiB", limit="64MiB"), source="host", name="pieces")
    blocks = [pool.empty(8 << 20) for _ in range(8)]
    del blocks[::2]
    save(pool.inspect().plot(), folder / "pieces.svg")
    for buffer in blocks:
        pool.movable(buffer, lambda old, new: None)
    pool.coalesce()
    save(pool.inspect().plot(), folder / "joined.svg")
    del blocks
    pool.close()


def commands(folder):
    """What commands draw of the recorded run."""
    trace = TRACE.name
    (folder / "inspect.txt").write_text(run("inspect", trace, "--plot", folder / "inspect.svg"))
    run("compare", trace, "--plot", folder / "compare.svg")
    run("tune", trace, "--trials", "100", "--seed", "0", "--plot", folder / "tune.svg")
    run("view", trace, "--out", folder / "two_streams.html")
    with vpool.Pool(source="simulated") as pool:
        blocks = [pool.allocate(size << 20) for size in (8, 24, 64, 8, 24)]
        for block in blocks[::2]:
            pool.deallocate(block)
        pool.snapshot().save(folder / "now.npz")
    (folder / "defrag.txt").write_text(run("defrag", folder / "now.npz"))


def top(folder):
    """What ``vpool top`` shows of a process."""
    pool = vpool.Pool(source="simulated", name="train")
    for size in (8, 24, 64):
        pool.allocate(size << 20)
    with mock.patch.object(sys, "argv", ["train.py"]), vpool.serve():
        (folder / "top.txt").write_text(run("top", os.getpid(), "--once"))
    pool.close()


if __name__ == "__main__":
    readme_picture(README_PICTURE)

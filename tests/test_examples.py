"""The programs of the folder `docs/examples` run, and do what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import vpool

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "docs" / "examples"


def output_of(name, *arguments, cwd):
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name, *arguments],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_phases(tmp_path):
    printed = output_of("phases.py", "run.npz", cwd=tmp_path)
    assert re.findall(r"^(\w+) +(.* MiB)", printed, re.MULTILINE) == [
        ("forward", "51.0 MiB"),
        ("backward", "58.0 MiB"),
        ("weights", "17.0 MiB"),
        ("activations", "34.0 MiB"),
        ("gradients", "17.0 MiB"),
    ]
    trace = vpool.Trace.load(tmp_path / "run.npz")
    assert (trace.allocations, len(trace.marks_us), trace.peak_live_bytes) == (28, 3, 58 << 20)


def test_server(tmp_path):
    printed = output_of("server.py", cwd=tmp_path)
    assert printed == "4 done, 2 busy\n10 of 14 blocks are left in the cache\n"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_is_shown_and_tried(path):
    assert f".. literalinclude:: examples/{path.name}\n" in (ROOT / "docs" / "examples.rst").read_text()
    assert f'"{path.name}"' in Path(__file__).read_text()

"""A build for CUDA 12: from source, against the bindings and the headers of that version."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BINDINGS = os.environ.get("VPOOL_TEST_CUDA_12")
MODULES = ("cuda_built", "cuda_driver")  # all that includes headers of CUDA

pytestmark = pytest.mark.skipif(
    not BINDINGS, reason="VPOOL_TEST_CUDA_12 names no folder with cuda-bindings 12 and headers"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs this Python where CUDA 12 comes first, in a copy of the checkout with its modules of CUDA built again."""
    tree = tmp_path_factory.mktemp("cuda_12") / "vpool"
    shutil.copytree(
        ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "docs", "tests", "__pycache__", "*.egg-info")
    )
    for name in MODULES:
        (tree / f"vpool/_storage/{name}{sysconfig.get_config_var('EXT_SUFFIX')}").unlink()
        os.utime(tree / f"pyx/storage/{name}.pyx")

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tree), BINDINGS))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    said = run("setup.py", "build_ext", "--inplace")
    assert sum(line.startswith("copying build") for line in said.splitlines()) >= len(MODULES)
    return run


def test_the_modules_are_those_of_cuda_12(run):
    program = "import vpool, vpool._storage.cuda_built as built; print(vpool.__file__, built.CUDA_MAJOR)"
    path, major = run("-c", program).split()
    assert "cuda_12" in path
    assert major == "12"


def test_the_sources_are_there_but_for_a_device(run):
    """Every function of the bindings is found with its types, which importing the module checks."""
    program = (
        "import vpool, cuda.bindings\n"
        "print(cuda.bindings.__version__)\n"
        "import vpool._storage.cuda_driver\n"
        "try: print(vpool.Pool(source='cuda').source)\n"
        "except vpool.SourceError as error: print(error)\n"
    )
    version, said = run("-c", program).splitlines()
    assert version.startswith("12.")
    assert "built for CUDA 13" not in said
    assert "no CUDA device" in said or said == "cuda"


def test_the_distribution_asks_for_cuda_12(run, tmp_path):
    run("setup.py", "-q", "egg_info", "--egg-base", str(tmp_path))
    (asked,) = tmp_path.glob("*/requires.txt")
    assert "cuda-python<13,>=12" in asked.read_text().splitlines()

"""The compiled probe of this folder."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import vpool

BUILD = """
import sys
from Cython.Build import cythonize
from setuptools import Extension, setup

setup(
    name="probe",
    script_args=["build_ext", "--inplace"],
    ext_modules=cythonize(
        [Extension("probe", ["probe.pyx"], extra_compile_args=["-O2", "-Wall", "-Wno-unused-function"])],
        include_path=sys.argv[1:],
        compiler_directives={
            "language_level": "3", "boundscheck": False, "wraparound": False, "initializedcheck": False,
            "cdivision": True, "freethreading_compatible": True,
        },
    ),
)
"""


@pytest.fixture(scope="session")
def probe(tmp_path_factory):
    """A module compiled against the installed vpool, as a user's would be, without CUDA's headers."""
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.pyx").write_text(Path(__file__).with_name("probe.pyx").read_text())
    (folder / "build_probe.py").write_text(BUILD)
    done = subprocess.run(
        [sys.executable, "build_probe.py", vpool.get_include()], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("probe.*.so")
    spec = importlib.util.spec_from_file_location("probe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

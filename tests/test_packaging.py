"""The package as others get it: source distribution, wheel, and a compiled module on top of it."""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import types
import venv
import zipfile
from pathlib import Path

import pytest

import vpool
from vpool._storage.cuda_built import CUDA_MAJOR

ROOT = Path(__file__).resolve().parent.parent
LEFTOVERS = (
    *("build", "dist", "*.so", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", ".git", ".venv"),
    *("_build", "_pictures"),
)


def run(python, *command, cwd):
    done = subprocess.run(
        [python, *map(str, command)],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


SHIPPED = ("*.py", "*.pxd", "*.pyi", "*.npz", "*.json", "py.typed", "*.html", "*.css", "*.js", "*.h", "*.cpp")


def files_of(*patterns):
    """Files of the package, relative to the root."""
    return {
        path.relative_to(ROOT).as_posix()
        for pattern in patterns
        for path in (ROOT / "vpool").rglob(pattern)
        if "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """A source distribution, built in a copy of the checkout."""
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, folder / "checkout", ignore=shutil.ignore_patterns(*LEFTOVERS))
    build = f"import setuptools.build_meta as build; build.build_sdist({str(folder)!r})"
    run(sys.executable, "-c", build, cwd=folder / "checkout")
    (archive,) = folder.glob("*.tar.gz")
    return archive


FOLDERS = (".ci", "docs", "pyx", "tests", "vpool")
FILES = (
    *(".pre-commit-config.yaml", "CHANGELOG.rst", "CITATION.cff", "LICENSE", "MANIFEST.in", "Makefile", "README.md"),
    *("pyproject.toml", "setup.py"),
)


def test_manifest_has_every_file(tmp_path):
    """What setuptools would pack; of the modules nothing is translated, so this takes a moment only."""
    tree = tmp_path / "checkout"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFTOVERS))
    run(sys.executable, "-c", "import setuptools; setuptools.setup(script_args=['-q', 'egg_info'])", cwd=tree)
    lines = (tree / "vpool.egg-info" / "SOURCES.txt").read_text().splitlines()
    listed = {line.removeprefix("./") for line in lines}
    there = {path.relative_to(tree).as_posix() for folder in FOLDERS for path in (tree / folder).rglob("*")}
    files = {name for name in there if (tree / name).is_file()} | set(FILES)
    assert files == {name for name in listed if not name.startswith("vpool.egg-info/")}


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory):
    """What the source distribution holds, and remains of an earlier build with modules that are gone."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    if (ROOT / "build" / "cython").exists():
        # Times are kept, so that what Cython generated before is taken as it is.
        shutil.copytree(ROOT / "build" / "cython", tree / "build" / "cython")
    stale = tree / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "vpool"
    for name in ("gone.py", "_storage/gone.pxd", f"_storage/gone{sysconfig.get_config_var('EXT_SUFFIX')}"):
        (stale / name).parent.mkdir(parents=True, exist_ok=True)
        (stale / name).write_text("")
    return tree


@pytest.fixture(scope="module")
def wheel(unpacked):
    """A wheel, built from the source distribution without network."""
    options = ("--no-build-isolation", "--no-deps", "--no-index", "-w", unpacked.parent)
    run(sys.executable, "-m", "pip", "wheel", *options, unpacked, cwd=unpacked.parent)
    (built,) = unpacked.parent.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def fresh_python(wheel, tmp_path_factory):
    """Python of a fresh environment with the wheel; what vpool depends on is borrowed from this one."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    installed = run(python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))", cwd=folder).strip()
    pip = ("-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    run(sys.executable, *pip, wheel, cwd=folder)
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(installed) / "borrowed.pth").write_text("\n".join(borrowed))
    return python


def test_sdist_has_all_that_a_build_needs(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "pyx").rglob("*.pyx")} <= names
    assert files_of(*SHIPPED) <= names
    assert {"docs/conf.py", "tests/conftest.py", ".ci/run"} <= names
    assert set(FILES) <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
    # What is generated is not shipped; a tool that a test compiles is.
    assert not [name for name in names if name.endswith(".c") and not name.startswith("tests/")]


def test_wheel_has_all_that_users_need(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    modules = {f"vpool/_{path.parent.name}/{path.stem}{suffix}" for path in (ROOT / "pyx").rglob("*.pyx")}
    content = {name for name in names if ".dist-info/" not in name}
    assert content == modules | files_of(*SHIPPED)
    assert [name for name in names if name.endswith("/licenses/LICENSE")]


def test_wheel_forgets_removed_modules(wheel):
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if "gone" in name]


def test_changed_declarations_are_compiled_again(unpacked, wheel):
    """A module's own .pxd lies where Cython does not look for changes."""
    assert "Cythonizing" not in run(sys.executable, "setup.py", "--version", cwd=unpacked)
    generated = unpacked / "build" / "cython" / "pyx" / "management" / "walk.c"
    newer = generated.stat().st_mtime + 1
    os.utime(unpacked / "vpool" / "_management" / "walk.pxd", (newer, newer))
    assert "Cythonizing pyx/management/walk.pyx" in run(sys.executable, "setup.py", "--version", cwd=unpacked)


def test_a_folder_that_is_not_compiled_says_so(unpacked, tmp_path):
    shutil.copytree(unpacked / "vpool", tmp_path / "vpool", ignore=shutil.ignore_patterns(*LEFTOVERS))
    done = subprocess.run([sys.executable, "-c", "import vpool"], cwd=tmp_path, capture_output=True, text=True)
    (last,) = [line for line in done.stderr.splitlines() if line.startswith("ImportError: ")]
    assert f"the vpool in {tmp_path} is not compiled for this Python: run pip install -e . there" in last


@pytest.fixture
def other_major(tmp_path):
    """A folder in which Python finds the bindings of another CUDA, which end the program that imports them."""
    (tmp_path / "cuda" / "bindings").mkdir(parents=True)
    (tmp_path / "cuda" / "bindings" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "cuda_bindings-12.9.5.dist-info").mkdir()
    (tmp_path / "cuda_bindings-12.9.5.dist-info" / "METADATA").write_text("Name: cuda-bindings\nVersion: 12.9.5\n")
    return tmp_path


def run_beside(folder, program):
    """The output of a program that finds what is in a folder before anything else."""
    return run(sys.executable, "-c", f"import sys\nsys.path.insert(0, {str(folder)!r})\n{program}", cwd=ROOT)


def test_another_cuda_is_refused_in_one_line(other_major):
    program = (
        "import vpool\n"
        "for source in ('cuda', 'cuda-vmm', 'cuda-async', 'pinned', 'managed'):\n"
        "    try:\n"
        "        vpool.Pool(source=source)\n"
        "    except vpool.SourceError as error:\n"
        "        print(error)\n"
    )
    lines = run_beside(other_major, program).splitlines()
    assert len(lines) == 5
    assert set(lines) == {
        f"CUDA cannot be used here: vpool was built for CUDA {CUDA_MAJOR}, and cuda-bindings 12.9.5 is installed:"
        f' pip install "cuda-python>={CUDA_MAJOR},<{CUDA_MAJOR + 1}"'
    }


def test_the_rest_works_beside_another_cuda(other_major):
    program = (
        "import importlib, pkgutil, vpool\n"
        "for found in pkgutil.walk_packages(vpool.__path__, 'vpool.'):\n"
        "    if found.name not in ('vpool.__main__', 'vpool._storage.cuda_driver'):\n"
        "        importlib.import_module(found.name)\n"
        "print(vpool.Pool().source.name, vpool.inspect().source)\n"
        "from vpool.commands import main\n"
        "assert main(['doctor']) == 0\n"
    )
    lines = run_beside(other_major, program).splitlines()
    assert lines[0] == "host host"
    assert [line for line in lines if "built for CUDA" in line and line.startswith("CUDA ")]
    assert f"python          {platform.python_version()}" in lines  # beside its name, however long another line is


def test_a_driver_that_is_too_old_or_missing_is_named(monkeypatch):
    def old_driver():
        raise RuntimeError("no CUDA device: cudaErrorInsufficientDriver")

    module = types.SimpleNamespace(CudaDriver=old_driver)
    monkeypatch.setitem(sys.modules, "vpool._storage.cuda_driver", module)
    monkeypatch.setattr(vpool.sources, "_cuda_driver", None)
    monkeypatch.setattr(vpool.sources, "_cuda_missing", None)
    with pytest.raises(vpool.SourceError, match=f"no driver, or one older than CUDA {CUDA_MAJOR}, which"):
        vpool.sources.Cuda()


def extras():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_every_extra_is_documented():
    page = (ROOT / "docs" / "quickstart.rst").read_text()
    table = page[page.index("extra ") : page.index("vpool itself needs")]
    rows = re.findall(r"^(``.*?)  ", table, re.MULTILINE)
    assert sorted(re.findall(r"``(\w+)``", " ".join(rows))) == sorted(extras())


def test_messages_name_extras_that_exist():
    files = [*(ROOT / "vpool").rglob("*.py"), *(ROOT / "docs").rglob("*.rst"), ROOT / "README.md"]
    named = {
        extra
        for path in files
        for group in re.findall(r"(?:vpool|\.)\[([\w,]+)\]", path.read_text())
        for extra in group.split(",")
    }
    assert named - {"extra"} <= set(extras())
    assert len(named) > 5


def test_wheel_works_in_a_fresh_environment(fresh_python, tmp_path):
    program = "import vpool; print(vpool.__file__); print(vpool.inspect())"
    output = run(fresh_python, "-c", program, cwd=tmp_path)
    assert output.startswith(str(fresh_python.parent.parent))
    assert "utilization" in output
    script = fresh_python.with_name("vpool")
    assert run(script, "--version", cwd=tmp_path).startswith("vpool ")


def test_compiled_modules_can_use_pools(fresh_python, tmp_path):
    (tmp_path / "downstream.pyx").write_text(
        "# cython: language_level=3\n"
        "from libc.stdint cimport uint64_t\n"
        "from vpool cimport Pool\n"
        "from vpool._management.areas cimport areas_allocate, areas_deallocate\n"
        "\n"
        "def rounds(Pool pool not None, uint64_t nbytes, int repeats):\n"
        "    cdef uint64_t address = 0\n"
        "    cdef int done = 0\n"
        "    with nogil:\n"
        "        while done < repeats and areas_allocate(pool.areas, pool.default_arena, nbytes, &address):\n"
        "            areas_deallocate(pool.areas, pool.default_arena, address)\n"
        "            done += 1\n"
        "    return done\n"
    )
    (tmp_path / "setup.py").write_text(
        "import vpool\n"
        "from Cython.Build import cythonize\n"
        "from setuptools import setup\n"
        "setup(ext_modules=cythonize(['downstream.pyx'], include_path=[vpool.get_include()]))\n"
    )
    run(fresh_python, "setup.py", "-q", "build_ext", "--inplace", cwd=tmp_path)
    program = (
        "import downstream, vpool\n"
        "with vpool.Pool(source='host') as pool:\n"
        "    print(downstream.rounds(pool, 1000, 7), pool.stats.allocations)\n"
    )
    assert run(fresh_python, "-c", program, cwd=tmp_path).split() == ["7", "7"]

"""What all plug-ins have in common: they are asked for by name, and say what is missing."""

import pickle
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import vpool
from tests.helpers.frameworks import fake_pool, without
from tests.helpers.pools import GIB, run_cleanly
from vpool.integrations import cuda_core, cupy, numba, packages, rmm
from vpool.integrations.packages import PoolOfDevice, as_error_of, required

ROOT = Path(__file__).parent.parent
NAMING = ((".", "README.md"), ("docs", "*.rst"), ("vpool", "*.py"))  # where extras are named
FRAMEWORKS = ("torch", "cupy", "numba", "rmm", "cuda.core", "jax")


def test_nothing_is_imported_before_it_is_asked_for():
    code = f"""
import sys, pkgutil, importlib, vpool, vpool.integrations
assert not [name for name in sys.modules if name.startswith("vpool.integrations.")]
for found in pkgutil.iter_modules(vpool.integrations.__path__, "vpool.integrations."):
    importlib.import_module(found.name)
print([name for name in {FRAMEWORKS!r} if name in sys.modules])
"""
    assert run_cleanly(code) == "[]\n"


@pytest.mark.parametrize(
    ("package", "extra", "call"),
    [
        ("cupy", "cupy", cupy.install),
        ("cupy", "cupy", cupy.uninstall),
        ("cupy", "cupy", cupy.allocator),
        ("numba", "numba", numba.install),
        ("rmm", "rmm", rmm.install),
    ],
)
def test_a_missing_package_is_one_clear_line(monkeypatch, package, extra, call):
    without(monkeypatch, package)
    numba._manager.cache_clear()
    with pytest.raises(ImportError) as caught:
        call()
    assert str(caught.value).count("\n") == 0
    assert f'pip install "vpool[{extra}]"' in str(caught.value)


def test_a_package_that_is_broken_says_so_itself(monkeypatch, tmp_path):
    (tmp_path / "broken_framework.py").write_text("import something_else_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="something_else"):
        required("broken_framework", "x")


def test_every_extra_that_is_named_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = "".join(path.read_text() for folder, kind in NAMING for path in (ROOT / folder).rglob(kind))
    named = set(re.findall(r'\bvpool\[(\w+)\]|\brequired\("[\w.]+", "(\w+)"\)', text))
    listed = re.findall(r"^(``\w.*``) {2,}", (ROOT / "docs" / "quickstart.rst").read_text(), re.MULTILINE)
    extras = set(project["optional-dependencies"])
    assert {first or second for first, second in named} <= extras
    assert set(re.findall(r"``(\w+)``", " ".join(listed))) == extras


@pytest.mark.parametrize("source", ["host", "simulated"])
def test_a_pool_that_no_gpu_can_use(source):
    with vpool.Pool(vpool.Dynamic(initial=0), source=source) as pool:
        for plugin in (cupy.allocator, numba.install, rmm.resource, rmm.install):
            with pytest.raises((ValueError, ImportError), match=f"no GPU can use .*'{source}'|pip install"):
                plugin(pool)
        with pytest.raises(ValueError, match=f"no GPU can use .*'{source}'"):
            PoolOfDevice([pool])
    with pytest.raises(TypeError, match=r"vpool\.Pool, not str"):
        PoolOfDevice(["pool"])


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [("CUDA cannot be used here: another version", "CUDA cannot be used here: another"), (None, "choose a source")],
)
def test_a_default_pool_that_no_gpu_can_use(no_default_pools, monkeypatch, missing, remedy):
    """A framework may know of a GPU where vpool cannot use CUDA, and has its default pool on ordinary memory."""
    monkeypatch.setattr(packages, "cuda_missing", lambda: missing)
    with vpool.Pool(source="host") as pool:
        vpool.set_default_pool(pool)
        for ask in (lambda: PoolOfDevice(())(0), rmm.resource):
            with pytest.raises(ValueError, match=f"no GPU can use .*'host'>: {remedy}"):
                ask()
        assert pool.stats.allocations == 0


def test_pools_by_device(no_default_pools):
    with fake_pool() as first, fake_pool(device=1) as second, fake_pool() as third:
        pool_of = PoolOfDevice((first, second))
        assert (pool_of(0), pool_of(1)) == (first, second)
        with pytest.raises(ValueError, match="two pools for device 0"):
            PoolOfDevice((first, third))
        pool_of.forget(third)
        assert pool_of(0) is first
        pool_of.forget(first)
        vpool.set_default_pool(third)
        assert pool_of(0) is third


class TheirError(MemoryError):
    """Of a framework, with a constructor of its own."""

    def __init__(self, size, total):
        super().__init__(f"{size} of {total}")
        self.total = total


def test_an_error_of_both_kinds():
    with fake_pool() as pool:
        cause = ValueError("of a callback")
        pool.on_pressure(lambda nbytes: (_ for _ in ()).throw(cause))
        with pytest.raises(vpool.OutOfMemoryError) as caught:
            pool.allocate(GIB)
        error = as_error_of(TheirError, caught.value, total=7)
        assert isinstance(error, TheirError)
        assert isinstance(error, vpool.OutOfMemoryError)
        assert (error.requested, error.report, error.steps, error.total) == (
            GIB,
            caught.value.report,
            caught.value.steps,
            7,
        )
        assert str(error) == str(caught.value)
        assert error.__cause__ is cause
        assert type(as_error_of(TheirError, caught.value)) is type(error)
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is vpool.OutOfMemoryError
        assert again.requested == GIB


def test_cuda_core_is_a_dependency():
    """Other than the rest: cuda-python brings it."""
    assert subprocess.run([sys.executable, "-c", "import cuda.core"], check=False).returncode == 0
    assert cuda_core.resource

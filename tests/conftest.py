"""Fixtures of the whole suite."""

import gc
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

# Before the first lock is made: biased locks are tested also where they would not pay.
os.environ.setdefault("VPOOL_BIASED_LOCKS", "1")

import pytest

import vpool
from tests.helpers.pools import host_pool, simulated_pool

# Files that take minutes, longest first: where files run side by side, no core waits for one of them at the end.
LONGEST = (
    "test_format_damage.py",
    "test_sanitizers.py",
    "test_thread_sanitizer.py",
    "test_packaging.py",
    "test_source_code.py",
)


def pytest_configure(config):
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # of pytest-xdist, which would begin with the files of most tests


def pytest_collection_modifyitems(items):
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))


@pytest.fixture(scope="module", autouse=True)
def little_garbage():
    """A collection, which each request that fails makes, need not look at all that the tests are made of."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_tracer():
    """A test that traces takes the place of who counts the lines that run; the next one is counted again."""
    tracer = sys.gettrace()
    yield
    if sys.gettrace() is not tracer:
        sys.settrace(tracer)


@pytest.fixture(scope="session")
def foreign_thread(tmp_path_factory):
    """The library of `foreign_thread.c`."""
    library = tmp_path_factory.mktemp("thread") / "thread.so"
    source = Path(__file__).parent / "helpers" / "foreign_thread.c"
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "gcc").split()[0]
    subprocess.run([compiler, "-shared", "-fPIC", "-pthread", source, "-o", library], check=True)
    return library


@pytest.fixture
def pool():
    """A pool of simulated memory, checked at the end."""
    with simulated_pool(name="under test") as pool:
        yield pool
        pool.check()


@pytest.fixture
def writable_pool():
    """A pool of host memory, checked at the end."""
    with host_pool(name="under test") as pool:
        yield pool
        pool.check()


@pytest.fixture
def no_default_pools(monkeypatch):
    """As at the start of a process: no device has a default pool."""
    monkeypatch.setattr(vpool.defaults, "_defaults", {})

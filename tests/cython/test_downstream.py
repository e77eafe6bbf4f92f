"""The examples of modules on top of vpool, in Cython and in C++: they build, and what they call does as it says."""

import ctypes
import importlib.util
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import vpool
from tests.helpers.debug import unraised
from tests.helpers.pools import MIB, assert_whole, host_pool, unchanged
from vpool._storage.fake_cuda import FakeCudaDriver
from vpool._storage.source import Source
from vpool.streams import HOST

SOURCES = Path(__file__).with_name("downstream")
OK, INVALID_VALUE, OUT_OF_MEMORY, INVALID_POINTER, CLOSED, FORKED = range(6)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("downstream") / "source"
    shutil.copytree(SOURCES, folder)
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=folder,
        env={**__import__("os").environ, "CFLAGS": "-O1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    modules = {}
    for name in ("frames", "scratch"):
        (path,) = folder.glob(f"{name}.*.so")
        spec = importlib.util.spec_from_file_location(name, path)
        modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[name])
    return modules


@pytest.fixture
def frames(built):
    return built["frames"]


@pytest.fixture
def scratch(built):
    return built["scratch"]


class TestCython:
    def test_the_example(self, frames):
        with host_pool() as pool:
            decoder = frames.Decoder(pool)
            assert decoder.decode(100_000, 100, True) == 100
            assert pool.stats.frees == 100
            assert decoder.decode(128 * MIB, 1) == 0
            assert decoder.status == OUT_OF_MEMORY
            assert_whole(pool)

    def test_it_keeps_its_pool(self, frames):
        decoder = frames.Decoder(host_pool())
        assert decoder.decode(1000, 10) == 10

    def test_threads(self, frames):
        with host_pool() as pool:
            decoders = [frames.Decoder(pool, stream) for stream in (0, 7, 7, 9)]
            threads = [threading.Thread(target=decoder.decode, args=(1000, 5000)) for decoder in decoders]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert pool.stats.frees == 20_000
            assert_whole(pool)

    @pytest.mark.parametrize("debug", [(), "guard"])
    @pytest.mark.parametrize("noted", [False, True])
    @pytest.mark.parametrize("alignment", [None, 1, 256, 4096, 2 * MIB])
    def test_blocks(self, frames, debug, noted, alignment):
        with vpool.Pool(vpool.Dynamic(initial=0, limit=64 * MIB), source="host", debug=debug) as pool:
            with pool.record() if noted else vpool.stream(None):
                status, address = frames.allocate(pool, 7, 1000, alignment)
                assert status == OK
                assert address % (alignment or 256) == 0
                assert pool.stats.requested_bytes >= 1000
                assert frames.record_stream(pool, 9, address) == OK
                assert frames.deallocate(pool, 0, address) == OK, "the stream is where it is looked for first"
                assert frames.deallocate(pool, 7, address) == INVALID_POINTER
                assert frames.record_stream(pool, 9, address) == INVALID_POINTER
            assert pool.stats.allocated_bytes == 0
            pool.check()

    @pytest.mark.parametrize(
        ("nbytes", "alignment", "expected"),
        [
            (2**63, None, INVALID_VALUE),
            (2**64 - 1, 4096, INVALID_VALUE),
            (100, 0, INVALID_VALUE),
            (100, 3, INVALID_VALUE),
            (100, 4 * MIB, INVALID_VALUE),
            (1 << 40, None, OUT_OF_MEMORY),
            (1 << 40, 4096, OUT_OF_MEMORY),
            (2**63 - 1, None, OUT_OF_MEMORY),
            (2**63 - 1, 4096, OUT_OF_MEMORY),
            (0, None, OK),
            (0, 4096, OK),
        ],
    )
    def test_what_is_refused_gives_no_address(self, frames, nbytes, alignment, expected):
        with host_pool() as pool, unchanged(pool):
            assert frames.allocate(pool, None, nbytes, alignment) == (expected, 0)
            assert frames.deallocate(pool, None, 0) == frames.deallocate(pool, None, 0, True) == OK

    def test_a_closed_pool(self, frames):
        pool = host_pool()
        _, address = frames.allocate(pool, None, 1000)
        decoder = frames.Decoder(pool)
        pool.close()
        assert frames.allocate(pool, None, 1000) == frames.allocate(pool, None, 0) == (CLOSED, 0)
        assert frames.allocate(pool, None, 1000, 4096) == (CLOSED, 0)
        assert decoder.decode(10, 1) == 0
        assert decoder.status == CLOSED
        assert frames.deallocate(pool, None, address) == OK
        assert pool.stats.reserved_bytes == 0

    def test_the_order_of_streams(self, frames):
        driver = FakeCudaDriver(64 * MIB)
        with vpool.Pool(vpool.Fixed(MIB), Source(driver, "cuda", 0)) as pool:
            own, other = driver.create_stream(), driver.create_stream()
            _, address = frames.allocate(pool, own, MIB)
            assert frames.record_stream(pool, other, address) == OK
            position = driver.queue_work(other)
            assert frames.deallocate(pool, own, address) == OK
            assert pool.stats.pending_bytes == MIB
            assert frames.allocate(pool, own, MIB) == (OK, address)
            assert driver.ordered(own, other, position)
            position = driver.queue_work(own)
            assert frames.deallocate(pool, other, address, True) == OK
            assert frames.allocate(pool, HOST, MIB) == (OK, address)
            assert driver.finished(driver.number_of(own), position)

    @pytest.mark.parametrize("debug", [(), "quarantine", "guard,poison,quarantine"])
    def test_a_free_on_another_stream(self, frames, debug):
        with vpool.Pool(vpool.Dynamic(initial=0, limit=64 * MIB), source="host", debug=debug) as pool:
            _, address = frames.allocate(pool, 7, 1000)
            assert frames.deallocate(pool, 9, address + 256, True) == INVALID_POINTER
            assert frames.deallocate(pool, 9, address, True) == OK
            assert frames.deallocate(pool, 9, address, True) == INVALID_POINTER
            assert (pool.stats.frees, pool.stats.requested_bytes) == (1, 0)
            pool.check()

    @pytest.mark.parametrize("on", [False, True])
    def test_damage_is_reported(self, frames, on):
        with vpool.Pool(vpool.Dynamic(initial=0, limit=64 * MIB), source="host", debug="guard") as pool:
            _, address = frames.allocate(pool, 7, 1000)
            ctypes.memset(address + 1000, 1, 1)
            with unraised() as caught:
                assert frames.deallocate(pool, 9, address, on) == OK
            assert [type(error) for error in caught] == [vpool.GuardError]
            assert pool.stats.requested_bytes == 0

    def test_a_stream_that_is_none(self, frames):
        with host_pool() as pool, pytest.raises(TypeError, match="stream"):
            frames.allocate(pool, object(), 10)

    def test_a_child_of_the_pools_process(self, frames):
        import os

        pool = host_pool()
        _, address = frames.allocate(pool, None, 1000)
        decoder = frames.Decoder(pool)
        child = os.fork()
        if child == 0:
            found = decoder.decode(10, 1), decoder.status
            os._exit(0 if found == (0, FORKED) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert frames.deallocate(pool, None, address) == OK


class TestCpp:
    @pytest.mark.parametrize("stream", [None, 0, 7, HOST])
    def test_the_example(self, scratch, stream):
        with host_pool() as pool:
            assert scratch.rounds(pool, stream, 100_000, 4096, 100) == 100
            assert pool.stats.frees == 100
            assert_whole(pool)

    def test_errors(self, scratch):
        with host_pool() as pool:
            with unchanged(pool), pytest.raises(MemoryError):
                scratch.rounds(pool, None, 1 << 40, 256, 1)
            with unchanged(pool), pytest.raises(ValueError, match="refused"):
                scratch.rounds(pool, None, 100, 77, 1)
            with unchanged(pool), pytest.raises(TypeError, match=r"vpool\.Pool, not int"):
                scratch.rounds(7, None, 100, 256, 1)
            with unchanged(pool), pytest.raises(TypeError, match="stream"):
                scratch.rounds(pool, b"x", 100, 256, 1)
        with pytest.raises(ValueError, match="refused"):
            scratch.rounds(pool, None, 100, 256, 1)

    def test_a_module_that_needs_a_newer_vpool_says_so(self, scratch):
        with pytest.raises(ImportError, match=r"version 1, .* needs 2: install a newer vpool"):
            scratch.newer()


def test_the_header_is_what_is_compiled():
    """The table is declared twice, for C and for Cython; only ever added to, so its beginning stands here too."""
    root = Path(vpool.__file__).parent
    header = re.findall(r"\(\*(\w+)\)\(", (root / "capi.h").read_text())
    assert header[:7] == [
        "pool_of",
        "stream_of",
        "allocate",
        "allocate_aligned",
        "deallocate",
        "deallocate_on",
        "record_stream",
    ]
    code = (SOURCES.parents[2] / "pyx" / "interface" / "compiled.pyx").read_text()
    assert re.findall(r"\(\*(\w+)\)\(", code) == header
    assert re.findall(r"^_table\.(\w+) = _", code, re.MULTILINE) == header
    numbers = dict(re.findall(r"VPOOL_(\w+) = (\d)", (root / "capi.h").read_text()))
    declared = dict(re.findall(r"^    (\w+) = (\d)$", (root / "_interface" / "compiled.pxd").read_text(), re.MULTILINE))
    assert numbers == declared
    assert re.search(r"VERSION = (\d+)", code)[1] == re.search(r"VERSION (\d+)", (root / "capi.h").read_text())[1]

"""Segments and blocks as heaps and regions of NVTX: a tool hears of all that is so, and of nothing else."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

import vpool
from tests.helpers.pools import MIB
from vpool import annotation

pytestmark = pytest.mark.skipif(annotation._library() is None, reason="nvidia-nvtx is not installed")

SOURCE = Path(__file__).parent / "helpers" / "nvtx_tool.c"


@pytest.fixture(scope="module")
def tool(tmp_path_factory):
    """A library that NVTX takes for a profiler."""
    roots = importlib.util.find_spec("nvidia").submodule_search_locations
    include = next(path for root in roots for path in Path(root).glob("*/include") if (path / "nvtx3").is_dir())
    library = tmp_path_factory.mktemp("tool") / "libtool.so"
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "gcc").split()[0]
    command = [compiler, "-shared", "-fPIC", "-pthread", "-I", include, SOURCE, "-o", library]
    subprocess.run(command, check=True)
    return library


class Told:
    """What the tool was told, in order, and whether it makes sense at each moment."""

    def __init__(self, text):
        self.calls = [line.split(" ", 4) for line in text.splitlines()]
        self.heaps, self.regions = {}, {}
        for kind, *rest in self.calls:
            getattr(self, kind)(*rest)

    def wrong(self, *what):
        raise AssertionError(" ".join(what))

    def domain(self, name):
        assert name == "vpool"

    def heap(self, number, address, nbytes, _):
        begin, end = int(address), int(address) + int(nbytes)
        assert all(end <= low or high <= begin for low, high in self.heaps.values())
        self.heaps[number] = (begin, end)

    def heap_ends(self, number):
        begin, end = self.heaps.pop(number)
        assert not any(begin <= address < end for address in self.regions), "a heap went with a region in it"

    def region(self, number, address, nbytes):
        begin, end = int(address), int(address) + int(nbytes)
        low, high = self.heaps[number]
        assert low <= begin < end <= high
        assert all(end <= one or last <= begin for one, last in self.regions.items())
        self.regions[begin] = end

    def name(self, address, *_):
        assert int(address) in self.regions

    def region_ends(self, address):
        del self.regions[int(address)]

    def of(self, *kinds):
        return [call for call in self.calls if call[0] in kinds]


@pytest.fixture
def run(tool, tmp_path):
    """Run a program with the tool listening; what it printed, as numbers, and what the tool was told."""

    def run(program):
        told = tmp_path / "told"
        environment = {**os.environ, "NVTX_INJECTION64_PATH": str(tool), "NVTX_TOOL_TOLD": str(told)}
        code = "import vpool\nfrom vpool.debugging import Debugger\n" + textwrap.dedent(program)
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split(), Told(told.read_text() if told.exists() else "")

    return run


class TestBlocks:
    def test_each_is_a_region(self, run):
        printed, told = run("""
            with vpool.Pool(vpool.Fixed("1MiB"), source="simulated", name="seen", debug="nvtx-memory") as pool:
                with vpool.tag("weights"):
                    buffer = pool.empty(1000)
                ptr = pool.allocate(500)
                pool.deallocate(ptr)
                print(buffer.ptr, ptr)
                buffer.close()
        """)
        one, two = printed
        (_, heap, _, nbytes, name), *_ = told.of("heap")
        assert (nbytes, name) == (str(MIB), "seen")
        assert told.of("region", "name", "region_ends", "heap_ends") == [
            ["region", heap, one, "1000"],
            ["name", one, "weights"],
            ["region", heap, two, "500"],
            ["name", two, "block"],
            ["region_ends", two],
            ["region_ends", one],
            ["heap_ends", heap],
        ]

    def test_sites_name_what_has_no_tag(self, run):
        _, told = run("""
            with vpool.Pool(source="simulated", debug="nvtx-memory,sites") as pool:
                pool.empty(1000)
        """)
        assert told.of("name")[0][2].startswith("<string>")

    def test_in_quarantine_it_is_none(self, run):
        _, told = run("""
            with vpool.Pool(source="simulated", debug="nvtx-memory,quarantine") as pool:
                ptr = pool.allocate(1000)
                pool.deallocate(ptr)
                try:
                    pool.deallocate(ptr)
                except vpool.DoubleFreeError:
                    pool.deallocate(pool.allocate(1000))
        """)
        kinds = [call[0] for call in told.of("region", "region_ends", "heap_ends")]
        assert kinds == ["region", "region_ends"] * 2 + ["heap_ends"]

    def test_a_free_that_fails(self, run):
        """The block is live, so it may be used."""
        _, told = run("""
            with vpool.Pool(source="simulated", debug="nvtx-memory") as pool:
                ptr = pool.allocate(1000)
                leave = Debugger.leave
                def failing(*args):
                    Debugger.leave = leave
                    raise RuntimeError("not now")
                Debugger.leave = failing
                try:
                    pool.deallocate(ptr)
                except RuntimeError:
                    pass
                else:
                    raise SystemExit("it did not fail")
                pool.deallocate(ptr)
        """)
        assert [call[0] for call in told.of("region", "region_ends")] == ["region", "region_ends"] * 2

    def test_one_that_its_caller_never_got(self, run):
        _, told = run("""
            enter = Debugger.enter
            def failing(self, block):
                enter(self, block)
                raise RuntimeError("not this one")
            with vpool.Pool(source="simulated", debug="nvtx-memory") as pool:
                Debugger.enter = failing
                try:
                    pool.allocate(1000)
                except RuntimeError:
                    pass
                else:
                    raise SystemExit("it did not fail")
                Debugger.enter = enter
        """)
        assert [call[0] for call in told.of("region", "region_ends")] == ["region", "region_ends"]

    def test_a_buffer_that_is_dropped(self, run):
        _, told = run("""
            with vpool.Pool(source="simulated", debug="nvtx-memory") as pool:
                pool.empty(1000)
                pool.empty(2000)
        """)
        assert [call[0] for call in told.of("region", "region_ends")] == ["region", "region_ends"] * 2


class TestSegments:
    @pytest.mark.parametrize("source", ["simulated", "host"])
    def test_they_come_and_go(self, run, source):
        _, told = run(f"""
            with vpool.Pool(vpool.Dynamic(limit="64MiB"), source="{source}", debug="nvtx-memory") as pool:
                for _ in range(3):
                    held = [pool.empty(5 << 20) for _ in range(4)]
                    held.clear()
                    pool.trim()
        """)
        assert len(told.of("region")) == len(told.of("region_ends")) == 12
        assert len(told.of("heap")) > 1
        assert not told.heaps

    def test_a_pool_with_a_fixed_core(self, run):
        _, told = run("""
            strategy = vpool.Hybrid("4MiB", dynamic=vpool.Dynamic(initial=0))
            pool = vpool.Pool(strategy, source="simulated", debug="nvtx-memory")
            held = [pool.empty(nbytes) for nbytes in (1000, 300_000, 20 << 20)]
            held.clear()
            pool.close()
            del pool
        """)
        assert len(told.of("heap")) == 2
        assert not told.heaps

    @pytest.mark.parametrize("close", [True, False])
    def test_what_is_live_keeps_its_own(self, run, close):
        """Of a closed pool until it is freed, of one that is dropped as long as the pool is there."""
        printed, told = run(f"""
            pool = vpool.Pool(source="simulated", debug="nvtx-memory")
            buffer = pool.empty(1000)
            if {close}:
                pool.close()
            del pool
            print(buffer.ptr)
            buffer.close()
            del buffer
        """)
        kinds = [call[0] for call in told.of("region_ends", "heap_ends")]
        assert kinds == ["region_ends", "heap_ends"]
        assert told.of("region_ends")[0][1] == printed[0]

    def test_one_that_the_source_does_not_take_back(self, run):
        """Nothing is lent from it any more."""
        _, told = run("""
            pool = vpool.Pool(source="simulated", debug="nvtx-memory")
            pool.empty(1000)
            pool.source.driver.fail("free", 700, times=1)
            try:
                pool.trim()
            except vpool.SourceError:
                pool.trim()
            else:
                raise SystemExit("it did not fail")
            pool.empty(1000)
            pool.close()
        """)
        assert len(told.of("heap")) == len(told.of("heap_ends")) == 2


def test_many_threads(run):
    _, told = run("""
        import random, threading
        with vpool.Pool(vpool.Dynamic(limit="64MiB"), source="simulated", debug="nvtx-memory,quarantine=1MiB") as pool:
            def work(seed):
                choose, held = random.Random(seed), []
                for _ in range(400):
                    if held and choose.random() < 0.5:
                        pool.deallocate(held.pop(choose.randrange(len(held))))
                    else:
                        held.append(pool.allocate(choose.randrange(1, 500_000)))
                    if choose.random() < 0.05:
                        pool.trim()
                for ptr in held:
                    pool.deallocate(ptr)
            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    """)
    assert len(told.of("region")) == len(told.of("region_ends")) > 700
    assert not told.heaps


class TestMode:
    def test_a_pool_without_it_tells_nothing(self, run):
        _, told = run("""
            with vpool.Pool(source="simulated", debug="quarantine") as pool:
                pool.empty(1000)
        """)
        assert told.calls == []

    def test_beside_ranges(self, run):
        pytest.importorskip("nvtx")
        _, told = run("""
            with vpool.Pool(source="simulated", debug="nvtx,nvtx-memory") as pool:
                pool.empty(1000)
        """)
        assert len(told.of("region")) == len(told.of("region_ends")) == 1

    def test_without_a_tool(self):
        with vpool.Pool(source="simulated", debug="nvtx-memory") as pool:
            assert pool.debug.nvtx_memory
            pool.empty(1000).close()

    @pytest.mark.parametrize("other", ["guard", "poison"])
    def test_not_with_what_writes_outside_blocks(self, other):
        with pytest.raises(ValueError, match="writes outside blocks"):
            vpool.Pool(source="host", debug=f"nvtx-memory,{other}")

    def test_not_on_virtual_memory(self, monkeypatch):
        """Of which compute-sanitizer takes no heap."""
        with pytest.raises(ValueError, match="virtual memory"):
            vpool.Pool(source="simulated-vmm", debug="nvtx-memory")
        monkeypatch.setenv("VPOOL_DEBUG", "nvtx-memory,sites")
        with vpool.Pool(source="simulated-vmm") as pool, vpool.Pool(source="simulated") as other:
            assert (pool.debug.nvtx_memory, pool.debug.sites) == (False, 1)
            assert (other.debug.nvtx_memory, other.debug.sites) == (True, 1)
            pool.empty(1000).close()

    def test_without_the_library(self, monkeypatch):
        monkeypatch.setattr(annotation, "_library", lambda: None)
        with pytest.raises(vpool.Error, match=r'pip install "vpool\[nvtx\]"'):
            vpool.Pool(source="simulated", debug="nvtx-memory")

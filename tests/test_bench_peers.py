"""vpool bench: the processes of its peers, and the program that runs the compiled ones, over the C library's malloc."""

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass

import numpy as np
import pytest

from tests.helpers import fake_peer
from vpool import bench as benchmarks
from vpool.bench import bench, build
from vpool.bench.build import BuildError, program
from vpool.bench.cases import GROUPS, Case, cases_of
from vpool.bench.peers import PEERS, Peer, PeerError, Worker, started_peers

MALLOC = next(peer for peer in PEERS if peer.name == "malloc")
PAIR = Case("pair", "pair", 512, (512, 0))


@dataclass(frozen=True)
class FakePeer(Peer):
    """A peer whose process answers in the way that its name says."""

    def command(self):
        return [sys.executable, fake_peer.__file__, self.name]


def fake(way, title="Fake", **more):
    return FakePeer(title, way, on_device=False, **more)


@pytest.fixture
def worker(request):
    made = Worker(fake(request.param), seconds=5)
    yield made
    made.close()


class TestWorkers:
    @pytest.mark.parametrize("worker", ["answers"], indirect=True)
    def test_a_peer_answers_every_case(self, worker):
        assert worker.version == "1.0"
        for case in cases_of(list(GROUPS), False, [("x", None, "/some/file")]):
            if worker.supports(case):
                assert worker.measure(case, 10)["elapsed"] > 0

    @pytest.mark.parametrize("worker", ["refuses"], indirect=True)
    def test_a_peer_that_cannot_says_so_and_goes_on(self, worker):
        for _ in range(2):
            with pytest.raises(PeerError, match=r"^cannot pair$"):
                worker.measure(PAIR, 10)
        assert worker.supports(PAIR)

    @pytest.mark.parametrize("worker", ["dies"], indirect=True)
    def test_a_peer_that_dies_takes_part_no_more(self, worker):
        with pytest.raises(PeerError, match=r"^has ended: out of luck$"):
            worker.measure(PAIR, 10)
        assert not worker.supports(PAIR)

    @pytest.mark.parametrize("worker", ["babbles"], indirect=True)
    def test_an_answer_that_is_none(self, worker):
        with pytest.raises(PeerError, match="answered 'hello'"):
            worker.measure(PAIR, 10)

    @pytest.mark.parametrize("worker", ["hangs"], indirect=True)
    def test_a_peer_that_hangs_is_ended(self, worker):
        worker.seconds = 0.2
        with pytest.raises(PeerError, match=r"pair took more than 0\.2 seconds"):
            worker.measure(PAIR, 10)
        assert not worker.supports(PAIR)

    def test_peers_that_do_not_start_are_a_line_each(self):
        notes = []
        peers = [
            fake("no device", "One"),
            fake("dies at once", "Two", flavour="host"),
            fake("answers", "Three"),
            fake("answers", "Four", package="no_such_package_anywhere"),
            fake("answers", "Five", cases=frozenset({"buffer"})),
        ]
        workers = started_peers([PAIR], False, notes, peers)
        try:
            assert [one.who for one in workers] == ["Three"]
            assert notes == [
                "One (from Python): CUDA says no",
                "Two (compiled): has ended: Segmentation fault, as it were",
                "Four (from Python): no_such_package_anywhere is not installed",
            ]
        finally:
            for one in workers:
                one.close()

    def test_without_a_device_none_that_needs_one_is_started(self):
        notes = []
        assert started_peers([PAIR], False, notes, [Peer("A", "a", "cuda"), Peer("B", "b", "cuda")]) == []
        assert len(notes) == 1

    def test_a_run_with_peers(self, monkeypatch):
        peers = [fake("answers", "Good"), fake("refuses later", "Bad"), fake("dies", "Worse")]
        monkeypatch.setattr(
            benchmarks, "started_peers", lambda cases, device, notes: started_peers(cases, device, notes, peers)
        )
        found = bench(only=["pair", "traces"], rounds=2, scale=0.01)
        assert {row.who for row in found.rows if row.kind == "peer"} >= {"Good"}
        assert {row.case for row in found.having("pair", kind="peer")} == {"pair"}
        assert found.find("trace", "cold_ns", who="Good").median == 900.0
        assert "Worse" not in {row.who for row in found.rows}
        assert [note for note in found.notes if note.startswith("Worse")] == [
            "Worse, pair at 512: has ended: out of luck"
        ]
        assert [note for note in found.notes if note.startswith("Bad")]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of its own, with the program that has malloc alone."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        program("host")
        yield folder


@pytest.fixture(scope="module")
def malloc(cache):
    made = Worker(MALLOC)
    yield made
    made.close()


class TestCompiledPeers:
    @pytest.mark.parametrize("case", cases_of(list(GROUPS), False), ids=lambda case: f"{case.name}-{case.at}")
    def test_every_workload_runs(self, malloc, case):
        if not malloc.supports(case):
            assert case.name in ("python_pair", "buffer", "resident", "miss")
            return
        figures = malloc.measure(case, 100)
        assert figures.pop("elapsed") > 0
        expected = {
            "latency": {"p50_ns", "p99_ns", "p999_ns"},
            "threads": {"ns", "per_us"},
            "handoff": {"ns", "per_us"},
        }
        assert set(figures) == expected.get(case.group, {"ns"})
        assert all(value > 0 for value in figures.values())

    def test_misses_and_traces_run(self, malloc, tmp_path):
        figures = malloc.measure(Case("misses", "miss", 4096, (4096,)), 8)
        assert set(figures) == {"elapsed", "miss_ns", "hit_ns"}
        (_, trace, path), *_ = benchmarks._written([], tmp_path)
        figures = malloc.measure(Case("traces", "trace", "x", subject=(trace, path)), 2)
        assert set(figures) == {"elapsed", "cold_ns", "warm_ns"}
        assert figures["cold_ns"] > 0

    @pytest.mark.parametrize(
        "case",
        [
            Case("pair", "pear", 512, (512, 0)),
            Case("pair", "pair", 512, ()),
            Case("pair", "random", 512, ("many",)),
            Case("pair", "pair", 512, (1 << 62, 0)),
            Case("traces", "trace", "x", subject=(None, "/nowhere at all")),
        ],
        ids=lambda case: f"{case.name}{case.numbers}",
    )
    def test_what_cannot_be_measured_is_one_line(self, malloc, case):
        with pytest.raises(PeerError) as refused:
            malloc.measure(case, 10)
        assert "\n" not in str(refused.value)
        assert malloc.measure(PAIR, 10)["ns"] > 0

    def test_threads_that_run_out_of_memory_end(self, malloc):
        huge = 1 << 62
        for case in (Case("", "one_same", 3, (huge, 3)), Case("", "handoff", 2, (huge, 2))):
            with pytest.raises(PeerError):
                malloc.measure(case, 50)
        assert malloc.measure(PAIR, 10)["ns"] > 0

    def test_an_unknown_allocator_is_one_line(self, cache):
        with pytest.raises(PeerError, match="no allocator nobody is compiled in"):
            Worker(Peer("Nobody", "nobody", "host"))


class TestBuild:
    def test_a_program_is_built_once(self, cache, monkeypatch):
        before = program("host")
        monkeypatch.setattr(build, "_compile", lambda *arguments: pytest.fail("built again"))
        assert program("host") == before
        assert before.is_relative_to(cache)
        assert os.listdir(before.parent) == ["peer"]

    def test_no_compiler(self, monkeypatch, tmp_path):
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
            program("host")

    def test_a_compiler_that_refuses_is_one_line(self, monkeypatch, tmp_path):
        compiler = tmp_path / "compiler"
        compiler.write_text("#!/bin/sh\necho 'in file x:' >&2\necho 'peer.cpp:1: error: no such thing' >&2\nexit 1\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        with pytest.raises(BuildError, match=r"^cannot be built: peer\.cpp:1: error: no such thing$"):
            program("host")
        monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
        with pytest.raises(BuildError, match=r"^cannot be built: "):
            program("host")

    @pytest.mark.parametrize(("flavour", "names"), [("cuda", "CUDA"), ("rmm", "librmm"), ("torch", "torch")])
    def test_headers_that_are_not_here(self, monkeypatch, tmp_path, flavour, names):
        monkeypatch.setattr(build, "_folders", lambda package: [])
        monkeypatch.setattr(build, "_cuda_roots", lambda: [tmp_path])
        with pytest.raises(BuildError, match=names):
            program(flavour)

    def test_other_libraries_are_another_program(self, monkeypatch, tmp_path):
        for folder in ("include/crt", "lib"):
            (tmp_path / folder).mkdir(parents=True)
        (tmp_path / "include" / "cuda_runtime_api.h").touch()
        monkeypatch.setattr(build, "_cuda_roots", lambda: [tmp_path])
        with pytest.raises(BuildError, match="CUDA"):
            program("cuda")
        (tmp_path / "include" / "crt" / "host_defines.h").touch()
        library = tmp_path / "lib" / "libcudart.so.13"
        library.touch()
        compiled = []
        monkeypatch.setattr(build, "_compile", lambda command, path: compiled.append((command, path)))
        program("cuda")
        os.utime(library, (1, 1))
        program("cuda")
        (command, first), (_, second) = compiled
        assert first != second
        assert {"-DWITH_CUDA", f"-I{tmp_path / 'include'}", str(library)} <= set(command)


@pytest.mark.parametrize(("flavour", "package"), [("cuda", "nvidia"), ("rmm", "librmm")])
def test_headers_of_peers_compile(flavour, package):
    """As far as this machine has them; whether what is built runs, a device shows."""
    if not build._folders(package):
        pytest.skip(f"{package} is not installed")
    command = [*build._compiler(), "-std=c++20", "-fsyntax-only", str(build._SOURCES[0]), *build._arguments(flavour)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class TestPeersInPython:
    CUPY = """
        __version__ = "3.0"
        class cuda:
            class MemoryPool:
                def malloc(self, nbytes):
                    print("a framework says something")
                    if nbytes > 4096:
                        raise MemoryError("too\\nmuch")
                    return bytearray(8)
            def set_allocator(malloc):
                cuda.alloc = staticmethod(malloc)
    """

    @pytest.fixture
    def packages(self, tmp_path, monkeypatch):
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), os.getcwd()])
        monkeypatch.setenv("PYTHONPATH", path)
        return tmp_path

    def test_pairs_and_buffers(self, packages):
        (packages / "cupy.py").write_text(textwrap.dedent(self.CUPY))
        worker = Worker(Peer("CuPy", "cupy", cases=frozenset({"python_pair", "buffer"})), seconds=60)
        try:
            assert worker.version == "3.0"
            for name in ("python_pair", "buffer"):
                assert worker.measure(Case("", name, 512, (512,)), 20)["ns"] > 0
            with pytest.raises(PeerError, match=r"^MemoryError: too much$"):
                worker.measure(Case("", "buffer", 8192, (8192,)), 20)
            with pytest.raises(PeerError, match="ValueError"):
                worker.measure(PAIR, 20)
        finally:
            worker.close()

    @pytest.mark.parametrize("name", ["cupy", "rmm_pool", "torch", "cuda_core"])
    def test_a_framework_that_cannot_be_imported(self, packages, name):
        for module in ("cupy", "rmm", "torch", "cuda"):
            (packages / f"{module}.py").write_text("raise RuntimeError('no\\nCUDA')")
        # A package that is installed in two places is the first one's.
        with pytest.raises(PeerError, match=r"^RuntimeError: no CUDA$"):
            Worker(Peer("X", name), seconds=60)


def test_events_are_written_as_the_program_reads_them(tmp_path):
    ((name, trace, path),) = benchmarks._written([], tmp_path)
    assert name == "two_streams"
    words = np.fromfile(path, "<u4").reshape(-1, 6)
    assert len(words) == len(trace)
    assert (words[:, 0] == trace.op).all()
    assert (words[:, 1] == trace.number).all()
    assert (words[:, 2:4].copy().view("<u8")[:, 0] == trace.bytes).all()
    assert (words[:, 4] == trace.stream).all()

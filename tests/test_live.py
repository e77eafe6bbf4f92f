"""A running process told of: metrics for Prometheus, the socket of ``vpool top``, ranges of NVTX."""

import builtins
import contextlib
import errno
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading

import pytest

import vpool
from tests.helpers.pools import ODD_NAMES, simulated_pool
from vpool import live
from vpool.commands import main
from vpool.commands.top import render
from vpool.debugging import Debugger

prometheus_client = pytest.importorskip("prometheus_client")


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Sockets in a folder of the test's own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def without(monkeypatch):
    """A function that lets a package be missing."""
    real = builtins.__import__

    def forget(package):
        def refuse(name, *args, **kwargs):
            if name.partition(".")[0] == package:
                raise ImportError(name)
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", refuse)

    return forget


def _told(**changes):
    """An answer that is whole but for the changes."""
    told = {"format_version": 1, "pid": 1, "program": "train.py", "time": 1.0, "pools": []}
    return json.dumps({**told, **changes}).encode()


class TestMetrics:
    def test_counters_are_those_of_the_pool(self):
        with simulated_pool(name="mine") as pool:
            held = [pool.empty(1000 * number) for number in range(1, 20)]
            held.pop().close()
            registry = prometheus_client.CollectorRegistry()
            registry.register(vpool.metrics.Collector([pool]))
            labels = {"pool": "mine", "device": "0", "source": "simulated"}
            stats = pool.stats
            for name in vpool.stats.PoolStats.__slots__:
                rises = name in ("allocations", "frees", "hits", "source_calls", "ooms")
                sample = registry.get_sample_value(f"vpool_{name}{'_total' if rises else ''}", labels)
                assert sample == getattr(stats, name), name

    def test_all_open_pools_as_openmetrics(self):
        with simulated_pool(name="a") as pool, simulated_pool(name="b"):
            buffer = pool.empty(5000)
            text = vpool.metrics.text()
            assert text.endswith("# EOF\n")
            assert 'vpool_requested_bytes{device="0",pool="a",source="simulated"} 5000.0' in text
            assert 'vpool_requested_bytes{device="0",pool="b",source="simulated"} 0.0' in text
            buffer.close()
        assert 'pool="a"' not in vpool.metrics.text()

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_names_of_any_characters(self, name):
        parser = pytest.importorskip("prometheus_client.openmetrics.parser")

        def named():
            families = parser.text_string_to_metric_families(vpool.metrics.text().encode().decode())
            return {sample.labels["pool"] for family in families for sample in family.samples}

        before = named()  # the default pool, or others that tests before this one left to the collector
        with simulated_pool(name=name):
            assert named() - before == {name.encode(errors="backslashreplace").decode()}

    def test_pools_of_one_name_count_together(self):
        with simulated_pool(name="twin") as one, simulated_pool(name="twin") as other:
            buffers = [one.empty(1000), other.empty(500)]
            assert 'vpool_requested_bytes{device="0",pool="twin",source="simulated"} 1500.0' in vpool.metrics.text()
            assert len(buffers) == 2

    def test_register_is_undone(self):
        registry = prometheus_client.CollectorRegistry()
        collector = vpool.metrics.register(registry)
        assert b"vpool_allocations" in prometheus_client.generate_latest(registry)
        registry.unregister(collector)
        assert b"vpool_allocations" not in prometheus_client.generate_latest(registry)

    def test_a_registry_tells_of_pools_once(self):
        registry = prometheus_client.CollectorRegistry()
        vpool.metrics.register(registry)
        with pytest.raises(ValueError, match="vpool_allocated_bytes"):
            vpool.metrics.register(registry)
        assert prometheus_client.generate_latest(registry).count(b"# TYPE vpool_allocated_bytes ") == 1

    def test_a_lock_that_is_held_delays_nothing(self):
        """Threads allocate all the while, and what is told stays possible."""
        with simulated_pool(name="busy") as pool:
            ended = threading.Event()

            def work():
                while not ended.is_set():
                    pool.deallocate(pool.allocate(1000))

            threads = [threading.Thread(target=work) for _ in range(3)]
            for thread in threads:
                thread.start()
            try:
                for _ in range(50):
                    told = float(re.search(r'vpool_requested_bytes{.*pool="busy".*} (.*)', vpool.metrics.text())[1])
                    assert told in (0, 1000, 2000, 3000)
            finally:
                ended.set()
                for thread in threads:
                    thread.join()

    def test_without_the_package(self, without):
        without("prometheus_client")
        for call in (vpool.metrics.text, vpool.metrics.register, lambda: list(vpool.metrics.Collector().collect())):
            with pytest.raises(vpool.Error, match=r'pip install "vpool\[metrics\]"'):
                call()


class TestServe:
    def test_folder_and_socket_are_the_users_own(self, tmp_path):
        with vpool.serve() as server:
            assert server.path == tmp_path / "vpool" / f"{os.getpid()}.sock"
            assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
            assert stat.S_IMODE(server.path.parent.stat().st_mode) == 0o700
            assert vpool.serve() is server
        assert server.closed
        assert not server.path.exists()
        server.close()
        with vpool.serve() as again:
            assert again is not server

    def test_after_an_interrupted_close_another_one_serves(self, monkeypatch):
        def interrupted(thread):
            raise KeyboardInterrupt

        server = vpool.serve()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "join", interrupted)
            with pytest.raises(KeyboardInterrupt):
                server.close()
        with vpool.serve() as again:
            assert server.closed
            assert again.path.is_socket()

    def test_what_is_told(self):
        with simulated_pool(name="told") as pool, vpool.serve():
            buffer = pool.empty(12345)
            told = live.ask(os.getpid())
            assert told["pid"] == os.getpid()
            (row,) = (row for row in told["pools"] if row["name"] == "told")
            assert row["requested_bytes"] == 12345
            assert row["reserved_bytes"] == pool.stats.reserved_bytes
            buffer.close()

    def test_it_goes_on_where_a_file_could_not_be_opened(self, monkeypatch):
        failures = [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

        class Full:
            """A socket in a process that has as many files open as it may."""

            def __getattr__(self, name):
                return getattr(real, name)

            def accept(self):
                if failures:
                    raise failures.pop()
                return real.accept()

        with vpool.serve() as server:
            real = server._socket
            monkeypatch.setattr(server, "_socket", Full())
            for _ in range(3):
                assert live.ask(os.getpid())["pid"] == os.getpid()
            assert not failures

    def test_nobody_else_is_told(self, monkeypatch):
        with vpool.serve() as server:
            monkeypatch.setattr(live, "_peer", lambda connection: (os.getpid(), os.geteuid() + 1))
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(server.path))
                assert connection.recv(100) == b""
            with pytest.raises(vpool.Error, match="is not a socket of process"):
                live.ask(os.getpid())

    @pytest.mark.parametrize("kind", ["open", "link", "file"])
    def test_a_folder_that_is_somebody_elses(self, kind, tmp_path):
        folder = tmp_path / "vpool"
        if kind == "open":
            folder.mkdir()
            folder.chmod(0o755)
        elif kind == "link":
            (tmp_path / "other").mkdir(0o700)
            folder.symlink_to(tmp_path / "other")
        else:
            folder.touch()
        with pytest.raises(vpool.Error, match="not a folder of this user alone"):
            vpool.serve()

    def test_a_socket_that_was_left_behind(self, tmp_path):
        (tmp_path / "vpool").mkdir(0o700)
        (tmp_path / "vpool" / f"{os.getpid()}.sock").touch()
        with vpool.serve():
            assert live.ask(os.getpid())["pid"] == os.getpid()

    def test_readers_that_do_not_read(self):
        with vpool.serve() as server, contextlib.ExitStack() as stack:
            for _ in range(6):
                stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(server.path))
            assert live.ask(os.getpid())["format_version"] == live.FORMAT_VERSION

    def test_no_answer(self):
        with pytest.raises(vpool.Error, match=r"process 999999 serves no counters.*those that do: none"):
            live.ask(999999)

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"", "nothing that vpool understands"),
            (b"[1, 2]", "nothing that vpool understands"),
            (b'{"format_version": 1}', "nothing that vpool understands"),
            (b'{"format_version": "x", "pools": []}', "nothing that vpool understands"),
            (b"[" * 100_000, "nothing that vpool understands"),
            (_told(pools=None), "nothing that vpool understands"),
            (_told(pools=[5]), "nothing that vpool understands"),
            (_told(pools=[{"name": "one"}]), "nothing that vpool understands"),
            (_told(time=1e300), "nothing that vpool understands"),
            (_told(time=float("nan")), "nothing that vpool understands"),
            (b'{"format_version": 2, "pools": []}', "format version 2; this vpool reads up to 1"),
        ],
    )
    def test_answers_that_are_none(self, content, reason, tmp_path):
        (tmp_path / "vpool").mkdir(0o700)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(tmp_path / "vpool" / f"{os.getpid()}.sock"))
            server.listen()

            def answer():
                connection, _ = server.accept()
                with connection:
                    connection.sendall(content)

            thread = threading.Thread(target=answer)
            thread.start()
            with pytest.raises(vpool.FormatError, match=reason):
                live.ask(os.getpid())
            thread.join()

    def test_a_child_of_a_fork_serves_for_itself(self):
        with vpool.serve() as server:
            child = os.fork()
            if child == 0:
                own = vpool.serve()
                right = own.path != server.path and live.ask(os.getpid())["pid"] == os.getpid()
                own.close()
                server.close()
                os._exit(0 if right else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert live.ask(os.getpid())["pid"] == os.getpid()


PROGRAM = """
import sys, vpool
pool = vpool.Pool(vpool.Dynamic(initial="1MiB", limit="64MiB"), source="host", name="child")
held = [pool.empty(100_000) for _ in range(3)]
vpool.serve()
print("ready", flush=True)
sys.stdin.read()
"""


class TestTop:
    @pytest.fixture
    def process(self):
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout.readline() == "ready\n"
            yield process
            process.stdin.close()
            assert process.wait(20) == 0

    def test_another_process(self, process, capsys):
        assert main(["top", str(process.pid)]) == 0
        shown = capsys.readouterr().out
        assert f"process {process.pid}, -c: 1 pool\n" in shown
        assert re.search(r"child, device 0 +host .* 100\.0%|child, device 0 +host", shown)
        assert main(["top", str(process.pid), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["pools"][0]["requested_bytes"] == 300_000
        assert live.serving() == [process.pid]

    def test_the_socket_goes_with_the_process(self, process, tmp_path):
        process.stdin.close()
        assert process.wait(20) == 0
        assert list((tmp_path / "vpool").iterdir()) == []

    def test_a_process_that_is_stopped(self, process, monkeypatch, capsys):
        monkeypatch.setattr(live, "_PATIENCE", 0.1)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # not all threads of it have stopped when it is told to
        try:
            assert main(["top", str(process.pid)]) == 1
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert f"process {process.pid} does not answer" in capsys.readouterr().err

    def test_a_process_that_was_killed(self, tmp_path, capsys):
        (tmp_path / "vpool").mkdir(0o700)
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(tmp_path / "vpool" / "999999.sock"))
        assert live.serving() == []
        assert main(["top", "999999"]) == 1
        assert "those that do: none" in capsys.readouterr().err

    def test_no_such_process(self, capsys):
        assert main(["top", "999999"]) == 1
        assert capsys.readouterr().err == (
            "vpool top: process 999999 serves no counters: it has to call vpool.serve(); those that do: none\n"
        )
        for wrong in (["x"], ["1", "--interval", "0"], []):
            with pytest.raises(SystemExit):
                main(["top", *wrong])

    def test_on_a_terminal_it_goes_on_until_the_process_ends(self, monkeypatch, capsys):
        moments = iter(
            [
                {**TOLD, "time": 100.0, "pools": [row(allocations=0, hits=0)]},
                {**TOLD, "time": 102.0, "pools": [row(allocations=5000, hits=4000)]},
                {**TOLD, "time": 103.0, "pools": [row(allocations=5001, hits=4000), row(name="new")]},
            ]
        )

        def ask(pid):
            try:
                return next(moments)
            except StopIteration:
                raise vpool.Error("process 7 serves no counters") from None

        monkeypatch.setattr("vpool.commands.top.ask", ask)
        monkeypatch.setattr("vpool.commands.top.time.sleep", lambda seconds: None)
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        assert main(["top", "7"]) == 1
        first, second = capsys.readouterr().out.split("\033[H\033[J")[1:]
        assert re.search(r"mine, device 0 .* 2,500 +80\.0%", first)
        assert re.search(r"mine, device 0 .* 1 +80\.0%", second)
        assert "new, device 0" in second

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_names_stay_in_their_line(self, name):
        shown = render({**TOLD, "program": name, "pools": [row(name=name)]})
        assert len(shown.split("\n")) == 3
        assert shown.replace("\n", "").isprintable()
        assert "a pool" in shown

    def test_what_has_no_rate(self):
        before = {**TOLD, "time": 5.0, "pools": [row(allocations=10), row(name="twin"), row(name="twin")]}
        after = {**TOLD, "time": 6.0, "pools": [row(allocations=5), row(name="twin"), row(name="twin")]}
        assert " 10 " not in render(after, before)
        assert "0 pools" in render({**TOLD, "pools": []}, before)


TOLD = {"format_version": 1, "pid": 7, "program": "train.py", "time": 0.0}


def row(name="mine", **figures):
    zeros = dict.fromkeys(vpool.stats.PoolStats.__slots__, 0)
    return {"name": name, "device": 0, "source": "cuda", **zeros, **figures}


class TestNvtx:
    @pytest.fixture
    def tool(self, monkeypatch):
        """What a profiler would see: a list of calls."""
        nvtx = pytest.importorskip("nvtx")

        calls = []

        class Counter:
            def __init__(self, name):
                self.name = name

            def sample(self, value):
                calls.append(("sample", self.name, value))

        class Domain:
            def start_range(self, message, category, payload):
                calls.append(("start", message, category, payload))
                return len(calls)

            def end_range(self, number):
                calls.append(("end", calls[number - 1][1]))

            def get_counter(self, name, dtype):
                assert dtype is int
                return Counter(name)

        monkeypatch.setattr(nvtx, "get_domain", lambda name: Domain())
        return calls

    def test_blocks_are_ranges(self, tool):
        with vpool.Pool(source="simulated", name="seen", debug="nvtx") as pool:
            with vpool.tag("weights"):
                buffer = pool.empty(1000)
            ptr = pool.allocate(500)
            pool.deallocate(ptr)
            buffer.close()
        samples = [value for kind, *told in tool if kind == "sample" for value in told[1:]]
        assert samples == [1000, 1500, 1000, 0]
        assert [call for call in tool if call[0] != "sample"] == [
            ("start", "weights", "seen", 1000),
            ("start", "block", "seen", 500),
            ("end", "block"),
            ("end", "weights"),
        ]

    def test_sites_name_what_has_no_tag(self, tool):
        with vpool.Pool(source="simulated", debug="nvtx,sites") as pool:
            pool.empty(1000)
        assert "test_live.py" in tool[0][1]
        assert tool[-2][0] == "end"

    def test_a_free_that_fails_ends_no_range(self, tool):
        with vpool.Pool(source="simulated", debug="nvtx,quarantine") as pool:
            ptr = pool.allocate(1000)
            pool.deallocate(ptr)
            with pytest.raises(vpool.DoubleFreeError):
                pool.deallocate(ptr)
        assert [call[0] for call in tool] == ["start", "sample", "end", "sample"]

    def test_a_buffer_whose_free_fails_is_gone_all_the_same(self, tool, monkeypatch):
        def failing(*args):
            raise RuntimeError("not now")

        told = []
        monkeypatch.setattr(sys, "unraisablehook", told.append)
        with vpool.Pool(source="simulated", debug="nvtx") as pool:
            buffer = pool.empty(1000)
            with monkeypatch.context() as patched:
                patched.setattr(Debugger, "leave", failing)
                del buffer
            assert pool.stats.allocated_bytes == 0
        assert len(told) == 1
        assert [call[0] for call in tool] == ["start", "sample", "end", "sample"]

    def test_a_free_that_fails_leaves_the_range(self, tool, monkeypatch):
        with vpool.Pool(source="simulated", debug="nvtx") as pool:
            ptr = pool.allocate(1000)
            with monkeypatch.context() as patched:
                patched.setattr(Debugger, "leave", lambda *args: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    pool.deallocate(ptr)
            assert [call[0] for call in tool] == ["start", "sample"]
            pool.deallocate(ptr)
        assert [call[0] for call in tool] == ["start", "sample", "end", "sample"]

    def test_with_the_package_and_without_a_tool(self):
        pytest.importorskip("nvtx")
        with vpool.Pool(source="simulated", debug="nvtx") as pool:
            pool.empty(1000).close()

    def test_a_pool_without_the_mode_does_not_import_it(self):
        code = "import sys, vpool; vpool.Pool(source='simulated').empty(5); sys.exit('nvtx' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code]).returncode == 0

    def test_without_the_package(self, without):
        without("nvtx")
        with pytest.raises(vpool.Error, match=r'pip install "vpool\[nvtx\]"'):
            vpool.Pool(source="simulated", debug="nvtx")

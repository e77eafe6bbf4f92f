"""``vpool run``: a program runs as it does by itself, and its memory comes from a pool."""

import json
import os
import signal
import subprocess
import sys
import zipfile

import pytest

import vpool
from tests.helpers.pools import KIB, MIB
from vpool.integrations.on_import import after_import


def by(command, *arguments, cwd, **variables):
    command = [sys.executable, "-W", "error", *command, *map(str, arguments)]
    environment = os.environ | variables
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )


def plainly(*arguments, cwd, **variables):
    return by([], *arguments, cwd=cwd, **variables)


def under_a_pool(*arguments, cwd, **variables):
    return by(["-m", "vpool", "run"], *arguments, cwd=cwd, **variables)


@pytest.fixture
def folder(tmp_path):
    """Where the program is called from; its files are in ``programs``."""
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "beside.py").write_text("name = __name__")
    return tmp_path


def script(folder, text, name="program.py"):
    path = folder / "programs" / name
    path.write_text(text)
    return path.relative_to(folder)


WHO_AM_I = """
import sys, pickle, __main__
class Kept: pass
pickle.loads(pickle.dumps(Kept()))
spec = __spec__ and __spec__.name
print(sys.argv, __name__, __file__, spec, __package__, __main__.Kept is Kept, sys.path[0], type(__loader__).__name__)
"""


class TestAsByItself:
    """Whatever a program says and ends with is the same."""

    @pytest.mark.parametrize("arguments", [[], ["--record", "x", "-m", "--help", "--", "--json"]])
    def test_a_script(self, folder, arguments):
        path = script(folder, WHO_AM_I + "import beside; print(beside.name)")
        expected = plainly(path, *arguments, cwd=folder)
        found = under_a_pool(path, *arguments, cwd=folder)
        assert (found.returncode, found.stdout) == (0, expected.stdout)
        assert "program.py" in found.stdout

    @pytest.mark.parametrize("name", ["programs.inside", "programs.package", "programs"])
    def test_a_module(self, folder, name):
        script(folder, WHO_AM_I, "inside.py")
        script(folder, WHO_AM_I, "__main__.py")
        (folder / "programs" / "package").mkdir()
        script(folder, WHO_AM_I, "package/__main__.py")
        expected = plainly("-m", name, "-x", "--json", cwd=folder)
        found = under_a_pool("-m", name, "-x", "--json", cwd=folder)
        assert (found.returncode, found.stdout) == (0, expected.stdout)
        assert "-x" in found.stdout

    def test_a_folder_and_an_archive(self, folder):
        script(folder, WHO_AM_I + "import beside", "__main__.py")
        with zipfile.ZipFile(folder / "all.zip", "w") as archive:
            for name in ("__main__.py", "beside.py"):
                archive.write(folder / "programs" / name, name)
        for path in ("programs", "all.zip"):
            assert under_a_pool(path, "a", cwd=folder).stdout == plainly(path, "a", cwd=folder).stdout != ""

    @pytest.mark.parametrize(
        "text",
        [
            "import sys; sys.exit()",
            "import sys; sys.exit(7)",
            "import sys; sys.exit(256)",
            "import sys; sys.exit(True)",
            "import sys; sys.exit('why')",
            "import sys; sys.exit(2.5)",
            "raise SystemExit([1])",
            "def inner():\n    raise ValueError('of mine')\ninner()",
            "import vpool\nraise vpool.Error('of mine')",
            "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise OSError('after it') from error",
            "import nothing_of_that_name",
            "def broken(:\n    pass",
            "import sys\nsys.excepthook = lambda *error: print('a hook', error[0])\n1 / 0",
            "import warnings; warnings.warn('is an error')",
        ],
    )
    def test_its_end(self, folder, text):
        path = script(folder, text)
        expected, found = plainly(path, cwd=folder), under_a_pool(path, cwd=folder)
        assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
        assert found.stderr == expected.stderr + "vpool run: no pool was used\n"

    def test_an_interrupt(self, folder):
        # Whoever runs the tests in the background may have made processes deaf to it.
        listen = "signal.signal(signal.SIGINT, signal.default_int_handler)"
        path = script(folder, f"import os, signal, time\n{listen}\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)")
        found = under_a_pool(path, cwd=folder)
        assert found.returncode in (130, -signal.SIGINT)
        assert "KeyboardInterrupt" in found.stderr

    def test_threads_and_what_runs_at_exit(self, folder):
        text = """
import atexit, pickle, threading, time
class Kept: pass
def work():
    time.sleep(0.3)
    print("thread", pickle.loads(pickle.dumps(Kept())).__class__ is Kept)
threading.Thread(target=work).start()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
atexit.register(lambda: print("at exit", pickle.loads(pickle.dumps(Kept())).__class__ is Kept))
"""
        path = script(folder, text)
        expected = plainly(path, cwd=folder)
        assert under_a_pool(path, cwd=folder).stdout == expected.stdout == "thread True\nat exit True\n"

    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_processes_of_its_own(self, folder, method):
        text = f"""
import multiprocessing
def double(number):
    return 2 * number
if __name__ == "__main__":
    with multiprocessing.get_context({method!r}).Pool(2) as workers:
        print(workers.map(double, range(3)))
"""
        assert under_a_pool(script(folder, text), cwd=folder).stdout == "[0, 2, 4]\n"

    def test_a_fork_of_its_own_tells_no_report(self, folder):
        text = """
import os, vpool
vpool.deallocate(vpool.allocate(1000))
if os.fork() == 0:
    raise SystemExit(3)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
        found = under_a_pool("--record", "out.npz", script(folder, text), cwd=folder)
        assert (found.returncode, found.stdout) == (0, "3\n")
        assert found.stderr.count("default-0") == found.stderr.count("recorded: ") == 1

    @pytest.mark.parametrize(
        ("arguments", "status", "message"),
        [
            (["nothing.py"], 1, "nothing.py"),
            (["-m", "nothing_of_that_name"], 1, "nothing_of_that_name"),
            (["-m", "json.nothing"], 1, "json.nothing"),
            (["--policy", "nothing.toml", "programs/beside.py"], 1, "nothing.toml"),
            (["--policy", "programs/beside.py", "programs/beside.py"], 1, "beside.py"),
            (["--record", "programs/beside.py", "programs/beside.py"], 1, "the file to read"),
            (["--record", "nowhere/out.npz", "programs/beside.py"], 1, "nowhere"),
            (["--"], 2, "PROGRAM"),
            ([], 2, "PROGRAM"),
            (["--unknown", "programs/beside.py"], 2, "--unknown"),
        ],
    )
    def test_what_is_not_there_is_one_line(self, folder, arguments, status, message):
        found = under_a_pool(*arguments, cwd=folder)
        assert (found.returncode, found.stdout) == (status, "")
        assert message in found.stderr
        assert found.stderr.count("\n") == 1


USES = f"""
import vpool
with vpool.tag("mine"):
    kept = vpool.empty({3 * MIB})
for _ in range(10):
    vpool.deallocate(vpool.allocate({5 * KIB}))
"""


class TestReports:
    def test_the_table(self, folder):
        found = under_a_pool(script(folder, USES), cwd=folder)
        header, row = found.stderr.splitlines()
        assert header.startswith("pool ")
        assert row.split()[:2] == ["default-0", vpool.default_pool().source.name]
        assert "11" in row.split()

    def test_the_whole_report(self, folder):
        found = under_a_pool("--report", script(folder, USES), cwd=folder)
        assert "pool 'default-0'" in found.stderr
        assert "mine" in found.stderr

    def test_a_recording_and_a_policy(self, folder):
        vpool.Policy(vpool.Dynamic(initial=64 * MIB), source="simulated").save(folder / "policy.toml")
        options = ["--policy", "policy.toml", "--record", "out.npz", "--json"]
        path = script(folder, "import os; os.chdir('/')\n" + USES)
        found = json.loads(under_a_pool(*options, path, cwd=folder).stdout)
        assert (found["exit_status"], found["recorded"], found["not_hooked"]) == (0, [str(folder / "out.npz")], {})
        (pool,) = found["pools"]
        assert (pool["source"], pool["peak_reserved_bytes"]) == ("simulated", 64 * MIB)
        trace = vpool.Trace.load(folder / "out.npz")
        assert trace.allocations == 11
        assert trace.details.tags.count("mine") == 1

    @pytest.mark.parametrize("text", ["pass", "import vpool; vpool.Pool(source='host', name='own').empty(1)"])
    def test_without_a_default_pool_there_is_no_recording_and_a_line_says_so(self, folder, text):
        found = under_a_pool("--record", "out.npz", script(folder, text), cwd=folder)
        assert found.returncode == 0
        assert found.stderr.splitlines()[-1].startswith("vpool run: out.npz was not written: ")
        assert not (folder / "out.npz").exists()

    def test_a_program_that_fails_is_recorded_too(self, folder):
        found = under_a_pool("--record", "out.npz", script(folder, USES + "1 / 0"), cwd=folder)
        assert found.returncode == 1
        assert vpool.Trace.load(folder / "out.npz").allocations == 11

    def test_pools_that_were_closed_and_pools_of_the_programs_own(self, folder):
        text = USES + "vpool.default_pool().close(); own = vpool.Pool(source='host', name='own'); " + USES.lstrip()
        found = under_a_pool("--record", "out.npz", "--json", script(folder, text), cwd=folder)
        found = json.loads(found.stdout)
        assert [pool["name"] for pool in found["pools"]] == ["default-0", "default-0", "own"]
        assert [os.path.basename(path) for path in found["recorded"]] == ["out.npz", "out-default-0-1.npz"]
        assert [vpool.Trace.load(path).allocations for path in found["recorded"]] == [11, 11]


FRAMEWORK = """
import sys
print("imported", __name__, __spec__.loader is __loader__)
installed = []
"""


@pytest.fixture
def frameworks(folder):
    """Modules with the names of frameworks, and plug-ins that note what they are asked for."""
    for name in ("torch", "cupy", "rmm"):
        script(folder, FRAMEWORK, f"{name}.py")
    plugins = """
import sys, types
for name in ("torch", "cupy", "rmm"):
    plugin = types.ModuleType(f"vpool.integrations.{name}")
    def install(name=name):
        print("installed", name, sys.modules[name].installed)
    plugin.install = install
    sys.modules[plugin.__name__] = plugin
"""
    script(folder, plugins, "plugins.py")
    return folder


class TestFrameworks:
    def lines(self, folder, text, *options, **variables):
        found = under_a_pool(*options, script(folder, "import plugins\n" + text), cwd=folder, **variables)
        assert found.returncode == 0, found.stderr
        return found.stdout.splitlines()

    def test_each_is_hooked_when_it_is_imported(self, frameworks):
        text = "print('begin'); import torch; print('between'); from cupy import installed; import torch; import rmm"
        assert self.lines(frameworks, text) == [
            *("begin", "imported torch True", "installed torch []", "between"),
            *("imported cupy True", "installed cupy []", "imported rmm True"),
        ]

    def test_only_those_that_are_asked_for(self, frameworks):
        lines = self.lines(frameworks, "import torch, cupy, rmm", "--cupy", "--rmm")
        assert [line for line in lines if line.startswith("installed")] == ["installed cupy []", "installed rmm []"]

    def test_an_import_that_fails_at_first(self, frameworks):
        first = "import sys\nif not hasattr(sys, 'again'):\n    sys.again = 1\n    1 / 0\n"
        script(frameworks, first + FRAMEWORK, "torch.py")
        text = "try:\n    import torch\nexcept ZeroDivisionError:\n    print('failed')\nimport torch"
        assert self.lines(frameworks, text) == ["failed", "imported torch True", "installed torch []"]

    def test_a_plugin_that_cannot_serve_is_told_and_the_program_goes_on(self, frameworks):
        text = """
import plugins, sys
def fail():
    raise RuntimeError("no\\nCUDA")
sys.modules["vpool.integrations.torch"].install = fail
import torch
print("goes on")
"""
        found = under_a_pool("--json", script(frameworks, text), cwd=frameworks)
        assert found.stderr.splitlines()[0] == "vpool run: torch does not allocate from a pool: no CUDA"
        assert json.loads(found.stdout.partition("goes on\n")[2])["not_hooked"] == {"torch": "no CUDA"}

    @pytest.mark.parametrize(
        ("options", "before", "expected"),
        [
            ([], None, "vpool.integrations.numba"),
            (["--numba"], None, "vpool.integrations.numba"),
            (["--cupy"], None, "None"),
            (["--numba"], "another", "vpool.integrations.numba"),
            ([], "another", "another"),
        ],
    )
    def test_numba_is_told_by_its_variable(self, folder, options, before, expected):
        path = script(folder, "import os; print(os.environ.get('NUMBA_CUDA_MEMORY_MANAGER'))")
        variables = {"NUMBA_CUDA_MEMORY_MANAGER": before} if before else {}
        assert under_a_pool(*options, path, cwd=folder, **variables).stdout == f"{expected}\n"

    def test_real_cupy(self, folder):
        pytest.importorskip("cupy")
        path = script(folder, "import cupy; print(cupy.cuda.get_allocator().__module__)")
        assert under_a_pool(path, cwd=folder).stdout == "vpool.integrations.cupy\n"

    def test_real_numba(self, folder):
        pytest.importorskip("numba.cuda")
        text = """
import warnings; warnings.simplefilter("ignore")
from numba.cuda.cudadrv import driver
driver._ensure_memory_manager()
print(driver._memory_manager.__module__)
"""
        assert under_a_pool(script(folder, text), cwd=folder).stdout == "vpool.integrations.numba\n"


class TestAfterImport:
    @pytest.fixture(autouse=True)
    def modules(self, tmp_path, monkeypatch):
        (tmp_path / "one_to_import.py").write_text("text = 'here'")
        (tmp_path / "folder_alone").mkdir()
        monkeypatch.syspath_prepend(tmp_path)
        before = list(sys.meta_path)
        yield
        assert sys.meta_path == before
        for name in ("one_to_import", "folder_alone"):
            sys.modules.pop(name, None)

    def test_it_is_called_once(self):
        seen = []
        after_import("one_to_import", lambda module: seen.append(module.text))
        import one_to_import

        assert seen == ["here"]
        after_import("one_to_import", seen.append)
        assert seen == ["here", one_to_import]

    def test_the_wish_is_taken_back(self):
        forget = after_import("one_to_import", pytest.fail)
        forget()
        forget()
        __import__("one_to_import")

    def test_what_is_not_there_and_what_has_no_code(self):
        wishes = [after_import(name, pytest.fail) for name in ("nothing_of_that_name", "folder_alone")]
        with pytest.raises(ModuleNotFoundError):
            __import__("nothing_of_that_name")
        __import__("folder_alone")
        for forget in wishes:
            forget()

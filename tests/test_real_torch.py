"""What PyTorch itself makes of vpool, as far as that goes with a build of it that knows no GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import vpool
from tests.helpers import torch_fake
from tests.helpers.frameworks import fake_pool
from tests.helpers.pools import GIB, KIB, MIB, run_cleanly, run_python
from tests.test_torch_install import Calls
from vpool.integrations import torch as plugin

torch = pytest.importorskip("torch")

PROGRAMS = Path(__file__).parent / "gpu" / "programs"


# Ranks.

RANK = """
import sys, warnings
warnings.simplefilter("ignore")
import torch.distributed as distributed
import vpool
from vpool.integrations import torch as plugin

rank, file = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
pool = vpool.Pool(vpool.Dynamic(initial="1MiB"), source="host", name=f"of-{rank}")
pool.allocate(1024 * (rank + 1))
gathered = plugin.gather_reports()
for row in gathered.rows:
    print(row["where"], row["name"], row["allocated_bytes"])
print(len(str(gathered).splitlines()))
alone = plugin.gather_reports(distributed.new_group([1])) if rank else distributed.new_group([1])
print([row["where"] for row in alone.rows] if rank else None)
distributed.destroy_process_group()
"""


def test_each_rank_gets_the_reports_of_all(tmp_path):
    pytest.importorskip("torch.distributed")
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), tmp_path / "meet"], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    for rank, lines in enumerate(said):
        assert lines[:3] == ["rank 0 of-0 1024", "rank 1 of-1 2048", "4"]
        assert lines[3] == ("['rank 1']" if rank else "None")


def test_there_have_to_be_ranks():
    with pytest.raises(RuntimeError, match="init_process_group"):
        plugin.gather_reports()


# A build without CUDA.

without_cuda = pytest.mark.skipif(hasattr(torch._C, "_cuda_customAllocator"), reason="this PyTorch has CUDA")


@without_cuda
@pytest.mark.parametrize("call", [plugin.install, plugin.mem_pool])
def test_a_build_without_cuda_is_one_clear_line(call):
    with fake_pool() as pool, pytest.raises(RuntimeError, match="was built without CUDA") as caught:
        call(pool)
    assert "\n" not in str(caught.value)


@without_cuda
def test_a_program_under_vpool_run_goes_on_without(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import torch; print(int(torch.ones(10).sum()), torch.__spec__.name)")
    code = f"import sys; from vpool.commands import main; sys.exit(main(['run', '--torch', {str(program)!r}]))"
    done = run_python("import warnings; warnings.simplefilter('ignore'); " + code, timeout=120)
    assert (done.returncode, done.stdout) == (0, "10 torch\n")
    assert done.stderr.splitlines()[0].startswith("vpool run: torch does not allocate from a pool: PyTorch")


def test_vpool_does_not_begin_pytorchs_use_of_cuda():
    code = """
import warnings
warnings.simplefilter("ignore")
import torch, vpool
from vpool.integrations import torch as plugin
print(torch.cuda.is_initialized())
"""
    assert run_cleanly(code, timeout=120) == "False\n"


# The functions that it calls, and what it reads.


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """A module with the files of PyTorch itself, and what catches its exceptions."""
    if torch_fake.compiler() is None:
        pytest.skip("no C++ compiler")
    files = Path(torch.__file__).parent
    fake = torch_fake.torch_of(tmp_path)
    fake.__file__, fake.__version__ = torch.__file__, torch.__version__
    fake._C._GLIBCXX_USE_CXX11_ABI = torch._C._GLIBCXX_USE_CXX11_ABI
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(plugin, "_installed", False)
    catcher = tmp_path / "catcher.so"
    options = "-I", files / "include", "-L", files / "lib", "-lc10", f"-Wl,-rpath,{files / 'lib'}"
    source = Path(torch_fake.__file__).with_name("torch_catcher.cpp")
    subprocess.run(
        [torch_fake.compiler(), "-shared", "-fPIC", "-std=c++20", source, "-o", catcher, *options], check=True
    )
    return fake, torch_fake.ctypes.CDLL(str(catcher))


def test_pytorchs_own_exception_is_thrown(compiled):
    """Compiled against its own headers and library, so that it becomes ``torch.OutOfMemoryError``."""
    fake, catcher = compiled
    with fake_pool() as pool:
        plugin.install(pool, statistics=False)
        calls = Calls(fake, catcher)
        status, block = calls.lend(KIB)
        assert status == 0
        status, text = calls.lend(GIB)
        assert status == 1
        assert "Limit 4.00 MiB" in text
        calls.take(block)
        assert pool.stats.requested_bytes == 0


def test_its_summary_finds_every_figure(monkeypatch, no_default_pools):
    from vpool.integrations import torch_stats

    with fake_pool() as pool:
        vpool.set_default_pool(pool)
        pool.allocate(3 * MIB)
        monkeypatch.setattr(torch_stats.numbered, "served", lambda device: pool)
        monkeypatch.setattr(torch.cuda.memory, "memory_stats", plugin.memory_stats)
        monkeypatch.setattr(torch.cuda._utils, "_get_device_index", lambda device, optional=False: 0)
        monkeypatch.setattr(torch.cuda.memory, "_get_device_index", lambda device, optional=False: 0)
        summary = torch.cuda.memory.memory_summary(0)
        assert "3.00 MiB" in summary or "3072 KiB" in summary
        assert torch.cuda.memory.memory_allocated(0) == pool.stats.allocated_bytes


# The programs that are measured on a GPU.


@pytest.mark.parametrize("name", ["training", "generation", "detection"])
def test_the_programs_work(name):
    command = [sys.executable, PROGRAMS / f"{name}.py", "--device", "cpu", "--small", "--steps", "2"]
    found = json.loads(subprocess.check_output(command, text=True, timeout=240))
    assert (found["program"], found["mode"], len(found["digest"])) == (name, "default", 16)
    assert found["median_step_seconds"] > 0

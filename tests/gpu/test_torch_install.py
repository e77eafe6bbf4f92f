"""PyTorch with every tensor in a pool, on a real device: programs of their own, since an allocator is set once."""

import pytest

import vpool
from tests.helpers.pools import run_cleanly, run_python
from vpool.errors import SourceError

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

try:
    vpool.sources.Cuda()
except SourceError as error:
    pytest.skip(str(error), allow_module_level=True)

pytest.importorskip("torch")

BEGIN = """
import warnings
warnings.simplefilter("ignore")
import gc, threading, time, torch, vpool
from vpool.integrations import torch as plugin
pool = vpool.Pool(vpool.Dynamic(initial=0, limit="4GiB"), source={source!r})
plugin.install(pool)
MIB, GIB = 1 << 20, 1 << 30
"""
# The end is checked, too: nothing is live, and every invariant holds.
END = """
gc.collect()
torch.cuda.synchronize()
pool.check()
print("end")
"""


def program(body, source="cuda"):
    return run_cleanly(BEGIN.format(source=source) + body + END, timeout=300)


@pytest.fixture(params=["cuda", "cuda-vmm"])
def source(request):
    return request.param


def test_tensors_and_statistics(source):
    body = """
tensor = torch.ones(1_000_000, device="cuda")
assert pool.stats.requested_bytes >= tensor.nbytes
assert vpool.explain(tensor.data_ptr()) is not None
assert torch.cuda.memory_allocated() == pool.stats.allocated_bytes
assert torch.cuda.max_memory_reserved() == pool.stats.peak_reserved_bytes
assert float(tensor.sum()) == 1_000_000
assert "GPU reserved memory" in torch.cuda.memory_summary()
del tensor
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
assert torch.cuda.max_memory_allocated() == pool.stats.allocated_bytes
"""
    assert program(body, source) == "end\n"


def test_out_of_memory(source):
    body = """
kept = torch.zeros(1000, device="cuda")
for _ in range(3):
    try:
        torch.empty(8 * GIB, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        assert "Limit 4.00 GiB" in str(error), error
    else:
        raise AssertionError("there was memory")
    assert float((kept + 1).sum()) == 1000
held = [torch.empty(512 * MIB, dtype=torch.uint8, device="cuda") for _ in range(7)]
try:
    torch.empty(GIB, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    assert "What would help" in str(error)
del held
torch.empty(GIB, dtype=torch.uint8, device="cuda")
torch.cuda.set_per_process_memory_fraction(0.02)
limit = pool.inspect().limit_bytes
assert limit == int(0.02 * pool.source.memory()[1])
try:
    torch.empty(limit + MIB, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    pass
else:
    raise AssertionError("there was memory")
"""
    body = body.replace("torch.cuda.set_per_process", "torch.cuda.empty_cache(); torch.cuda.set_per_process")
    assert program(body, source) == "end\n"


TRAINING = """
def train():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 30 * 30, 100)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for seed in range(10):
        torch.manual_seed(seed)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.utils.checkpoint.checkpoint(
                model, torch.randn(32 + seed, 3, 32, 32, device="cuda"), use_reentrant=False
            ).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
import torch.utils.checkpoint
torch.use_deterministic_algorithms(True)
torch.backends.cudnn.benchmark = False
"""


def test_training_is_the_same(source, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    plain = "import warnings; warnings.simplefilter('ignore'); import torch" + TRAINING + "print(train())"
    expected = run_python(plain, timeout=300)
    assert expected.returncode == 0, expected.stderr
    assert program(TRAINING + "print(train())", source) == expected.stdout + "end\n"


def test_streams(source):
    """A tensor that another stream uses is not lent before that is done, where `record_stream` says so."""
    body = """
side = torch.cuda.Stream()
for turn in range(200):
    tensor = torch.full((MIB,), turn % 100, dtype=torch.uint8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = sum(tensor.sum(dtype=torch.int64) for _ in range(10))
    tensor.record_stream(side)
    del tensor
    torch.full((MIB,), 255, dtype=torch.uint8, device="cuda")
    side.synchronize()
    assert int(total) == 10 * MIB * (turn % 100), turn
    del total
assert pool.source.name != "cuda" or pool.crossings["drains"] == 0, pool.crossings
"""
    assert program(body, source) == "end\n"


def test_threads(source):
    body = """
wrong = []
def work(seed):
    with torch.cuda.stream(torch.cuda.Stream()):
        for turn in range(200):
            tensor = torch.full((100_000 + turn,), seed * 1000 + turn, device="cuda")
            tensor = tensor + 1
            if int(tensor.sum()) != (seed * 1000 + turn + 1) * len(tensor):
                wrong.append((seed, turn))
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not wrong, wrong
"""
    assert program(body, source) == "end\n"


def test_graphs(source):
    body = """
def work(tensor):
    return torch.nn.functional.gelu(tensor * 2 + 1).cumsum(0)
source = torch.arange(1000.0, device="cuda")
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        work(source)
torch.cuda.current_stream().wait_stream(side)
graphs = []
for _ in range(3):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work(source)
    graphs.append((graph, result))
others = [torch.full((1000,), 5.0, device="cuda") for _ in range(100)]
for turn in range(5):
    source.copy_(torch.arange(1000.0, device="cuda") + turn)
    expected = work(source)
    for graph, result in graphs:
        result.zero_()
        graph.replay()
        assert torch.equal(result, expected)
assert all(bool((other == 5).all()) for other in others)
assert len(pool.captures) == 3
del graph, result, graphs
gc.collect()
torch.cuda.synchronize()
torch.cuda.empty_cache()
waited = time.monotonic() + 10
while pool.captures and time.monotonic() < waited:  # the driver tells on a thread of its own
    time.sleep(0.01)
assert pool.captures == (), pool.captures
"""
    assert program(body, source) == "end\n"


def test_a_program_that_used_cuda_before():
    body = """
import torch, vpool
from vpool.integrations import torch as plugin
torch.zeros(1, device="cuda")
try:
    plugin.install()
except RuntimeError as error:
    print(error)
"""
    assert "before it does" in run_cleanly("import warnings\nwarnings.simplefilter('ignore')\n" + body, timeout=300)


def test_a_fork_before_cuda_is_used():
    """Neither vpool nor its plug-in begin the use of CUDA when they are imported, so a child can."""
    body = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch, vpool
from vpool.integrations import torch as plugin
if os.fork() == 0:
    plugin.install()
    assert float(torch.ones(10, device="cuda").sum()) == 10
    os._exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    assert run_cleanly(body, timeout=300) == "0\n"


def test_the_end_with_tensors_that_live():
    assert program("kept = [torch.ones(1000, device='cuda') for _ in range(10)]\n") == "end\n"


def test_three_frameworks_in_one_pool(source):
    pytest.importorskip("cupy")
    pytest.importorskip("numba.cuda")
    body = """
import cupy
import numpy as np
from vpool.integrations import cupy as cupy_plugin, numba as numba_plugin
cupy_plugin.install(pool)
numba_plugin.install(pool)
from numba import cuda
before = pool.stats.requested_bytes
tensor = torch.arange(1000, device="cuda")
array = cupy.asarray(tensor) * 2
host = cuda.to_device(array.get())
assert pool.stats.requested_bytes - before >= 3 * 8000
assert (host.copy_to_host() == np.arange(1000) * 2).all()
assert int(torch.as_tensor(array, device="cuda").sum()) == 999_000
with pool.measure() as measured:
    cupy.zeros(MIB)
assert measured.peak_allocated_bytes >= 8 * MIB
del tensor, array, host
"""
    assert program(body, source) == "end\n"

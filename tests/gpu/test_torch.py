"""PyTorch in a pool, on a real device."""

import gc
import threading

import pytest

import vpool
from tests.helpers.pools import GIB, MIB, run_cleanly
from vpool.errors import SourceError

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

try:
    vpool.sources.Cuda()
except SourceError as error:
    pytest.skip(str(error), allow_module_level=True)

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def pool():
    """One for all tests: PyTorch's functions are bound to it for good."""
    return vpool.Pool(vpool.Dynamic(initial=0, limit="4GiB"), source="cuda")


@pytest.fixture
def segments(pool):
    from vpool.integrations import torch as plugin

    torch.cuda.empty_cache()
    segments = plugin.mem_pool(pool)
    yield segments
    del segments
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    pool.check()


def test_tensors_lie_in_the_pool(pool, segments):
    with torch.cuda.use_mem_pool(segments):
        tensor = torch.ones(1_000_000, device="cuda")
        small = torch.ones(10, device="cuda")
    # 2 MiB for what is small, and what the large one is rounded up to.
    assert pool.stats.requested_bytes >= 2 * MIB + tensor.nbytes
    assert vpool.explain(tensor.untyped_storage().data_ptr()) is not None
    assert float(tensor.sum() + small.sum()) == 1_000_010
    assert torch.cuda.memory_allocated() >= tensor.nbytes
    del tensor, small


def test_segments_come_back(pool, segments):
    before = pool.stats.requested_bytes
    with torch.cuda.use_mem_pool(segments):
        tensors = [torch.ones(10_000_000, device="cuda") for _ in range(3)]
    assert pool.stats.requested_bytes > before
    del tensors


def test_everything_came_back_at_the_end_of_the_tests_before(pool):
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert pool.stats.requested_bytes == 0


def test_out_of_memory_is_pytorchs_own_error(pool, segments):
    with torch.cuda.use_mem_pool(segments):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(5 * GIB, dtype=torch.uint8, device="cuda")
        tensor = torch.ones(1000, device="cuda")
    assert float(tensor.sum()) == 1000
    del tensor


def test_a_step_of_training_is_the_same(segments):
    def step():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(5):
            torch.manual_seed(seed)
            loss = model(torch.randn(64, 256, device="cuda")).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    expected = step()
    with torch.cuda.use_mem_pool(segments):
        assert step() == expected


def test_threads_and_statistics_do_not_block_each_other(segments):
    """Statistics take PyTorch's lock with the GIL, and allocations want segments with that lock."""
    stop = threading.Event()

    def look():
        while not stop.is_set():
            torch.cuda.memory_stats()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        with torch.cuda.use_mem_pool(segments):
            for turn in range(50):
                tensor = torch.empty((1 + turn % 7) * 30 * MIB, dtype=torch.uint8, device="cuda")
                del tensor
    finally:
        stop.set()
        thread.join()


def test_a_graph(segments):
    side = torch.cuda.Stream()
    source = torch.arange(1000.0, device="cuda")
    with torch.cuda.stream(side):
        (source * 2 + 1).sum()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=segments.id):
        temporary = source * 2
        result = temporary + 1
        del temporary
    others = [torch.full((1000,), 5.0, device="cuda") for _ in range(20)]
    source.fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    assert bool((result == 7).all())
    assert all(bool((other == 5).all()) for other in others)
    del graph, result


def test_the_interpreter_ends_quietly():
    code = """
import warnings
warnings.simplefilter("ignore")
import torch, vpool
from vpool.integrations import torch as plugin
pool = vpool.Pool(source="cuda")
segments = plugin.mem_pool(pool)
with torch.cuda.use_mem_pool(segments):
    kept = torch.ones(1000, device="cuda")
print(int(kept.sum()))
"""
    assert run_cleanly(code, timeout=120) == "1000\n"

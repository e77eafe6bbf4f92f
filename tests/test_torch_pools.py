"""PyTorch's plug-in: what it gives PyTorch, with a PyTorch that only notes it."""

import contextlib
import ctypes
import types

import pytest

import vpool
from tests.helpers.frameworks import fake_pool, without
from tests.helpers.pools import MIB, assert_whole
from vpool.integrations import torch as plugin

LEND = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
TAKE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


@pytest.fixture(scope="module")
def pool():
    return fake_pool()  # its functions are bound for good


@pytest.fixture
def torch(monkeypatch):
    """As much of PyTorch as makes a memory pool."""
    torch = types.ModuleType("torch")
    torch.__version__ = "0"
    torch.devices = []

    @contextlib.contextmanager
    def device(ordinal):
        torch.devices.append(ordinal)
        yield

    torch._C = types.SimpleNamespace(_cuda_customAllocator=lambda *addresses: ("allocator", *addresses))
    torch.cuda = types.SimpleNamespace(
        device=device, current_device=lambda: 0, MemPool=lambda allocator, **options: (allocator, options)
    )
    monkeypatch.setitem(__import__("sys").modules, "torch", torch)
    return torch


def test_pytorch_gets_two_functions_that_work(torch, pool):
    (kind, lend, take), options = plugin.mem_pool(pool, use_on_oom=True)
    assert (kind, options, torch.devices) == ("allocator", {"use_on_oom": True}, [0])
    ptr = LEND(lend)(2 * MIB, 0, None)
    assert pool.stats.requested_bytes == 2 * MIB
    TAKE(take)(ptr, 2 * MIB, 0, None)
    assert_whole(pool)


def test_the_default_pool(torch, pool, no_default_pools):
    vpool.set_default_pool(pool)
    assert plugin.mem_pool()[0] == plugin.mem_pool(pool)[0]


def test_a_pytorch_without_cuda(torch, pool):
    del torch._C._cuda_customAllocator
    with pytest.raises(RuntimeError, match="without CUDA"):
        plugin.mem_pool(pool)


def test_a_pool_with_debug_modes(torch):
    with fake_pool(debug="leaks") as pool, pytest.raises(ValueError, match="debug modes"):
        plugin.mem_pool(pool)


def test_a_missing_pytorch(monkeypatch, pool):
    without(monkeypatch, "torch")
    with pytest.raises(ImportError, match=r'pip install "vpool\[torch\]"'):
        plugin.mem_pool(pool)

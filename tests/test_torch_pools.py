"""PyTorch's plug-in: what it gives PyTorch, with a PyTorch that only notes it."""

import ctypes
import sys

import pytest

import vpool
from tests.helpers.frameworks import fake_pool, without
from tests.helpers.pools import MIB, assert_whole
from tests.helpers.torch_fake import torch_of
from vpool.integrations import torch as plugin

LEND = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
TAKE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


@pytest.fixture(scope="module")
def pool():
    return fake_pool()  # its functions are bound for good


@pytest.fixture
def torch(monkeypatch, tmp_path):
    torch = torch_of(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


def test_pytorch_gets_two_functions_that_work(torch, pool):
    allocator, options = plugin.mem_pool(pool, use_on_oom=True)
    lend, take = allocator.functions
    assert (options, torch.devices) == ({"use_on_oom": True}, [0])
    ptr = LEND(lend)(2 * MIB, 0, None)
    assert pool.stats.requested_bytes == 2 * MIB
    TAKE(take)(ptr, 2 * MIB, 0, None)
    assert_whole(pool)


def test_the_default_pool(torch, pool, no_default_pools):
    vpool.set_default_pool(pool)
    assert plugin.mem_pool()[0].functions == plugin.mem_pool(pool)[0].functions


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

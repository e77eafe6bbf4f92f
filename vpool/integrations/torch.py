"""PyTorch in a pool: its segments (`mem_pool`), or every tensor (`install`).

.. code-block:: python

   import vpool.integrations.torch
   segments = vpool.integrations.torch.mem_pool(pool)

   with torch.cuda.use_mem_pool(segments):
       model = Model().cuda()
"""

import ctypes
import logging
from typing import Any

from vpool._interface import numbered
from vpool._interface.segments import bind
from vpool.defaults import default_pool
from vpool.gathered import Gathered, reports_here
from vpool.integrations import torch_shim
from vpool.integrations.caches import ask_before_failing
from vpool.integrations.packages import PoolOfDevice, of_a_gpu, required
from vpool.integrations.torch_stats import memory_stats, patch_statistics

__all__ = ["gather_reports", "install", "mem_pool", "memory_stats"]

TAG = "torch"  # of blocks for threads that have none

logger = logging.getLogger("vpool")

_kept: list[object] = []  # what PyTorch calls as long as it runs
_installed = False


def mem_pool(pool=None, **options):
    """A ``torch.cuda.MemPool`` whose segments are blocks of a pool.

    Parameters
    ----------
    pool : Pool, optional
        The default pool of PyTorch's current device if not given.
    **options
        For ``torch.cuda.MemPool``.

    Returns
    -------
    torch.cuda.MemPool
        For ``torch.cuda.use_mem_pool``, and as ``pool=`` of ``torch.cuda.graph`` by its ``id``.

    Raises
    ------
    TypeError, ValueError
        For what is no pool of a GPU's memory, and for one with debug modes, which need Python where PyTorch may not
        wait for it.
    RuntimeError
        Where 16 pools of this process serve in this way, PyTorch was built without CUDA, or `install` was called.

    Notes
    -----
    PyTorch's own allocator cuts the segments, so all that it offers goes on working, and its statistics count them.
    A pool that gives none is an out-of-memory error of PyTorch's own, once its cached segments are given back.

    A block that comes back waits for the device, as ``cudaFree`` does.
    """
    torch = _with_cuda()
    if _installed:
        raise RuntimeError("PyTorch allocates from vpool already, and that way knows no memory pools of its own")
    pool = of_a_gpu(pool, torch.cuda.current_device())
    lend, take, _ = bind(pool, TAG)
    ask_before_failing(pool)
    with torch.cuda.device(pool.device):
        allocator = torch._C._cuda_customAllocator(lend, take)
        _kept.append(allocator)
        return torch.cuda.MemPool(allocator, **options)


def install(*pools, statistics=True):
    """Have PyTorch allocate every tensor on a GPU from pools, until the process ends.

    Call it before CUDA is first used.

    Parameters
    ----------
    *pools : Pool
        Each for its own device; a device without one has its default pool.
    statistics : bool
        Whether ``torch.cuda.memory_stats`` and what is made of it, as ``torch.cuda.memory_allocated``, tell of the
        pools.  Without, they raise ``RuntimeError``, as for every allocator that is not PyTorch's.

    Raises
    ------
    RuntimeError
        Where PyTorch has used CUDA already, was built without it, or its functions cannot be compiled: see the page.
        After an earlier call, where that had other pools.

    Notes
    -----
    The same call once more changes nothing.  Out of memory is ``torch.OutOfMemoryError`` with the pool's diagnosis.
    """
    global _installed
    torch = _with_cuda()
    if _installed:
        if all(numbered.served(pool.device) is pool for pool in pools):
            return
        raise RuntimeError("PyTorch allocates from other pools already; it cannot change its allocator again")
    if torch.cuda.is_initialized():
        raise RuntimeError("PyTorch has used CUDA already: call install() before it does")
    pool_of = PoolOfDevice(pools)
    shim = torch_shim.load(torch)

    def serve(device):
        numbered.serve(numbered.Numbered(pool_of(device), _Streams(torch, device), TAG), device)

    numbered.call_unserved(serve)
    for pool in pools:
        serve(pool.device)
    hooks = _Hooks()
    functions = (*numbered.functions(), _address(hooks.reset), _address(hooks.limit))
    shim.vpool_bind((ctypes.c_void_p * len(functions))(*functions))
    allocator = torch._C._cuda_customAllocator(_address(shim.vpool_alloc), _address(shim.vpool_free))
    allocator.set_record_stream_fn(_address(shim.vpool_record_stream))
    allocator.set_reset_fn(_address(shim.vpool_reset))
    allocator.set_memory_fraction_fn(_address(shim.vpool_memory_fraction))
    torch._C._cuda_changeCurrentAllocator(allocator)
    _installed = True
    _kept.extend((allocator, shim, hooks))
    if statistics:
        patch_statistics(torch)


def gather_reports(group=None):
    """The reports of all pools of all ranks of ``torch.distributed``.

    Every rank of the group has to call it, and gets the same.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        All ranks if not given.

    Returns
    -------
    vpool.gathered.Gathered
        By ``"rank 0"`` and so on, as the whole program numbers them.

    Raises
    ------
    RuntimeError
        Where PyTorch has no ``torch.distributed``, or no process group was made.
    """
    distributed = required("torch.distributed", "torch")
    if not distributed.is_available() or not distributed.is_initialized():
        raise RuntimeError("there is no process group: call torch.distributed.init_process_group first")
    answers: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(answers, (distributed.get_rank(), reports_here()), group)
    return Gathered({f"rank {rank}": reports for rank, reports in answers})


def _with_cuda():
    torch = required("torch", "torch")
    if not hasattr(torch._C, "_cuda_customAllocator"):
        raise RuntimeError(f"PyTorch {torch.__version__} was built without CUDA: it has no memory pools")
    return torch


def _address(function):
    return ctypes.cast(function, ctypes.c_void_p).value


class _Stream:
    """A stream of PyTorch's own, which it never destroys."""

    def __init__(self, handle):
        self.cuda_stream = handle


class _Streams:
    """What a pool is given for a stream of PyTorch's, by its handle: called when it meets one."""

    def __init__(self, torch, device):
        self._current = torch._C._cuda_getCurrentStream
        self._handle_of_current = torch._C._cuda_getCurrentRawStream
        self._device = device
        self._lasting = {}

    def __call__(self, handle):
        if handle in self._lasting:
            return self._lasting[handle]
        # Of the stream that is current the id is known: that of one that the program made itself is its handle, and
        # such a stream may be destroyed.  Others have odd ones.
        number, *_ = self._current(self._device)
        if number & 1 and self._handle_of_current(self._device) == handle:
            return self._lasting.setdefault(handle, _Stream(handle))
        return handle


class _Hooks:
    """What PyTorch asks for rarely, in Python."""

    def __init__(self):
        self.reset = ctypes.CFUNCTYPE(ctypes.c_int)(self._reset)
        self.limit = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_double, ctypes.c_int)(self._limit)

    def _reset(self):
        """Of ``torch.cuda.empty_cache``."""
        try:
            for pool in numbered.all_served():
                if not pool.closed:
                    pool.trim()
        except Exception as error:
            logger.warning("torch.cuda.empty_cache: %s", error)
            return 1
        return 0

    def _limit(self, fraction, device):
        """Of ``torch.cuda.set_per_process_memory_fraction``."""
        try:
            pool = numbered.served(device) or default_pool(device)
            pool.set_limit(int(fraction * pool.source.memory()[1]))
        except Exception as error:
            logger.warning("torch.cuda.set_per_process_memory_fraction: %s", error)
            return 1
        return 0

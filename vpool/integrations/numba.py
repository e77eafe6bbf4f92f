"""Numba in a pool: its device arrays have blocks of vpool's, by its interface for external memory management.

.. code-block:: python

   import vpool.integrations.numba
   vpool.integrations.numba.install()       # before CUDA is first used in the process

or, without a change to the program, ``NUMBA_CUDA_MEMORY_MANAGER=vpool.integrations.numba``.

That interface knows no streams.  So an array has memory that no queued work touches, and its block comes back when the
device was waited for: for 10 of them together, or a fifth of the device's memory, as by Numba itself.
"""

import contextlib
import functools
import weakref
from typing import Any

from vpool._interface.deferred import Deferred
from vpool.errors import ForeignPointerError, OutOfMemoryError
from vpool.integrations.packages import PoolOfDevice, as_error_of, required

__all__ = ["install"]

TAG = "numba"  # of blocks for threads that have none

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_pool_of = PoolOfDevice(())


def install(*pools):
    """Have Numba allocate device memory from pools.

    Parameters
    ----------
    *pools : Pool
        Each for its own device; a device without one has its default pool.

    Notes
    -----
    Contexts that Numba has made already keep the memory manager that they have, so call it first.
    """
    global _pool_of
    cuda = required("numba.cuda", "numba")
    pool_of = PoolOfDevice(pools)
    cuda.set_memory_manager(_manager())
    _pool_of = pool_of


def __getattr__(name):
    if name == "_numba_memory_manager":
        return _manager()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _manager():
    """The class that Numba makes a memory manager of for each context."""
    cuda: Any = required("numba.cuda", "numba")
    driver = required("numba.cuda.cudadrv.driver", "numba")
    config = required("numba.cuda.core.config", "numba")

    class Manager(cuda.GetIpcHandleMixin, cuda.HostOnlyCUDAMemoryManager):
        """Device memory of a context, from a pool; the host's is Numba's own affair."""

        interface_version = 1

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)  # may not touch CUDA
            self._blocks = None

        def _serving(self):
            """The blocks of the pool that serves the context's device now."""
            pool = _pool_of(self.context.device.id)
            blocks = self._blocks
            if blocks is None or blocks.pool is not pool:
                most_bytes = int(pool.source.memory()[1] * config.CUDA_DEALLOCS_RATIO)
                blocks = self._blocks = Deferred(pool, max(1, config.CUDA_DEALLOCS_COUNT), most_bytes, TAG)
            return blocks

        def initialize(self):
            if self.deallocations.memory_capacity == 0:  # not set
                self.deallocations.memory_capacity = self.get_memory_info().total

        def memalloc(self, size):
            blocks = self._serving()
            try:
                pointer = blocks.allocate(size)
            except OutOfMemoryError as error:
                kind = driver.CudaAPIError
                raise as_error_of(kind, error, code=_OUT_OF_MEMORY, msg=error.args[0]) from error.__cause__
            # Called once, perhaps at the end of the interpreter.
            finalizer = functools.partial(blocks.deallocate, pointer, size)
            address = driver.binding.CUdeviceptr(pointer)
            return cuda.MemoryPointer(weakref.proxy(self.context), address, size, finalizer=finalizer)

        def get_memory_info(self):
            info = self._serving().pool.memory_info()
            return cuda.MemoryInfo(free=info.available_bytes, total=info.device_total_bytes)

        def get_ipc_handle(self, memory):
            block = getattr(memory, "owner", memory)  # of a view
            with contextlib.suppress(ForeignPointerError):  # of somebody else
                # From here on the pool keeps the segment.
                self._serving().pool.ipc_handle(int(block.handle))
            return super().get_ipc_handle(memory)

        def reset(self):
            super().reset()
            blocks, self._blocks = self._blocks, None
            if blocks is not None:
                # Numba destroys the context next, and with it all memory: nothing of it may be freed or lent any more.
                blocks.settle()
                blocks.abandon()
                blocks.pool.close()

        @contextlib.contextmanager
        def defer_cleanup(self):
            blocks = self._serving()
            with super().defer_cleanup():
                blocks.hold(1)
                try:
                    yield
                finally:
                    blocks.hold(-1)

    return Manager

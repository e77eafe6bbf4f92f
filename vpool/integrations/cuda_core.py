"""cuda.core in a pool: a memory resource whose buffers have blocks of vpool's.

.. code-block:: python

   from cuda.core import Device
   import vpool.integrations.cuda_core

   device = Device()
   device.memory_resource = vpool.integrations.cuda_core.resource(pool)
   buffer = device.allocate(1 << 20, stream=device.default_stream)
"""

import functools
from typing import Any

from vpool._interface.tags import default_tag
from vpool.defaults import default_pool
from vpool.integrations.caches import ask_before_failing
from vpool.integrations.packages import required

__all__ = ["resource"]

_tagged = default_tag("cuda.core")


def resource(pool=None):
    """A ``cuda.core.MemoryResource`` over a pool.

    Parameters
    ----------
    pool : Pool, optional
        The current device's default pool if not given.

    Notes
    -----
    A buffer is freed on the stream that cuda.core names: that of ``close``, that of ``set_deallocation_stream``, or the
    one that it was allocated for.  A stream that captures, as a ``GraphBuilder`` does, gets memory that stays with its
    graph.  Where no memory is left, the error is `vpool.OutOfMemoryError`.
    """
    return _resource_class()(default_pool() if pool is None else pool)


@functools.cache
def _resource_class():
    core: Any = required("cuda.core", "cuda_core")

    class PoolResource(core.MemoryResource):
        """The memory of a pool, as cuda.core sees it."""

        def __init__(self, pool):
            self.pool = pool
            ask_before_failing(pool)

        def __repr__(self):
            return f"<PoolResource of {self.pool!r}>"

        def __reduce__(self):
            raise TypeError("a pool's memory resource cannot be pickled: it owns memory of this process")

        def allocate(self, size, *, stream):
            if stream is None:
                raise TypeError("stream must be a stream of cuda.core, not None")
            with _tagged:
                ptr = self.pool.allocate(size, stream)
            try:
                return core.Buffer.from_handle(ptr, size, mr=self, stream=stream)
            except BaseException:
                self.pool.deallocate(ptr)
                raise

        def deallocate(self, ptr, size, *, stream):
            self.pool.deallocate(int(ptr), stream)

        @property
        def is_device_accessible(self):
            return self.pool.source.has_memory and self.pool.source.name != "host"

        @property
        def is_host_accessible(self):
            return self.pool.source.host_accessible

        @property
        def is_managed(self):
            return self.pool.source.name == "managed"

        @property
        def device_id(self):
            return self.pool.device if self.is_device_accessible and self.pool.source.name != "pinned" else -1

    return PoolResource

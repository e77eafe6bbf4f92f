"""RMM in a pool: a memory resource of RMM's that allocates by vpool, for cuDF and whatever else uses RMM.

.. code-block:: python

   import vpool.integrations.rmm
   vpool.integrations.rmm.install()
"""

from vpool._interface.tags import default_tag
from vpool.defaults import default_pool
from vpool.integrations.caches import ask_before_failing
from vpool.integrations.packages import required
from vpool.sources import current_device

__all__ = ["install", "resource"]

_tagged = default_tag("rmm")


def resource(pool=None):
    """An ``rmm.mr.CallbackMemoryResource`` over a pool.

    Parameters
    ----------
    pool : Pool, optional
        The current device's default pool if not given.

    Notes
    -----
    RMM names a stream by its number in both calls, so memory that crosses streams waits for the device, unless the
    pool was also given the stream as an object that holds it.  Where no memory is left, RMM raises its own
    ``MemoryError``.
    """
    pool = default_pool() if pool is None else pool
    ask_before_failing(pool)

    def allocate(nbytes, stream):
        with _tagged:
            return pool.allocate(nbytes, _handle(stream))

    def deallocate(ptr, nbytes, stream):
        pool.deallocate(ptr, _handle(stream))

    return required("rmm.mr", "rmm").CallbackMemoryResource(allocate, deallocate)


def _handle(stream):
    """The number of a stream that RMM passes: the object is made for this call alone and holds nothing."""
    protocol = getattr(stream, "__cuda_stream__", None)
    return int(stream.value() if protocol is None else protocol()[1])


def install(pool=None):
    """Make a pool RMM's resource of the current device.

    Parameters
    ----------
    pool : Pool, optional
        Of the current device; its default pool if not given.

    Raises
    ------
    ValueError
        For a pool of another device: RMM wants its resources made while their device is the current one.
    """
    mr = required("rmm.mr", "rmm")
    pool = default_pool() if pool is None else pool
    if pool.device != current_device():
        raise ValueError(f"{pool!r} is of device {pool.device}, and the current one is {current_device()}")
    mr.set_current_device_resource(resource(pool))

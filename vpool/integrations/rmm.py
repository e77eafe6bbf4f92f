"""RMM in a pool: a memory resource of RMM's that allocates by vpool, for cuDF and whatever else uses RMM.

.. code-block:: python

   import vpool.integrations.rmm
   vpool.integrations.rmm.install()

and the other way round, a pool whose segments RMM gives:

.. code-block:: python

   pool = vpool.Pool(source=vpool.integrations.rmm.source())
"""

from vpool._interface.tags import default_tag
from vpool._storage.source import Source
from vpool._storage.upstream_driver import UpstreamDriver
from vpool.integrations.caches import ask_before_failing
from vpool.integrations.packages import of_a_gpu, required
from vpool.sources import Cuda, current_device

__all__ = ["install", "resource", "source"]

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

    Raises
    ------
    TypeError, ValueError
        For what is no pool of a GPU's memory.
    """
    pool = of_a_gpu(pool)
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
    TypeError, ValueError
        For what is no pool of a GPU's memory, or one of another device: RMM wants its resources
        made while their device is the current one.
    """
    mr = required("rmm.mr", "rmm")
    pool = of_a_gpu(pool)
    if pool.device != current_device():
        raise ValueError(f"{pool!r} is of device {pool.device}, and the current one is {current_device()}")
    mr.set_current_device_resource(resource(pool))


def source(resource=None):
    """A source of the current device whose segments an RMM resource gives.

    Parameters
    ----------
    resource : rmm.mr.DeviceMemoryResource, optional
        RMM's resource of the current device if not given.  Not one that allocates from the same pool.

    Returns
    -------
    vpool.sources.Source
        For ``vpool.Pool(source=...)``.

    Raises
    ------
    SourceError
        Where CUDA cannot be used.

    Notes
    -----
    What RMM gives in the order of a stream is waited for, so any stream can use a segment at once.  Each call of the
    resource takes the GIL; so PyTorch cannot have its segments from such a pool (`vpool.integrations.torch.mem_pool`).
    """
    rmm = required("rmm", "rmm")
    device = Cuda()
    upstream = rmm.mr.get_current_device_resource() if resource is None else resource
    stream = rmm.pylibrmm.stream.Stream()

    def lend(nbytes):
        address = upstream.allocate(nbytes, stream)
        try:
            stream.synchronize()
        except BaseException:
            upstream.deallocate(address, nbytes, stream)
            raise
        return address

    def take(address, nbytes):
        upstream.deallocate(address, nbytes, stream)

    return Source(UpstreamDriver(device.driver, lend, take), "rmm", device.device)

"""The packages of the frameworks, which vpool does not depend on."""

import functools
import importlib
from typing import Any

from vpool._interface.pool import Pool
from vpool.defaults import default_pool
from vpool.errors import OutOfMemoryError
from vpool.integrations.caches import ask_before_failing
from vpool.sources import cuda_missing

__all__ = ["PoolOfDevice", "as_error_of", "of_a_gpu", "required"]


def required(module: str, extra: str) -> Any:
    """Import a module of a framework.

    Raises
    ------
    ImportError
        Where its package is missing; the message names the extra of vpool that has it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is None or module.partition(".")[0] != error.name.partition(".")[0]:
            raise  # it is there, and something in it is broken
        name = module.partition(".")[0]
        raise ImportError(
            f'vpool.integrations.{extra} needs the package of {name!r}: pip install "vpool[{extra}]"', name=error.name
        ) from None


def of_a_gpu(pool=None, device=None):
    """A pool whose memory a framework's kernels can use: `pool`, or else the default pool of a device.

    Raises
    ------
    TypeError
        For what is no pool.
    ValueError
        For a pool of ordinary or simulated memory, which would end the first kernel with an illegal access.  A default
        pool is one where vpool cannot use CUDA, even if the framework can, and where its policy says so.
    """
    if pool is None:
        pool = default_pool(device)
    if not isinstance(pool, Pool):
        raise TypeError(f"pool must be a vpool.Pool, not {type(pool).__name__}")
    source = pool.source
    if not source.has_memory or source.name == "host":
        remedy = cuda_missing() or 'choose a source of CUDA, such as "cuda"'
        raise ValueError(f"no GPU can use the memory of {pool!r}: {remedy}")
    return pool


class PoolOfDevice:
    """The pool that serves a device: one that was chosen for it, else its default pool.

    Each asks the frameworks of this process for their caches before a request fails.

    Parameters
    ----------
    pools : iterable of Pool
        Each for its own device.

    Raises
    ------
    TypeError, ValueError
        For what is no pool of a GPU's memory, or two pools for one device.
    """

    def __init__(self, pools):
        self._chosen: dict[int, Pool] = {}
        self._known: Pool | None = None  # the default pool that was met last
        for pool in map(of_a_gpu, pools):
            if pool.device in self._chosen:
                raise ValueError(f"two pools for device {pool.device}: {self._chosen[pool.device]!r} and {pool!r}")
            self._chosen[pool.device] = pool
        for pool in self._chosen.values():
            ask_before_failing(pool)

    def __call__(self, device):
        pool = self._chosen.get(device)
        if pool is None:
            pool = default_pool(device)
            if pool is not self._known:
                ask_before_failing(of_a_gpu(pool))
                self._known = pool
        return pool

    def forget(self, pool):
        """Serve a pool's device from its default pool from now on."""
        if pool in self._chosen.values():
            del self._chosen[pool.device]


def as_error_of(kind, error, **attributes):
    """An `OutOfMemoryError` as an exception that is also of a framework's own kind, with the same text and figures."""
    joined = _joined(kind)
    made = BaseException.__new__(joined, *error.args)  # the framework's `__init__` has arguments of its own
    made.__dict__.update(error.__dict__, **attributes)
    made.__cause__ = error.__cause__
    return made


@functools.cache
def _joined(kind):
    def reduce(self):
        return OutOfMemoryError, OutOfMemoryError.__reduce__(self)[1]  # where it is read there may be no framework

    attributes = {"__module__": __name__, "__doc__": OutOfMemoryError.__doc__, "__reduce__": reduce}
    return type("OutOfMemoryError", (OutOfMemoryError, kind), attributes)

"""Dask: a pool on each worker, and the report of all of them.

.. code-block:: python

   import vpool.integrations.dask

   client.register_plugin(vpool.integrations.dask.worker_plugin("policy.toml", frameworks=["cupy"]))
   ...
   print(vpool.integrations.dask.inspect_cluster(client))
"""

import functools
import importlib
from typing import Any

from vpool._interface.pool import Pool
from vpool.defaults import set_default_pool
from vpool.gathered import Gathered, reports_here
from vpool.integrations.packages import required
from vpool.policy import Policy

__all__ = ["inspect_cluster", "worker_plugin"]

_FRAMEWORKS = ("torch", "cupy", "numba", "rmm")
_pools: dict[str, Pool] = {}  # of this process, by their policy: workers that are threads share one


def worker_plugin(policy=None, frameworks=()):
    """A ``distributed.WorkerPlugin`` that makes a pool the default one of a worker.

    Parameters
    ----------
    policy : path, Policy or strategy, optional
        Read here, so workers need no such file; ``Dynamic()`` if not given.
    frameworks : iterable of {"torch", "cupy", "numba", "rmm"}
        What allocates from that pool, by the `install` of its plug-in.

    Returns
    -------
    distributed.WorkerPlugin
        For ``client.register_plugin``.

    Raises
    ------
    ValueError, FormatError, OSError, TypeError
        For a framework or a policy that is none.

    Notes
    -----
    Each process has one pool for each policy, on the device that is current when the worker begins.  It stays open
    when the plug-in is unregistered, since blocks may live.
    """
    frameworks = tuple([frameworks] if isinstance(frameworks, str) else frameworks)
    for name in frameworks:
        if name not in _FRAMEWORKS:
            raise ValueError(f"no framework {name!r} for workers; there are {', '.join(_FRAMEWORKS)}")
    text = Policy().dumps() if policy is None else Policy.of(policy).dumps()
    return _plugin_class()(text, frameworks)


def _restored(text, frameworks):
    return _plugin_class()(text, frameworks)


@functools.cache
def _plugin_class():
    distributed: Any = required("distributed", "dask")

    class PoolOfWorker(distributed.WorkerPlugin):
        """Sets a worker up."""

        name = "vpool"

        def __init__(self, text, frameworks):
            self.text = text
            self.frameworks = frameworks

        def __reduce__(self):
            return _restored, (self.text, self.frameworks)

        def setup(self, worker):
            pool = _pools.get(self.text)
            if pool is not None and not pool.closed and not pool.forked:
                return
            pool = _pools[self.text] = Pool.from_policy(Policy.loads(self.text), name="dask-worker")
            set_default_pool(pool)
            for name in self.frameworks:
                importlib.import_module(f"vpool.integrations.{name}").install(pool)

    return PoolOfWorker


def inspect_cluster(client):
    """The reports of all pools of all workers.

    Parameters
    ----------
    client : distributed.Client

    Returns
    -------
    vpool.gathered.Gathered
        By the addresses of the workers; `failed` has those that did not answer.

    Raises
    ------
    TypeError
        For a client that is asynchronous.
    """
    if client.asynchronous:
        raise TypeError("inspect_cluster waits for workers, so it needs a client that is not asynchronous")
    answers = client.run(reports_here, on_error="return")
    failed = {where: str(answer) for where, answer in answers.items() if isinstance(answer, BaseException)}
    return Gathered({where: answer for where, answer in answers.items() if where not in failed}, failed)

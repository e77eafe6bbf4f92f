"""The packages of the frameworks, which vpool does not depend on."""

import importlib

from vpool._interface.pool import Pool
from vpool.defaults import default_pool

__all__ = ["PoolOfDevice", "required"]


def required(module, extra):
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


class PoolOfDevice:
    """The pool that serves a device: one that was chosen for it, else its default pool.

    Parameters
    ----------
    pools : iterable of Pool
        Each for its own device.
    """

    def __init__(self, pools):
        self._chosen: dict[int, Pool] = {}
        for pool in pools:
            if pool.device in self._chosen:
                raise ValueError(f"two pools for device {pool.device}: {self._chosen[pool.device]!r} and {pool!r}")
            self._chosen[pool.device] = pool

    def __call__(self, device):
        pool = self._chosen.get(device)
        return default_pool(device) if pool is None else pool

    def forget(self, pool):
        """Serve a pool's device from its default pool from now on."""
        if pool in self._chosen.values():
            del self._chosen[pool.device]

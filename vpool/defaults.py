"""The default pool of each device, and the functions that use it."""

import threading

from vpool._interface.pool import Pool
from vpool.errors import ClosedPoolError, ForeignPointerError
from vpool.sources import checked_ordinal, current_device, resolve

__all__ = ["allocate", "deallocate", "default_pool", "empty", "inspect", "set_default_pool"]

_defaults: dict[int, Pool] = {}
_making = threading.RLock()  # a finaliser may ask for the pool while it is made
_former: list[Pool] = []  # default pools that were closed or replaced, kept for the addresses that they gave


def default_pool(device=None):
    """The default pool of a device, made on first use.

    Parameters
    ----------
    device : int, optional
        Ordinal; the thread's current device if not given.

    Returns
    -------
    Pool
    """
    ordinal = current_device() if device is None else checked_ordinal(device)
    pool = _defaults.get(ordinal)
    if pool is None or pool.closed:
        with _making:
            pool = _defaults.get(ordinal)
            if pool is None or pool.closed:
                made = Pool(source=resolve(None, ordinal), name=f"default-{ordinal}")
                pool = _defaults.get(ordinal)
                if pool is None or pool.closed:
                    _put_default(ordinal, made)
                    pool = made
    return pool


def _put_default(ordinal, pool):
    """Replace a default pool; the one before.  `_making` is held."""
    before = _defaults.get(ordinal)
    if before is not None and before is not pool:
        _former[:] = [one for one in _former if one.stats.reserved_bytes or not one.closed]
        _former.append(before)
    _defaults[ordinal] = pool
    return before


def set_default_pool(pool):
    """Make `pool` the default of its device; the one before stays open.

    Returns
    -------
    Pool or None
        The default before, if one was made.
    """
    if not isinstance(pool, Pool):
        raise TypeError(f"a default pool is a vpool.Pool, not {type(pool).__name__}")
    if pool.closed:
        raise ClosedPoolError(f"{pool!r} cannot be a default pool")
    with _making:
        return _put_default(pool.device, pool)


def allocate(nbytes, stream=None, alignment=256):
    """Lend a block of the current device's default pool: see `Pool.allocate`."""
    return default_pool().allocate(nbytes, stream, alignment)


def deallocate(ptr, stream=None):
    """Give a block back to the current device's default pool: see `Pool.deallocate`."""
    try:
        default_pool().deallocate(ptr, stream)
    except ForeignPointerError:
        # An address of the default pool before this one is still a good address.
        for pool in list(_former):
            try:
                return pool.deallocate(ptr, stream)
            except ForeignPointerError:
                continue
        raise


def empty(nbytes, stream=None):
    """Lend a `Buffer` of the current device's default pool: see `Pool.empty`."""
    return default_pool().empty(nbytes, stream)


def inspect(device=None):
    """The report of a default pool.

    Parameters
    ----------
    device : int or "all", optional
        Ordinal; the thread's current device if not given.  ``"all"`` gives a dict of reports by
        ordinal, of each device that has a default pool.
    """
    if device == "all":
        return {ordinal: pool.inspect() for ordinal, pool in sorted(_defaults.items())}
    return default_pool(device).inspect()

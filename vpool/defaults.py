"""The default pool of each device, and the functions that use it."""

import contextlib
import os
import threading
from collections.abc import Callable

from vpool._interface.pool import Pool
from vpool._storage.fork import PerProcess
from vpool.errors import ClosedPoolError, ForeignPointerError, ForkedProcessError
from vpool.policy import Policy
from vpool.sources import checked_ordinal, current_device, resolve

__all__ = ["allocate", "deallocate", "default_pool", "empty", "inspect", "set_default_pool"]

_VARIABLE = "VPOOL_POLICY"

_defaults: dict[int, Pool] = {}
_making = PerProcess(threading.RLock)  # a finaliser may ask for the pool while it is made
# Called with each default pool that is made, before it lends a block.
when_made: list[Callable[[Pool], None]] = []
_former: list[Pool] = []  # default pools that were closed or replaced, kept for the addresses that they gave


def default_pool(device=None):
    """The default pool of a device, made on first use.

    It works by the policy file that the environment variable ``VPOOL_POLICY`` names, if that is set when
    the pool is made.

    Parameters
    ----------
    device : int, optional
        Ordinal; the thread's current device if not given.

    Returns
    -------
    Pool

    Raises
    ------
    FormatError, OSError, ValueError, SourceError, OutOfMemoryError, ForkedProcessError
        Where no pool can be made by that policy; the message begins with the variable's name.
    """
    ordinal = current_device() if device is None else checked_ordinal(device)
    pool = _defaults.get(ordinal)
    if pool is None or pool.closed:
        with _making.here:
            pool = _defaults.get(ordinal)
            if pool is None or pool.closed:
                made = _made_default(ordinal)
                pool = _defaults.get(ordinal)
                if pool is None or pool.closed:
                    for call in when_made:
                        call(made)
                    _put_default(ordinal, made)
                    pool = made
    return pool


def _made_default(ordinal):
    name = f"default-{ordinal}"
    path = os.environ.get(_VARIABLE)
    if not path:
        return Pool(source=resolve(None, ordinal), name=name)
    with _naming_the_variable():
        return Pool(**Policy.load(path).pool_arguments(ordinal), name=name)


@contextlib.contextmanager
def _naming_the_variable():
    """Errors inside keep their kind and figures; their message tells who named the policy."""
    try:
        yield
    except OSError as error:
        error.strerror = f"{_VARIABLE}: {error.strerror}"
        raise
    except Exception as error:
        error.args = (f"{_VARIABLE}: {error}", *error.args[1:])
        raise


def _put_default(ordinal, pool):
    """Replace a default pool; the one before.  `_making` is held."""
    before = _defaults.get(ordinal)
    if before is not None and before is not pool:
        _former[:] = [one for one in _former if one.forked or not one.closed or one.stats.reserved_bytes]
        _former.append(before)
    _defaults[ordinal] = pool
    return before


def set_default_pool(pool):
    """Make `pool` the default of its device; the one before stays open.

    Returns
    -------
    Pool or None
        The default before, if one was made.

    Raises
    ------
    TypeError
        For what is no pool.
    ClosedPoolError
        For a closed one.
    ForkedProcessError
        For a pool of a parent of this process.
    """
    if not isinstance(pool, Pool):
        raise TypeError(f"a default pool is a vpool.Pool, not {type(pool).__name__}")
    if pool.forked:
        raise ForkedProcessError(
            f'{pool!r} cannot be a default pool: make one after the fork, or start processes by "spawn" or "forkserver"'
        )
    if pool.closed:
        raise ClosedPoolError(f"{pool!r} cannot be a default pool")
    with _making.here:
        return _put_default(pool.device, pool)


def allocate(nbytes, stream=None, alignment=256):
    """Lend a block of the current device's default pool: see `Pool.allocate`."""
    return default_pool().allocate(nbytes, stream, alignment)


def deallocate(ptr, stream=None):
    """Give a block back to the current device's default pool: see `Pool.deallocate`."""
    try:
        default_pool().deallocate(ptr, stream)
    except ForkedProcessError:
        pass  # no pool can be made in this child, so the block is its parent's
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

"""NumPy arrays in a pool's memory: of the host, pinned or managed.

An array has a block of its own, which comes back to the pool when the array and all views of it are gone.

>>> import vpool
>>> import vpool.integrations.numpy
>>> pool = vpool.Pool(source="host")
>>> array = vpool.integrations.numpy.zeros((2, 3), "float32", pool=pool)
>>> array.sum()
np.float32(0.0)
>>> pool.stats.allocated_bytes
256
>>> del array
>>> pool.stats.allocated_bytes
0
"""

import math
import operator

import numpy as np

from vpool._interface.buffer import Buffer
from vpool.defaults import default_pool
from vpool.streams import HOST

__all__ = ["buffer_of", "empty", "full", "record_stream", "zeros"]


def empty(shape, dtype=float, order="C", *, pool=None):
    """An array whose content is not set.

    Parameters
    ----------
    shape : int or tuple of int
    dtype
        Any that has no Python objects.
    order : {"C", "F"}
    pool : Pool, optional
        Of memory that the host can reach, as those of ``"pinned"``, ``"managed"`` and ``"host"`` are; the current
        device's default pool if not given.

    Returns
    -------
    numpy.ndarray

    Raises
    ------
    OutOfMemoryError
        As of `Pool.allocate`.
    TypeError
        For a type of Python objects: bytes that are not set are none.
    ValueError
        For a pool whose memory the host cannot reach, or negative dimensions.

    Notes
    -----
    No queued work touches the block, so the host may write at once.  Its free does not wait for copies that still use
    it: wait for them first, or tell the stream by `record_stream`.
    """
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        raise TypeError(f"a pool's memory cannot hold Python objects, as dtype {dtype} would")
    if order not in ("C", "F"):
        raise ValueError(f'order must be "C" or "F", not {order!r}')
    try:
        shape = (operator.index(shape),)
    except TypeError:
        shape = tuple(operator.index(length) for length in shape)
    if any(length < 0 for length in shape):
        raise ValueError(f"no dimension can be negative, as in {shape}")
    pool = default_pool() if pool is None else pool
    if not pool.source.host_accessible:
        raise ValueError(f'the host cannot reach memory of source {pool.source.name!r}; that of "pinned" it can')
    buffer = pool.empty(math.prod(shape) * dtype.itemsize, HOST)
    return np.ndarray(shape, dtype, buffer, order=order)


def zeros(shape, dtype=float, order="C", *, pool=None):
    """An array of zeros; the rest is as of `empty`."""
    return full(shape, 0, dtype, order, pool=pool)


def full(shape, fill_value, dtype=None, order="C", *, pool=None):
    """An array of one value, whose type it has unless another is given; the rest is as of `empty`."""
    array = empty(shape, np.asarray(fill_value).dtype if dtype is None else dtype, order, pool=pool)
    array[...] = fill_value
    return array


def buffer_of(array):
    """The `vpool.Buffer` that an array's memory is of; None where it is no pool's."""
    while array is not None and not isinstance(array, Buffer):
        array = array.obj if isinstance(array, memoryview) else getattr(array, "base", None)
    return array


def record_stream(array, stream):
    """Tell that a stream uses an array, or a view of it: its block comes back once that work is complete.

    Raises
    ------
    ValueError
        For an array whose memory is no pool's.
    """
    buffer = buffer_of(array)
    if buffer is None:
        raise ValueError("this array's memory is of no vpool pool")
    buffer.record_stream(stream)

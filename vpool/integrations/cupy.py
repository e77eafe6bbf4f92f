"""CuPy in a pool: its arrays have blocks of vpool's.

.. code-block:: python

   import vpool.integrations.cupy
   vpool.integrations.cupy.install()                # from each device's default pool

   with cupy.cuda.using_allocator(vpool.integrations.cupy.allocator(pool)):
       ...                                          # a thread's, for a while
"""

import functools

from vpool._interface.buffer import Buffer
from vpool._interface.c_allocator import Blocks
from vpool._interface.lender import pools_and_closed
from vpool._interface.tags import default_tag
from vpool.errors import ForeignPointerError, OutOfMemoryError
from vpool.integrations.caches import ask_before_failing
from vpool.integrations.packages import PoolOfDevice, as_error_of, required
from vpool.streams import HOST

__all__ = ["allocator", "c_allocator", "install", "pinned_allocator", "record_stream", "uninstall"]

TAG = "cupy"  # of blocks for threads that have none
_tagged = default_tag(TAG)
_before: list = []  # the allocators that `install` has replaced


def allocator(*pools):
    """A function that CuPy allocates by: for ``cupy.cuda.set_allocator`` and ``cupy.cuda.using_allocator``.

    Parameters
    ----------
    *pools : Pool
        Each for its own device; a device without one has its default pool.

    Returns
    -------
    callable
        Bytes to ``cupy.cuda.MemoryPointer``.  Called on any thread, for that thread's current device and stream.

    Notes
    -----
    An array's block is of the stream that is current when it is made, and is freed on it.  As with CuPy's own pool,
    nobody tells of other streams that use it: call `record_stream`.

    Where no memory is left, pressure callbacks and a garbage collection are tried, and then the error is one of
    ``cupy.cuda.memory.OutOfMemoryError`` and of `vpool.OutOfMemoryError` at once.  CuPy's limits, hooks and statistics
    know nothing of a pool's memory.
    """
    cupy = required("cupy", "cupy")
    pool_of = PoolOfDevice(pools)
    current_device = cupy.cuda.device.get_device_id
    current_stream = cupy.cuda.get_current_stream
    error_of_cupy = cupy.cuda.memory.OutOfMemoryError
    memory, pointer = cupy.cuda.UnownedMemory, cupy.cuda.MemoryPointer

    def allocate(nbytes):
        device = current_device()
        try:
            with _tagged:
                buffer = pool_of(device).empty(nbytes, current_stream())
        except OutOfMemoryError as error:
            raise as_error_of(error_of_cupy, error) from error.__cause__
        return pointer(memory(buffer.ptr, nbytes, buffer, device), 0)

    return allocate


def c_allocator(*pools):
    """The same by C functions, with fewer Python objects for each array: ``cupy.cuda.memory.CFunctionAllocator``.

    Parameters, and what is said of streams and errors, are as for `allocator`.  The pools live as long as the process.
    """
    cupy = required("cupy", "cupy")
    error_of_cupy = cupy.cuda.memory.OutOfMemoryError
    error_of = functools.partial(as_error_of, error_of_cupy)
    blocks = Blocks(PoolOfDevice(pools), cupy.cuda.get_current_stream, error_of, TAG)
    return cupy.cuda.memory.CFunctionAllocator(*blocks.functions(), blocks).malloc


def install(*pools):
    """Have CuPy allocate from pools, on every thread, until `uninstall`; they may be nested.

    Parameters
    ----------
    *pools : Pool
        As for `allocator`.
    """
    cuda = required("cupy", "cupy").cuda
    before = cuda.get_allocator()
    cuda.set_allocator(allocator(*pools))
    _before.append(before)


def uninstall():
    """Have CuPy allocate as before the last `install`; by its own default pool where there was none.

    Arrays that are there keep their blocks.
    """
    cupy = required("cupy", "cupy")
    cupy.cuda.set_allocator(_before[-1] if _before else cupy.get_default_memory_pool().malloc)
    del _before[-1:]


class _PinnedMemory:
    """A block, as CuPy looks at pinned memory."""

    def __init__(self, buffer, nbytes):
        self.buffer = buffer
        self.ptr = buffer.ptr
        self.size = nbytes


def pinned_allocator(pool):
    """A function that CuPy allocates pinned memory by: for ``cupy.cuda.set_pinned_memory_allocator``.

    Parameters
    ----------
    pool : Pool
        Of pinned memory.  Its blocks are whole multiples of 256 bytes, where those of CuPy's are powers of two.

    Notes
    -----
    No queued work touches a block that is given, so the host may write at once.  As with CuPy's own, the program sees
    to it that copies are complete before the memory is dropped; CuPy's own transfers do.
    """
    cupy = required("cupy", "cupy")
    if pool.source.name != "pinned":
        raise ValueError(f'memory of source {pool.source.name!r} is not pinned; that of "pinned" is')
    ask_before_failing(pool)
    pointer = cupy.cuda.PinnedMemoryPointer
    error_of_cupy = cupy.cuda.memory.OutOfMemoryError

    def allocate(nbytes):
        try:
            with _tagged:
                buffer = pool.empty(nbytes, HOST)
        except OutOfMemoryError as error:
            raise as_error_of(error_of_cupy, error) from error.__cause__
        return pointer(_PinnedMemory(buffer, nbytes), 0)

    return allocate


def record_stream(array, stream):
    """Tell that a stream uses an array, or a view of it: its block comes back once that work is complete.

    Parameters
    ----------
    array : cupy.ndarray
    stream
        As for `Pool.record_stream`.

    Raises
    ------
    ValueError
        For an array whose memory is of no pool.
    """
    memory = array.data.mem
    buffer = getattr(memory, "_owner", None)
    if isinstance(buffer, Buffer):
        buffer.record_stream(stream)
        return
    kind = required("cupy", "cupy").cuda.memory.CFunctionAllocatorMemory
    for pool in pools_and_closed() if isinstance(memory, kind) else ():
        try:
            pool.record_stream(memory.ptr, stream)
        except ForeignPointerError:
            continue
        return
    raise ValueError("this array's memory is of no vpool pool")

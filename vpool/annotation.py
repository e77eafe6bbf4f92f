"""What a pool tells NVTX, NVIDIA's interface for tools.

Blocks as ranges, which Nsight Systems shows in a timeline, through the package ``nvtx``; and segments and blocks as
heaps and regions of memory, which compute-sanitizer checks accesses by, through the library of ``nvidia-nvtx``.
"""

import ctypes
import functools
import importlib.util
import threading
from pathlib import Path

from vpool._storage.heaps import FUNCTIONS, Heaps
from vpool.debugging import Debugger, label_of
from vpool.errors import Error

__all__ = ["Annotator", "BlockRanges", "debugger_of", "heaps_of"]

DOMAIN = "vpool"


class BlockRanges:
    """A range for each live block of a pool, and a counter of what is requested.

    A range is named by the block's tag, or else by its call site, or "block"; its category is the pool, and its
    payload the requested bytes.  It begins and ends on the host, when the block is lent and freed.

    Parameters
    ----------
    pool : str
        Name of the pool.

    Raises
    ------
    Error
        Where nvtx is not installed; ``pip install "vpool[nvtx]"`` has it.

    Notes
    -----
    Thread safety: any method may be called from any thread.
    """

    def __init__(self, pool):
        try:
            import nvtx
        except ImportError:
            raise Error('debug="nvtx" needs the package nvtx: pip install "vpool[nvtx]"') from None
        self._pool = pool
        # Where no tool listens this one does nothing.
        self._domain = nvtx.get_domain(DOMAIN)
        self._counter = self._domain.get_counter(f"{pool}: requested bytes", int)
        self._live = 0
        self._counting = threading.RLock()  # a collection within may drop a buffer

    def begin(self, nbytes, label):
        """A block was lent; what `end` wants to know."""
        range_id = self._domain.start_range(message=label, category=self._pool, payload=nbytes)
        self._count(nbytes)
        return range_id, nbytes

    def end(self, begun):
        """The block is free."""
        range_id, nbytes = begun
        self._domain.end_range(range_id)
        self._count(-nbytes)

    def _count(self, change):
        with self._counting:
            self._live += change
            self._counter.sample(self._live)


class Annotator(Debugger):
    """A debugger whose live blocks are ranges."""

    def __init__(self, name, modes, access, limit):
        super().__init__(name, modes, access, limit)
        self._ranges = BlockRanges(name)
        self._begun: dict[object, tuple] = {}  # by block: another one may have its address at once

    def enter(self, block):
        """Watch a block from now on."""
        self._begun[block] = self._ranges.begin(block.requested, label_of(block))
        super().enter(block)

    def free(self, address, slot=None, *, surely=False):
        """Take a block back: see `Ledger.free`."""
        block = self.live.get(address)
        error = super().free(address, slot, surely=surely)
        if error is None:
            self._end(block)
        return error

    def drop(self, address):
        """Take the block of a dropped buffer back, also where that fails: see `Ledger.drop`."""
        block = self.live.get(address)
        super().drop(address)
        self._end(block)

    def forget(self, address):
        """Watch a block no more that its caller never got."""
        block = self.live.get(address)
        super().forget(address)
        self._end(block)

    def _end(self, block):
        begun = self._begun.pop(block, None)
        if begun is not None:
            self._ranges.end(begun)


@functools.cache
def _library():
    """The library that exports NVTX's functions; None where none has those for memory, as before CUDA 13."""
    packages = importlib.util.find_spec("nvidia")
    roots = packages.submodule_search_locations or () if packages else ()
    found = sorted((path for root in roots for path in Path(root).glob("*/lib/libnvtx3interop.so*")), reverse=True)
    for path in (*found, "libnvtx3interop.so.1"):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        if all(hasattr(library, function) for function in FUNCTIONS):
            return library
    return None


@functools.cache
def _domain():
    create = _library().nvtxDomainCreateA
    create.restype, create.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    return create(DOMAIN.encode()) or 0  # none where no tool listens


def heaps_of(pool):
    """What tells tools of a pool's memory.

    Parameters
    ----------
    pool : str
        Its name.

    Returns
    -------
    Heaps

    Raises
    ------
    Error
        Where the library is not installed; ``pip install "vpool[nvtx]"`` has it.
    """
    library = _library()
    if library is None:
        raise Error('debug="nvtx-memory" needs the library of nvidia-nvtx, 13 or newer: pip install "vpool[nvtx]"')
    functions = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in FUNCTIONS]
    return Heaps(pool, _domain(), functions)


def debugger_of(name, modes, access, limit):
    """What watches the blocks of a pool with some modes: see `vpool.debugging.Debugger`."""
    kind = Annotator if modes.nvtx else Debugger
    if modes.nvtx_memory:
        access.tell_of_heaps(heaps_of(name))
    return kind(name, modes, access, limit)

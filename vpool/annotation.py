"""What a pool tells NVTX, NVIDIA's interface for tools.

Blocks as ranges, which Nsight Systems shows in a timeline, through the package ``nvtx``; and segments and blocks as
heaps and regions of memory, which compute-sanitizer checks accesses by, through the library of ``nvidia-nvtx``.
"""

import ctypes
import functools
import importlib.util
from pathlib import Path

from vpool._interface.ledger import Ranges
from vpool._storage.heaps import FUNCTIONS, Heaps
from vpool.debugging import Debugger
from vpool.errors import Error

__all__ = ["debugger_of", "heaps_of", "ranges_of"]

DOMAIN = "vpool"


def ranges_of(pool):
    """What tells a profiler of a pool's blocks.

    A range is named by the block's tag, or else by its call site, or "block"; its category is the pool, and its
    payload the requested bytes.  It begins and ends on the host, when the block is lent and freed.

    Parameters
    ----------
    pool : str
        Its name.

    Returns
    -------
    Ranges

    Raises
    ------
    Error
        Where nvtx is not installed; ``pip install "vpool[nvtx]"`` has it.
    """
    try:
        import nvtx
    except ImportError:
        raise Error('debug="nvtx" needs the package nvtx: pip install "vpool[nvtx]"') from None
    domain = nvtx.get_domain(DOMAIN)
    return Ranges(pool, domain, domain.get_counter(f"{pool}: requested bytes", int))


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
    if modes.nvtx_memory:
        access.tell_of_heaps(heaps_of(name))
    return Debugger(name, modes, access, limit, ranges_of(name) if modes.nvtx else None)

"""What frameworks keep for later, asked for before a pool that shares the device with them is out of memory.

Only of frameworks that the program has imported and used: none is imported for it.
"""

import functools
import logging
import sys
import weakref
from typing import Any

from vpool._interface import numbered
from vpool._interface.captures import captures_go_on

__all__ = ["ask_before_failing"]

logger = logging.getLogger("vpool")

PRIORITY = 50  # before callbacks of a program's own, which may have to drop what it still wants

_asking: weakref.WeakSet = weakref.WeakSet()


def ask_before_failing(pool):
    """Have a pool that serves a framework ask all of them for their caches before a request fails.

    Parameters
    ----------
    pool : Pool

    Notes
    -----
    Each is asked by a pressure callback of its own, so that the next one is only where that was not enough.  While a
    capture is known none is: to free memory would invalidate it.
    """
    if pool in _asking:
        return
    of_host = pool.source.name == "pinned"
    for name, give_back in (("cupy", _cupy_pinned),) if of_host else (("torch", _torch), ("cupy", _cupy)):
        pool.on_pressure(functools.partial(_ask, name, give_back, pool.device), PRIORITY)
    _asking.add(pool)


def _ask(name, give_back, device, nbytes):
    """Of a pool that needs some bytes.  What fails here is no reason for its failure."""
    framework = sys.modules.get(name)
    if framework is None or captures_go_on():
        return
    try:
        give_back(framework, device)
    except Exception as error:
        logger.info("%s did not give its caches back: %s", name, error)


def _torch(torch: Any, device):
    if numbered.all_served():
        return  # every tensor is a block: PyTorch has no caches
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.empty_cache()


def _cupy(cupy: Any, device):
    with cupy.cuda.Device(device):
        if not cupy.cuda.get_current_stream().is_capturing():
            # Plans of transforms have work areas from whatever allocator is in use.
            cupy.fft.config.get_plan_cache().clear()
            cupy.get_default_memory_pool().free_all_blocks()


def _cupy_pinned(cupy: Any, device):
    cupy.get_default_pinned_memory_pool().free_all_blocks()

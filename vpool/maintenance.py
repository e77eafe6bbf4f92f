"""The helper thread that maintains a pool, for who wants one."""

import logging
import threading
import weakref

from vpool.errors import Error

__all__ = ["Maintainer"]

logger = logging.getLogger("vpool")


class Maintainer:
    """A thread that calls a pool's `maintain` now and then.

    It refers to the pool weakly, ends with it, at `stop`, and before the interpreter does.

    Parameters
    ----------
    pool : vpool.Pool
    every : float
        Seconds between two calls.
    """

    def __init__(self, pool, every):
        if isinstance(every, bool) or not isinstance(every, (int, float)):
            raise TypeError(f"maintain_every must be a number of seconds, not {type(every).__name__}")
        if not 0 < every < threading.TIMEOUT_MAX:
            raise ValueError(f"maintain_every must be above 0 seconds, got {every}")
        ending = threading.Event()
        thread = threading.Thread(
            target=_maintain, args=(weakref.ref(pool), every, ending), name=f"vpool maintains {pool.name}", daemon=True
        )
        # Runs at the end of the interpreter too, while threads can still be waited for.
        self.stop = weakref.finalize(pool, _end, ending, thread)
        thread.start()


def _end(ending, thread):
    ending.set()
    if thread is not threading.current_thread():
        thread.join()


def _maintain(reference, every, ending):
    while not ending.wait(every):
        pool = reference()
        if pool is None or pool.closed:
            return
        try:
            pool.maintain()
        except Error as error:
            logger.warning("pool %r, maintained: %s", pool.name, error)
        del pool

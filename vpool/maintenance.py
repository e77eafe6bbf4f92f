"""The helper thread that maintains a pool, for who wants one."""

import atexit
import logging
import threading
import time
import weakref

from vpool._storage.fork import PerProcess
from vpool.errors import ClosedPoolError

__all__ = ["Maintainer", "checked_interval"]

logger = logging.getLogger("vpool")

_LONGEST_NAP = 0.05  # seconds after which it is seen that a pool is gone
_at_work: "PerProcess[weakref.WeakSet[Maintainer]]" = PerProcess(weakref.WeakSet)


def checked_interval(every):
    """Seconds between two calls of `maintain`; TypeError or ValueError for what is none."""
    if isinstance(every, bool) or not isinstance(every, (int, float)):
        raise TypeError(f"maintain_every must be a number of seconds, not {type(every).__name__}")
    if not 0 < every < threading.TIMEOUT_MAX:
        raise ValueError(f"maintain_every must be above 0 seconds, got {every}")
    return every


class Maintainer:
    """A thread that calls a pool's `maintain` now and then.

    It refers to the pool weakly and looks itself whether it is wanted: whatever ends it may run inside a
    garbage collection, where no lock may be taken and no thread be waited for.

    Parameters
    ----------
    pool : vpool.Pool
    every : float
        Seconds between two calls.
    marks : tuple of int, optional
        Low and high bytes: with more than the high ones reserved and neither live nor pending, it also trims.
    """

    def __init__(self, pool, every, marks=None):
        self.ended = False
        self._thread = threading.Thread(
            target=_maintain,
            args=(self, weakref.ref(pool), every, marks),
            name=f"vpool maintains {pool.name}",
            daemon=True,
        )
        _at_work.here.add(self)
        self._thread.start()

    def stop(self):
        """Have the thread end, within a twentieth of a second or when it has done what it is at."""
        self.ended = True

    def join(self):
        """Wait until the thread has ended."""
        self._thread.join()


@atexit.register
def _end_all():
    """Before the interpreter goes: a thread in the middle of a driver call must not meet what is torn down."""
    working = list(_at_work.here)
    for maintainer in working:
        maintainer.stop()
    for maintainer in working:
        maintainer.join()


def _trim(pool, marks):
    """Trim between the marks, for as long as one nap takes."""
    low, high = marks
    stats = pool.stats
    used = stats.allocated_bytes + stats.pending_bytes
    if stats.reserved_bytes - used > high:
        pool.trim(keep=used + low, budget=_LONGEST_NAP)


def _maintain(maintainer, reference, every, marks):
    due = time.monotonic() + every
    while not maintainer.ended:
        time.sleep(max(0.0, min(due - time.monotonic(), _LONGEST_NAP)))
        pool = reference()
        if pool is None or pool.closed or maintainer.ended:
            return
        if time.monotonic() >= due:
            due = time.monotonic() + every
            try:
                pool.maintain()
                if marks is not None:
                    _trim(pool, marks)
            except ClosedPoolError:
                return
            except Exception as error:
                logger.warning("pool %r, maintained: %s", pool.name, error)
        del pool

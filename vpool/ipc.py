"""Blocks in other processes: what a pool exports, and what another process opens by it.

Processes that use one device share memory without copies.  The process that has the pool makes an
`IpcHandle` by `Pool.ipc_handle` and sends it, pickled, by a queue or a pipe; the other one opens it.
"""

import logging
import os
import threading
import weakref
from dataclasses import dataclass, field

from vpool._storage.fork import PerProcess, forks
from vpool.errors import ForkedProcessError, SourceError
from vpool.sources import Cuda

__all__ = ["IpcHandle", "SharedBlock"]

logger = logging.getLogger("vpool")

# Which process made a handle: numbers of processes are reused, and are others in another container.
_process = PerProcess(lambda: os.urandom(16))
# What is open here, by handle and device.
_open: "PerProcess[dict[tuple, _Segment]]" = PerProcess(dict)
# Re-entrant: a collection inside may drop a block.
_opening = PerProcess(threading.RLock)


@dataclass(frozen=True)
class IpcHandle:
    """A block that another process can open on the same device.  Made by `Pool.ipc_handle`; can be pickled.

    Attributes
    ----------
    handle : bytes
        CUDA's 64 bytes for the segment that the block is in.
    base : int
        Address of the segment in the process that has the pool.
    offset, nbytes : int
        Where the block lies in the segment, and its bytes.
    device : int
        Ordinal of the device in the process that has the pool.
    source : str
        Name of the pool's source.
    """

    handle: bytes = field(repr=False)
    base: int
    offset: int
    nbytes: int
    device: int
    source: str
    process: bytes = field(repr=False, default_factory=lambda: _process.here)

    def open(self, device=None):
        """Open the block in this process.

        Parameters
        ----------
        device : int, optional
            Ordinal of its device here; the same as in the process that has the pool if not given.

        Returns
        -------
        SharedBlock
            Best used in a ``with`` statement.

        Raises
        ------
        ValueError
            In the process that has the pool, which has the block already; for a device that is not there.
        SourceError
            Where CUDA does not open it: the segment is gone, or of another device.

        Notes
        -----
        The pool does not know of it: the block must not be freed there before it is closed here, and what one
        process writes is there for the other once its streams have done so and the other was told.
        """
        if self.process == _process.here:
            raise ValueError(f"this process has the block already, at {self.base + self.offset:#x}")
        return SharedBlock(self, device)


class SharedBlock:
    """A block of another process, open here until it is closed or dropped.  Made by `IpcHandle.open`.

    Attributes
    ----------
    ptr : int
        Its address in this process; 0 after `close`.
    nbytes : int
        Bytes of the block.
    """

    def __init__(self, handle, device):
        self.ptr = 0
        self.nbytes = handle.nbytes
        self._entry = ((handle.handle, handle.device if device is None else device), forks(), object())
        # Before it is open, since a signal may come at any moment; and called at the latest at the end of the
        # interpreter, while CUDA is there.
        self._letting_go = weakref.finalize(self, _dropped, *self._entry)
        try:
            self.ptr = _entered(*self._entry) + handle.offset
        except BaseException:
            self._letting_go()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def __int__(self):
        return self.ptr

    def __repr__(self):
        state = "closed" if self.closed else f"of {self.nbytes} bytes at {self.ptr:#x}"
        return f"<vpool.ipc.SharedBlock {state}>"

    def __reduce__(self):
        raise TypeError("a shared block cannot be copied or pickled: send its handle")

    @property
    def closed(self):
        """Whether it was closed."""
        return self.ptr == 0

    def close(self):
        """Let go of the block; its address means nothing here then.  Closing twice does nothing.

        Raises
        ------
        SourceError
            Where CUDA does not close it; it stays open.
        """
        if self.ptr == 0:
            return
        # Let go of by `_dropped` too if a signal comes, so nothing is detached before it is done.
        error = _left(*self._entry)
        self.ptr = 0
        self._letting_go.detach()
        if error is not None:
            raise error


class _Segment:
    """An allocation of another process, open here once, as CUDA does it, for however many blocks."""

    def __init__(self, device):
        self.source = Cuda(device)
        self.bases = []  # its address here, once it is open
        self.holders = set()  # a token of each block


def _entered(key, process, holder):
    """Have one more block hold the segment of a handle; the address of that here."""
    with _opening.here:
        while True:
            segment = _open.here.get(key) or _open.here.setdefault(key, _Segment(key[1]))
            segment.holders.add(holder)
            # A finaliser may have closed it in between.
            if _open.here.get(key) is segment:
                break
        return segment.bases[0] if segment.bases else segment.source.open_shared(key[0], segment.bases)


def _left(key, process, holder):
    """Have a block hold nothing any more, and close the segment after the last; nothing in a child of who opened it.

    SourceError where it is still open, and the block holds it.  An error of what came after that is returned.
    """
    if process != forks():
        return None
    error = None
    with _opening.here:
        segment = _open.here.get(key)
        if segment is None:
            return None
        if segment.holders <= {holder}:
            try:
                del _open.here[key]
                if segment.bases:
                    error = segment.source.close_shared(segment.bases[0], segment.bases)
            finally:
                if segment.bases:
                    # Still open, and CUDA would not open it again: whoever comes next uses it.
                    _open.here.setdefault(key, segment)
        if not segment.bases or len(segment.holders) > 1:
            segment.holders.discard(holder)
    return error


def _dropped(key, process, holder):
    try:
        error = _left(key, process, holder)
    except (SourceError, ForkedProcessError) as failed:
        error = failed
    except BaseException:
        _left(key, process, holder)  # a signal's: nobody else would ever do it
        raise
    if error is not None:
        logger.warning("a block of another process, dropped: %s", error)

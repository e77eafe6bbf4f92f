"""Streams: the handle of whatever a caller passes as one."""

import operator
import sys

__all__ = ["HOST", "read_stream", "stream_handle"]


class _Host:
    """What stands for the host where a stream is expected."""

    handle = 2**63 - 1  # of no stream, and as good a number in every format that a report is written in

    def __repr__(self):
        return "vpool.streams.HOST"

    def __reduce__(self):
        return "HOST"


HOST = _Host()
"""The host itself, as a stream, for blocks of which nobody can say which stream uses them.

No work that any stream has queued touches a block that is allocated for it, so the host, or any stream, may use it
at once; and a block that is freed on it serves every stream without a wait, so whoever frees it has seen that all
work with it is complete.  Streams that still have work with it can be told by `Pool.record_stream`.
"""


def stream_handle(stream, device=None):
    """The CUDA handle of a stream.

    Parameters
    ----------
    stream : None, int, "current" or object
        None is the legacy default stream.  ``"current"`` asks the framework in use, PyTorch or CuPy.
        An object has `__cuda_stream__` (the protocol of cuda.core), `cuda_stream` (PyTorch), `ptr`
        (CuPy) or `handle` (Numba).  `HOST` has a number that is no handle, for reports.
    device : int, optional
        Ordinal of the device whose stream ``"current"`` means; the framework's current one if not given.

    Returns
    -------
    int
        The handle; 0 for the legacy default stream, however it was spelled.

    Raises
    ------
    TypeError
        For anything that is no stream.
    ValueError
        For a handle that is no address.
    """
    return read_stream(stream, device)[0]


def read_stream(stream, device=None):
    """The CUDA handle of a stream, and whether it lasts as long as the object.

    What is a number itself, or has one as a ctypes pointer does, may be another stream's the next time; an object of a
    framework has its handle as long as it lives.

    Parameters
    ----------
    stream, device
        As of `stream_handle`.

    Returns
    -------
    tuple of (int, bool)

    Raises
    ------
    TypeError, ValueError
        As of `stream_handle`.
    """
    if stream is None:
        return 0, False
    if isinstance(stream, bool):
        raise TypeError("stream must not be a bool")
    if isinstance(stream, str):
        if stream != "current":
            raise ValueError(f'a stream that is named must be "current", not {stream!r}')
        return stream_handle(_current(device)), False
    protocol = getattr(stream, "__cuda_stream__", None)
    lasts = True
    if protocol is not None:
        answer = protocol() if callable(protocol) else protocol
        try:
            handle = answer[1]
        except (TypeError, LookupError):
            kind = type(stream).__name__
            raise TypeError(f"__cuda_stream__ of {kind} must give a version and a handle, not {answer!r}") from None
    else:
        for attribute in ("cuda_stream", "ptr", "handle"):
            if hasattr(stream, attribute):
                handle = getattr(stream, attribute)
                break
        else:
            handle, lasts = stream, False
    handle = getattr(handle, "value", handle)  # a ctypes pointer
    try:
        handle = operator.index(0 if handle is None else handle)  # Numba's default stream has None
    except TypeError:
        raise TypeError(f"stream must be a handle or an object that has one, not {type(stream).__name__}") from None
    if not 0 <= handle < 2**64:
        raise ValueError(f"a stream handle has 64 bits, got {handle}")
    return 0 if handle == 1 else handle, lasts


def _current(device):
    """Handle of the framework's current stream on a device; of the legacy default stream if none is in use."""
    torch = _imported("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.current_stream(device).cuda_stream
    cupy = _imported("cupy")
    if cupy is not None:
        try:
            return cupy.cuda.get_current_stream(-1 if device is None else device).ptr
        except cupy.cuda.runtime.CUDARuntimeError:
            return 0  # imported, and without a device that it could use
    return 0


def _imported(name):
    """A module, if some thread has imported it whole."""
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module

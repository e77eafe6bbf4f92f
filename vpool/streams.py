"""Streams: the handle of whatever a caller passes as one."""

import operator

__all__ = ["stream_handle"]


def stream_handle(stream):
    """The CUDA handle of a stream.

    Parameters
    ----------
    stream : None, int or object
        None is the legacy default stream.  An object has `__cuda_stream__` (the protocol of
        cuda.core), `cuda_stream` (PyTorch), `ptr` (CuPy) or `handle` (Numba).

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
    if stream is None:
        return 0
    if isinstance(stream, bool):
        raise TypeError("stream must not be a bool")
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        handle = protocol()[1] if callable(protocol) else protocol[1]
    else:
        handle = stream
        for attribute in ("cuda_stream", "ptr", "handle"):
            if hasattr(stream, attribute):
                handle = getattr(stream, attribute)
                break
    if handle is None:  # Numba's default stream
        return 0
    handle = getattr(handle, "value", handle)  # a ctypes pointer
    try:
        handle = operator.index(0 if handle is None else handle)
    except TypeError:
        raise TypeError(f"stream must be a handle or an object that has one, not {type(stream).__name__}") from None
    if not 0 <= handle < 2**64:
        raise ValueError(f"a stream handle has 64 bits, got {handle}")
    return 0 if handle == 1 else handle

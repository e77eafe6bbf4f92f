"""Recorded traces that come with vpool."""

from importlib.resources import as_file, files

from vpool.trace import Trace

__all__ = ["bundled_trace"]


def bundled_trace():
    """Training with a side stream that prefetches."""
    with as_file(files("vpool.data") / "two_streams.npz") as path:
        return Trace.load(path)

"""What the tests of the debug modes share."""

import ctypes
import inspect
import sys
from contextlib import contextmanager

import vpool
from tests.helpers.pools import GIB, MIB
from vpool._storage.fake_cuda import FakeCudaDriver
from vpool.sources import Host, Simulated, Source

SOURCES = {
    "host": Host,
    "fake cuda": lambda: Source(FakeCudaDriver(GIB), "cuda"),
    "simulated": Simulated,
}


def debug_pool(debug, source="host", strategy=None, name="watched"):
    """A pool with debug modes on a small source of its own."""
    strategy = strategy or vpool.Dynamic(initial=MIB, limit=64 * MIB)
    return vpool.Pool(strategy, SOURCES[source](), name=name, debug=debug)


def line_above():
    """The site of the line before the one that calls this."""
    return _line(inspect.currentframe().f_back, -1)


def line_below():
    """The site of the line behind the one that calls this."""
    return _line(inspect.currentframe().f_back, 1)


def _line(frame, by):
    return f"{frame.f_code.co_filename}:{frame.f_lineno + by} in {frame.f_code.co_name}"


def write(address, byte=0x41, nbytes=1):
    ctypes.memset(address, byte, nbytes)


def read(address, nbytes):
    return ctypes.string_at(address, nbytes)


@contextmanager
def unraised(expected=1):
    """A list of what nobody could catch inside; there must be as many as expected."""
    caught = []
    before = sys.unraisablehook
    sys.unraisablehook = lambda args: caught.append(args.exc_value)
    try:
        yield caught
    finally:
        sys.unraisablehook = before
    assert len(caught) == expected, caught

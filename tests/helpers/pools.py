"""Pools for tests, and the proof that an error changed nothing."""

import subprocess
import sys
import threading
import unicodedata
from contextlib import contextmanager

import numpy as np

import vpool

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40
GRANULE = 256
# Names that would leave their line, move a cursor, turn text around, or cannot be written as UTF-8.
ODD_NAMES = [
    'a pool\nof "two" lines',
    "a pool\r\x1b[2J",
    "a pool\u202e",
    "a pool\u2028",
    "a pool\0",
    "a pool\udcff",
    r"a pool\n",
]

# Those that take more columns than characters, or more characters as they are shown.
WIDE_NAMES = {
    "controls": "\0" * 40,
    "wide": "記憶" * 40,
    "combining": "e\u0301" * 200,
    "quotes": "'\"\\" * 40,
    "emoji": "\U0001f4be" * 90,
    "endless": "x" * 20_000,
}


def columns(text):
    """Columns of a terminal that the widest line of a text takes."""
    return max(
        sum(1 + (unicodedata.east_asian_width(one) in "WF") - bool(unicodedata.combining(one)) for one in line)
        for line in text.splitlines()
    )


LIVE_FIGURES = ("allocated_bytes", "requested_bytes", "pending_bytes", "allocations", "frees")


def simulated_pool(capacity=None, *, initial=MIB, growth=1.5, limit=1.0, base_offset=0, name=None):
    """A pool on a simulated device, by default unbounded and with the whole device for itself."""
    source = vpool.sources.Simulated(capacity, base_offset=base_offset)
    return vpool.Pool(vpool.Dynamic(initial=initial, growth=growth, limit=limit), source=source, name=name)


def host_pool(*, initial=MIB, growth=1.5, limit=64 * MIB, name=None):
    """A small pool of memory that can be read and written."""
    return vpool.Pool(vpool.Dynamic(initial=initial, growth=growth, limit=limit), source="host", name=name)


def round_up(nbytes, unit=GRANULE):
    return -(-nbytes // unit) * unit


def live_rows(pool):
    """The live blocks, by address."""
    blocks = pool.inspect().blocks
    return np.sort(blocks[blocks["state"] == "live"], order="address")


def live_figures(pool):
    """Every figure of what is lent; no error may change one of them."""
    stats = pool.stats
    return {name: getattr(stats, name) for name in LIVE_FIGURES}


@contextmanager
def unchanged(pool):
    """Inside, nothing that is live may change; afterwards every invariant holds."""
    figures, rows, limit = live_figures(pool), live_rows(pool), pool.inspect().limit_bytes
    yield
    pool.check()
    assert live_figures(pool) == figures
    assert np.array_equal(live_rows(pool), rows)
    assert pool.inspect().limit_bytes == limit


def assert_whole(pool):
    """Nothing is live, every segment is one free block once streams gave back their loans, and the figures say so."""
    pool.check()
    pool.coalesce()
    pool.check()
    report = pool.inspect()
    assert (report.live_blocks, report.allocated_bytes, report.requested_bytes) == (0, 0, 0)
    assert report.free_blocks == report.segments
    assert report.free_bytes == report.reserved_bytes


def on_a_small_stack(call):
    """What a call returns in a thread with 64 KiB of stack.

    For a process of its own: where one thread has ended, the next may get its stack, which may be larger.
    """
    results = []
    before = threading.stack_size(64 * KIB)
    try:
        thread = threading.Thread(target=lambda: results.append(call()))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    return results[0]


def run_python(code, *arguments, timeout=60):
    """A fresh interpreter in which every warning is an error."""
    command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def run_cleanly(code, *arguments, timeout=60):
    """What a fresh interpreter printed; it must exit with 0 and say nothing on standard error."""
    done = run_python(code, *arguments, timeout=timeout)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout

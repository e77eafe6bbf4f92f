"""Scenarios of the fault matrix that take more than a pool: debug modes, blocks of other processes, moves."""

import atexit
import ctypes
import functools
import pickle
import subprocess
import sys

import vpool
from tests.helpers.pools import KIB, MIB
from vpool._storage.mapped_source import MappedSource

SMALL = vpool.Dynamic(initial="1MiB", growth="1MiB", limit="8MiB")


def watch(rig):
    """Poison is written and read, in stream order and where a stream is out of reach."""
    pool = rig.pool(SMALL, **rig.machine.options or {"debug": "poison,quarantine=1MiB,sites"})
    stream, other = rig.stream(), rig.stream()
    for on, freer in ((0, None), (stream, None), (stream, other), (0, other)):
        ptr = rig.allocate(pool, 300 * KIB, on)
        rig.record_stream(pool, ptr, other)
        rig.free(pool, ptr, freer)
        rig.free(pool, rig.allocate(pool, 400 * KIB, on))
    rig.do(pool.check)
    rig.do(pool.trim)
    rig.free(pool, rig.allocate(pool, 2 * MIB))


EXPORTING = """
import pickle, sys
import vpool
from vpool._storage.fake_cuda import FakeCudaDriver
pool = vpool.Pool(vpool.Dynamic(initial="1MiB"), vpool.sources.Source(FakeCudaDriver(1 << 30), "cuda", 0))
print(pickle.dumps(pool.ipc_handle(pool.allocate(1000))).hex(), flush=True)
sys.stdin.read()
"""


@functools.cache
def exported():
    """The handle of a block of another process, which ends with this one."""
    command = [sys.executable, "-c", EXPORTING]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.communicate)
    return pickle.loads(bytes.fromhex(process.stdout.readline()))


def open_exported(rig):
    """Blocks of another process are opened and closed, twice at once too."""
    driver, vpool.sources._cuda_driver = vpool.sources._cuda_driver, rig.driver
    blocks = []
    try:
        for _ in range(2):
            blocks += [rig.do(exported().open, 1), rig.do(exported().open, 1)]
            assert blocks[-1].ptr == blocks[-2].ptr
            for block in blocks:
                rig.do(block.close)
                assert block.closed
    finally:
        rig.disarm()
        while blocks:
            blocks.pop().close()
        assert vpool.ipc._open.here == {}, "with a driver that works again, all is given back"
        vpool.sources._cuda_driver = driver


def move(rig):
    """Memory goes to where it is needed, comes back, and is given back for other memory."""
    rig.do(rig.machine.on, rig.machine.device)
    pool = rig.pool(vpool.Dynamic(limit="28MiB"))
    for _ in range(2):
        blocks = [rig.allocate(pool, 3 * MIB) for _ in range(8)]
        for ptr in blocks[::2]:
            rig.free(pool, ptr)
        large = rig.allocate(pool, 6 * MIB)
        rig.refused(pool.allocate, 12 * MIB)
        rig.free(pool, large)
        rig.do(pool.inspect)
        for ptr in blocks[1::2]:
            rig.free(pool, ptr)
    rig.do(pool.trim, "4MiB")
    rig.allocate(pool, 20 * MIB)


def suspend(rig):
    """Memory that is given up and comes back, with its content."""
    pool = rig.pool(vpool.Dynamic(limit="64MiB"))
    stream = rig.stream()
    blocks = [rig.allocate(pool, 3 * MIB, stream=one) for one in (0, stream, 0)]
    rig.free(pool, blocks.pop())
    for _ in range(2):
        rig.do(pool.suspend, offload=rig.source.has_memory)
        rig.do(pool.resume)
        rig.check()
    for ptr in blocks:
        rig.free(pool, ptr)


def resize(rig):
    """A block of other sizes: where it is, and by a copy on its own stream and on another."""
    pool = rig.pool(vpool.Dynamic(initial="1MiB", growth="1MiB", limit="8MiB"))
    stream = rig.stream()
    ptr = rig.empty(pool, 1000)
    owner = 0
    for nbytes, on in ((5000, None), (300_000, None), (100, None), (200, stream), (3 * MIB, None)):
        owner = owner if on is None else on
        ptr = rig.resize(pool, ptr, nbytes, on, owner)
    rig.drop(pool, ptr)


def coalesce(rig):
    """Loans and pending blocks go home."""
    pool = rig.pool(vpool.Dynamic(initial="8MiB", limit="8MiB"))
    one, other = rig.stream(), rig.stream()
    rig.free(pool, rig.allocate(pool, 8 * MIB))
    rig.driver.complete()
    lent = [rig.allocate(pool, MIB, stream) for stream in (one, other)]
    rig.record_stream(pool, lent[0], other)
    for ptr in lent:
        rig.free(pool, ptr)
        rig.do(pool.coalesce)
    rig.driver.complete()
    rig.do(pool.coalesce)
    rig.free(pool, rig.allocate(pool, 8 * MIB))


def reserve(rig):
    """Memory is taken ahead: what is free counts, idle memory that is too small goes back, too much is refused."""
    pool = rig.pool(vpool.Dynamic(initial="1MiB", growth="1MiB", limit="8MiB"))
    stream = rig.stream()
    rig.do(pool.reserve, 2 * MIB)
    rig.free(pool, rig.allocate(pool, 2 * MIB, stream), stream)
    rig.driver.complete()
    rig.do(pool.reserve, 7 * MIB)
    ptr = rig.allocate(pool, 7 * MIB)
    rig.refused(pool.reserve, 2 * MIB)
    rig.free(pool, ptr)


def move_blocks(rig):
    """Blocks and buffers that may move are moved, of the default stream and of another, with their content."""
    for stream in (0, rig.stream()):
        pool = rig.pool(vpool.Dynamic(initial="8MiB", growth="1MiB", limit="12MiB"))
        checker, contents = rig.of(pool), {}

        def moved(old, new, checker=checker, stream=stream, contents=contents):
            contents[new] = contents.pop(old)
            del checker.live[old]
            checker.take(new, MIB, stream)
            if old in rig.buffers:
                rig.buffers[new] = rig.buffers.pop(old)
            if rig.source.has_memory:
                assert ctypes.string_at(new, MIB) == bytes([contents[new]]) * MIB

        blocks = [(rig.empty if number % 4 else rig.allocate)(pool, MIB, stream) for number in range(8)]
        for number, ptr in enumerate(blocks):
            if number % 2:
                rig.drop(pool, ptr)
                continue
            contents[ptr] = number
            if rig.source.has_memory:
                ctypes.memset(ptr, number, MIB)
            rig.do(pool.movable, rig.buffers.get(ptr, ptr), moved)
        rig.driver.complete()
        rig.do(pool.coalesce)
        rig.check()
        # The range of memory that moves is the default stream's, and what others borrow of it stays.
        stays = stream != 0 and isinstance(rig.source, MappedSource)
        assert (set(contents) == set(blocks[::2])) == stays or rig.met
        for ptr in contents:
            (rig.drop if ptr in rig.buffers else rig.free)(pool, ptr)

"""What a server does: a trace of requests of fixed shapes, and workers that hand one another blocks."""

import collections
import contextlib
import ctypes
import random
import threading
import time

import numpy as np

import vpool
from tests.helpers.pools import GRANULE, KIB, MIB, round_up

# Of each class of requests: how many are served at once, bytes of what lives as long as one does, and of its scratch.
CLASSES = (
    (12, (256 * KIB, 64 * KIB, 1000), (2 * MIB,)),
    (8, (MIB, 256 * KIB, 64 * KIB, 1000), (4 * MIB, 64 * KIB)),
    (4, (32 * MIB, MIB, 1000), (4 * MIB, 4 * MIB, 20_000)),
)


def serving_trace(requests=200, seed=0):
    """So many requests of each place in a busy server, one after the other; places overlap as chance will have it."""
    rng = random.Random(seed)
    events = []  # (time, number of the block, bytes; 0 to free it)
    for kept, scratch in ((kept, scratch) for places, kept, scratch in CLASSES for _ in range(places)):
        now = rng.randrange(10_000)
        for _ in range(requests):
            end = now + rng.randrange(2000, 20_000)
            for nbytes in (*kept, *scratch):
                number = len(events)
                events.append((now, number, nbytes))
                events.append((end if nbytes in kept else end - rng.randrange(1, 1000), number, 0))
            now = end + rng.randrange(1, 100)
    sizes = {number: nbytes for _, number, nbytes in events if nbytes}
    events.sort()
    return vpool.Trace(
        np.array([nbytes == 0 for *_, nbytes in events], np.uint8),
        np.array([number for _, number, _ in events], np.uint32),
        np.array([sizes[number] for _, number, _ in events], np.uint64),
        np.zeros(len(events), np.uint16),
        np.array([at for at, *_ in events], np.int64),
    )


def blocks_for(trace):
    """Pairs of size and count of the blocks that a trace needs: of each size as many as are ever live."""
    live, most = collections.Counter(), collections.Counter()
    for op, nbytes in zip(trace.op.tolist(), trace.bytes.tolist(), strict=True):
        size = round_up(nbytes)
        live[size] += -1 if op else 1
        most[size] = max(most[size], live[size])
    return sorted(most.items())


class Worker:
    """A thread on a stream of its own: it writes into its blocks, hands some on, and frees others' on its stream."""

    def __init__(self, pool, number, seconds, largest, handed):
        self.pool = pool
        self.stream = 16 * number or None
        self.until = time.monotonic() + seconds
        self.largest = largest
        self.handed = handed
        self.rng = random.Random(number)
        self.blocks = []
        self.lent = self.freed = self.refused = 0

    def words(self, ptr, nbytes):
        return np.ctypeslib.as_array((ctypes.c_uint64 * (round_up(nbytes) // 8)).from_address(ptr))[:: GRANULE // 8]

    def lend(self):
        nbytes = int(self.largest ** self.rng.random())
        try:
            ptr = self.pool.allocate(nbytes, self.stream)
        except vpool.OutOfMemoryError:
            self.refused += 1
            return False
        self.lent += 1
        mark = self.rng.getrandbits(60)
        self.words(ptr, nbytes)[:] = mark
        (self.handed if self.rng.random() < 0.4 else self.blocks).append((ptr, nbytes, mark))
        return True

    def free(self, block, stream):
        ptr, nbytes, mark = block
        assert (self.words(ptr, nbytes) == mark).all(), "two owners had the same memory"
        self.pool.deallocate(ptr, stream)
        self.freed += 1

    def __call__(self):
        while time.monotonic() < self.until:
            if self.rng.random() < 0.5 and len(self.blocks) < 60 and self.lend():
                continue
            if self.blocks:
                self.free(self.blocks.pop(self.rng.randrange(len(self.blocks))), None)
            with contextlib.suppress(IndexError):
                self.free(self.handed.popleft(), self.rng.choice([None, self.stream or 0]))
        while self.blocks:
            self.free(self.blocks.pop(), None)


def hammer(pool, *, seconds=1.0, threads=8, largest=16 * KIB):
    """Workers on one pool, all at once; how many blocks were lent, and freed, and how many requests were refused."""
    handed = collections.deque()
    workers = [Worker(pool, number, seconds, largest, handed) for number in range(threads)]
    errors = []

    def run(worker):
        try:
            worker()
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]
    while handed:
        workers[0].free(handed.pop(), None)
    return tuple(sum(getattr(worker, name) for worker in workers) for name in ("lent", "freed", "refused"))

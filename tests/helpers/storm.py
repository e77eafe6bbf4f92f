"""A storm on one pool, to find deadlocks: everything at once, with threads that change places all the time.

    python -m tests.helpers.storm --seconds 600

Threads lend, share and free on several streams of a pool that is too small, while pressure callbacks free
and allocate, a logging handler at DEBUG allocates from the same pool, collections free buffers inside any
call, finalisers free on streams that the pool meets there first, and others look at the pool.  The process
ends with the tracebacks of all threads where it hangs.
"""

import argparse
import collections
import ctypes
import faulthandler
import gc
import json
import logging
import os
import random
import sys
import threading
import time
import traceback

import numpy as np

import vpool
from vpool._interface import bench

LIMIT = 4 << 20
GRACE = 30  # seconds after which a storm that should have ended is taken for hung
SEGMENT = 256 << 10


class Cycle:
    """A buffer that only a collection frees."""

    def __init__(self, buffer):
        self.buffer = buffer
        self.myself = self


class Finaliser(Cycle):
    """The same, freed on a stream that the pool has perhaps not met."""

    def __init__(self, buffer, stream):
        super().__init__(buffer)
        self.stream = stream

    def __del__(self):
        self.buffer.close(self.stream)


class AllocatingHandler(logging.Handler):
    """Takes memory of the pool that it logs about, and gives it back."""

    def __init__(self, pool):
        super().__init__(logging.DEBUG)
        self.pool = pool
        self.inside = threading.local()
        self.records = 0

    def emit(self, record):
        record.getMessage()
        self.records += 1
        if getattr(self.inside, "now", False):
            return
        self.inside.now = True
        try:
            self.pool.empty(5000).close()
            Cycle(self.pool.empty(3000, stream=16))
        except vpool.OutOfMemoryError:
            pass
        finally:
            self.inside.now = False


class Storm:
    def __init__(self, options):
        self.options = options
        strategy = vpool.Dynamic(initial=SEGMENT, growth="256KiB", limit=LIMIT)
        self.pool = vpool.Pool(strategy, source="host", debug=options.debug)
        self.streams = [16 * (i + 1) for i in range(4)]
        self.stash = collections.deque()
        self.counts = collections.Counter()
        self.progress = [0] * options.threads
        self.errors = []
        self.stop = threading.Event()
        self.handler = AllocatingHandler(self.pool)
        logger = logging.getLogger("vpool")
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        logger.addHandler(self.handler)
        self.pool.on_pressure(self.free_some, priority=1)
        self.pool.on_pressure(self.free_and_allocate)
        self.pool.on_pressure(self.fail)

    def free_some(self, nbytes):
        for _ in range(3):
            if self.stash:
                self.stash.popleft().close()

    def free_and_allocate(self, nbytes):
        self.free_some(nbytes)
        self.stash.append(self.pool.empty(1000, stream=self.streams[nbytes % len(self.streams)]))

    def fail(self, nbytes):
        if nbytes % 7 == 0:
            raise ValueError("a callback that fails")

    def words(self, buffer):
        return np.ctypeslib.as_array((ctypes.c_uint64 * (buffer.requested // 8)).from_address(buffer.ptr))

    def lend(self, rng, blocks):
        nbytes = 8 * int(2 ** rng.uniform(0, 15))
        buffer = self.pool.empty(nbytes, stream=rng.choice((None, *self.streams)))
        mark = rng.getrandbits(60)
        self.words(buffer)[:] = mark
        blocks.append((buffer, mark))

    def check(self, buffer, mark):
        assert (self.words(buffer) == mark).all(), "two owners had the same memory"

    def free(self, rng, blocks):
        buffer, mark = blocks.pop(rng.randrange(len(blocks)))
        self.check(buffer, mark)
        way = rng.randrange(7)
        if way == 0:
            buffer.close(rng.choice(self.streams))
        elif way == 1:
            buffer.record_stream(rng.choice(self.streams))
            buffer.close()
        elif way == 2:
            Cycle(buffer)
        elif way == 3:
            Finaliser(buffer, rng.choice((*self.streams, rng.randrange(1000, 1100))))
        elif way == 4:
            self.stash.append(buffer)
        elif way == 5:
            self.pool.deallocate(buffer, stream=rng.choice((None, *self.streams)))

    def look(self, rng):
        way = rng.randrange(6)
        if way == 0:
            self.pool.check()
        elif way == 1:
            self.pool.inspect()
        elif way == 2:
            self.pool.coalesce()
        elif way == 3:
            gc.collect()
        elif way == 4:
            stats = self.pool.stats
            assert 0 <= stats.reserved_bytes <= LIMIT
        else:
            self.pool.ladder, self.pool.crossings, vpool.pools()

    def work(self, number):
        rng = random.Random(self.options.seed * 100 + number)
        blocks = []
        try:
            while not self.stop.is_set():
                self.progress[number] += 1
                way = rng.random()
                try:
                    if way < 0.03:
                        self.look(rng)
                    elif way < 0.05:
                        self.pool.empty(LIMIT // 2 + rng.randrange(LIMIT))
                    elif way < 0.06:
                        with vpool.stream(rng.choice(self.streams)):
                            self.pool.deallocate(self.pool.allocate(rng.randrange(1, 10000), alignment=4096))
                    elif way < 0.07:
                        bench.pair(self.pool, 4096, 2000)
                    elif way < 0.5 and len(blocks) < 40:
                        self.lend(rng, blocks)
                    elif blocks:
                        self.free(rng, blocks)
                except vpool.OutOfMemoryError:
                    self.counts["ooms"] += 1
                    if blocks:
                        self.free(rng, blocks)
            while blocks:
                self.free(rng, blocks)
        except BaseException:
            self.errors.append(traceback.format_exc())
            self.stop.set()

    def run(self):
        threads = [threading.Thread(target=self.work, args=(i,)) for i in range(self.options.threads)]
        until = time.monotonic() + self.options.seconds
        for thread in threads:
            thread.start()
        seen = list(self.progress)
        while not self.stop.wait(min(5.0, max(0.01, until - time.monotonic()))) and time.monotonic() < until:
            if any(now == before for now, before in zip(self.progress, seen, strict=True)):
                self.counts["stalls"] += 1  # a thread did nothing for five seconds; not an error by itself
            seen = list(self.progress)
        self.stop.set()
        for thread in threads:
            thread.join()
        logging.getLogger("vpool").removeHandler(self.handler)
        while self.stash:
            self.stash.popleft().close()
        gc.collect()

    def figures(self):
        self.pool.check()
        stats = self.pool.stats
        if stats.allocated_bytes and not self.errors:
            self.errors.append(f"blocks are live after the storm: {stats}")
        self.pool.close()
        if self.pool.stats.reserved_bytes and not self.errors:
            self.errors.append(f"memory is reserved after close: {self.pool.stats}")
        return {
            "operations": sum(self.progress),
            "slowest": min(self.progress),
            "allocations": stats.allocations,
            "records": self.handler.records,
            **self.counts,
            "crossings": self.pool.crossings,
            "ladder": self.pool.ladder,
            "errors": self.errors,
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--switch", type=float, default=1e-6, help="seconds between forced changes of thread")
    parser.add_argument("--debug", default="", help="the pool's debug modes")
    parser.add_argument("--one-core", action="store_true", help="as under `taskset -c 0`")
    options = parser.parse_args()
    if options.one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    faulthandler.dump_traceback_later(options.seconds + GRACE, exit=True)
    sys.setswitchinterval(options.switch)
    gc.set_threshold(50, 2, 2)
    storm = Storm(options)
    storm.run()
    figures = storm.figures()
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps(figures))
    return 1 if figures["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""What runs under a sanitizer: the storm, compiled loops without the GIL, and readers of the plain counters.

python -m tests.sanitize.stress --seconds 10
"""

import argparse
import contextlib
import faulthandler
import sys
import threading

import numpy as np

import vpool
from tests.helpers.storm import Storm
from vpool._interface import bench

GRACE = 60  # seconds after which a stress that should have ended is taken for hung
SIZES = np.array([256, 700, 4096, 33000], np.uint64)


def loops(storm, seed):
    """Allocations and frees without the GIL, on the pool that the storm uses."""
    while not storm.stop.is_set():
        bench.random_toggles(storm.pool, SIZES, 20, 3000, seed)
        with contextlib.suppress(vpool.OutOfMemoryError):  # the storm may have taken all there is
            bench.pair(storm.pool, 5000, 500)


def counters(storm):
    """What is read without any lock, and what is read under all."""
    while not storm.stop.wait(0.001):
        stats = storm.pool.stats
        assert stats.allocations >= stats.frees >= 0
        storm.pool.inspect()
        storm.pool.coalesce()


def replays():
    """A recorded program through a pool of its own, on simulated and on real memory."""
    trace = vpool.Trace.load("vpool/data/two_streams.npz")
    for pessimistic in (False, True):
        assert vpool.replay(trace, "dynamic", pessimistic=pessimistic).oom is None


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    options.threads, options.seed, options.debug = 4, 1, ""
    faulthandler.dump_traceback_later(options.seconds + GRACE, exit=True)
    sys.setswitchinterval(1e-4)
    replays()
    storm = Storm(options)
    threads = [threading.Thread(target=loops, args=(storm, seed)) for seed in range(2)]
    threads.append(threading.Thread(target=counters, args=(storm,)))
    for thread in threads:
        thread.start()
    storm.run()
    for thread in threads:
        thread.join()
    figures = storm.figures()
    faulthandler.cancel_dump_traceback_later()
    print(f"{figures['operations']} operations, {figures['allocations']} allocations")
    for error in figures["errors"]:
        print(error)
    return 1 if figures["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())

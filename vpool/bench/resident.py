"""Resident memory of many live blocks: ``python -m vpool.bench.resident BLOCKS`` prints two numbers of bytes."""

import resource
import sys

import numpy as np

from vpool._interface import bench as loops
from vpool._interface.pool import Pool
from vpool.strategies import Dynamic

__all__ = ["main"]

_BYTES = 512


def _resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main(live):
    """What so many live blocks of 512 bytes take, and what is left of it with every second one freed."""
    addresses = np.ones(live, np.uint64)  # its pages are there before the count begins
    with Pool(Dynamic(initial=2 * live * _BYTES, limit=1.0), "simulated", name="bench", debug=()) as pool:
        loops.pair(pool, _BYTES, 10)
        before = _resident()
        loops.fill(pool, _BYTES, addresses)
        whole = _resident() - before
        loops.drop(pool, addresses, 2)
        halved = _resident() - before
        loops.drop(pool, addresses)
    return whole, halved


if __name__ == "__main__":
    print(*main(int(sys.argv[1])))

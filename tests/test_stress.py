"""A million random operations against a light model."""

import random

import numpy as np
import pytest

import vpool
from tests.helpers.model import assert_disjoint
from tests.helpers.pools import GIB, KIB, MIB, assert_whole, round_up, run_cleanly, simulated_pool

OPERATIONS = 1_000_000
CHECKPOINTS = 20


def small(rng):
    return rng.randrange(1, 4 * KIB)


def every_scale(rng):
    return int(2 ** (8 + 20 * rng.random()))


def a_few_sizes(rng):
    return (512, 4 * KIB + 1, 64 * KIB, MIB + 300, 20 * MIB)[rng.randrange(5)]


def checkpoint(pool, live):
    pool.check()
    rows = pool.inspect().blocks
    rows = rows[rows["state"] == "live"]
    assert_disjoint(rows["address"], rows["nbytes"])
    expected = np.array(sorted(live), np.uint64).reshape(-1, 2)
    found = rows[np.argsort(rows["address"])]
    assert np.array_equal(found["address"], expected[:, 0])
    assert np.array_equal(found["requested"], expected[:, 1])
    assert pool.stats.requested_bytes == sum(nbytes for _, nbytes in live)
    assert pool.stats.allocated_bytes == sum(round_up(nbytes) for _, nbytes in live)


def stress(pool, operations, sizes, most_live, seed, checkpoints=CHECKPOINTS):
    """Random allocations and frees; half the time more of the one, half of the other."""
    rng = random.Random(seed)
    live = []
    refused = 0
    allocate, deallocate, chance = pool.allocate, pool.deallocate, rng.random
    for part in range(checkpoints):
        lends = 0.6 if part % 2 == 0 else 0.4
        for _ in range(operations // checkpoints):
            if live and (len(live) >= most_live or chance() > lends):
                place = int(chance() * len(live))
                live[place], live[-1] = live[-1], live[place]
                deallocate(live.pop()[0])
            else:
                nbytes = sizes(rng)
                try:
                    live.append((allocate(nbytes), nbytes))
                except vpool.OutOfMemoryError:
                    refused += 1
        checkpoint(pool, live)
    for ptr, _ in live:
        deallocate(ptr)
    assert_whole(pool)
    return refused


def test_a_million_operations():
    with simulated_pool(initial=256 * MIB) as pool:
        assert stress(pool, OPERATIONS, every_scale, 10_000, seed=1) == 0
        assert pool.stats.allocations + pool.stats.frees >= OPERATIONS


@pytest.mark.parametrize("sizes", [small, a_few_sizes])
def test_other_mixes_of_sizes(sizes):
    with simulated_pool() as pool:
        assert stress(pool, OPERATIONS // 10, sizes, 5_000, seed=2) == 0


def test_a_pool_that_keeps_running_out():
    with simulated_pool("256MiB", initial=0) as pool:
        assert stress(pool, 60_000, every_scale, 1_000, seed=3) > 100
        assert pool.stats.ooms == pool.ladder["wait for pending work"][0] > 100


@pytest.mark.parametrize("factor", [1.1, 2.0])
def test_many_segments(factor):
    with simulated_pool(initial=0, growth=factor) as pool:
        assert stress(pool, 50_000, small, 3_000, seed=4, checkpoints=5) == 0
        assert pool.stats.peak_reserved_bytes < GIB


LITTLE_ADDRESS_SPACE = """
import collections, itertools, resource, vpool

def limit(room):
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + room if room else resource.RLIM_INFINITY, resource.RLIM_INFINITY))

refusals = set()
for room in range(1 << 20, 1 << 30, 1 << 20):
    limit(room)
    try:
        pool = vpool.Pool(vpool.Dynamic(initial=0, growth=1.01, limit=1.0), source="simulated")
        break
    except MemoryError as error:
        refusals.add(str(error))
    finally:
        limit(None)
print(refusals)
live = []
try:
    live.extend(map(pool.allocate, itertools.repeat(1, 10_000_000)))
except vpool.OutOfMemoryError as error:
    print("records" in str(error), len(live) > 1000)
pool.check()
collections.deque(map(pool.deallocate, live[::2] + live[1::2]), maxlen=0)
pool.check()
print(pool.stats.allocated_bytes, pool.inspect().live_blocks, pool.allocate(1) > 0)
"""


def test_where_address_space_is_short_records_run_out_and_nothing_breaks():
    """Fewer records have to do; when they are gone that is out of memory, and every block can still be freed."""
    assert run_cleanly(LITTLE_ADDRESS_SPACE).splitlines() == [
        '{"no address space for the pool\'s own records"}',
        "True True",
        "0 0 True",
    ]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_ten_million_operations(seed):
    with simulated_pool(initial=256 * MIB) as pool:
        stress(pool, 10 * OPERATIONS, every_scale, 50_000, seed)

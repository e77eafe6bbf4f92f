"""A million random operations against a light model."""

import random

import numpy as np
import pytest

import vpool
from tests.helpers.model import assert_disjoint
from tests.helpers.pools import GIB, KIB, MIB, assert_whole, round_up, simulated_pool

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


@pytest.mark.parametrize("factor", [1.1, 2.0])
def test_many_segments(factor):
    with simulated_pool(initial=0, growth=factor) as pool:
        assert stress(pool, 50_000, small, 3_000, seed=4, checkpoints=5) == 0
        assert pool.stats.peak_reserved_bytes < GIB


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_ten_million_operations(seed):
    with simulated_pool(initial=256 * MIB) as pool:
        stress(pool, 10 * OPERATIONS, every_scale, 50_000, seed)

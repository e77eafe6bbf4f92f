"""Memory that goes from stream to stream, and on, and back: what that costs, and what reports say of it."""

import random
import resource
from pathlib import Path

import pytest

import vpool
from tests.helpers.order import Checker
from tests.helpers.pools import KIB, MIB, run_cleanly

STREAMS = [0x7000 + 16 * number for number in range(3)]
ROUNDS = 20_000  # twice as many took 4 MiB of the host's memory where each was a loan inside the one before


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def small_pool(nbytes=MIB):
    return vpool.Pool(vpool.Dynamic(initial=nbytes, limit=nbytes), source="simulated")


def steals(pool, nbytes, stream, _other):
    pool.deallocate(pool.allocate(nbytes, stream))


def hands_over(pool, nbytes, stream, other):
    pool.deallocate(pool.allocate(nbytes, stream), other)


@pytest.mark.parametrize("nbytes", [KIB, MIB])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("step", [steals, hands_over])
def test_memory_that_goes_to_and_fro_needs_no_more_and_more_records(step, count, nbytes):
    streams = STREAMS[:count]
    with small_pool() as pool:
        for at in range(3 * ROUNDS):
            if at == ROUNDS:
                before = resident_bytes()
            step(pool, nbytes, streams[at % count], streams[(at + 1) % count])
        assert resident_bytes() - before < MIB
        pool.check()
        blocks = pool.inspect().blocks
        assert blocks["nbytes"].sum() == MIB
        assert len(blocks) <= MIB // KIB
        pool.coalesce()
        pool.check()
        assert pool.inspect().largest_free_bytes == MIB


def test_a_report_needs_no_deep_stack_for_loans_inside_loans():
    """Each block is cut from the one that the other stream has just been handed."""
    run_cleanly("""
import vpool
from tests.helpers.pools import GRANULE, on_a_small_stack
depth, streams = 8000, (0x7010, 0x7020)
nbytes = (depth + 1) * GRANULE
pool = vpool.Pool(vpool.Dynamic(initial=nbytes, limit=nbytes), source="simulated")
for granules in range(depth, 0, -1):
    pool.deallocate(pool.allocate(granules * GRANULE, streams[granules % 2]), streams[1 - granules % 2])
pool.check()
blocks = on_a_small_stack(pool.inspect).blocks
assert len(blocks) >= depth
assert blocks["nbytes"].sum() == nbytes
assert (blocks["address"][1:] == (blocks["address"] + blocks["nbytes"])[:-1]).all()
pool.coalesce()
pool.check()
""")


@pytest.mark.parametrize("on_pressure", ["raise", "wait"])
@pytest.mark.parametrize(
    "strategy",
    [
        vpool.Dynamic(initial=MIB, limit=MIB),
        vpool.Fixed(MIB),
        vpool.Fixed(MIB, block="64KiB"),
        vpool.Hybrid(512 * KIB, block="64KiB", dynamic=vpool.Dynamic(limit=MIB)),
    ],
    ids=["dynamic", "fixed", "blocks", "hybrid"],
)
@pytest.mark.parametrize("seed", range(2))
def test_what_is_lent_on_is_never_given_out_early(seed, strategy, on_pressure):
    """Few sizes on three streams, so that most blocks are loans lent on; where the pool may wait, some streams die."""
    choose = random.Random(seed)
    source = vpool.sources.Simulated(2 * MIB)
    pool = vpool.Pool(strategy, source, on_pressure=on_pressure)
    driver, checker = source.driver, Checker(pool)
    streams = [driver.create_stream() for _ in range(3)]
    for _ in range(1000):
        stream = choose.choice(streams)
        kind = choose.random()
        ptr = choose.choice(list(checker.live)) if checker.live else None
        if kind < 0.45 or ptr is None:
            try:
                checker.use(checker.allocate(choose.choice((KIB, 64 * KIB)), stream), stream)
            except vpool.OutOfMemoryError:
                for ptr in list(checker.live)[::2]:
                    if checker.may_free(ptr):
                        checker.free(ptr)
        elif kind < 0.6 and checker.may_free(ptr):
            checker.free(ptr)
        elif kind < 0.85 and checker.may_free(ptr, stream):
            checker.free(ptr, stream)
        elif kind < 0.9:
            checker.record_stream(ptr, stream)
            checker.use(ptr, stream)
        elif kind < 0.98:
            driver.complete(stream)
        elif on_pressure == "wait":
            driver.destroy_stream(stream)
            streams.remove(stream)
            streams.append(driver.create_stream(choose.choice((stream, None))))
        checker.check()
    assert checker.allocated > 100
    checker.finish(stuck=True)

"""Memory crosses streams where no record is left to keep book with: late, perhaps, but never early and never lost."""

import ctypes
import random

import pytest

import vpool
from tests.helpers.order import Checker
from tests.helpers.pools import GRANULE, MIB
from tests.helpers.programs import Program, run_all
from tests.test_mapped import fake, pool_on, simulated, virtual

OUT_OF_MEMORY = 2

# Every stream is known, and has had memory of the others.
MET = tuple(one for i in range(3) for one in (("allocate", 2, i), ("free", 0, -1)))
PREFIXES = {
    "nothing": (),
    "a block of each stream": (("allocate", 1, 0), ("allocate", 1, 1)),
    "recorded once": (("allocate", 1, 0), ("record", 0, 1)),
    "recorded twice": (("allocate", 1, 0), ("record", 0, 1), ("record", 0, 2)),
    "lent, half live": (("allocate", 2, 0), ("free", 0, -1), ("allocate", 1, 1)),
    "lent whole": (("allocate", 2, 0), ("free", 0, -1), ("allocate", 2, 1)),
    "pending": (("allocate", 1, 0), ("record", 0, 1), ("free", 0, -1), ("allocate", 1, 2)),
}


class Recordless(Program):
    """A program in which records are gone from some point on."""

    def __init__(self, probe, prefix, refused, spare=True):
        super().__init__(3, 2 * GRANULE, sizes=(1, 2))
        self.records = probe.Records(self.pool)
        self.spare = spare
        self.refused_records = refused
        for choice in (*MET, *prefix):
            super().do(choice)
        self.done.clear()
        self.done.append(("query", 0, 2))

    def choices(self):
        # A block that could not be recorded is not used there either, so a correct program goes on.
        return [choice for choice in super().choices() if choice[0] not in ("destroy", "recycle")]

    def do(self, choice):
        self.records.take()
        if not self.spare:
            self.records.take_spare()
        try:
            super().do(choice)
        except MemoryError:
            assert choice[0] == "record"
            self.refused_records[0] += 1
            self.check()

    def check(self):
        self.records.give_spare()
        super().check()

    def finish(self, stuck=False):
        self.records.take()
        super().finish(stuck)
        self.records.give_back()


@pytest.mark.parametrize("spare", [True, False], ids=["spare ones", "none"])
@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_every_short_program_without_records(probe, prefix, spare):
    refused = [0]
    assert run_all(lambda: Recordless(probe, prefix, refused, spare), 2 if prefix else 3) > 50
    assert refused[0] > 0


@pytest.mark.parametrize("finished", [True, False])
def test_a_block_of_a_third_stream_is_not_lost(probe, finished):
    """It was lent whole, and freed on a stream that has no record for it, where its owner has none to wait for both."""
    source = vpool.sources.Simulated(MIB)
    driver = source.driver
    pool = vpool.Pool(vpool.Dynamic(initial=MIB, limit=MIB), source)
    checker = Checker(pool)
    owner, borrower, freer = (driver.create_stream() for _ in range(3))
    # Known, and without memory or a record of its own.
    noted = checker.allocate(MIB, owner)
    checker.record_stream(noted, freer)
    checker.free(noted)
    driver.complete()
    ptr = checker.allocate(MIB, borrower)
    checker.use(ptr, borrower)
    records = probe.Records(pool)
    records.take()
    driver.wait(freer, driver.number_of(borrower))
    checker.free(ptr, freer)
    checker.check()
    assert pool.stats.pending_bytes == MIB
    records.give_back()
    if finished:
        driver.complete()
    checker.use(checker.allocate(MIB, borrower), borrower)
    checker.finish()


def test_a_loan_that_goes_on_forgets_whom_it_was_with(probe):
    """What a report left on it is a number of the last borrower's records, of which the next may have fewer."""
    assert probe.edge_after_going_on() == 0


class TestMoves:
    """Memory that moves in a mapped pool."""

    @pytest.mark.parametrize("seed", range(20))
    def test_few_records_are_left(self, probe, seed):
        """What is begun is ended: no handle is lost between two places."""
        choices = random.Random(seed)
        with pool_on(simulated(64 * MIB)) as pool:
            blocks = [pool.allocate(choices.randrange(1, 7) * MIB) for _ in range(12)]
            for _ in range(6):
                pool.deallocate(blocks.pop(choices.randrange(len(blocks))))
            records = probe.Records(pool)
            for _ in range(20):
                records.take(choices.randrange(7))
                try:
                    blocks.append(pool.allocate(choices.randrange(1, 14 * MIB)))
                except vpool.OutOfMemoryError:
                    pool.deallocate(blocks.pop(choices.randrange(len(blocks))))
                pool.check()
            records.give_back()
            for ptr in blocks:
                pool.deallocate(ptr)
            pool.trim()
            pool.check()
            assert virtual(pool)[1:] == (0, 0)

    def test_others_take_the_last_ones_in_the_middle_of_a_move(self, probe):
        """The handle serves the next request."""
        with pool_on(fake(64 * MIB)) as pool:
            kept, ptr, behind = (pool.allocate(2 * MIB) for _ in range(3))
            pool.deallocate(ptr)
            assert probe.Records(pool).lost_in_a_move(ptr) == OUT_OF_MEMORY
            pool.check()
            assert pool.stats.reserved_bytes == 6 * MIB
            again = pool.allocate(2 * MIB)
            pool.check()
            assert (pool.stats.reserved_bytes, virtual(pool)[1]) == (6 * MIB, 3)
            ctypes.memset(again, 1, 2 * MIB)
            for one in (kept, again, behind):
                pool.deallocate(one)
            pool.trim()
            pool.check()
            assert virtual(pool)[1:] == (0, 0)

    def test_what_was_lost_in_a_move_comes_behind_the_work_on_it(self, probe):
        with pool_on(fake(64 * MIB)) as pool:
            driver = pool.source.driver
            other = driver.create_stream()
            pool.deallocate(pool.allocate(2 * MIB, stream=other), other)
            pool.trim()
            ptr = pool.allocate(2 * MIB)
            position = driver.queue_work(0)
            pool.deallocate(ptr)
            assert probe.Records(pool).lost_in_a_move(ptr) == OUT_OF_MEMORY
            again = pool.allocate(2 * MIB, stream=other)
            assert virtual(pool)[1] == 1
            assert driver.ordered(other, 0, position)
            pool.deallocate(again, other)
            pool.trim()
            pool.check()
            assert virtual(pool)[1:] == (0, 0)

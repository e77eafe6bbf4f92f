"""Memory crosses streams where no record is left to keep book with: late, perhaps, but never early and never lost."""

import pytest

from tests.helpers.pools import GRANULE
from tests.helpers.programs import Program, run_all

# Every stream is known, and has had memory of the others.
MET = tuple(one for i in range(3) for one in (("allocate", 2, i), ("free", 0, -1)))
PREFIXES = {
    "nothing": (),
    "a block of each stream": (("allocate", 1, 0), ("allocate", 1, 1)),
    "recorded once": (("allocate", 1, 0), ("record", 0, 1)),
    "recorded twice": (("allocate", 1, 0), ("record", 0, 1), ("record", 0, 2)),
    "lent, half live": (("allocate", 2, 0), ("free", 0, -1), ("allocate", 1, 1)),
    "pending": (("allocate", 1, 0), ("record", 0, 1), ("free", 0, -1), ("allocate", 1, 2)),
}


class Recordless(Program):
    """A program in which records are gone from some point on."""

    def __init__(self, probe, prefix, refused):
        super().__init__(3, 2 * GRANULE, sizes=(1, 2))
        self.records = probe.Records(self.pool)
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
        try:
            super().do(choice)
        except MemoryError:
            assert choice[0] == "record"
            self.refused_records[0] += 1
            self.checker.check()

    def finish(self, stuck=False):
        self.records.take()
        super().finish(stuck)
        self.records.give_back()


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_every_short_program_without_records(probe, prefix):
    refused = [0]
    assert run_all(lambda: Recordless(probe, prefix, refused), 2 if prefix else 3) > 50
    assert refused[0] > 0

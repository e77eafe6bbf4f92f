"""A pool as simple as can be: a dictionary of the blocks that are live."""

import numpy as np

from tests.helpers.pools import round_up


class Model:
    """What must be true of a pool's live blocks, told by the calls that it answered."""

    def __init__(self):
        self.live = {}  # address -> (requested bytes, stream)
        self.allocations = 0
        self.frees = 0

    def allocated(self, ptr, nbytes, stream=0):
        assert ptr not in self.live, "an address that is live already"
        self.live[ptr] = nbytes, stream
        self.allocations += 1

    def freed(self, ptr):
        del self.live[ptr]
        self.frees += 1

    @property
    def requested_bytes(self):
        return sum(nbytes for nbytes, _ in self.live.values())

    def assert_agrees(self, pool, base_slack=0):
        """Compare every figure and every live block, and look for overlaps.

        `base_slack` is what each segment loses because its base is no multiple of the granule.  Where the pool
        has equal blocks, a live one may be larger than what was asked for.
        """
        pool.check()
        blocks = {size for size, _ in (pool.inspect().core or {"block_sizes": ()})["block_sizes"]}
        report, stats = pool.inspect(), pool.stats
        rows = report.blocks[report.blocks["state"] == "live"]
        found = {int(row["address"]): (int(row["requested"]), int(row["stream"]), int(row["nbytes"])) for row in rows}
        assert found.keys() == self.live.keys()
        for ptr, (nbytes, stream) in self.live.items():
            assert found[ptr][:2] == (nbytes, stream)
            assert found[ptr][2] in blocks if blocks and found[ptr][2] != round_up(nbytes) else True
            assert found[ptr][2] >= round_up(nbytes) if blocks else found[ptr][2] == round_up(nbytes)
        assert_disjoint(rows["address"], rows["nbytes"])
        assert stats.requested_bytes == report.requested_bytes == self.requested_bytes
        assert stats.allocated_bytes == rows["nbytes"].sum()
        assert (stats.allocations, stats.frees) == (self.allocations, self.frees)
        in_blocks = report.allocated_bytes + report.free_bytes + report.pending_bytes
        assert report.reserved_bytes == in_blocks + base_slack * report.segments
        assert pool.source.driver.used == stats.reserved_bytes <= report.limit_bytes
        assert stats.peak_allocated_bytes >= stats.allocated_bytes
        assert stats.peak_reserved_bytes >= stats.reserved_bytes


def assert_disjoint(addresses, sizes):
    """No two of these ranges overlap."""
    order = np.argsort(addresses)
    ends = addresses[order] + sizes[order]
    assert (addresses[order][1:] >= ends[:-1]).all()

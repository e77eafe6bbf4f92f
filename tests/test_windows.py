"""Which free memory and holes a block is made of, where memory has to move for it."""

import vpool
from tests.helpers.pools import MIB


def test_where_too_little_can_move_free_memory_beside_live_blocks_is_used():
    """Two places for 62 MiB: one has 20 free, most of which could move; the other 14 that cannot."""
    source = vpool.sources.SimulatedVmm("1GiB", handle="16MiB")
    with vpool.Pool(vpool.Dynamic(limit=1.0), source=source) as pool:
        pool.deallocate(pool.allocate(64 * MIB))
        first = pool.allocate(62 * MIB)
        pool.allocate(2 * MIB)  # keeps the last of the first's handles
        pool.deallocate(first)
        pool.deallocate(pool.allocate(100 * MIB))  # takes the others
        pool.allocate(80 * MIB)
        assert pool.stats.reserved_bytes == 116 * MIB
        assert pool.allocate(62 * MIB) == first
        assert pool.stats.reserved_bytes == 144 * MIB
        pool.check()

"""A driver that fails, and memory that is short, while a pool is suspended or resumed."""

import contextlib

import pytest

import vpool
from tests.helpers.pools import MIB, unchanged
from tests.test_mapped import fake, pool_on, simulated
from tests.test_suspend import fill, holds, states


class TestFailures:
    """Each call of the driver fails once: the pool is as before, or can be brought back."""

    @pytest.mark.parametrize("call", ["synchronize", "read", "handle_unmap", "handle_release", "event_record"])
    @pytest.mark.parametrize("after", [0, 1, 3])
    def test_while_it_is_given_up(self, call, after):
        with pool_on(fake()) as pool:
            blocks = [pool.allocate(3 * MIB) for _ in range(9)]
            for i, ptr in enumerate(blocks):
                fill(ptr, 3 * MIB, i + 1)
            pool.source.driver.fail(call, 1, after=after)
            with contextlib.suppress(vpool.SourceError):
                pool.suspend(offload=True)
            pool.source.driver.fail(call, times=0)
            pool.check()
            if states(pool).get("suspended"):
                pool.resume()
            pool.check()
            assert states(pool)["live"] == 27 * MIB
            assert all(holds(ptr, 3 * MIB, i + 1) for i, ptr in enumerate(blocks))
            pool.suspend(offload=True)
            pool.resume()
            assert all(holds(ptr, 3 * MIB, i + 1) for i, ptr in enumerate(blocks))

    @pytest.mark.parametrize("call", ["handle_create", "handle_map", "access_set", "write"])
    @pytest.mark.parametrize("after", [0, 2])
    def test_while_it_is_brought_back(self, call, after):
        with pool_on(fake()) as pool:
            blocks = [pool.allocate(3 * MIB) for _ in range(9)]
            for i, ptr in enumerate(blocks):
                fill(ptr, 3 * MIB, i + 1)
            pool.suspend(offload=True)
            pool.source.driver.fail(call, 1, after=after)
            with pytest.raises(vpool.SourceError):
                pool.resume()
            pool.check()
            assert states(pool) == {"suspended": 27 * MIB}
            assert pool.stats.reserved_bytes == 0
            pool.resume()
            pool.check()
            assert all(holds(ptr, 3 * MIB, i + 1) for i, ptr in enumerate(blocks))

    def test_where_it_cannot_even_be_undone(self):
        """The driver takes the memory back neither when it shall nor later; once it works again, nothing is lost."""
        with pool_on(fake()) as pool:
            ptr = pool.allocate(9 * MIB)
            fill(ptr, 9 * MIB, 3)
            pool.suspend(offload=True)
            pool.source.driver.fail("write", 1, sticky=True)
            with pytest.raises(vpool.SourceError):
                pool.resume()
            pool.source.driver.fail("write", times=0)
            pool.check()
            assert states(pool) == {"suspended": 9 * MIB}
            pool.resume()
            pool.check()
            assert holds(ptr, 9 * MIB, 3)

    @pytest.mark.parametrize("then", ["resume", "suspend", "free", "free while it stays"])
    def test_what_stays_mapped_in_vain_serves_elsewhere(self, then):
        """The device cannot use it at the place it was for, which has no memory whatever becomes of the handle."""
        with pool_on(fake()) as pool:
            ptr = pool.allocate(9 * MIB)
            fill(ptr, 9 * MIB, 3)
            pool.suspend(offload=True)
            pool.source.driver.fail("access_set", 1)
            pool.source.driver.fail("handle_unmap", 1, times=1000)
            with pytest.raises(vpool.SourceError):
                pool.resume()
            other = pool.allocate(2 * MIB)
            fill(other, 2 * MIB, 7)
            pool.check()
            if then == "free while it stays":
                pool.deallocate(ptr)
                with contextlib.suppress(vpool.SourceError):
                    pool.trim()
                pool.check()
            pool.source.driver.fail("handle_unmap", times=0)
            if then == "suspend":
                pool.suspend(offload=True)
                pool.check()
            elif then == "free":
                pool.deallocate(ptr)
                pool.trim()
                pool.check()
            pool.resume()
            pool.check()
            assert holds(other, 2 * MIB, 7)
            if then in ("resume", "suspend"):
                assert holds(ptr, 9 * MIB, 3)
            pool.deallocate(other)
            pool.trim()
            pool.check()
            assert pool.stats.reserved_bytes == (10 * MIB if then in ("resume", "suspend") else 0)

    def test_where_it_cannot_be_mapped_again(self):
        with pool_on(fake()) as pool:
            ptr = pool.allocate(9 * MIB)
            fill(ptr, 9 * MIB, 3)
            pool.source.driver.fail("handle_unmap", 1, after=2, sticky=True)
            with pytest.raises(vpool.SourceError):
                pool.suspend(offload=True)
            pool.source.driver.fail("handle_unmap", times=0)
            pool.check()
            pool.resume()
            pool.check()
            assert holds(ptr, 9 * MIB, 3)

    def test_no_room_to_come_back(self):
        source = simulated(64 * MIB)
        with pool_on(source) as pool:
            kept = pool.allocate(40 * MIB)
            pool.suspend()
            other = pool.allocate(50 * MIB)
            with unchanged(pool), pytest.raises(vpool.OutOfMemoryError, match=r"41,943,040 bytes.*nothing is lost"):
                pool.resume()
            assert states(pool)["suspended"] == 40 * MIB
            pool.deallocate(other)
            assert pool.resume() == 40 * MIB, "idle memory goes back for it"
            pool.check()
            pool.deallocate(kept)

    def test_the_limit_holds(self):
        with vpool.Pool(vpool.Dynamic(limit="64MiB"), source=simulated()) as pool:
            pool.allocate(40 * MIB)
            pool.suspend()
            pool.allocate(50 * MIB)
            with pytest.raises(vpool.OutOfMemoryError, match="pass the limit"):
                pool.resume()
            pool.check()

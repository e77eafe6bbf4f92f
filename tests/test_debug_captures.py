"""Debug modes while a stream captures: nothing is read or filled that would invalidate the capture."""

import gc

import pytest

import vpool
from tests.helpers.debug import unraised, write
from tests.helpers.pools import MIB
from tests.test_captures import MODES, Graph, fake_pool

ALL = "guard,poison,quarantine=1MiB,sites"


@pytest.mark.parametrize("mode", MODES)
def test_a_capture_stays_valid_whatever_is_allocated_and_freed_meanwhile(mode):
    pool, driver = fake_pool(debug=ALL)
    streams = [0, driver.create_stream(), driver.create_stream(blocking=False)]
    before = [pool.allocate(1000, stream) for stream in streams]
    with Graph(driver, mode) as graph, unraised(0):
        for stream in [*streams, graph.stream]:
            for nbytes in (1000, MIB, 3 * MIB):
                pool.deallocate(pool.allocate(nbytes, stream), stream)
                pool.empty(nbytes, stream).close()
            dropped = pool.empty(1000, stream)
            del dropped
        pool.deallocate(before.pop(), graph.stream)
        for ptr in before:
            pool.record_stream(ptr, graph.stream)
            pool.deallocate(ptr)
        pool.check()
        pool.trim()
    pool.check()
    graph.destroy()
    gc.collect()
    pool.trim()
    assert driver.used() == 0


def test_what_a_graph_has_is_never_looked_at():
    """Its memory may be written whenever the graph is launched, which cannot be told from a mistake."""
    pool, driver = fake_pool(debug=ALL)
    with Graph(driver) as graph:
        inside = pool.allocate(1000, graph.stream)
    write(inside + 1000)
    pool.check()
    reads = driver.calls()["read_on"][0]
    pool.deallocate(inside)
    other = pool.allocate(1000, graph.stream)
    pool.deallocate(other, graph.stream)
    write(inside, 0x42, 1000)
    with unraised(0):
        pool.trim()
    assert driver.calls()["read_on"][0] == reads + 3, "two guards and the poison of the one outside"


def test_a_block_that_was_lent_during_a_capture_is_not_taken_for_damaged():
    pool, driver = fake_pool(debug=ALL)
    with Graph(driver):
        ptr = pool.allocate(1000)  # the legacy default stream waits for the capture's
    pool.check()
    pool.deallocate(ptr)


def test_guards_work_again_after_the_capture():
    pool, driver = fake_pool(debug=ALL)
    ptr = pool.allocate(1000)
    with Graph(driver):
        write(ptr + 1000)
        pool.check()
    with pytest.raises(vpool.GuardError):
        pool.check()
    with pytest.raises(vpool.GuardError):
        pool.deallocate(ptr)
    pool.deallocate(ptr)

"""Buffers that are resized while a stream captures, or after: no graph writes to what is not its own."""

import ctypes

import pytest

import vpool
from tests.helpers.pools import MIB, unchanged
from tests.test_captures import MODES, Graph, disjoint, fake_pool


def content(buffer, nbytes=1000):
    return ctypes.string_at(buffer.ptr, nbytes)


def filled(pool, stream, byte, nbytes=1000):
    """A buffer that cannot grow where it is."""
    buffer = pool.empty(nbytes, stream=stream)
    ctypes.memset(buffer.ptr, byte, nbytes)
    return buffer, pool.empty(256, stream=stream)


def eager_blocks(pool, *streams):
    """Memory for whoever asks outside of captures, as much as there is."""
    blocks = []
    for stream in streams:
        try:
            while True:
                blocks.append((pool.allocate(MIB, stream=stream), MIB))
        except vpool.OutOfMemoryError:
            pass
    return blocks


@pytest.fixture(params=[True, False], ids=["blocking", "non-blocking"])
def blocking(request):
    return request.param


@pytest.mark.parametrize("mode", MODES)
def test_the_copy_is_captured_and_both_blocks_are_the_graphs(mode, blocking):
    pool, driver = fake_pool(capacity=16 * MIB)
    with Graph(driver, mode, blocking=blocking) as graph:
        inside, _wall = filled(pool, graph.stream, 5)
        old = inside.ptr
        copies = driver.calls()["copy_on"][0]
        pool.resize(inside, 500_000, graph.stream)
        assert driver.calls()["copy_on"][0] == copies + 1
        assert inside.ptr != old
        assert content(inside) != bytes([5]) * 1000, "the copy was made at once"
        again = pool.empty(1000, stream=graph.stream)
        assert again.ptr == old, "freed in the capture, it serves the capture"
        used = [(old, 1000), (inside.ptr, 500_000)]
    inside.close()
    again.close()
    assert disjoint(used, eager_blocks(pool, graph.stream, None))
    pool.check()
    graph.destroy()
    pool.close()


def test_a_block_from_before_stays_as_long_as_the_graph_that_copies_it(blocking):
    pool, driver = fake_pool(capacity=16 * MIB)
    stream = driver.create_stream(blocking=blocking)
    buffer, _wall = filled(pool, stream, 6)
    old = buffer.ptr
    with Graph(driver, stream=stream) as graph:
        pool.resize(buffer, 500_000, stream)
    assert buffer.ptr != old
    assert ctypes.string_at(old, 1000) == bytes([6]) * 1000
    eager = eager_blocks(pool, stream, None)
    assert disjoint([(old, 1000), (buffer.ptr, 500_000)], eager), "each launch reads the old block"
    for ptr, _ in eager:
        pool.deallocate(ptr)
    _wall.close()
    buffer.close()
    graph.destroy()
    pool.trim()
    assert driver.used() == 0


def test_a_copy_that_nobody_meant_for_the_graph_is_none(blocking):
    """Its old block would be lent again before the graph has read it."""
    pool, driver = fake_pool()
    stream = driver.create_stream(blocking=blocking)
    buffer, _wall = filled(pool, stream, 7)
    ptr = buffer.ptr
    copies = driver.calls()["copy_on"][0]
    with Graph(driver, stream=stream):
        live = pool.stats.allocated_bytes, pool.stats.requested_bytes
        with pytest.raises(vpool.Error, match="pass the stream"):
            pool.resize(buffer, 500_000)
        assert live == (pool.stats.allocated_bytes, pool.stats.requested_bytes)
        pool.resize(buffer, 700)  # where it is
    assert driver.calls()["copy_on"][0] == copies
    assert (buffer.ptr, content(buffer, 700)) == (ptr, bytes([7]) * 700)
    pool.resize(buffer, 500_000)
    assert content(buffer, 700) == bytes([7]) * 700


def test_a_capture_is_not_invalidated_by_a_copy_on_the_default_stream(blocking):
    pool, driver = fake_pool()
    buffer, _wall = filled(pool, None, 8)
    with Graph(driver, blocking=blocking):
        if blocking:
            with pytest.raises(vpool.Error, match="while a capture goes on"):
                pool.resize(buffer, 500_000)
            assert buffer.requested == 1000
        else:
            pool.resize(buffer, 500_000)
        assert content(buffer) == bytes([8]) * 1000
    pool.resize(buffer, 900_000)
    assert content(buffer) == bytes([8]) * 1000


@pytest.mark.parametrize("sized", [True, False])
def test_nothing_grows_into_what_the_graph_writes_to(sized, blocking):
    """After a capture all that is free in its memory is what each launch uses."""
    pool, driver = fake_pool()
    with Graph(driver, blocking=blocking) as graph:
        result = pool.empty(1000, stream=graph.stream)
        temporary = pool.empty(500_000, stream=graph.stream)
        of_the_graph = [(temporary.ptr, 500_000)]
        assert temporary.ptr == result.ptr + 1024
        temporary.close()
        if not sized:
            pool.resize(result, 0)
    ctypes.memset(of_the_graph[0][0] - 1024, 9, 1000)
    with unchanged(pool), pytest.raises(vpool.Error, match="capture's memory: pass the stream"):
        pool.resize(result, 400_000)
    if sized:
        pool.resize(result, 600)  # where it is
    pool.resize(result, 400_000, graph.stream)
    assert disjoint([(result.ptr, 400_000)], of_the_graph)
    assert not sized or content(result, 600) == bytes([9]) * 600
    pool.check()


def test_in_a_capture_it_grows_in_place_on_the_stream_that_is_passed(blocking):
    pool, driver = fake_pool()
    with Graph(driver, blocking=blocking) as graph:
        inside = pool.empty(1000, stream=graph.stream)
        ptr = inside.ptr
        copies = driver.calls()["copy_on"][0]
        pool.resize(inside, 100_000, graph.stream)
        assert (inside.ptr, driver.calls()["copy_on"][0]) == (ptr, copies)
    pool.check()

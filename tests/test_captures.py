"""Streams that capture: no call that would invalidate the capture, memory kept for the graph and let go with it.

The simulated streams refuse, and count as fatal for the capture, what CUDA was seen to refuse.
"""

import gc
import itertools
import sys
import threading

import pytest

import vpool
from tests.helpers.pools import MIB, assert_whole
from vpool._storage.fake_cuda import FakeCudaDriver

MODES = ("global", "thread_local", "relaxed")


def fake_pool(capacity=64 * MIB, strategy=None, *, initial=4 * MIB, devices=1, **options):
    """A pool on a CUDA over ordinary memory, and its driver."""
    driver = FakeCudaDriver(capacity, devices=devices)
    source = vpool.sources.Source(driver, "cuda", 0)
    return vpool.Pool(strategy or vpool.Dynamic(initial=initial, limit=1.0), source=source, **options), driver


class Graph:
    """A capture on a stream of its own, ended or aborted at the end of the block."""

    def __init__(self, driver, mode="global", *, stream=None, blocking=True, spoil=False):
        self.driver = driver
        self.mode = mode
        self.stream = driver.create_stream(blocking=blocking) if stream is None else stream
        self.spoil = spoil

    def __enter__(self):
        self.id = self.driver.begin_capture(self.stream, self.mode)
        return self

    def __exit__(self, *exc_info):
        if self.spoil:
            self.driver.fail_capture(self.stream)
        self.valid = self.driver.end_capture(self.stream)
        if exc_info == (None, None, None):
            assert self.valid == (not self.spoil), "the capture was invalidated"

    def destroy(self):
        self.driver.destroy_graph(self.id)


def disjoint(blocks, others):
    """Whether no (address, bytes) of the first overlaps one of the second."""
    return all(a + n <= b or b + m <= a for (a, n), (b, m) in itertools.product(blocks, others))


# Memory.


def test_what_is_kept_for_a_graph_is_not_reserved():
    pool, driver = fake_pool(strategy=vpool.Fixed(8 * MIB))
    with Graph(driver) as graph:
        pool.deallocate(pool.allocate(5 * MIB, stream=graph.stream))
    pool.reserve(3 * MIB)
    with pytest.raises(vpool.OutOfMemoryError):
        pool.reserve(4 * MIB)
    pool.release_capture(graph.id)
    pool.reserve(8 * MIB)
    pool.deallocate(pool.allocate(8 * MIB))


def test_a_graph_keeps_what_it_was_captured_with():
    pool, driver = fake_pool()
    with Graph(driver) as graph:
        temporary = pool.allocate(MIB, stream=graph.stream)
        pool.deallocate(temporary)
        assert pool.allocate(MIB, stream=graph.stream) == temporary
        pool.deallocate(temporary)
    eager = [(pool.allocate(MIB, stream=stream), MIB) for stream in (0, graph.stream) for _ in range(6)]
    assert disjoint([(temporary, MIB)], eager)
    assert pool.captures == (graph.id,)
    pool.trim()
    pool.check()
    for address, _ in eager:
        pool.deallocate(address)
    pool.release_capture(graph.id)
    assert pool.captures == ()
    assert pool.trim() > 0
    assert driver.used() == 0
    assert_whole(pool)


def test_allocation_inside_a_captured_graph():
    pool, driver = fake_pool()
    with Graph(driver) as graph:
        temporary = pool.empty(MIB, stream=graph.stream)
        result = pool.empty(MIB, stream=graph.stream)
        temporary.close()
    before = pool.inspect().to_dict()
    for _ in range(1000):
        driver.queue_work(graph.stream)  # a launch
    assert pool.inspect().to_dict() == before
    graph.destroy()
    result.close()
    pool.trim()
    assert driver.used() == 0


def test_memory_of_a_capture_is_its_own():
    """What was free before serves a capture only if no work can touch it any more."""
    pool, driver = fake_pool(initial=8 * MIB)
    stream = driver.create_stream()
    old = pool.allocate(8 * MIB, stream=stream)
    driver.queue_work(stream)
    pool.deallocate(old)
    with Graph(driver, stream=stream) as graph:
        ptr = pool.allocate(MIB, stream=stream)
    assert disjoint([(old, 8 * MIB)], [(ptr, MIB)]), "a graph could run before the work that was queued"
    driver.complete()
    with Graph(driver, blocking=False) as second:
        other = pool.allocate(MIB, stream=second.stream)
    assert not disjoint([(old, 8 * MIB)], [(other, MIB)]), "free memory serves a capture, too"
    assert (graph.valid, second.valid) == (True, True)
    pool.check()


def test_every_stream_of_a_capture_has_its_memory():
    pool, driver = fake_pool()
    other = driver.create_stream()
    with Graph(driver) as graph:
        driver.fork_capture(graph.stream, other)
        mine, its = pool.allocate(MIB, stream=graph.stream), pool.allocate(MIB, stream=other)
        pool.deallocate(its)
        assert pool.allocate(MIB, stream=other) == its
        assert pool.allocate(MIB, stream=graph.stream) not in (mine, its), "nothing orders the two branches"
        pool.deallocate(its, stream=graph.stream)
        driver.join_capture(graph.stream, other)
    assert pool.captures == (graph.id,)
    eager = [(pool.allocate(MIB, stream=other), MIB) for _ in range(4)]
    assert disjoint([(mine, MIB), (its, MIB)], eager)
    pool.check()


def test_two_captures_have_nothing_in_common():
    pool, driver = fake_pool()
    blocks = []
    for _ in range(2):
        with Graph(driver) as graph:
            ptr = pool.allocate(MIB, stream=graph.stream)
            pool.deallocate(ptr)
        blocks.append([(ptr, MIB)])
    assert disjoint(*blocks)
    first, second = pool.captures
    pool.release_capture(first)
    eager = [(pool.allocate(MIB), MIB) for _ in range(8)]
    assert disjoint(blocks[1], eager), "the second graph is still valid"
    assert pool.captures == (second,)


def test_two_captures_share_memory_if_told():
    pool, driver = fake_pool()
    with Graph(driver) as first:
        ptr = pool.allocate(MIB, stream=first.stream)
        pool.deallocate(ptr)
    with Graph(driver, stream=first.stream) as second:
        pool.share_capture(second.id, first.id)
        pool.share_capture(second.id, first.id)
        assert pool.allocate(MIB, stream=second.stream) == ptr
        pool.deallocate(ptr)
    pool.release_capture(first.id)
    eager = [(pool.allocate(MIB), MIB) for _ in range(8)]
    assert disjoint([(ptr, MIB)], eager)
    second.destroy()
    assert pool.captures == ()
    for address, _ in eager:
        pool.deallocate(address)
    pool.trim()
    assert driver.used() == 0


def test_a_capture_that_was_to_share_memory_which_is_released_has_its_own():
    pool, driver = fake_pool()
    with Graph(driver) as first:
        pool.deallocate(pool.allocate(MIB, stream=first.stream))
    with Graph(driver) as second:
        pool.share_capture(second.id, first.id)
        pool.release_capture(first.id)
        pool.deallocate(pool.allocate(MIB, stream=second.stream))
    pool.close()
    del pool
    gc.collect()
    assert driver.used() > 0, "the graph may use it"
    other, _ = fake_pool()
    second.destroy()
    other.trim()
    gc.collect()
    assert driver.used() == 0


@pytest.mark.parametrize("spoil", [False, True])
def test_a_capture_that_shares_and_allocates_nothing_keeps_nothing(spoil):
    """Only what allocates can be asked for its graph, so nothing would tell that it is over."""
    pool, driver = fake_pool()
    with Graph(driver) as first:
        ptr = pool.allocate(MIB, stream=first.stream)
        pool.deallocate(ptr)
    with Graph(driver, spoil=spoil) as second:
        pool.share_capture(second.id, first.id)
    with Graph(driver, stream=first.stream) as third:
        pool.share_capture(third.id, second.id)
        assert pool.allocate(MIB, stream=third.stream) == ptr
        pool.deallocate(ptr)
    assert pool.captures == (first.id, third.id)
    first.destroy()
    third.destroy()
    assert pool.captures == ()
    pool.trim()
    assert driver.used() == 0


def test_sharing_that_makes_no_sense_is_refused():
    pool, driver = fake_pool()
    with pytest.raises(ValueError, match="no memory of a capture 99"):
        pool.share_capture(1, 99)
    graphs = []
    for _ in range(2):
        with Graph(driver) as graph:
            pool.deallocate(pool.allocate(MIB, stream=graph.stream))
        graphs.append(graph)
    with pytest.raises(ValueError, match="memory of its own already"):
        pool.share_capture(graphs[1].id, graphs[0].id)
    for wrong in (True, "1", None, 1.0):
        with pytest.raises(TypeError, match="id is an int"):
            pool.release_capture(wrong)
        for id, other in ((wrong, graphs[0].id), (99, wrong)):
            with pytest.raises(TypeError, match="id is an int"):
                pool.share_capture(id, other)
    pool.release_capture(12345)
    assert len(pool.captures) == 2


@pytest.mark.parametrize("strategy", [vpool.Fixed(16 * MIB), vpool.Fixed(16 * MIB, block=MIB), vpool.Hybrid(8 * MIB)])
def test_a_capture_borrows_from_a_fixed_core(strategy):
    pool, driver = fake_pool(strategy=strategy)
    with Graph(driver) as graph:
        blocks = [pool.allocate(MIB, stream=graph.stream) for _ in range(3)]
        for ptr in blocks:
            pool.deallocate(ptr)
    eager = [(pool.allocate(MIB), MIB) for _ in range(4)]
    assert disjoint([(ptr, MIB) for ptr in blocks], eager)
    graph.destroy()
    for address, _ in eager:
        pool.deallocate(address)
    assert_whole_after_drain(pool)


def assert_whole_after_drain(pool):
    pool.trim()
    pool.check()
    report = pool.inspect()
    assert (report.live_blocks, report.pending_bytes) == (0, 0)
    assert report.largest_free_bytes == 0 or report.free_bytes == report.reserved_bytes


# The end of a capture.


@pytest.mark.parametrize("ending", ["release", "graph", "both", "abort", "abort and release"])
def test_memory_comes_back(ending):
    pool, driver = fake_pool()
    with Graph(driver, spoil="abort" in ending) as graph:
        kept = pool.empty(MIB, stream=graph.stream)
        pool.deallocate(pool.allocate(3 * MIB, stream=graph.stream))
    if ending in ("graph", "both"):
        graph.destroy()
    if "release" in ending or ending == "both":
        pool.release_capture(graph.id)
    assert pool.captures == ()
    pool.trim()
    assert pool.stats.allocated_bytes == MIB, "what is live stays so"
    assert 0 < driver.used() <= 4 * MIB
    kept.close()
    assert_whole_after_drain(pool)
    assert driver.used() == 0


def test_memory_of_a_graph_that_still_runs_is_waited_for():
    pool, driver = fake_pool(16 * MIB, initial=0)
    with Graph(driver) as graph:
        ptr = pool.allocate(12 * MIB, stream=graph.stream)
        pool.deallocate(ptr)
    launched_on = driver.create_stream()
    driver.queue_work(launched_on)  # a launch of the graph, on a stream the pool never saw
    pool.release_capture(graph.id)
    assert pool.allocate(12 * MIB) == ptr
    assert driver.finished(driver.number_of(launched_on), 1), "handed out while the graph may run"


def test_a_dropped_pool_keeps_memory_while_a_graph_may_use_it():
    pool, driver = fake_pool()
    with Graph(driver) as graph:
        pool.deallocate(pool.allocate(MIB, stream=graph.stream))
    pool.close()
    del pool
    gc.collect()
    assert driver.used() > 0
    other, _ = fake_pool()
    graph.destroy()
    other.trim()
    gc.collect()
    assert driver.used() == 0


def test_the_same_stream_captures_again_and_again():
    pool, driver = fake_pool(256 * MIB)
    stream = driver.create_stream()
    most = 0
    for number in range(200):
        with Graph(driver, stream=stream) as graph:
            pool.deallocate(pool.allocate(MIB, stream=stream))
        graph.destroy()
        most = max(most, pool.stats.reserved_bytes)
        if number % 10 == 9:
            pool.trim()  # the device is waited for: no launch runs any more
    assert most <= 32 * MIB
    assert pool.captures == ()
    pool.trim()
    assert driver.used() == 0
    pool.check()


def test_many_captures_at_once_and_their_slots_are_used_again():
    pool, driver = fake_pool(2048 * MIB)
    for _ in range(3):
        graphs = []
        for _ in range(100):
            with Graph(driver) as graph:
                pool.deallocate(pool.allocate(MIB, stream=graph.stream))
            graphs.append(graph)
        assert len(pool.captures) == 100
        for graph in graphs:
            graph.destroy()
            driver.destroy_stream(graph.stream)
        pool.trim()
        assert driver.used() == 0
    pool.check()


class Stream:
    def __init__(self, handle):
        self.handle = handle


def test_a_capture_that_ends_while_other_threads_ask_does_not_come_back():
    pool, driver = fake_pool()
    stream = Stream(driver.create_stream())
    over = threading.Event()

    def ask():
        while not over.is_set():
            pool.captures  # noqa: B018

    threads = [threading.Thread(target=ask) for _ in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(300):
            with Graph(driver, "thread_local", stream=stream.handle) as graph:
                pool.deallocate(pool.allocate(1000, stream=stream))
            graph.destroy()
            pool.trim()
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
        sys.setswitchinterval(before)
    assert pool.captures == ()
    pool.trim()
    assert driver.used() == 0


# Nothing that is forbidden.


def everything(pool, stream, other):
    """Every public call, on the stream that captures and on others, with growth, trims and want of memory."""
    buffers = [pool.empty(n, stream=s) for n in (100, MIB, 6 * MIB) for s in (stream, other, None)]
    for buffer in buffers[::2]:
        buffer.record_stream(other)
        buffer.record_stream(stream)
    for buffer, freer in zip(buffers, itertools.cycle([None, stream, other]), strict=False):
        buffer.close(freer)
    ptr = pool.allocate(MIB, stream=other, alignment=4096)
    pool.record_stream(ptr, stream)
    pool.deallocate(ptr, stream=stream)
    grows = pool.empty(1000, stream=other)
    for nbytes in (MIB, 2 * MIB):
        pool.resize(grows, nbytes, stream)
    grows.close()
    with vpool.stream(stream):
        pool.deallocate(pool.allocate(2 * MIB))
    for s in (stream, other, None):
        with pytest.raises(vpool.OutOfMemoryError):
            pool.allocate(1 << 40, stream=s)
    pool.stats, pool.ladder, pool.crossings, pool.captures, pool.core_share  # noqa: B018
    str(pool.inspect())
    pool.coalesce()
    pool.trim()
    pool.trim(keep="1MiB")
    pool.maintain()
    pool.check()
    pool.set_limit(pool.inspect().limit_bytes)
    pool.reset_peaks()
    gc.collect()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("where", ["same thread", "another thread"])
def test_every_call_is_safe_in_a_capture(mode, blocking, where):
    pool, driver = fake_pool(48 * MIB)
    other, third = driver.create_stream(), driver.create_stream()
    for stream in (None, other, third):
        pool.deallocate(pool.allocate(3 * MIB, stream=stream))
        if stream:
            driver.queue_work(stream)
    with Graph(driver, mode, blocking=blocking) as graph:
        before = pool.allocate(MIB, stream=graph.stream)
        if where == "same thread":
            everything(pool, graph.stream, other)
        else:
            errors = []

            def work():
                try:
                    everything(pool, graph.stream, other)
                except BaseException as error:
                    errors.append(error)

            worker = threading.Thread(target=work)
            worker.start()
            worker.join(60)
            assert not worker.is_alive()
            assert errors == []
        pool.deallocate(before)
        pool.forget_stream(third)
    graph.destroy()
    driver.complete()
    assert_whole_after_drain(pool)


def test_a_pool_closed_in_a_capture():
    pool, driver = fake_pool()
    pool.deallocate(pool.allocate(MIB))
    with Graph(driver) as graph:
        buffer = pool.empty(MIB, stream=graph.stream)
        pool.close()
        buffer.close()
    assert driver.used() > 0
    pool.release_capture(graph.id)
    pool.trim()
    assert driver.used() == 0


def test_out_of_memory_in_a_capture_is_an_ordinary_error():
    pool, driver = fake_pool(16 * MIB, initial=0)
    live = pool.empty(4 * MIB)
    cached = pool.allocate(8 * MIB)
    pool.deallocate(cached)
    before = driver.calls()
    with Graph(driver) as graph, pytest.raises(vpool.OutOfMemoryError, match="capture"):
        pool.allocate(13 * MIB, stream=graph.stream)
    assert driver.calls()["free"] == before["free"]
    live.close()
    assert pool.allocate(13 * MIB) > 0


def test_garbage_is_collected_before_a_capture_runs_out():
    pool, driver = fake_pool(8 * MIB, initial=0)
    with Graph(driver) as graph:
        cycle = [pool.empty(6 * MIB, stream=graph.stream)]
        cycle.append(cycle)
        del cycle
        assert pool.allocate(6 * MIB, stream=graph.stream)


def test_pending_work_of_a_captured_stream_is_never_waited_for_outside():
    """A block that a graph was recorded to use stays pending as long as the graph may run."""
    pool, driver = fake_pool(16 * MIB, initial=0)
    ptr = pool.allocate(12 * MIB)
    with Graph(driver) as graph:
        pool.record_stream(ptr, graph.stream)
        pool.deallocate(ptr)
        with pytest.raises(vpool.OutOfMemoryError):
            pool.allocate(12 * MIB)
    assert pool.stats.pending_bytes == 12 * MIB
    with pytest.raises(vpool.OutOfMemoryError):
        pool.allocate(12 * MIB)
    graph.destroy()
    assert pool.allocate(12 * MIB) == ptr


def test_memory_freed_before_a_capture_serves_others_after_it():
    """Nothing can be proved for a stream that captures; afterwards it can."""
    pool, driver = fake_pool(8 * MIB, initial=0)
    stream = driver.create_stream()
    ptr = pool.allocate(6 * MIB, stream=stream)
    pool.deallocate(ptr)
    with Graph(driver, stream=stream), pytest.raises(vpool.OutOfMemoryError):
        pool.allocate(6 * MIB)
    assert pool.allocate(6 * MIB) == ptr


def test_a_dead_stream_as_freer_while_something_captures():
    pool, driver = fake_pool()
    stream, dead = driver.create_stream(), driver.create_stream()
    ptr = pool.allocate(MIB, stream=stream)
    driver.destroy_stream(dead)
    with Graph(driver) as graph:
        pool.deallocate(pool.allocate(MIB, stream=graph.stream))
        with pytest.raises(vpool.SourceError):
            pool.deallocate(ptr, stream=dead)
    pool.deallocate(ptr, stream=dead)
    assert pool.stats.allocated_bytes == 0


def test_a_graph_that_is_gone_keeps_no_pool_from_waiting():
    """Also where the pool that it had memory of is not called any more."""
    idle, driver = fake_pool()
    pool = vpool.Pool(vpool.Dynamic(initial=0), vpool.sources.Source(driver, "cuda", 0, checks_handles=False))
    ptr = pool.allocate(MIB, stream=driver.create_stream())
    with Graph(driver) as graph:
        idle.deallocate(idle.allocate(MIB, stream=graph.stream))
    pool.deallocate(ptr)
    # One that no pool knows of, without which this driver would not be taken for one that may capture.
    driver.begin_capture(driver.create_stream(blocking=False))
    assert pool.trim() == 0
    assert driver.calls()["synchronize"][0] == 0
    graph.destroy()
    with pytest.raises(vpool.SourceError, match="StreamCapture"):
        pool.trim()
    assert driver.calls()["synchronize"][0] == 1


# Asking costs nothing where nothing captures.


def test_a_driver_that_knows_is_not_asked():
    pool, driver = fake_pool()
    stream = driver.create_stream()
    pool.deallocate(pool.allocate(MIB, stream=stream))
    before = driver.calls()["stream_captures"]
    for _ in range(10):
        pool.deallocate(pool.allocate(MIB, stream=stream))
    assert driver.calls()["stream_captures"] == before


def test_a_pool_that_is_told_of_no_captures_never_asks():
    pool, driver = fake_pool(captures=False)
    with Graph(driver) as graph:
        known = driver.create_stream()
        pool.deallocate(pool.allocate(MIB, stream=known))
        assert driver.calls()["stream_captures"][0] == 0
    assert pool.captures == ()
    with pytest.raises(ValueError, match="never allocate in a capture"):
        pool.share_capture(1, 2)
    pool.release_capture(graph.id)


# The driver fails.


@pytest.mark.parametrize("call", ["stream_captures", "capture_info", "capture_mode", "graph_retain"])
@pytest.mark.parametrize("status", [1, 400, 700, 999])
def test_questions_that_fail(call, status):
    pool, driver = fake_pool()
    with Graph(driver) as graph:
        driver.fail(call, status)
        try:
            ptr = pool.allocate(MIB, stream=graph.stream)
        except vpool.SourceError:
            ptr = pool.allocate(MIB, stream=graph.stream)
        pool.deallocate(ptr)
        pool.check()
    graph.destroy()
    pool.release_capture(graph.id)
    assert_whole_after_drain(pool)
    assert driver.used() == 0

"""Stream objects of any kind and any end: a pool keeps some, and must neither outlive its use of them nor be hurt."""

import contextlib
import ctypes
import gc
import os
import sys
import threading
import time
import weakref

import numpy as np
import pytest

import vpool
from tests.helpers.owned_stream import Stream
from tests.helpers.pools import run_cleanly
from vpool._interface import streams
from vpool._storage.simulated_driver import SimulatedDriver

MIB = 1 << 20
CAPACITY = 64 * MIB


def make_pool():
    """One segment, on a source that does not answer for destroyed handles."""
    source = vpool.sources.Source(SimulatedDriver(CAPACITY), "simulated", has_memory=False, checks_handles=False)
    return vpool.Pool(vpool.Dynamic(initial=CAPACITY, limit=CAPACITY), source)


@pytest.fixture
def pool():
    with make_pool() as pool:
        yield pool


def meet(pool, stream):
    pool.deallocate(pool.allocate(100, stream))


def cross(pool, one, other):
    """Have all of the pool go from one stream to another, with work that is not complete."""
    ptr = pool.allocate(CAPACITY, one)
    pool.source.driver.queue_work(getattr(one, "handle", one))
    pool.deallocate(ptr)
    pool.deallocate(pool.allocate(CAPACITY, other))


@pytest.mark.parametrize("box", [ctypes.c_void_p, np.array], ids=["ctypes", "numpy"])
def test_what_holds_a_number_that_changes_is_asked_each_time(pool, box):
    """As programs have one pointer for every stream that they create and destroy in turn."""
    streams = [pool.source.driver.create_stream() for _ in range(2)]
    place = box(streams[0])
    buffer = pool.empty(100, place)
    assert buffer.stream == streams[0]
    if box is np.array:
        place[...] = streams[1]
    else:
        place.value = streams[1]
    assert pool.empty(100, place).stream == streams[1]
    buffer.close(stream=place)
    pool.forget_stream(place)
    assert pool.empty(100, streams[0]).stream == streams[0]


# Whose an object is.


@pytest.mark.parametrize("count", [2, 5])
def test_pools_that_keep_the_same_object_are_no_owners_to_one_another(count):
    pools = [make_pool() for _ in range(count)]
    stream = Stream(pools[0].source.driver)
    gone, key = weakref.ref(stream), id(stream)
    for pool in pools:
        meet(pool, stream)
        pool.trim()
    assert gone() is stream
    del stream
    for pool in pools:
        assert gone() is not None
        pool.trim()
    assert gone() is None
    assert key not in streams._kept
    for pool in pools:
        pool.close()


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_a_closed_pool_that_is_empty_keeps_no_object(live, later):
    pool = make_pool()
    stream = Stream(pool.source.driver)
    gone = weakref.ref(stream)
    meet(pool, stream)
    kept = pool.empty(100, stream) if live else None
    pool.close()
    if live:
        kept.close()
    if later:
        with pytest.raises(vpool.InvalidPointerError):
            pool.deallocate(12345, stream)
    del stream, kept
    assert gone() is None
    assert pool.source.driver.calls_on_dead_streams == 0


@pytest.mark.parametrize("slots", [False, True])
def test_a_cycle_of_a_pool_and_a_kept_object_ends(slots):
    kind = {"__slots__": ("driver", "handle", "pool", "__weakref__")} if slots else {}
    pool = make_pool()
    stream = type("Mine", (), {"__init__": Stream.__init__, "__del__": Stream.__del__, **kind})(pool.source.driver)
    driver, stream.pool = pool.source.driver, pool
    gone, key = [weakref.ref(pool), weakref.ref(stream)], id(stream)
    cross(pool, stream, 0)
    del pool, stream
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert key not in streams._kept
    assert driver.calls_on_dead_streams == 0


# Kinds of objects.


class _Order(type):
    def mro(cls):
        return [cls, _First, _Second, object] if cls.__name__ == "Ordered" else type.mro(cls)


class _First:
    pass


class _Second(_First):
    pass


class _Answers(type):
    """Tells nothing of its classes, and runs code if asked."""

    @property
    def __dict__(cls):
        raise RuntimeError("asked")

    @property
    def __mro__(cls):
        raise RuntimeError("asked")


@pytest.mark.parametrize("finaliser", [False, True])
@pytest.mark.parametrize("made", ["an order of its own", "no answers", "a C base", "a mixin's finaliser"])
def test_classes_that_are_odd(pool, made, finaliser):
    driver = pool.source.driver
    kind = {"__init__": Stream.__init__} | ({"__del__": Stream.__del__} if finaliser else {})
    if made == "an order of its own":
        cls = _Order("Ordered", (_First, _Second), kind)
    elif made == "no answers":
        cls = _Answers("Silent", (), kind)
    elif made == "a C base":
        cls = type("Listed", (list,), kind | {"__init__": lambda self, driver: Stream.__init__(self, driver)})
    else:
        cls = type("Mixed", (type("Plain", (), {}), type("Mixin", (), kind)), {})
    stream = cls(driver)
    gone = weakref.ref(stream)
    cross(pool, stream, Stream(driver))
    assert pool.crossings["waits"] == 1, "an object holds its stream"
    kept = finaliser or made == "a C base"
    del stream
    assert (gone() is not None) == kept
    pool.trim()
    assert gone() is None
    cross(pool, 0, Stream(driver))
    assert driver.calls_on_dead_streams == 0


# Ends that do something.


def _raises(pool, stream):
    raise ValueError("a finaliser's")


def _comes_back(pool, stream):
    stream.back.append(stream)


def _closes(pool, stream):
    pool.close()


def _allocates(pool, stream):
    with contextlib.suppress(vpool.ClosedPoolError, vpool.OutOfMemoryError):
        meet(pool, Stream(pool.source.driver))
        cross(pool, Stream(pool.source.driver), stream.other)


def _forgets(pool, stream):
    pool.forget_stream(stream.other)


def _uses_threads(pool, stream):
    threads = [threading.Thread(target=_allocates, args=(pool, stream)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _forks(pool, stream):
    child = os.fork()
    if child == 0:
        try:
            pool.allocate(100, stream)
        except vpool.ForkedProcessError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    stream.back.append("a child")


@pytest.mark.parametrize("way", ["a new stream", "a miss", "trim", "forget_stream", "close", "a dropped pool"])
@pytest.mark.parametrize("end", [_raises, _comes_back, _closes, _allocates, _forgets, _uses_threads, _forks])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::DeprecationWarning")
def test_what_a_finaliser_may_do(end, way):
    pool = make_pool()
    driver, ended, back = pool.source.driver, [], []

    class Ending(Stream):
        def __del__(self):
            super().__del__()
            ended.append(True)
            end(reference() or make_pool(), self)

    reference = weakref.ref(pool)
    stream = Ending(driver)
    stream.other, stream.back = Stream(driver), back
    second = Ending(driver)
    second.other, second.back = stream.other, back
    for one in (stream, second):
        cross(pool, one, one.other)
    if way == "a new stream":
        del one, stream, second
        new = Stream(driver)
        pool.record_stream(0, new)
    elif way == "a miss":
        del one, stream, second
        try:
            pool.deallocate(pool.allocate(CAPACITY))
        except vpool.ClosedPoolError:
            assert end is _closes
    elif way == "forget_stream":
        del one, stream
        pool.forget_stream(second)
        del second
    else:
        del one, stream, second
        if way != "trim":
            pool.close()
        if way == "a dropped pool":
            del pool
            gc.collect()
        else:
            pool.trim()
    assert len(ended) == 2
    assert len(back) == (2 if end in (_comes_back, _forks) else 0)
    assert driver.calls_on_dead_streams == 0
    if way != "a dropped pool":
        pool.check()
        assert pool.stats.allocated_bytes == 0
        pool.close()


def test_a_finaliser_that_waits_for_a_thread_cannot_deadlock_inside_a_look_up():
    """Whatever a collection runs in the middle of one: nothing is collected while the table's lock is held."""
    code = """
import faulthandler, gc, threading, vpool
from vpool._storage.simulated_driver import SimulatedDriver
faulthandler.dump_traceback_later(20, exit=True)
gc.disable()
class Stream:
    def __init__(self): self.driver, self.handle = driver, driver.create_stream()
    def __del__(self): self.driver.destroy_stream(self.handle)
def elsewhere():
    pool.deallocate(pool.allocate(100, Stream())); pool.deallocate(pool.allocate(100, 2))
class Finaliser:
    def __init__(self): self.myself = self
    def __del__(self):
        ran.append(True)
        thread = threading.Thread(target=elsewhere); thread.start(); thread.join()
CALLS = (
    lambda: pool.allocate(100, new), lambda: pool.trim(), lambda: pool.allocate(100, 0x5000),
    lambda: pool.allocate(100, 2), lambda: pool.forget_stream(streams[0]),
)
ran = []
for call in CALLS:
    for after in range(16):
        driver = SimulatedDriver(64 << 20)
        source = vpool.sources.Source(driver, "simulated", has_memory=False, checks_handles=False)
        pool = vpool.Pool(vpool.Dynamic(initial="1MiB"), source)
        streams = [Stream() for _ in range(3)]
        for stream in streams:
            pool.deallocate(pool.allocate(100, stream))
        new = Stream()
        Finaliser()
        held = [[(i, i), [], {}] for i in range(2500)]   # or what is made would come from lists of spare objects
        gc.set_threshold(gc.get_count()[0] + 1 + after, 1, 1)
        gc.enable()
        call()
        gc.disable()
        gc.set_threshold(100000, 100, 100)
        gc.collect()
        assert driver.calls_on_dead_streams == 0
assert len(ran) == 16 * len(CALLS)
print("end")
"""
    assert run_cleanly(code) == "end\n"


def test_a_finaliser_that_waits_for_a_thread_cannot_deadlock_while_something_captures():
    code = """
import faulthandler, gc, threading
from tests.test_captures import Graph, fake_pool
faulthandler.dump_traceback_later(20, exit=True)
gc.disable()
class Finaliser:
    def __init__(self): self.myself = self
    def __del__(self):
        ran.append(True)
        thread = threading.Thread(target=pool.release_capture, args=(98765,)); thread.start(); thread.join()
CALLS = (
    lambda: pool.allocate(1000, stream=third.stream), lambda: pool.release_capture(first.id),
    lambda: pool.allocate(1000, stream=plain), lambda: pool.share_capture(third.id, first.id),
)
ran = []
for call in CALLS:
    for after in range(10):
        pool, driver = fake_pool()
        first, third, plain = Graph(driver), Graph(driver), driver.create_stream()
        with first:
            pool.deallocate(pool.allocate(1000, stream=first.stream))
        with third:
            Finaliser()
            held = [[(i, i), [], {}] for i in range(2500)]
            gc.set_threshold(gc.get_count()[0] + 1 + after, 1, 1)
            gc.enable()
            call()
            gc.disable()
            gc.set_threshold(100000, 100, 100)
            gc.collect()
            pool.release_capture(third.id)
        pool.release_capture(first.id)
        pool.trim()
        assert pool.captures == () and len(ran) % 10 == (after + 1) % 10
print("end")
"""
    assert run_cleanly(code) == "end\n"


def test_a_stream_that_a_finaliser_forgets_while_its_object_is_met_is_met_anew():
    code = """
import gc
from tests.test_stream_objects import CAPACITY, Stream, make_pool
gc.disable()
class Finaliser:
    def __init__(self): self.myself = self
    def __del__(self):
        ran.append(True)
        pool.forget_stream(one.handle)
ran = []
for after in range(16):
    pool = make_pool()
    driver = pool.source.driver
    one, other = Stream(driver), Stream(driver)
    Finaliser()
    held = [[(i, i), [], {}] for i in range(2500)]
    gc.set_threshold(gc.get_count()[0] + 1 + after, 1, 1)
    gc.enable()
    pool.record_stream(0, one)
    gc.disable()
    gc.set_threshold(100000, 100, 100)
    gc.collect()
    # A slot that is over would not do: its stream cannot be named, so the device would be waited for.
    ptr = pool.allocate(CAPACITY, one)
    driver.queue_work(one.handle)
    pool.deallocate(ptr)
    assert pool.allocate(CAPACITY, other) == ptr
    assert (pool.crossings["waits"], pool.crossings["drains"]) == (1, 0), after
assert len(ran) == 16
print("end")
"""
    assert run_cleanly(code) == "end\n"


# What it costs.


def test_a_hit_waits_for_no_other_threads_crossing(pool):
    """Although a stream object was dropped before, which must not end while that thread may name its stream."""

    class Fresh:
        """One more name of a stream, as frameworks make at each question for the current one."""

        def __init__(self, handle):
            self.handle = handle

        def __del__(self):
            ended.append(True)

    ended = []
    driver = pool.source.driver
    mine, one, other = driver.create_stream(), Stream(driver), Stream(driver)
    meet(pool, Fresh(mine))
    ptr = pool.allocate(CAPACITY // 2, one)
    driver.queue_work(one.handle)
    pool.deallocate(ptr)
    pool.trim()
    meet(pool, Fresh(mine))
    ptr = pool.allocate(CAPACITY // 2, one)
    pool.deallocate(ptr)
    ended.clear()
    driver.delay_records(0.6)
    begun = driver.calls()["event_record"][0]
    thread = threading.Thread(target=pool.allocate, args=(CAPACITY * 3 // 4, other))
    thread.start()
    while driver.calls()["event_record"][0] == begun:
        time.sleep(0.001)
    for _ in range(20):
        meet(pool, Fresh(mine))
    assert thread.is_alive(), "a hit waited"
    assert ended == []
    for _ in range(200):  # but not without end
        meet(pool, Fresh(mine))
    thread.join()
    assert len(ended) > 100
    pool.trim()
    assert len(ended) == 220
    assert driver.calls_on_dead_streams == 0


def test_a_thread_remembers_nothing_of_pools_that_are_gone():
    for _ in range(50):
        with vpool.Pool(vpool.Dynamic(initial=0), source="host") as pool:
            pool.empty(100, stream=2).close()
    del pool
    gc.collect()
    assert all(reference() is not None for reference in streams._defaults.ends.slots)
    assert len(streams._defaults.ends.slots) < 50


def test_threads_that_make_and_drop_stream_objects_while_others_cross(pool):
    """With collections at each turn, and threads switched all the time."""
    driver, until, failed = pool.source.driver, time.monotonic() + 1.5, []
    other_pool = make_pool()

    class Looped(Stream):
        def __init__(self, driver):
            super().__init__(driver)
            self.me = self

    def work(number):
        try:
            turn = 0
            mine = Stream(driver)
            while time.monotonic() < until:
                turn += 1
                stream = (Stream if turn % 3 else Looped)(driver)
                ptr = pool.allocate(MIB << (turn % 4), stream)  # together at most half of the limit
                if turn % 4 == number:
                    meet(other_pool, mine)
                pool.deallocate(ptr, mine if turn % 5 == 0 else None)
                del stream
                if turn % 50 == 0:
                    pool.trim()
        except BaseException as error:
            failed.append(error)

    before, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(1)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
        gc.set_threshold(*threshold)
    assert failed == []
    assert driver.calls_on_dead_streams == 0
    pool.check()
    assert pool.stats.allocated_bytes == 0
    other_pool.close()

"""Memory is never given out while unfinished work may touch it, unless its new owner is ordered after that work."""

import ctypes
import gc
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vpool
from tests.helpers.order import Checker
from tests.helpers.pools import GRANULE, MIB
from tests.helpers.programs import Program, run_all
from vpool._storage.simulated_driver import SimulatedDriver

FAULTY = ("stream_id", "event_create", "event_record", "event_query", "stream_wait_event", "synchronize")
WEIGHTS = {"allocate": 6, "free": 3, "free_on": 3, "record": 3, "complete": 2, "query": 1, "recycle": 1, "destroy": 0}
PREFIXES = {
    "nothing": (),
    "freed elsewhere": (("allocate", 1, 0), ("free_on", 0, 1)),
    "recorded and freed": (("allocate", 1, 0), ("record", 0, 1), ("free", 0, -1)),
    "lent whole, half live": (("allocate", 2, 0), ("free", 0, -1), ("allocate", 1, 1)),
    "freed by a stream that is gone": (("allocate", 1, 0), ("allocate", 1, 1), ("free", 0, -1), ("destroy", 0, 0)),
    "its handle came back": (("allocate", 1, 0), ("allocate", 1, 1), ("free_on", 0, 1), ("recycle", 0, 1)),
    "two events": (("allocate", 1, 0), ("allocate", 1, 0), ("free_on", 0, 1), ("record", 0, 1), ("free", 0, -1)),
}


class Stream:
    """A stream object as frameworks have them, by the attribute that holds the handle."""

    def __init__(self, handle, attribute="ptr"):
        setattr(self, attribute, handle)


class ProtocolStream:
    def __init__(self, handle):
        self.of = handle

    def __cuda_stream__(self):
        return 0, self.of


def ordered_pool(nbytes=MIB, **options):
    source = vpool.sources.Simulated(nbytes)
    return vpool.Pool(vpool.Dynamic(initial=nbytes, limit=nbytes), source, **options)


def made_calls(driver, *but):
    return {name: figures[0] for name, figures in driver.calls().items() if name not in but}


def prepared(prefix, *arguments, **options):
    program = Program(*arguments, **options)
    for choice in prefix:
        program.do(choice)
    return program


# Every program of a few operations.


@pytest.mark.parametrize("on_pressure", ["raise", "wait"])
@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_every_short_program_on_two_streams(prefix, on_pressure):
    assert run_all(lambda: prepared(prefix, 2, 512, sizes=(1, 2), on_pressure=on_pressure), 3) > 100


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_every_short_program_on_three_streams(prefix):
    assert run_all(lambda: prepared(prefix, 3, 512, sizes=(1, 2)), 3) > 200


def test_every_program_on_a_single_block():
    assert run_all(lambda: Program(2, 256), 4) > 500


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("on_pressure", ["raise", "wait"])
@pytest.mark.parametrize("streams", [2, 3])
@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_every_longer_program(prefix, streams, on_pressure):
    run_all(lambda: prepared(prefix, streams, 512, sizes=(1, 2), on_pressure=on_pressure), 5)


# Random ones.


def run_random(program, numbers, faults=()):
    """The operations that numbers stand for; a failing driver may make any of them fail, with a typed error."""
    for at, number in enumerate(numbers):
        choices = program.choices()
        kinds = sorted({choice[0] for choice in choices})
        weighted = [kind for kind in kinds for _ in range(WEIGHTS[kind])]
        if not weighted:
            break
        kind = weighted[number % len(weighted)]
        fitting = [choice for choice in choices if choice[0] == kind]
        if at in faults:
            program.driver.fail(*faults[at])
        try:
            program.do(fitting[number // len(weighted) % len(fitting)])
        except vpool.SourceError:
            assert faults
            program.checker.check()
    for call in FAULTY if faults else ():
        program.driver.fail(call, times=0)
    # Of a stream that the driver once called invalid the pool believes that it is gone.
    program.finish(stuck=any(fault[:2] == ("stream_id", 400) for fault in dict(faults).values()))


numbers = st.lists(st.integers(0, 2**20), min_size=5, max_size=80)
shapes = st.sampled_from(
    [
        {"streams": 5, "capacity": 16 * GRANULE, "sizes": (1, 2, 3, 5), "most_live": 8},
        {"streams": 5, "capacity": 6 * MIB, "sizes": (1, 2048, 4096, 8192, 12289), "most_live": 8},
        {"streams": 3, "capacity": 4 * GRANULE, "sizes": (1, 2, 3), "most_live": 5},
    ]
)
pressures = st.sampled_from(["raise", "wait"])


@settings(max_examples=150, deadline=None)
@given(shapes, pressures, numbers)
def test_random_programs(shape, on_pressure, numbers):
    run_random(Program(**shape, on_pressure=on_pressure), numbers)


@settings(max_examples=150, deadline=None)
@given(
    shapes,
    pressures,
    numbers,
    st.dictionaries(
        st.integers(0, 80),
        st.tuples(st.sampled_from(FAULTY), st.sampled_from([2, 400, 700]), st.integers(0, 3), st.integers(1, 3)),
        min_size=1,
        max_size=12,
    ),
)
def test_random_programs_on_a_failing_driver(shape, on_pressure, numbers, faults):
    run_random(Program(**shape, on_pressure=on_pressure), numbers, faults)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=20_000, deadline=None)
@given(shapes, pressures, numbers)
def test_many_random_programs(shape, on_pressure, numbers):
    run_random(Program(**shape, on_pressure=on_pressure), numbers)


def test_programs_climb_every_rung(program_numbers):
    """The random programs would prove little if they never came to the rungs that move memory."""
    hits, crossings = {}, {}
    for shape in (
        {"streams": 5, "capacity": 6 * MIB, "sizes": (1, 2048, 4096, 8192, 12289), "most_live": 8},
        {"streams": 5, "capacity": 16 * GRANULE, "sizes": (1, 2, 3, 5), "most_live": 8},
    ):
        for numbers in program_numbers(60, 80):
            program = Program(**shape, on_pressure="wait")
            run_random(program, numbers)
            for rung, (_, successes) in program.pool.ladder.items():
                hits[rung] = hits.get(rung, 0) + successes
            for name, count in program.pool.crossings.items():
                crossings[name] = crossings.get(name, 0) + count
    never = {rung for rung, successes in hits.items() if successes == 0}
    # A scan of a class and callbacks need their own set-ups, in `test_pressure.py`.
    assert never <= {"search the whole size class", "pressure callbacks", "give idle segments back and grow"}, hits
    assert all(crossings.values()), crossings


@pytest.fixture
def program_numbers():
    import random

    def lists(count, length):
        random_numbers = random.Random(4)
        return [[random_numbers.randrange(2**20) for _ in range(length)] for _ in range(count)]

    return lists


# What costs no driver call.


@pytest.mark.parametrize("kind", ["default", "object", "protocol", "per-thread"])
def test_hits_on_the_own_stream_call_no_driver(kind):
    with ordered_pool() as pool:
        driver = pool.source.driver
        handle = driver.create_stream()
        stream = {"default": None, "object": Stream(handle), "protocol": ProtocolStream(handle), "per-thread": 2}[kind]
        pool.deallocate(pool.allocate(1000, stream))
        before = driver.calls()
        for _ in range(10_000):
            pool.deallocate(pool.allocate(1000, stream), stream)
        assert driver.calls() == before


def test_a_raw_handle_is_checked_on_each_call_and_nothing_else():
    with ordered_pool() as pool:
        driver = pool.source.driver
        handle = driver.create_stream()
        pool.deallocate(pool.allocate(1000, handle))
        before = made_calls(driver, "stream_id")
        for _ in range(100):
            pool.deallocate(pool.allocate(1000, handle))
        assert made_calls(driver, "stream_id") == before


def test_frees_call_no_driver():
    with ordered_pool() as pool:
        driver = pool.source.driver
        mine, other, third = (Stream(driver.create_stream()) for _ in range(3))
        blocks = [pool.allocate(1000, mine) for _ in range(300)]
        for stream in (other, third):
            pool.deallocate(pool.allocate(1, stream))
        before = driver.calls()
        for at, ptr in enumerate(blocks):
            if at % 3 == 1:
                pool.record_stream(ptr, other)
            pool.deallocate(ptr, (None, third, other)[at % 3])
        assert driver.calls() == before


# Many pending blocks.


def test_outstanding_frees_take_few_events_and_none_is_stuck():
    count = 100_000
    with ordered_pool(64 * MIB) as pool:
        driver = pool.source.driver
        mine = Stream(driver.create_stream())
        others = [Stream(driver.create_stream()) for _ in range(4)]
        blocks = [pool.allocate(256, mine) for _ in range(count)]
        for at, ptr in enumerate(blocks):
            driver.queue_work(others[at % 4].ptr)
            pool.record_stream(ptr, others[at % 4])
            pool.deallocate(ptr)
            if at % 10_000 == 0:
                pool.coalesce()
        assert pool.stats.pending_bytes == 256 * count
        assert driver.calls()["event_create"][0] <= 4 * (len(others) + 1)
        for done, other in enumerate(others, 1):
            driver.complete(other.ptr)
            pool.coalesce()
            assert pool.stats.pending_bytes == 256 * count * (4 - done) // 4
        assert driver.calls()["event_create"][0] <= 4 * (len(others) + 1)
        pool.check()


def test_a_pending_block_blocks_no_later_one():
    with ordered_pool(4 * GRANULE, on_pressure="raise") as pool:
        driver = pool.source.driver
        mine, slow, quick = (driver.create_stream() for _ in range(3))
        first, second, third, fourth = (pool.allocate(256, mine) for _ in range(4))
        for ptr, stream in ((first, slow), (second, quick), (third, slow), (fourth, quick)):
            driver.queue_work(stream)
            pool.record_stream(ptr, stream)
            pool.deallocate(ptr)
        driver.complete(quick)
        waits = pool.crossings["waits"]
        assert {pool.allocate(256, mine), pool.allocate(256, mine)} == {second, fourth}
        assert pool.crossings["waits"] == waits


def test_earlier_work_of_one_stream_frees_its_blocks_before_the_later():
    with ordered_pool(2 * GRANULE, on_pressure="raise") as pool:
        driver = pool.source.driver
        mine, other = driver.create_stream(), driver.create_stream()
        blocks = [pool.allocate(256, mine) for _ in range(2)]
        for ptr in blocks:
            driver.queue_work(other)
            pool.record_stream(ptr, other)
            pool.deallocate(ptr)
            pool.coalesce()
        driver.complete(other, upto=1)
        pool.coalesce()
        assert pool.stats.pending_bytes == 256
        assert pool.allocate(256, mine) == blocks[0]
        assert pool.crossings["waits"] == 0


# Drivers that fail.


@pytest.mark.parametrize("on_pressure", ["raise", "wait"])
@pytest.mark.parametrize("call", FAULTY)
def test_a_failing_call_never_hands_memory_out_early(call, on_pressure):
    with ordered_pool(2 * GRANULE, on_pressure=on_pressure) as pool:
        checker = Checker(pool)
        driver = pool.source.driver
        mine, other = driver.create_stream(), driver.create_stream()
        for recorded in (False, True):
            ptr = checker.allocate(512, mine)
            checker.use(ptr, mine)
            if recorded:
                checker.record_stream(ptr, other)
                checker.use(ptr, other)
            checker.free(ptr)
            driver.fail(call, 700, times=50)
            for stream in (other, mine):
                try:
                    ptr = checker.allocate(512, stream)
                except (vpool.OutOfMemoryError, vpool.SourceError):
                    checker.check()
                else:
                    checker.use(ptr, stream)
                    checker.free(ptr)
            driver.fail(call, times=0)
            ptr = checker.allocate(512, other)
            checker.free(ptr)
        checker.finish()


def test_a_failed_record_keeps_nothing_pending_for_good():
    with ordered_pool(GRANULE, on_pressure="raise") as pool:
        driver = pool.source.driver
        mine, other = driver.create_stream(), driver.create_stream()
        ptr = pool.allocate(256, mine)
        driver.queue_work(other)
        pool.record_stream(ptr, other)
        pool.deallocate(ptr)
        driver.fail("event_record", 700)
        pool.coalesce()
        driver.complete()
        pool.coalesce()
        assert pool.stats.pending_bytes == 0


# Who a stream is.


@pytest.mark.parametrize("attribute", ["cuda_stream", "ptr", "handle"])
def test_objects_of_one_handle_are_one_stream(attribute):
    with ordered_pool() as pool:
        handle = pool.source.driver.create_stream()
        ptr = pool.allocate(1000, Stream(handle, attribute))
        pool.deallocate(ptr, ProtocolStream(handle))
        assert pool.allocate(1000, handle) == ptr
        assert pool.crossings["crossings"] == 0


def test_dying_objects_leave_nothing_to_whoever_gets_their_place():
    with ordered_pool(8 * GRANULE, on_pressure="raise") as pool:
        checker = Checker(pool)
        driver = pool.source.driver
        for _ in range(200):
            handle = driver.create_stream()
            stream = Stream(handle)
            ptr = pool.allocate(512, stream)
            checker.take(ptr, 512, handle)
            checker.use(ptr, handle)
            checker.free(ptr)
            del stream  # the next object often gets its address
            other = Stream(driver.create_stream())
            ptr = pool.allocate(2048, other)
            checker.take(ptr, 2048, other.ptr)
            checker.free(ptr)
        gc.collect()
        checker.check()


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_handle_that_comes_back_inherits_nothing(forgotten):
    with ordered_pool(GRANULE) as pool:
        checker = Checker(pool)
        driver = pool.source.driver
        handle = driver.create_stream()
        for _ in range(100):
            ptr = checker.allocate(256, handle)
            checker.use(ptr, handle)
            checker.free(ptr)
            if forgotten:
                pool.forget_stream(handle)
            driver.destroy_stream(handle)
            assert driver.create_stream(handle) == handle
        checker.finish(stuck=True)


def test_forgotten_streams_cost_no_wait_for_the_device():
    with ordered_pool(GRANULE) as pool:
        checker = Checker(pool)
        driver = pool.source.driver
        for _ in range(50):
            handle = driver.create_stream()
            ptr = checker.allocate(256, handle)
            checker.use(ptr, handle)
            checker.free(ptr)
            pool.forget_stream(handle)
            driver.destroy_stream(handle)
        assert driver.calls()["synchronize"][0] == 0
        checker.finish(stuck=True)


def test_forgetting_an_object_forgets_its_own_stream():
    with ordered_pool() as pool:
        driver = pool.source.driver
        old = Stream(driver.create_stream())
        pool.deallocate(pool.allocate(256, old))
        driver.destroy_stream(old.ptr)
        driver.create_stream(old.ptr)
        new = Stream(old.ptr)
        ptr = pool.allocate(256, new)
        pool.deallocate(ptr)
        pool.forget_stream(old)
        # The new stream is not forgotten: what it freed it gets again at once.
        before = pool.crossings
        assert pool.allocate(256, new) == ptr
        assert pool.crossings == before


@pytest.mark.parametrize("on_pressure", ["wait", "raise"])
@pytest.mark.parametrize("lend", ["allocate", "empty"])
@pytest.mark.parametrize("met", ["never", "before", "forgotten"])
def test_a_free_on_a_stream_that_is_gone_waits_for_its_work(met, lend, on_pressure):
    """Also where the pool has no slot for it, as for one that only ever uses blocks and is met by the free."""
    with ordered_pool(GRANULE, on_pressure=on_pressure) as pool:
        checker = Checker(pool)
        driver = pool.source.driver
        stream = driver.create_stream()
        if met != "never":
            pool.deallocate(pool.allocate(256, stream))
            pool.coalesce()
        if met == "forgotten":
            pool.forget_stream(stream)
        block = getattr(pool, lend)(GRANULE)
        checker.take(int(block), GRANULE, 0)
        checker.use(int(block), 0)
        driver.wait(stream, driver.number_of(0))
        checker.use(int(block), stream)
        del checker.live[int(block)]
        driver.destroy_stream(stream)
        pool.deallocate(block, stream)
        checker.allocate(GRANULE)
        checker.finish()


@pytest.mark.parametrize("strategy", ["fixed", "hybrid"])
def test_that_wait_completes_what_a_fixed_core_has_pending(strategy):
    """Else it would be out of reach, since the stream that it waits for is gone too."""
    fixed = vpool.Fixed(2 * GRANULE, block=GRANULE)
    hybrid = vpool.Hybrid(2 * GRANULE, block=GRANULE, dynamic=vpool.Dynamic(initial=0, limit=2 * GRANULE))
    with vpool.Pool(hybrid if strategy == "hybrid" else fixed, source="simulated", on_pressure="raise") as pool:
        driver = pool.source.driver
        reader, stranger = driver.create_stream(), driver.create_stream()
        first, second = pool.allocate(GRANULE), pool.allocate(GRANULE)
        driver.queue_work(reader)
        pool.record_stream(first, reader)
        pool.deallocate(first)
        for stream in (reader, stranger):
            driver.destroy_stream(stream)
        with pytest.raises(vpool.OutOfMemoryError):
            pool.allocate(GRANULE)
        pool.deallocate(second, stranger)
        assert {pool.allocate(GRANULE), pool.allocate(GRANULE)} == {first, second}
        pool.deallocate(first)
        pool.deallocate(second)


def test_many_streams_come_and_go():
    with ordered_pool(4 * GRANULE) as pool:
        checker = Checker(pool)
        driver = pool.source.driver
        first = driver.create_stream()
        for _ in range(500):
            stream = driver.create_stream()
            ptr = checker.allocate(512, stream)
            checker.use(ptr, stream)
            checker.free(ptr)
            if not checker.allocated % 3:
                ptr = checker.allocate(256, first)
                checker.use(ptr, first)
                checker.free(ptr)
            driver.destroy_stream(stream)
        checker.finish(stuck=True)


def test_per_thread_default_streams_differ_by_thread():
    with ordered_pool(GRANULE) as pool:
        drains = []

        def reuse():
            ptr = pool.allocate(256, 2)
            pool.deallocate(ptr)
            drains.append(pool.crossings["drains"])
            assert pool.allocate(256, 2) == ptr
            assert pool.crossings["drains"] == drains[-1]
            pool.deallocate(ptr, 2)

        for _ in range(5):
            thread = threading.Thread(target=reuse)
            thread.start()
            thread.join()
        assert len(drains) == 5
        # Another thread's stream cannot be named, so the device had to be waited for each time.
        assert drains == sorted(set(drains))
        pool.check()


@pytest.fixture(scope="module")
def run_steps(foreign_thread):
    """Calls a function several times on a thread that Python did not make."""
    run = ctypes.CDLL(foreign_thread).run_steps
    run.argtypes = (ctypes.CFUNCTYPE(None, ctypes.c_int), ctypes.c_long)

    def run_all(*steps):
        failed = []

        @run.argtypes[0]
        def step(number):
            try:
                steps[number]()
            except BaseException as error:
                failed.append(error)

        assert run(step, len(steps)) == 0
        assert failed == []

    return run_all


def test_the_stream_of_a_thread_that_python_did_not_make_lasts_between_its_calls(run_steps):
    """Python forgets such a thread after each call; its stream may still get work, and is nobody else's."""
    with ordered_pool(MIB) as pool:
        driver = pool.source.driver
        own = driver.create_stream()
        ptr = pool.allocate(MIB, own)
        seen = []

        def meet_others():
            pool.trim()
            pool.record_stream(0, driver.create_stream())

        def elsewhere():
            thread = threading.Thread(target=meet_others)
            thread.start()
            thread.join()

        def work():
            seen.append(driver.queue_work(2))

        def free_and_allocate():
            pool.deallocate(ptr)
            assert pool.allocate(MIB, own) == ptr
            assert driver.ordered(own, 2, seen[0])

        others = (lambda: pool.record_stream(0, driver.create_stream()) for _ in range(70))
        run_steps(*others, lambda: pool.record_stream(ptr, 2), elsewhere, work, free_and_allocate)
        pool.check()


def test_threads_that_python_did_not_make_never_use_up_the_slots(run_steps):
    """Once none is left, those of threads that are over are found; one that goes on keeps its own."""
    source = vpool.sources.Source(SimulatedDriver(MIB), "simulated", has_memory=False, checks_handles=False)
    with vpool.Pool(vpool.Dynamic(initial=MIB, limit=MIB), source) as pool:
        driver = pool.source.driver
        own = driver.create_stream()
        pool.record_stream(0, own)
        for number in range(4090):
            pool.record_stream(0, 0x100000 + 16 * number)

        def others():
            for _ in range(10):
                run_steps(lambda: pool.record_stream(0, 2))

        def go_on():
            ptr = pool.allocate(MIB, 2)
            thread = threading.Thread(target=others)
            thread.start()
            thread.join()
            work = driver.queue_work(2)
            pool.deallocate(ptr)
            assert pool.allocate(MIB, own) == ptr
            assert driver.ordered(own, 2, work)

        run_steps(go_on)
        pool.check()


def test_a_thread_that_python_did_not_make_has_one_slot(run_steps):
    with ordered_pool(MIB) as pool:

        def reuse():
            ptr = pool.allocate(MIB, 2)
            pool.source.driver.queue_work(2)
            pool.deallocate(ptr)

        run_steps(*[reuse] * 10)
        assert pool.crossings["waits"] == 0

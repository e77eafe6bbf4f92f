"""A fault in every driver call at every position: a typed error, and nothing is lost."""

import gc
import itertools
import logging

import pytest

import vpool
from tests.helpers.pools import GIB, MIB, unchanged
from vpool._storage.driver import CALL_NAMES
from vpool._storage.fake_cuda import FakeCudaDriver
from vpool._storage.source import Source

OUT_OF_MEMORY = 2
ILLEGAL_ADDRESS = 700
MOST_POSITIONS = 40


class FakeMachine:
    """A pool on device 1 of a fake machine whose current device is 0."""

    def __init__(self):
        self.driver = FakeCudaDriver(GIB, devices=2)
        self.driver.current_device = 0
        self.source = Source(self.driver, "cuda", 1)

    @property
    def used(self):
        return self.driver.used(1)


class SimulatedMachine:
    def __init__(self, base_offset=0):
        self.source = vpool.sources.Simulated(GIB, base_offset=base_offset)
        self.driver = self.source.driver

    @property
    def used(self):
        return self.driver.used


def grow_and_free(pool):
    blocks = []
    for nbytes in (100, MIB, 5 * MIB, 700):
        blocks.append(pool.allocate(nbytes))
        yield
    for ptr in blocks:
        pool.deallocate(ptr)
        yield


def run_out(pool):
    pool.allocate(60 * MIB)
    yield
    with pytest.raises(vpool.OutOfMemoryError):
        pool.allocate(60 * MIB)
    yield


def cross_streams(pool):
    ptr = pool.allocate(100, stream=7)
    yield
    pool.deallocate(ptr, stream=9)
    yield
    pool.empty(5 * MIB, stream=9).close(stream=7)
    yield


def report(pool):
    pool.allocate(100)
    yield
    pool.inspect()
    yield


def close_with_live_blocks(pool):
    kept = pool.allocate(3 * MIB)
    pool.deallocate(pool.allocate(9 * MIB))
    yield
    pool.close()
    yield
    pool.deallocate(kept)
    yield


# Each with the calls that it makes at least, on a machine of several devices.
SCENARIOS = {
    grow_and_free: {"malloc", "get_device", "set_device"},
    run_out: {
        "malloc",
        "memory_info",
        "set_device",
        "event_synchronize",
        "event_create",
        "event_record",
        "event_query",
    },
    cross_streams: {"malloc", "set_device", "stream_id", "event_create", "event_record", "event_query"},
    report: {"malloc", "memory_info", "get_device", "set_device"},
    close_with_live_blocks: {"malloc", "free", "get_device", "set_device", "event_synchronize"},
}


def run(scenario, pool):
    """Run a scenario to its end or to the error that it meets, which is returned."""
    try:
        for _ in scenario(pool):
            pool.check()
    except vpool.Error as error:
        return error
    return None


def assert_usable(pool):
    """The next calls work, and give back what they took."""
    pool.deallocate(pool.allocate(17 * MIB) if not pool.closed else 0)
    pool.check()
    str(pool.inspect())


def assert_nothing_lost(machine, pool):
    pool.check()
    assert machine.used == pool.stats.reserved_bytes
    for row in pool.inspect().blocks:
        if row["state"] == "live":
            pool.deallocate(int(row["address"]))
    pool.close()
    assert machine.used == pool.stats.reserved_bytes == 0


def fail_at_each_position(make_machine, scenario, call, status, times):
    """The call fails so often, from each position on until the scenario no longer reaches it; how many it reached."""
    for position in range(MOST_POSITIONS):
        machine = make_machine()
        pool = vpool.Pool(vpool.Dynamic(initial="1MiB", limit="100MiB"), source=machine.source)
        failures = machine.driver.calls()[call][1]
        machine.driver.fail(call, status, after=position, times=times)
        error = run(scenario, pool)
        machine.driver.fail(call, times=0)
        assert isinstance(error, vpool.SourceError | vpool.OutOfMemoryError | None)
        if isinstance(error, vpool.SourceError):
            assert error.name in str(error)
            assert error.name.startswith("cudaError")
        reached = machine.driver.calls()[call][1] > failures
        assert_usable(pool)
        assert_nothing_lost(machine, pool)
        if not reached:
            return position
    return pytest.fail(f"{call} is called more often than expected")


@pytest.mark.parametrize("make_machine", [FakeMachine, SimulatedMachine])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_failing_call_gives_a_typed_error_and_loses_nothing(make_machine, scenario):
    """Each call, at each position, once and from then on, for want of memory and for another reason."""
    reached = set()
    for call in CALL_NAMES:
        for status, times in itertools.product([OUT_OF_MEMORY, ILLEGAL_ADDRESS], [1, 1000]):
            if not fail_at_each_position(make_machine, scenario, call, status, times):
                break  # never called: no other failure of it would be noticed
            reached.add(call)
    assert reached >= SCENARIOS[scenario] - ({"set_device"} if make_machine is SimulatedMachine else set())


@pytest.mark.parametrize("call", ["get_device", "set_device", "memory_info"])
@pytest.mark.parametrize("position", [0, 1])
def test_a_pool_that_cannot_ask_its_device_is_not_made(call, position):
    machine = FakeMachine()
    machine.driver.fail(call, ILLEGAL_ADDRESS, after=position)
    if call == "set_device" or position == 0:
        with pytest.raises(vpool.SourceError):
            vpool.Pool(source=machine.source)
    vpool.Pool(source=machine.source).close()
    assert machine.used == 0


def test_another_error_than_want_of_memory_is_a_source_error_with_its_name(pool):
    pool.source.driver.fail("malloc", 101)
    with unchanged(pool), pytest.raises(vpool.SourceError, match="cudaErrorInvalidDevice") as caught:
        pool.allocate(100)
    assert caught.value.name == "cudaErrorInvalidDevice"
    assert pool.stats.source_calls == 1, "there is no use in asking for less"


def test_out_of_memory_stays_out_of_memory_when_the_device_does_not_answer():
    """The report of the error needs the device; what the caller is told must not change for that."""
    machine = SimulatedMachine()
    with vpool.Pool(vpool.Dynamic(initial="1MiB", limit="1MiB"), source=machine.source) as pool:
        pool.allocate(1000)
        with unchanged(pool):
            machine.driver.fail("memory_info", ILLEGAL_ADDRESS)
            with pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(2 * MIB)


class TestRefusedReturns:
    """The source does not take memory back."""

    def test_a_segment_whose_base_does_not_suit_is_not_lost(self):
        """The first segment of a misaligned device is handed back at once, to ask for one granule more."""
        machine = SimulatedMachine(base_offset=100)
        pool = vpool.Pool(vpool.Dynamic(initial="1MiB"), source=machine.source)
        machine.driver.fail("free", ILLEGAL_ADDRESS)
        run(report, pool)
        assert_nothing_lost(machine, pool)

    def test_memory_that_went_back_is_not_lent_again_where_only_the_current_device_is_not_restored(self):
        def idle_pool():
            machine = FakeMachine()
            pool = vpool.Pool(vpool.Dynamic(initial="1MiB"), source=machine.source)
            pool.deallocate(pool.allocate(100))
            return machine, pool, machine.driver.calls()["set_device"][0]

        machine, pool, before = idle_pool()
        pool.close()
        switches = machine.driver.calls()["set_device"][0] - before
        machine, pool, _ = idle_pool()
        machine.driver.fail("set_device", ILLEGAL_ADDRESS, after=switches - 1)
        with pytest.raises(vpool.SourceError):
            pool.close()
        assert machine.driver.calls()["set_device"][1] == 1
        assert machine.driver.calls()["free"][:2] == (1, 0)
        assert machine.used == pool.stats.reserved_bytes == 0

    def test_it_stays_with_the_pool_and_close_may_be_tried_again(self):
        machine = FakeMachine()
        pool = vpool.Pool(vpool.Dynamic(initial="1MiB"), source=machine.source)
        for ptr in [pool.allocate(MIB) for _ in range(3)]:
            pool.deallocate(ptr)
        machine.driver.fail("free", ILLEGAL_ADDRESS)
        with pytest.raises(vpool.SourceError):
            pool.close()
        pool.check()
        assert machine.used == pool.stats.reserved_bytes > 0
        pool.close()
        assert machine.used == 0

    def test_one_refusal_does_not_keep_the_rest(self):
        """A sticky error in one call: every other segment still goes back, and the error is told once."""
        machine = SimulatedMachine()
        pool = vpool.Pool(vpool.Dynamic(initial="1MiB", growth="1MiB"), source=machine.source)
        for ptr in [pool.allocate(MIB) for _ in range(3)]:
            pool.deallocate(ptr)
        machine.driver.fail("free", ILLEGAL_ADDRESS)
        with pytest.raises(vpool.SourceError):
            pool.close()
        assert machine.used == pool.stats.reserved_bytes == MIB

    def test_a_free_is_never_half_done(self):
        """An error says that nothing live has changed: a free that raises has freed nothing, or it does not raise."""
        machine = SimulatedMachine()
        pool = vpool.Pool(source=machine.source)
        ptr = pool.allocate(100)
        pool.close()
        machine.driver.fail("free", ILLEGAL_ADDRESS)
        live = pool.stats.allocated_bytes
        try:
            pool.deallocate(ptr)
        except vpool.SourceError:
            raised = True
        else:
            raised = False
        assert pool.stats.allocated_bytes == (live if raised else 0)

    def test_dropping_a_pool_is_silent(self):
        machine = SimulatedMachine()
        pool = vpool.Pool(source=machine.source)
        pool.allocate(100)
        machine.driver.fail("free", ILLEGAL_ADDRESS, times=100)
        del pool
        gc.collect()

    def test_dropping_a_buffer_of_a_closed_pool_logs_it(self, caplog):
        machine = SimulatedMachine()
        pool = vpool.Pool(source=machine.source)
        buffer = pool.empty(100)
        pool.close()
        machine.driver.fail("free", ILLEGAL_ADDRESS)
        with caplog.at_level(logging.WARNING, "vpool"):
            del buffer
        assert "did not take memory back" in caplog.text
        pool.check()
        pool.close()
        assert machine.used == 0

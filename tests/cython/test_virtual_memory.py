"""The storage layer's virtual memory: what moves, what is refused, and that no failure leaks anything."""

import ctypes

import pytest

from vpool._storage.fake_cuda import FakeCudaDriver
from vpool._storage.mapped_source import MappedSource
from vpool._storage.simulated_driver import SimulatedDriver
from vpool.errors import SourceError

MIB = 1 << 20
GRANULE = 2 * MIB
INVALID = 1
OUT_OF_MEMORY = 2
CALLS = ("address_reserve", "handle_create", "handle_map", "access_set", "handle_unmap", "handle_release")
# What any call may meet on its way in or out, once the thread is of another device, or something may capture.
AROUND = ("get_device", "set_device", "capture_mode")


def fake(capacity=256 * MIB, device=0, **options):
    return MappedSource(FakeCudaDriver(capacity, devices=2), "cuda-vmm", device, **options)


def simulated(capacity=256 * MIB, **options):
    return MappedSource(SimulatedDriver(capacity), "simulated-vmm", has_memory=False, **options)


@pytest.fixture(params=[fake, simulated])
def source(request):
    return request.param()


def used(source):
    driver = source.driver
    return driver.used() if isinstance(driver, FakeCudaDriver) else driver.used


def space_with(probe, source, *handles, nbytes=64 * MIB):
    """A range, and handles of these sizes that are mapped nowhere."""
    space = probe.Space(source)
    assert space.reserve(nbytes) == 0
    for size in handles:
        assert space.create(size) == 0
    return space


class TestMoving:
    def test_a_handle_carries_its_bytes(self, probe):
        space = space_with(probe, fake(), 4 * MIB)
        assert space.map(0, 0) == 0
        ctypes.memset(space.address + MIB, 77, 1000)
        assert space.unmap(0, 4 * MIB) == 0
        assert space.map(8 * MIB, 0) == 0
        assert ctypes.string_at(space.address + 9 * MIB, 1000) == bytes([77]) * 1000

    def test_two_places_show_the_same_memory(self, probe):
        space = space_with(probe, fake(), GRANULE)
        assert space.map(0, 0) == space.map(6 * MIB, 0) == 0
        ctypes.memset(space.address, 5, GRANULE)
        assert ctypes.string_at(space.address + 6 * MIB, GRANULE) == bytes([5]) * GRANULE
        assert space.unmap(0, GRANULE) == 0
        assert ctypes.string_at(space.address + 6 * MIB, 1) == b"\x05"

    def test_several_neighbours_are_unmapped_at_once(self, probe, source):
        space = space_with(probe, source, GRANULE, 6 * MIB)
        assert space.map(0, 0) == space.map(GRANULE, 1) == 0
        assert space.unmap(0, 8 * MIB) == 0
        assert source.driver.virtual() == (1, 2, 0)

    def test_memory_that_was_released_stays_while_it_is_mapped(self, probe, source):
        space = space_with(probe, source, GRANULE)
        assert space.map(0, 0) == 0
        assert space.release(0) == 0
        assert (space.token(0), used(source)) == (0, GRANULE)
        assert space.unmap(0, GRANULE) == 0
        assert used(source) == 0

    def test_fresh_memory_is_empty(self, probe):
        source = fake(4 * MIB)
        space = space_with(probe, source, 4 * MIB)
        space.map(0, 0)
        ctypes.memset(space.address, 1, 4 * MIB)
        space.unmap(0, 4 * MIB)
        space.release(0)
        assert space.create(4 * MIB) == 0
        space.map(0, 1)
        assert ctypes.string_at(space.address, 4 * MIB) == bytes(4 * MIB)

    def test_ten_thousand_cycles_leak_nothing(self, probe, source):
        space = space_with(probe, source, GRANULE, GRANULE)
        for _ in range(2500):
            for number in (0, 1):
                assert space.map(number * GRANULE, number) == space.map((8 + number) * GRANULE, number) == 0
                assert space.unmap(number * GRANULE, GRANULE) == space.unmap((8 + number) * GRANULE, GRANULE) == 0
        assert source.driver.virtual() == (1, 2, 0)
        space.release(0)
        space.release(1)
        space.unreserve()
        assert source.driver.virtual() == (0, 0, 0)
        assert used(source) == 0


class TestRefusals:
    """As CUDA refuses, so that what passes here passes there."""

    @pytest.fixture
    def space(self, probe, source):
        space = space_with(probe, source, 4 * MIB, 4 * MIB)
        assert space.map(0, 0) == 0
        return space

    @pytest.mark.parametrize("offset", [0, GRANULE, 62 * MIB, 64 * MIB, MIB])
    def test_mapping(self, space, source, offset):
        before = source.driver.virtual()
        assert space.map(offset, 1) == INVALID
        assert source.driver.virtual() == before

    @pytest.mark.parametrize(("offset", "nbytes"), [(0, GRANULE), (GRANULE, GRANULE), (0, 6 * MIB), (8 * MIB, GRANULE)])
    def test_unmapping(self, space, source, offset, nbytes):
        assert space.unmap(offset, nbytes) == INVALID
        assert source.driver.virtual() == (1, 2, 1)

    def test_a_range_that_is_in_use_is_not_freed(self, space, source):
        assert space.unreserve() == INVALID
        assert source.driver.virtual()[0] == 1
        address = space.address
        assert address == 0, "nobody has it any more"

    @pytest.mark.parametrize("nbytes", [0, 1, MIB, 3 * MIB])
    def test_sizes(self, probe, source, nbytes):
        space = probe.Space(source)
        assert space.reserve(nbytes) == INVALID
        assert space.create(nbytes) == INVALID

    def test_more_than_there_is(self, probe, source):
        space = probe.Space(source)
        assert space.create(258 * MIB) == OUT_OF_MEMORY
        assert space.create(256 * MIB) == 0
        assert space.create(GRANULE) == OUT_OF_MEMORY
        assert space.reserve(1 << 60) == OUT_OF_MEMORY
        assert source.driver.virtual() == (0, 1, 0)


class TestFailures:
    """A step that fails in the middle undoes those before it, on another device than the thread's, in a capture."""

    @pytest.fixture
    def source(self):
        source = fake(device=1)
        source.driver.current_device = 0
        source.driver.begin_capture(source.driver.create_stream())
        yield source
        source.driver.current_device = 0

    @pytest.mark.parametrize("call", CALLS + AROUND)
    @pytest.mark.parametrize("after", range(3))
    def test_acquire(self, probe, source, call, after):
        space = probe.Space(source)
        source.driver.fail(call, after=after)
        status = space.acquire(4 * MIB)
        source.driver.fail(call, times=0)
        if status == 0 or space.token(0):
            assert space.surrender() == 0
        # What the driver did not free is freed when the source is asked for more.
        assert space.acquire(GRANULE) == space.surrender() == 0
        assert source.driver.virtual() == (0, 0, 0)
        assert source.driver.used(1) == 0
        if call != "set_device":
            assert source.driver.current_device == 0

    @pytest.mark.parametrize("call", ["handle_unmap", "handle_release", "address_free", *AROUND])
    @pytest.mark.parametrize("after", range(6))
    def test_surrender(self, probe, source, call, after):
        space = probe.Space(source)
        assert space.acquire(4 * MIB) == 0
        source.driver.fail(call, after=after)
        space.surrender()
        source.driver.fail(call, times=0)
        if space.token(0):
            assert space.surrender() == 0
        assert space.acquire(GRANULE) == space.surrender() == 0
        assert source.driver.virtual() == (0, 0, 0)

    @pytest.mark.parametrize("call", ["handle_map", "access_set", *AROUND])
    def test_mapping_again(self, probe, source, call):
        space = space_with(probe, source, GRANULE)
        source.driver.fail(call)
        failed = space.map(0, 0) != 0
        source.driver.fail(call, times=0)
        assert failed
        assert source.driver.virtual() == (1, 1, 0 if failed else 1)
        if failed:
            assert space.map(0, 0) == 0

    def test_a_source_that_goes_frees_what_is_left(self, probe):
        driver = FakeCudaDriver(64 * MIB)
        source = MappedSource(driver, "cuda-vmm")
        space = probe.Space(source)
        driver.fail("address_free")
        assert space.reserve(4 * MIB) == 0
        assert space.unreserve() == OUT_OF_MEMORY
        assert driver.virtual()[0] == 1
        del space, source
        assert driver.virtual()[0] == 0


class TestOptions:
    def test_peers_get_access(self, probe):
        source = fake(peers=(1, 0))
        space = space_with(probe, source, GRANULE)
        before = source.driver.calls()["access_set"][0]
        assert space.map(0, 0) == 0
        assert source.driver.calls()["access_set"][0] == before + 2

    def test_a_peer_that_is_not_there(self, probe):
        space = space_with(probe, fake(peers=(5,)), GRANULE)
        assert space.map(0, 0) == 101
        assert space.map(0, 0) == 101, "nothing stayed mapped"

    @pytest.mark.parametrize(
        ("options", "error", "match"),
        [
            ({"handle_bytes": 3 * MIB}, ValueError, "multiple of 2,097,152"),
            ({"handle_bytes": 0}, ValueError, "multiple"),
            ({"slack": -0.1}, ValueError, "share"),
            ({"slack": float("nan")}, ValueError, "share"),
            ({"peers": range(1, 100)}, ValueError, "64 peers"),
        ],
    )
    def test_what_makes_no_sense(self, options, error, match):
        with pytest.raises(error, match=match):
            fake(**options)

    @pytest.mark.parametrize("call", ["device_attribute", "handle_granularity"])
    def test_a_device_without_virtual_memory(self, call):
        driver = FakeCudaDriver(64 * MIB)
        driver.fail(call, 801)
        with pytest.raises(SourceError, match="virtual memory: cudaErrorNotSupported"):
            MappedSource(driver, "cuda-vmm")

    def test_a_device_that_exports_nothing(self):
        driver = FakeCudaDriver(64 * MIB)
        driver.fail("device_attribute", 801, after=1)
        with pytest.raises(SourceError, match="exportable"):
            MappedSource(driver, "cuda-vmm", exportable=True)


def test_modelled_time_is_counted_and_not_waited_for(probe):
    source = simulated()
    space = space_with(probe, source, GRANULE)
    for _ in range(1000):
        space.map(0, 0)
        space.unmap(0, GRANULE)
    modelled = source.driver.modelled_ns()
    assert modelled["handle_create"] == 14_000
    assert modelled["access_set"] == 33_000_000
    assert modelled["handle_map"] == 1_500_000
    assert modelled["handle_unmap"] == 21_000_000
    calls, _, nanoseconds = source.driver.calls()["access_set"]
    assert calls == 1000
    assert nanoseconds < 10_000_000
    assert sum(fake().driver.modelled_ns().values()) == 0

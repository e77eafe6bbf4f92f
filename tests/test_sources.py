"""The storage layer: where memory comes from, on which device, and what the driver's table tells."""

import contextlib
import copy
import ctypes
import mmap
import pickle

import pytest

import vpool
from tests.helpers.pools import GIB, MIB, assert_whole, host_pool, run_cleanly, simulated_pool, unchanged
from vpool._storage.driver import CALL_NAMES
from vpool._storage.fake_cuda import FakeCudaDriver
from vpool._storage.source import Source

CAPACITY = GIB
DEVICES = 2


@pytest.fixture
def machine():
    """A CUDA machine of two devices over host memory; the calling thread is on device 0."""
    driver = FakeCudaDriver(CAPACITY, devices=DEVICES)
    driver.current_device = 0
    yield driver
    driver.current_device = 0


def cuda_pool(machine, device=0, **arguments):
    strategy = vpool.Dynamic(**{"initial": "1MiB", "limit": "64MiB", **arguments})
    return vpool.Pool(strategy, source=Source(machine, "cuda", device))


class TestImporting:
    """Importing vpool touches no driver, and neither does what needs none."""

    LOOK = (
        "print(sorted(name for name in set(sys.modules) - before"
        " if 'cuda' in name.split('.')[-1].removeprefix('cuda_built') or name.startswith('cuda')))"
    )

    @pytest.mark.parametrize(
        "use",
        [
            "",
            "vpool.Dynamic(); vpool.sources.Simulated('1GiB')",
            "vpool.Pool(source='simulated').allocate(100)",
            "vpool.Pool(source='host').empty(100)",
        ],
    )
    def test_loads_no_cuda(self, use):
        # Some installations load a module of their own as the interpreter starts.
        before = "import sys; before = set(sys.modules)"
        assert run_cleanly(f"{before}\nimport vpool\n{use}\n{self.LOOK}") == "[]\n"

    def test_cuda_without_a_device_says_what_is_missing(self):
        printed = run_cleanly(
            "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''\n"
            "import vpool\n"
            "for make in (lambda: vpool.Pool(source='cuda'), vpool.sources.Cuda, lambda: vpool.sources.Cuda(0)):\n"
            "    try: make()\n"
            "    except vpool.SourceError as error: print(error.name, len(str(error)) > 30)"
        )
        assert printed == "cudaErrorNoDevice True\n" * 3


class TestHost:
    """Ordinary memory of this process."""

    def test_it_can_be_written_and_read(self, writable_pool):
        blocks = [(writable_pool.allocate(nbytes), nbytes) for nbytes in (1, 256, 5000, 3 * MIB)]
        for number, (ptr, nbytes) in enumerate(blocks):
            ctypes.memset(ptr, number + 1, nbytes)
        for number, (ptr, nbytes) in enumerate(blocks):
            assert ctypes.string_at(ptr, nbytes) == bytes([number + 1]) * nbytes

    def test_segments_begin_at_pages(self, writable_pool):
        writable_pool.allocate(1)
        assert int(writable_pool.inspect().segment_table["address"][0]) % mmap.PAGESIZE == 0

    def test_a_report_knows_how_much_the_machine_has(self, writable_pool):
        assert 0 < writable_pool.inspect().largest_allocatable() <= 64 * MIB

    def test_more_than_the_address_space_is_out_of_memory(self):
        with host_pool(limit=2**62) as pool:
            with unchanged(pool), pytest.raises(vpool.OutOfMemoryError, match="refused"):
                pool.allocate(2**61)
            pool.allocate(MIB)


class TestSimulated:
    """Addresses only."""

    def test_capacity(self):
        with simulated_pool("4MiB") as pool:
            pool.allocate(4 * MIB)
            assert pool.source.driver.used == 4 * MIB
            with pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(1)

    def test_somebody_else_can_hold_memory(self):
        with simulated_pool("4MiB", initial=0) as pool:
            pool.source.driver.set_free(MIB)
            with pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(2 * MIB)
            pool.source.driver.set_free(4 * MIB)
            pool.allocate(2 * MIB)

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ({"capacity": -1}, ValueError),
            ({"capacity": 1.5}, TypeError),
            ({"capacity": True}, TypeError),
            ({"capacity": "lots"}, ValueError),
            ({"capacity": 2**64}, OverflowError),
            ({"base_offset": 1.5}, TypeError),
            ({"base_offset": "1"}, TypeError),
        ],
    )
    def test_arguments(self, arguments, error):
        with pytest.raises(error):
            vpool.sources.Simulated(**arguments)


class TestCudaDevices:
    """The CUDA source's code on a machine that is faked."""

    @pytest.mark.parametrize("device", range(DEVICES))
    @pytest.mark.parametrize("current", range(DEVICES))
    def test_memory_is_of_the_pools_device_whatever_the_current_one_is(self, machine, device, current):
        with cuda_pool(machine, device) as pool:
            machine.current_device = current
            ptr = pool.allocate(2 * MIB)
            assert machine.used(device) == pool.stats.reserved_bytes == 2 * MIB
            assert machine.used(1 - device) == 0
            assert pool.device == device
            assert machine.current_device == current
            ctypes.memset(ptr, 7, 2 * MIB)
            pool.deallocate(ptr)
            assert machine.current_device == current
            pool.inspect()
            pool.deallocate(pool.allocate(100, stream=7), stream=9)
            assert machine.current_device == current
        assert machine.used(device) == 0
        assert machine.current_device == current

    def test_close_gives_everything_back(self, machine):
        pool = cuda_pool(machine, 1)
        blocks = [pool.allocate(MIB) for _ in range(5)]
        for ptr in blocks:
            pool.deallocate(ptr)
        assert machine.used(1) == pool.stats.reserved_bytes > 0
        pool.close()
        assert machine.used(1) == 0
        free, total, _ = machine.calls()["free"]
        assert (free, total) == (pool.stats.source_calls / 2, 0)

    @pytest.mark.parametrize("current", range(DEVICES))
    def test_a_buffer_dropped_after_close_frees_on_the_right_device(self, machine, current):
        pool = cuda_pool(machine, 1)
        buffer = pool.empty(MIB)
        pool.close()
        machine.current_device = current
        del buffer
        assert machine.used(1) == 0
        assert machine.current_device == current

    @pytest.mark.parametrize("call", ["malloc", "set_device", "get_device", "memory_info", "free", "synchronize"])
    @pytest.mark.parametrize("status", [2, 700])
    def test_the_current_device_is_restored_after_a_failure(self, machine, call, status):
        """Also where the device cannot be entered, and for as long as restoring itself works."""
        pool = cuda_pool(machine, 1)
        kept = pool.allocate(100, stream=7)
        machine.fail(call, status, times=1)
        for use in (
            lambda: pool.deallocate(pool.allocate(5 * MIB)),
            pool.inspect,
            lambda: pool.deallocate(kept, stream=9),
            pool.close,
        ):
            with contextlib.suppress(vpool.Error):
                use()
            assert machine.current_device == 0
        pool.check()

    def test_without_a_device_to_switch_to_nothing_is_switched(self, machine):
        with cuda_pool(machine, 0) as pool:
            pool.allocate(MIB)
            pool.inspect()
        assert machine.calls()["set_device"][0] == 0

    def test_devices_run_out_one_by_one(self, machine):
        with cuda_pool(machine, 0, limit=2 * GIB) as first, cuda_pool(machine, 1, limit=2 * GIB) as second:
            first.allocate(CAPACITY)
            with unchanged(first), pytest.raises(vpool.OutOfMemoryError, match="refused"):
                first.allocate(1)
            second.allocate(CAPACITY)

    def test_a_hit_makes_no_driver_call(self, machine):
        with cuda_pool(machine, 1) as pool:
            pool.deallocate(pool.allocate(1000))
            before = machine.calls()
            for _ in range(1000):
                pool.deallocate(pool.allocate(1000))
                pool.empty(300)
            assert machine.calls() == before


class TestOrdinals:
    """Device numbers are checked where the driver is asked for."""

    @pytest.fixture
    def faked(self, machine, monkeypatch):
        monkeypatch.setattr(vpool.sources, "_cuda_driver", machine)
        monkeypatch.setattr(vpool.defaults, "_defaults", {})
        return machine

    @pytest.mark.parametrize("device", [-1, 2, 999, 2**40])
    def test_one_that_is_not_there(self, faked, device):
        with pytest.raises(ValueError, match="has 2"):
            vpool.Pool(source="cuda", device=device)

    @pytest.mark.parametrize("device", [True, 1.0, "1"])
    def test_no_ordinal(self, faked, device):
        with pytest.raises(TypeError):
            vpool.Pool(source="cuda", device=device)

    @pytest.mark.parametrize("current", range(DEVICES))
    def test_the_default_is_the_current_device(self, faked, current):
        faked.current_device = current
        with vpool.Pool() as pool:
            assert (pool.source.name, pool.device) == ("cuda", current)
        assert vpool.default_pool().device == current

    def test_each_device_has_its_default_pool(self, faked):
        vpool.set_default_pool(cuda_pool(faked, 0))
        vpool.set_default_pool(cuda_pool(faked, 1))
        faked.current_device = 1
        ptr = vpool.allocate(100)
        faked.current_device = 0
        assert vpool.empty(200).device == 0
        reports = vpool.inspect(device="all")
        assert {device: report.requested_bytes for device, report in reports.items()} == {0: 0, 1: 100}
        assert vpool.inspect(device=1).device == 1
        faked.current_device = 1
        vpool.deallocate(ptr)

    def test_the_driver_does_not_answer(self, faked):
        faked.fail("device_count", 3, times=10)
        with pytest.raises(vpool.SourceError):
            vpool.Pool(source="cuda")

    @pytest.mark.parametrize("devices", [0, 9, -1])
    def test_a_fake_machine_has_one_to_eight(self, devices):
        with pytest.raises(ValueError, match="1 to 8"):
            FakeCudaDriver(CAPACITY, devices=devices)


class TestTable:
    """Every driver call is counted and timed."""

    def test_calls_are_counted(self, machine):
        before = machine.calls()
        with cuda_pool(machine, 1) as pool:
            pool.deallocate(pool.allocate(100))
        calls = {name: figures[0] - before[name][0] for name, figures in machine.calls().items()}
        assert (calls["malloc"], calls["free"]) == (1, 1)
        # Its close waits for its stream.
        assert (calls["event_synchronize"], calls["synchronize"]) == (1, 0)
        # Into the pool's device and out again: for its total, its segment, an event made and recorded for that wait,
        # and the segment's return.
        assert calls["get_device"] == 5
        assert calls["set_device"] == 10
        assert {name for name, count in calls.items() if count} == {
            "malloc", "free", "memory_info", "get_device", "set_device", "event_create", "event_record",
            "event_synchronize",
        }  # fmt: skip
        assert calls["fill"] == calls["read"] == calls["write"] == 0

    def test_calls_are_timed(self, machine):
        with cuda_pool(machine) as pool:
            pool.allocate(100)
        calls, failures, nanoseconds = machine.calls()["malloc"]
        assert (calls, failures) == (1, 0)
        assert 0 < nanoseconds < 1e9

    def test_failures_are_counted(self, machine):
        with cuda_pool(machine) as pool:
            machine.fail("malloc", 700)
            with pytest.raises(vpool.SourceError):
                pool.allocate(100)
        assert machine.calls()["malloc"][:2] == (1, 1)

    def test_every_call_has_figures(self, machine):
        assert set(machine.calls()) == set(CALL_NAMES)

    def test_a_call_that_is_none_cannot_fail(self, machine):
        with pytest.raises(ValueError, match="tuple"):
            machine.fail("cudaMalloc")

    def test_a_fault_can_be_taken_away(self, machine):
        machine.fail("malloc", 700, times=5)
        machine.fail("malloc", times=0)
        with cuda_pool(machine) as pool:
            pool.allocate(100)


def test_pools_of_one_source_share_its_device():
    source = vpool.sources.Simulated("4MiB")
    strategy = vpool.Dynamic(initial=0, limit=1.0)
    with vpool.Pool(strategy, source=source) as first, vpool.Pool(strategy, source=source) as second:
        ptr = first.allocate(3 * MIB)
        with unchanged(second), pytest.raises(vpool.OutOfMemoryError):
            second.allocate(2 * MIB)
        with unchanged(second), pytest.raises(vpool.ForeignPointerError, match=first.name):
            second.deallocate(ptr)
        first.deallocate(ptr)
        assert_whole(first)


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_source_cannot_be_copied(way):
    with pytest.raises(TypeError, match="a source cannot be copied or pickled"):
        way(vpool.sources.Host())

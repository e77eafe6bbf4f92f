"""Pinned and managed memory and that of the driver's own pool, over a fake CUDA: the same pool, and the same errors."""

import ctypes

import pytest

import vpool
from tests.helpers.pools import GIB, MIB, run_cleanly, unchanged
from vpool import sources
from vpool._storage.fake_cuda import FakeCudaDriver

NAMES = ("cuda-async", "managed", "pinned")


@pytest.fixture
def machine(monkeypatch):
    """Drivers of each kind on a machine of two devices, by name."""
    drivers = {name: FakeCudaDriver(GIB, devices=2, pins=name == "pinned") for name in NAMES}
    drivers["cuda"] = FakeCudaDriver(GIB, devices=2)
    drivers["cuda"].current_device = 0
    monkeypatch.setattr(sources, "_load_cuda", lambda again=False: drivers["cuda"])
    monkeypatch.setattr(sources, "_driver_of", lambda kind, *arguments: drivers[kind])
    yield drivers
    drivers["cuda"].current_device = 0


def out(driver):
    return driver.used(0) + driver.used(1) + driver.pinned


@pytest.mark.parametrize("name", NAMES)
class TestEach:
    def test_by_name_and_by_function(self, name, machine):
        build = {"cuda-async": sources.CudaAsync, "managed": sources.Managed, "pinned": sources.Pinned}[name]
        for source in (name, build(1)):
            with vpool.Pool(vpool.Dynamic(initial="1MiB"), source=source, device=1) as pool:
                assert (pool.source.name, pool.device) == (name, 1)
                assert pool.source.host_accessible == (name != "cuda-async")
                ptr = pool.allocate(5000)
                ctypes.memset(ptr, 7, 5000)
                assert machine[name].used(0) == 0
                assert (machine[name].pinned, machine[name].used(1)) == ((MIB, 0) if name == "pinned" else (0, MIB))
                assert out(machine["cuda"]) == 0
                pool.deallocate(ptr)
                assert pool.trim() == MIB
                assert out(machine[name]) == 0
            machine["cuda"].current_device = 0

    def test_no_rounding_to_powers_of_two(self, name, machine):
        with vpool.Pool(vpool.Dynamic(initial=0), source=name) as pool:
            ptr = pool.allocate(33 * MIB)
            assert pool.stats.reserved_bytes == out(machine[name]) == 33 * MIB
            pool.deallocate(ptr)

    def test_calls_are_counted_and_timed(self, name, machine):
        with vpool.Pool(vpool.Dynamic(initial="1MiB"), source=name) as pool:
            pool.deallocate(pool.allocate(100))
        calls = machine[name].calls()
        assert calls["malloc"][:2] == (1, 0)
        assert calls["free"][:2] == (1, 0)
        assert calls["malloc"][2] > 0

    def test_a_refused_segment(self, name, machine):
        with vpool.Pool(vpool.Dynamic(initial="1MiB", growth="1MiB"), source=name) as pool:
            ptr = pool.allocate(MIB)
            with unchanged(pool):
                machine[name].fail("malloc", times=99)
                with pytest.raises(vpool.OutOfMemoryError):
                    pool.allocate(2 * MIB)
                machine[name].fail("malloc", 999)
                with pytest.raises(vpool.SourceError, match="cudaErrorUnknown"):
                    pool.allocate(2 * MIB)
            pool.deallocate(pool.allocate(2 * MIB))
            pool.deallocate(ptr)
            pool.check()

    def test_a_segment_that_is_not_taken_back(self, name, machine):
        pool = vpool.Pool(vpool.Dynamic(initial="1MiB"), source=name)
        pool.deallocate(pool.allocate(MIB))
        machine[name].fail("free", 999)
        with pytest.raises(vpool.SourceError):
            pool.trim()
        assert out(machine[name]) == pool.stats.reserved_bytes == MIB
        assert pool.trim() == MIB
        pool.close()
        assert out(machine[name]) == 0

    def test_no_such_device(self, name, machine):
        with pytest.raises(ValueError, match="no device 2: this machine has 2"):
            vpool.Pool(source=name, device=2)

    def test_a_full_machine(self, name, machine):
        with vpool.Pool(vpool.Dynamic(initial="512MiB", limit=1.0), source=name) as pool:
            ptr = pool.allocate(MIB)
            with pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(GIB)
            pool.deallocate(ptr)
            assert pool.source.memory() == (GIB - pool.stats.reserved_bytes, GIB)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_device(name):
    """One line says what is missing, and nothing else of vpool is harmed."""
    printed = run_cleanly(
        "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''\n"
        "import vpool\n"
        "try:\n"
        f"    vpool.Pool(source='{name}')\n"
        "except vpool.SourceError as error:\n"
        "    print(str(error).startswith('CUDA cannot be used here: '))\n"
        "vpool.Pool(source='host').allocate(100)\n"
    )
    assert printed == "True\n"

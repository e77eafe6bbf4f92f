"""Memory that moves, on a real device."""

import random
import threading

import pytest

import vpool
from tests.helpers.device import assert_follows, held
from tests.helpers.pools import GIB, MIB
from tests.helpers.traces import ALL, recorded
from vpool.errors import SourceError

pytestmark = pytest.mark.gpu

try:
    vpool.sources.CudaVmm()
except SourceError as error:
    pytest.skip(str(error), allow_module_level=True)

from tests.gpu.test_cuda import read, write  # noqa: E402 (skips itself without a device)


def pool_on(limit="4GiB", **options):
    return vpool.Pool(vpool.Dynamic(limit=limit), source=vpool.sources.CudaVmm(0, **options))


def calls(pool):
    return {name: figures[0] for name, figures in pool.source.driver.calls().items()}


def test_free_pieces_become_one_block():
    with pool_on(limit="1GiB", tight=True) as pool:
        blocks = [pool.allocate(32 * MIB) for _ in range(32)]
        for number, ptr in enumerate(blocks):
            write(ptr, bytes([number]) * 1000)
        for ptr in blocks[::2]:
            pool.deallocate(ptr)
        large = pool.allocate(480 * MIB)
        write(large, b"x" * 1000)
        write(large + 480 * MIB - 1000, b"y" * 1000)
        assert read(large + 480 * MIB - 1000, 1000) == b"y" * 1000
        for number, ptr in list(enumerate(blocks))[1::2]:
            assert read(ptr, 1000) == bytes([number]) * 1000
        pool.check()


def test_no_live_byte_changes():
    rng = random.Random(2)
    with pool_on(limit="512MiB", handle="4MiB") as pool:
        live = {}
        for turn in range(1500):
            if rng.random() < 0.5:
                nbytes = int(2 ** rng.uniform(10, 26))
                try:
                    ptr = pool.allocate(nbytes)
                except vpool.OutOfMemoryError:
                    continue
                live[ptr] = nbytes, turn % 255
                write(ptr, bytes([turn % 255]) * min(nbytes, 4096))
                write(ptr + nbytes - min(nbytes, 4096), bytes([turn % 255]) * min(nbytes, 4096))
            elif live:
                ptr = rng.choice(list(live))
                nbytes, byte = live.pop(ptr)
                part = min(nbytes, 4096)
                assert read(ptr, part) == read(ptr + nbytes - part, part) == bytes([byte]) * part
                pool.deallocate(ptr)
            if turn % 100 == 0:
                pool.check()
        assert calls(pool)["handle_map"] > calls(pool)["handle_create"]


def test_a_thread_without_a_context():
    failures = []

    def work(pool):
        try:
            ptr = pool.allocate(100 * MIB)
            write(ptr, b"a" * 100)
            pool.deallocate(ptr)
        except BaseException as error:
            failures.append(error)

    with pool_on() as pool:
        thread = threading.Thread(target=work, args=(pool,))
        thread.start()
        thread.join()
        assert not failures


def test_ten_thousand_moves_leak_nothing():
    rng = random.Random(1)
    driver = vpool.sources.CudaVmm(0).driver  # one for all sources of the process
    before = held(driver)
    with pool_on(limit="64MiB", tight=True) as pool:
        live = []
        for _ in range(20_000):
            if live and (len(live) > 12 or rng.random() < 0.5):
                pool.deallocate(live.pop(rng.randrange(len(live))))
                continue
            try:
                live.append(pool.allocate(2 * MIB * rng.randint(1, 4)))
            except vpool.OutOfMemoryError:
                pool.deallocate(live.pop())
                pool.trim("8MiB")
        for ptr in live:
            pool.deallocate(ptr)
        pool.check()
        pool.trim()
        assert pool.stats.reserved_bytes == 0
    assert held(driver) == before


def test_memory_goes_back_with_trim_and_close():
    source = vpool.sources.CudaVmm(0)
    before = held(source.driver)
    with vpool.Pool(vpool.Dynamic(limit="8GiB"), source=source) as pool:
        live = [pool.allocate(4 * GIB)]
        reserved = pool.stats.reserved_bytes
        assert 4 * GIB <= reserved <= 4 * GIB + 64 * MIB  # whole handles

        def give():
            pool.deallocate(live.pop())
            assert pool.stats.reserved_bytes == reserved
            assert pool.trim() == reserved

        def take():
            live.append(pool.allocate(4 * GIB))

        assert_follows(lambda: source.memory()[0], give, take, reserved)
        give()
        assert held(source.driver)["handle_create"] == before["handle_create"]
    assert held(source.driver) == before


# On three streams what is complete, and so may be moved or released, is another thing in each run.
CLOSE = {"fsdp_train": 0.03}
# Nor does it settle: handles go to and fro in each pass.
LATER = {"fsdp_train": 0.8}


@pytest.mark.parametrize("name", ALL)
def test_a_trace_needs_little_more_than_is_live(name):
    """And takes the same memory as the model to 1 %, or `CLOSE`; figures are printed for the documentation.

    The model of a device that is a few events behind: what was just recorded is not complete at once.
    """
    trace = recorded(name)
    result = vpool.replay(trace, source="cuda-vmm", passes=3)
    model = vpool.replay(trace, source="simulated-vmm", passes=3, lag=10)
    print(
        name, result.reserved_over_live, result.driver_calls, result.driver_ns, result.worst_driver_ns, model.driver_ns
    )
    assert result.oom is None
    assert result.reserved_over_live == pytest.approx(model.reserved_over_live, rel=CLOSE.get(name, 0.01))
    assert max(result.driver_ns[1:]) < LATER.get(name, 0.6) * result.driver_ns[0]


@pytest.mark.parametrize("name", ALL)
def test_a_trace_completes_with_hardly_more_than_is_live(name):
    trace = recorded(name)
    result = vpool.replay(trace, source="cuda-vmm", capacity=int(1.01 * trace.peak_live_bytes))
    print(name, result.reserved_over_live, result.driver_calls, result.driver_ns)
    assert result.oom is None


@pytest.mark.parametrize("name", ["two_streams", "resnet_train"])
def test_patterns_stay(name):
    result = vpool.replay(recorded(name), source="cuda-vmm", patterns=True)
    assert result.verified_bytes > 0

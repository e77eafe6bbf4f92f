"""Reported cases that only words describe; each test has the name of its case in `tests/cases`."""

import collections
import ctypes
import gc
import random
import threading
import time

import pytest

import vpool
from tests.helpers.pools import GIB, KIB, MIB, assert_whole, host_pool, run_cleanly, simulated_pool
from vpool._storage.fake_cuda import FakeCudaDriver

# Limits and the device.


def test_initial_larger_than_device_is_an_error():
    source = vpool.sources.Simulated(40 * MIB)
    with pytest.raises(ValueError, match=r"100 MiB.* 32\.0 MiB .*40\.0 MiB"):
        vpool.Pool(vpool.Dynamic(initial=100 * MIB), source=source)
    assert source.driver.used == 0
    with vpool.Pool(vpool.Dynamic(initial=8 * MIB), source=source) as pool:
        pool.deallocate(pool.allocate(8 * MIB))
        assert pool.stats.reserved_bytes == 8 * MIB


def test_pool_on_the_current_device(monkeypatch):
    machine = FakeCudaDriver(GIB, devices=2)
    monkeypatch.setattr(vpool.sources, "_cuda_driver", machine)
    machine.current_device = 1
    try:
        pool = vpool.Pool(vpool.Dynamic(initial=MIB))
        buffer = pool.empty(5 * MIB)
        assert pool.device == buffer.device == 1
        assert (machine.used(0), machine.used(1)) == (0, pool.stats.reserved_bytes)
        assert machine.current_device == 1
        # The functions of the default pools ask on every call, and for nothing else.
        before = {name: made for name, (made, *_) in machine.calls().items()}
        assert vpool.sources.current_device() == machine.current() == 1
        assert {name: made - before[name] for name, (made, *_) in machine.calls().items() if made != before[name]} == {
            "get_device": 2
        }
        machine.current_device = 0
        more = pool.empty(20 * MIB)
        assert more.device == 1
        more.close()
        buffer.close()
        pool.close()
        assert (machine.used(0), machine.used(1), machine.current_device) == (0, 0, 0)
    finally:
        machine.current_device = 0


def test_what_the_process_uses_is_not_what_the_pool_uses():
    """Somebody else takes memory of the device: the report tells, and the pool's own figures stay."""
    source = vpool.sources.Simulated(GIB)
    pool = vpool.Pool(vpool.Dynamic(initial=16 * MIB, limit=0.5), source=source)
    pool.allocate(MIB)
    before = pool.inspect().to_dict()
    source.driver.set_free(100 * MIB)
    after = pool.inspect().to_dict()
    assert before.pop("device_free_bytes") == GIB - 16 * MIB
    assert after.pop("device_free_bytes") == 100 * MIB
    # The advice is about the device, too.
    assert before.pop("advice") != after.pop("advice")
    assert before == after
    assert before["limit_bytes"] == GIB // 2


# The collector.


@pytest.fixture(params=[True, False], ids=["collector on", "collector off"])
def collector(request):
    was_enabled = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.usefixtures("collector")
def test_cycles_are_collected_before_oom():
    class Holder:
        def __init__(self):
            self.me = self
            self.buffer = pool.empty(4 * MIB)

    pool = simulated_pool(10 * MIB, initial=0)
    for _ in range(100):
        Holder()
    assert pool.ladder["collect Python's garbage"][1] > 0
    gc.collect()
    assert_whole(pool)


FINALISERS = """
import faulthandler, gc, sys, threading
import vpool

faulthandler.dump_traceback_later(60, exit=True)
threads = int(sys.argv[1])
pool = vpool.Pool(vpool.Dynamic(initial="1MiB", limit="64MiB"), source="host")
finalised = 0

class Node:
    def __init__(self, stream):
        self.me = self
        self.mine = pool.empty(700)
        self.other = pool.empty(300, stream=stream)

    def __del__(self):
        global finalised
        finalised += 1
        self.other.close()
        pool.empty(500, stream=9)
        pool.deallocate(pool.allocate(100))

def work(number):
    for i in range(10_000):
        pool.deallocate(pool.allocate(256 * (1 + i % 20), stream=number + i % 3))
        if i % 10 == 0:
            Node(stream=100 + i % 3)

gc.set_threshold(1, 1, 1)
workers = [threading.Thread(target=work, args=(10 * n,)) for n in range(threads)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
gc.collect()
pool.check()
assert finalised == 1000 * threads
print(pool.stats.requested_bytes, pool.stats.allocations == pool.stats.frees)
"""


@pytest.mark.parametrize("threads", [1, 4])
def test_finaliser_runs_inside_the_pool(threads):
    assert run_cleanly(FINALISERS, threads, timeout=90) == "0 True\n"


# Threads.


class Worker(threading.Thread):
    """Allocates into the queue of one thread and frees from its own, marks and verifies every block."""

    def __init__(self, pool, number, queues, operations):
        super().__init__(daemon=True)
        self.pool = pool
        self.number = number
        self.give, self.take = queues
        self.operations = operations
        self.error = None

    def run(self):
        try:
            rng = random.Random(self.number)
            for _ in range(self.operations):
                if rng.random() < 0.5:
                    self.lend(rng.randint(100, 10_000))
                elif self.take:
                    self.give_back()
        except BaseException as error:
            self.error = error

    def lend(self, nbytes):
        ptr = self.pool.allocate(nbytes)
        for place in (ptr, ptr + nbytes // 8 * 8 - 8):
            ctypes.c_uint64.from_address(place).value = ptr ^ self.number
        self.give.append((ptr, nbytes, self.number))

    def give_back(self):
        try:
            ptr, nbytes, number = self.take.popleft()
        except IndexError:
            return  # another thread was faster
        for place in (ptr, ptr + nbytes // 8 * 8 - 8):
            assert ctypes.c_uint64.from_address(place).value == ptr ^ number, "two owners had the same memory"
        self.pool.deallocate(ptr)


@pytest.mark.parametrize("freed_by", ["anybody", "another thread"])
@pytest.mark.parametrize("threads", [4, 16])
def test_four_threads_one_stream(threads, freed_by):
    pool = host_pool(limit=8 * GIB)
    shared = collections.deque()
    queues = [collections.deque() for _ in range(threads)]
    workers = [
        Worker(pool, n, (shared, shared) if freed_by == "anybody" else (queues[n - 1], queues[n]), 80_000 // threads)
        for n in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive(), "a thread hangs"
        if worker.error:
            raise worker.error
    pool.check()
    last = workers[0]
    for last.take in (shared, *queues):
        while last.take:
            last.give_back()
    assert_whole(pool)
    assert pool.stats.allocations == pool.stats.frees > 0


# Speed.


def seconds_of_pairs(pool, sizes):
    """Best time of a hundred requests of these sizes, each freed at once."""
    rng = random.Random(1)
    best = float("inf")
    for _ in range(100):
        wanted = rng.choices(sizes, k=100)
        started = time.perf_counter()
        for nbytes in wanted:
            pool.deallocate(pool.allocate(nbytes))
        best = min(best, time.perf_counter() - started)
    return best


def pool_of_sizes(count):
    """A pool with a free block of each size, a live block between any two of them."""
    pool = simulated_pool(initial=GIB)
    sizes = [512 * (i + 1) for i in range(count)]
    blocks = []
    for nbytes in sizes:
        blocks.append(pool.allocate(nbytes))
        pool.allocate(256)
    for ptr in blocks:
        pool.deallocate(ptr)
    return pool, sizes


def test_hundred_thousand_size_classes():
    few, many = (seconds_of_pairs(*pool_of_sizes(count)) for count in (10, 100_000))
    assert many < 3 * few, f"{many / 100 * 1e9:.0f} ns with 100000 sizes, {few / 100 * 1e9:.0f} ns with 10"


# The end of the process.


ENDINGS = {
    "globals": "pool = make(); buffer = pool.empty(1000); ptr = pool.allocate(1000)",
    "cycle": "cycle = [make()]; cycle += [cycle, cycle[0].empty(1000)]; del cycle",
    "thread local": """
import threading
local = threading.local()
def work():
    local.pool = make(); local.buffer = local.pool.empty(1000, stream=2)
worker = threading.Thread(target=work); worker.start(); worker.join()
work()
""",
    "exit in a thread": """
import sys, threading
def work():
    global pool
    pool = make(); mine = pool.empty(1000)
    sys.exit()
worker = threading.Thread(target=work); worker.start(); worker.join()
buffer = pool.empty(1000)
""",
}


@pytest.mark.parametrize("source", ["host", "simulated"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_pool_alive_at_exit(ending, source):
    make = f"import vpool\ndef make(): return vpool.Pool(vpool.Dynamic(initial={64 * KIB}), source={source!r})\n"
    assert run_cleanly(make + ENDINGS[ending]) == ""

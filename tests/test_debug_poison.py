"""Poison and quarantine: what is read or written after a free shows, and freed blocks wait before they are reused."""

import random
import threading

import numpy as np
import pytest

import vpool
from tests.helpers.debug import SOURCES, debug_pool, line_above, read, unraised, write
from tests.helpers.pools import KIB, MIB, assert_whole, unchanged
from vpool._storage.fake_cuda import FakeCudaDriver
from vpool.debugging import Debugger

WITH_MEMORY = ["host", "fake cuda"]
FREED, UNSET = b"\xdd", b"\xcd"


def quarantined(pool):
    return pool.stats.pending_bytes


# Poison.


@pytest.mark.parametrize("source", WITH_MEMORY)
@pytest.mark.parametrize("debug", ["poison", "guard,poison", "poison,quarantine"])
def test_a_use_after_free_reads_poison(source, debug):
    with debug_pool(debug, source) as pool:
        ptr = pool.allocate(1000)
        assert read(ptr, 1000) == UNSET * 1000
        write(ptr, 0x11, 1000)
        pool.deallocate(ptr)
        assert read(ptr, 1000) == FREED * 1000
        with pool.empty(5000) as buffer:
            ptr = buffer.ptr
        assert read(ptr, 5000) == FREED * 5000


def test_poison_comes_behind_the_work_of_the_stream_it_is_freed_on():
    machine = FakeCudaDriver(64 * MIB)
    with vpool.Pool(source=vpool.sources.Source(machine, "cuda"), debug="poison") as pool:
        own, freer = machine.create_stream(), machine.create_stream()
        ptr = pool.allocate(1000, own)
        at = machine.queue_work(own)
        fills = machine.calls()["fill_on"][0]
        pool.deallocate(ptr, freer)
        assert machine.calls()["fill_on"][0] == fills + 1
        assert machine.ordered(freer, own, at)
        assert machine.calls()["read_on"][0] == machine.calls()["synchronize"][0] == 0, "it only queues"


@pytest.mark.parametrize("debug", ["poison", "guard,poison,quarantine=64KiB"])
@pytest.mark.parametrize("source", WITH_MEMORY)
def test_poison_never_touches_what_is_lent_again(source, debug):
    """Four threads on four streams keep a pattern in each of their blocks; some are freed on another's stream."""
    errors = []

    def work(number):
        rng = random.Random(number)
        mine = []
        try:
            for _ in range(400):
                if len(mine) < 10 or rng.random() < 0.5:
                    nbytes = rng.randint(1, 20_000)
                    ptr = pool.allocate(nbytes, stream=number)
                    write(ptr, number, nbytes)
                    mine.append((ptr, nbytes))
                else:
                    ptr, nbytes = mine.pop(rng.randrange(len(mine)))
                    assert read(ptr, nbytes) == bytes([number]) * nbytes
                    pool.deallocate(ptr, rng.choice([None, 101, number]))
            for ptr, nbytes in mine:
                assert read(ptr, nbytes) == bytes([number]) * nbytes
                pool.deallocate(ptr)
        except BaseException as error:
            errors.append(error)

    with debug_pool(debug, source) as pool, unraised(0):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(100, 104)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        pool.check()
        assert pool.stats.requested_bytes == 0


# What is written into a block that waits in quarantine.


@pytest.mark.parametrize("source", WITH_MEMORY)
@pytest.mark.parametrize("offset", [-256, -1, 0, 500, 999, 1000])
def test_a_write_after_free_is_reported_when_the_block_leaves_quarantine(source, offset):
    with debug_pool("guard,poison,quarantine,sites", source) as pool:
        ptr = pool.allocate(1000)
        allocated = line_above()
        pool.deallocate(ptr)
        freed = line_above()
        write(ptr + offset, 0x42)
        with pytest.raises(vpool.GuardError, match="after it was freed"):
            pool.check()
        with unraised() as caught:
            pool.trim()
        (error,) = caught
        assert (error.address, error.requested, error.offset, error.found) == (ptr, 1000, offset, 0x42)
        assert f"Allocated at {allocated}, freed at {freed}." in str(error)
        assert quarantined(pool) == 0
        pool.check()


def test_a_write_far_inside_a_large_block_is_found():
    with debug_pool("poison,quarantine") as pool:
        ptr = pool.allocate(6 * MIB)
        pool.deallocate(ptr)
        write(ptr + 5 * MIB, 0x42, MIB)
        with unraised() as caught:
            pool.trim()
        assert caught[0].offset == 5 * MIB


def test_what_cannot_be_read_leaves_quarantine_all_the_same():
    with debug_pool("poison,quarantine") as pool:
        pool.deallocate(pool.allocate(1000))
        pool.source.driver.fail("read_on", 700)
        with unraised() as caught:
            pool.trim()
        assert isinstance(caught[0], vpool.SourceError)
        assert pool.stats.reserved_bytes == 0


def test_a_report_is_logged(caplog):
    caplog.set_level("INFO", "vpool")
    with debug_pool("poison,quarantine") as pool:
        ptr = pool.allocate(1000)
        pool.deallocate(ptr)
        write(ptr)
        with unraised():
            pool.trim()
    assert [record.message for record in caplog.records if "after it was freed" in record.message]


# Quarantine.


@pytest.mark.parametrize("source", SOURCES)
def test_a_freed_block_is_not_reused_before_younger_ones_were_freed(source):
    with debug_pool("quarantine=64KiB", source) as pool:
        freed = []
        for _ in range(100):
            ptr = pool.allocate(4096)
            assert ptr not in freed[-16:]
            pool.deallocate(ptr)
            freed.append(ptr)
        assert len(set(freed)) == 17


@pytest.mark.parametrize("source", SOURCES)
def test_quarantine_is_bounded(source):
    with debug_pool("quarantine=1MiB", source) as pool:
        for i in range(1, 1000):
            pool.deallocate(pool.allocate(700 * i))
            assert quarantined(pool) <= MIB
        pool.check()
        assert pool.stats.reserved_bytes <= 4 * MIB
        before = quarantined(pool)
        assert before > MIB // 4
        pool.deallocate(pool.allocate(2 * MIB))
        assert quarantined(pool) == before, "a block larger than the bound does not push all others out"


def test_quarantine_holds_no_more_than_an_eighth_of_the_limit():
    with debug_pool("quarantine=1GiB", "simulated", vpool.Dynamic(initial=0, limit=8 * MIB)) as pool:
        for _ in range(100):
            pool.deallocate(pool.allocate(64 * KIB))
        assert quarantined(pool) == MIB
        pool.set_limit(4 * MIB)
        assert quarantined(pool) == MIB // 2
        with unchanged(pool), pytest.raises(ValueError, match="reserved"):
            pool.set_limit(256)


def test_quarantine_holds_a_bounded_number_of_blocks(monkeypatch):
    monkeypatch.setattr("vpool.debugging._MOST_WAITING", 10)
    with debug_pool("quarantine", "simulated") as pool:
        for _ in range(100):
            pool.deallocate(pool.allocate(256))
        assert quarantined(pool) == 10 * 256


@pytest.mark.parametrize("source", SOURCES)
def test_a_request_gets_what_waits_before_it_fails(source):
    strategy = vpool.Dynamic(initial=8 * MIB, limit=8 * MIB)
    with debug_pool("quarantine", source, strategy) as pool:
        pool.allocate(7 * MIB)
        for stream in range(4):
            pool.deallocate(pool.allocate(256 * KIB, stream=stream))
        assert quarantined(pool) == MIB
        assert pool.inspect().largest_allocatable() == MIB
        pool.allocate(MIB)
        assert quarantined(pool) == 0
        with unchanged(pool), pytest.raises(vpool.OutOfMemoryError):
            pool.allocate(1)


@pytest.mark.parametrize("way", ["callback", "inside a callback", "collection"])
def test_a_request_gets_what_is_freed_for_it_into_quarantine(way):
    with debug_pool("quarantine", "host", vpool.Dynamic(initial=MIB, limit=MIB)) as pool:
        cache = [pool.empty(100 * KIB) for _ in range(10)]
        if way == "collection":
            cycle = [cache.pop()]
            cycle.append(cycle)
            del cycle
        elif way == "callback":
            pool.on_pressure(lambda nbytes: cache and cache.pop())
        else:
            pool.on_pressure(lambda nbytes: cache and cache.pop() and pool.empty(100 * KIB))
        cache.append(pool.empty(100 * KIB))
        pool.check()


@pytest.mark.parametrize("end", ["trim", "close"])
@pytest.mark.parametrize("source", SOURCES)
def test_nothing_waits_after(end, source):
    pool = debug_pool("quarantine", source)
    kept = pool.allocate(1000)
    for nbytes in (1000, 70_000):
        pool.deallocate(pool.allocate(nbytes))
    assert quarantined(pool) > 0
    getattr(pool, end)()
    assert quarantined(pool) == 0
    pool.deallocate(kept)
    assert quarantined(pool) == (1024 if end == "trim" else 0)
    pool.close()
    assert pool.stats.reserved_bytes == 0


def test_what_waits_counts_as_pending():
    with debug_pool("quarantine", "simulated") as pool:
        live = pool.allocate(5000)
        ptr = pool.allocate(1000)
        pool.deallocate(ptr)
        stats, report = pool.stats, pool.inspect()
        for figures in (stats, report):
            assert (figures.allocated_bytes, figures.requested_bytes, figures.pending_bytes) == (5120, 5000, 1024)
        assert (stats.allocations, stats.frees) == (2, 1)
        assert report.live_blocks == 1
        states = {int(row["address"]): str(row["state"]) for row in report.blocks}
        assert (states[live], states[ptr]) == ("live", "pending")
        assert report.reserved_bytes == report.allocated_bytes + report.free_bytes + report.pending_bytes
        pool.check()
        pool.trim(keep=MIB)
        pool.deallocate(live)
        pool.trim(keep=MIB)
        assert_whole(pool)


def test_what_waits_in_a_fixed_core_counts_as_pending():
    with debug_pool("quarantine", "simulated", vpool.Fixed(8 * MIB, block=4096)) as pool:
        blocks = [pool.allocate(4096) for _ in range(10)]
        for ptr in blocks[:4]:
            pool.deallocate(ptr)
        report = pool.inspect()
        assert (report.pending_bytes, report.core["allocated_bytes"]) == (4 * 4096, 6 * 4096)
        pool.check()


@pytest.mark.parametrize("source", SOURCES)
def test_a_double_free_of_what_waits_names_both_sites(source):
    with debug_pool("quarantine,sites", source) as pool:
        ptr = pool.allocate(1000)
        allocated = line_above()
        pool.deallocate(ptr)
        freed = line_above()
        with unchanged(pool), pytest.raises(vpool.DoubleFreeError) as caught:
            pool.deallocate(ptr)
        assert "waits in quarantine" in str(caught.value)
        assert f"Allocated at {allocated}, freed at {freed}." in str(caught.value)
        with pytest.raises(vpool.ForeignPointerError, match=r"8 bytes inside .*, which is free"):
            pool.deallocate(ptr + 8)


def test_a_block_that_waits_keeps_its_order_of_streams():
    """Freed on a stream, it leaves quarantine for that stream, and comes after its own stream's work."""
    machine = FakeCudaDriver(64 * MIB)
    strategy = vpool.Dynamic(initial=MIB, limit=MIB)
    with vpool.Pool(strategy, vpool.sources.Source(machine, "cuda"), debug="quarantine") as pool:
        own, freer, third = (machine.create_stream() for _ in range(3))
        pool.allocate(MIB - 64 * KIB, third)
        ptr = pool.allocate(64 * KIB, own)
        positions = {own: machine.queue_work(own), freer: machine.queue_work(freer)}
        pool.deallocate(ptr, freer)
        assert pool.allocate(64 * KIB, third) == ptr
        assert all(machine.ordered(third, stream, at) for stream, at in positions.items())


def test_a_stream_that_is_destroyed_while_its_block_waits():
    machine = FakeCudaDriver(64 * MIB)
    with vpool.Pool(source=vpool.sources.Source(machine, "cuda"), debug="poison,quarantine") as pool:
        stream = machine.create_stream()
        pool.deallocate(pool.allocate(1000, stream), stream)
        machine.queue_work(stream)
        machine.destroy_stream(stream)
        pool.trim()
        pool.check()
        assert (quarantined(pool), machine.calls_on_dead_streams) == (0, 0)


# All together.


@pytest.mark.parametrize("source", WITH_MEMORY)
@pytest.mark.parametrize("seed", range(3))
def test_random_programs_are_served_as_without_debug_modes(source, seed):
    """Sizes, alignments, streams, buffers and addresses at random; every byte is kept and every figure right."""
    rng = random.Random(seed)
    live = {}
    with debug_pool("guard,poison,quarantine=256KiB,sites=3", source) as pool, unraised(0):
        for step in range(2000):
            if len(live) < 20 or rng.random() < 0.5:
                nbytes, stream = int(2 ** rng.uniform(0, 16)), rng.randrange(4)
                if rng.random() < 0.5:
                    kept = pool.empty(nbytes, stream)
                    ptr = kept.ptr
                else:
                    alignment = 256 << rng.randrange(5)
                    kept = ptr = pool.allocate(nbytes, stream, alignment)
                    assert ptr % alignment == 0
                write(ptr, step % 251, nbytes)
                live[ptr] = (kept, nbytes, step % 251)
                if rng.random() < 0.2:
                    pool.record_stream(kept, rng.randrange(4))
            else:
                ptr = rng.choice(list(live))
                kept, nbytes, byte = live.pop(ptr)
                assert read(ptr, nbytes) == bytes([byte]) * nbytes
                pool.deallocate(kept, rng.choice([None, *range(4)]))
                assert read(ptr, nbytes) == FREED * nbytes
            if step % 100 == 0:
                pool.check()
                assert pool.stats.requested_bytes == sum(nbytes for _, nbytes, _ in live.values())
                rows = pool.inspect().blocks
                assert np.count_nonzero(rows["state"] == "live") == len(live) == pool.leaks().blocks
        for kept, _, _ in live.values():
            pool.deallocate(kept)
        kept = None
        live.clear()
        pool.trim(keep=64 * MIB)
        assert_whole(pool)


@pytest.mark.parametrize("debug", ["poison,quarantine", "guard,poison,quarantine"])
def test_memory_stays_while_a_check_looks_at_it(monkeypatch, debug):
    """Another thread may trim meanwhile, and the range would be gone under the eyes of the check."""
    with debug_pool(debug, "host", vpool.Dynamic(initial=0)) as pool:
        pool.deallocate(pool.allocate(4 * MIB))
        held = pool.stats.reserved_bytes
        looked, late = [], Debugger.written_late

        def look_late(debugger, block):
            looked.append(pool.stats.reserved_bytes)
            if len(looked) == 1:
                pool.trim()
                assert quarantined(pool) == 0
                looked.append(pool.stats.reserved_bytes)
            return late(debugger, block)

        monkeypatch.setattr(Debugger, "written_late", look_late)
        pool.check()
        assert looked == [held] * 3  # the second look is of who lets the block out of quarantine
        assert pool.trim() == held
        assert_whole(pool)


def test_a_live_block_that_is_freed_while_a_check_looks_at_it(monkeypatch):
    with debug_pool("guard", "host", vpool.Dynamic(initial=0)) as pool:
        ptr = pool.allocate(4 * MIB)
        looked, damage = [], Debugger._damage

        def look(debugger, block, slot, named):
            looked.append(pool.stats.allocated_bytes)
            if len(looked) == 1:
                pool.deallocate(ptr)
                assert pool.trim() == 0
            return damage(debugger, block, slot, named)

        monkeypatch.setattr(Debugger, "_damage", look)
        pool.check()
        assert len(looked) == 2
        with pytest.raises(vpool.DoubleFreeError):
            pool.deallocate(ptr)
        assert pool.trim() > 0
        assert pool.stats.reserved_bytes == 0


def look_in_between(monkeypatch, name):
    """Have a look of the debugger's wait in the middle; two events: it is there, and it may go on."""
    there, go_on = threading.Event(), threading.Event()
    look = getattr(Debugger, name)

    def look_slowly(debugger, block, *arguments):
        if threading.current_thread() is not threading.main_thread():
            there.set()
            assert go_on.wait(30)
        return look(debugger, block, *arguments)

    monkeypatch.setattr(Debugger, name, look_slowly)
    return there, go_on


def test_a_block_that_its_caller_never_got_stays_while_a_check_looks_at_it(monkeypatch):
    there, go_on = look_in_between(monkeypatch, "_damage")
    enter = Debugger.enter

    def enter_and_fail(debugger, block):
        enter(debugger, block)
        looker.start()
        assert there.wait(30)
        raise KeyboardInterrupt

    with debug_pool("guard", "host", vpool.Dynamic(initial=0)) as pool:
        looker = threading.Thread(target=pool.check)
        monkeypatch.setattr(Debugger, "enter", enter_and_fail)
        with pytest.raises(KeyboardInterrupt):
            pool.allocate(4 * MIB)
        pool.trim()
        held = pool.stats.reserved_bytes
        go_on.set()
        looker.join()
        assert held > 4 * MIB
        pool.trim()
        stats = pool.stats
        assert (stats.reserved_bytes, stats.allocated_bytes, stats.allocations, stats.frees) == (0, 0, 0, 0)


def test_a_pool_that_is_closed_while_a_check_looks_gives_all_back_once_it_has(monkeypatch):
    there, go_on = look_in_between(monkeypatch, "written_late")
    pool = debug_pool("poison,quarantine", "host", vpool.Dynamic(initial=0))
    pool.deallocate(pool.allocate(4 * MIB))
    looker = threading.Thread(target=pool.check)
    looker.start()
    assert there.wait(30)
    pool.close()
    assert pool.stats.reserved_bytes > 0
    go_on.set()
    looker.join()
    assert pool.stats.reserved_bytes == 0


@pytest.mark.parametrize("end", ["close", "trim"])
def test_quarantine_that_an_interrupt_has_kept_in_a_closed_pool(monkeypatch, end):
    """`close` lets all go in spite of one; of a second one, the next call that gives memory back."""
    pool = debug_pool("poison,quarantine", "host", vpool.Dynamic(initial=0))
    for _ in range(5):
        pool.deallocate(pool.allocate(MIB // 2))
    late, interrupts = Debugger.written_late, [KeyboardInterrupt] * (1 if end == "close" else 2)

    def look(debugger, block):
        if interrupts:
            raise interrupts.pop()
        return late(debugger, block)

    monkeypatch.setattr(Debugger, "written_late", look)
    with pytest.raises(KeyboardInterrupt):
        pool.close()
    assert pool.closed
    if end == "trim":
        assert quarantined(pool) > 0
        pool.trim()
    assert (quarantined(pool), pool.stats.reserved_bytes) == (0, 0)

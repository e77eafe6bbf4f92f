"""Trims: what goes back, in what time, and why the rest stays."""

import threading
import time

import pytest

import vpool
from tests.helpers.pools import GIB, MIB
from vpool.trimming import ASKED, CORE, ELSEWHERE, LATE, LIVE, PENDING


def segments(sizes, source="simulated", **kwargs):
    """A pool with a segment of each size, one block in each."""
    pool = vpool.Pool(vpool.Dynamic(initial=0, growth=MIB), source=source, **kwargs)
    return pool, [pool.allocate(size) for size in sizes]


def kept(trimmed):
    return {reason: nbytes for nbytes, reason in trimmed.kept}


def check(pool, trimmed):
    """The reasons cover all that is reserved."""
    assert sum(nbytes for nbytes, _ in trimmed.kept) == pool.stats.reserved_bytes
    pool.check()


class TestReasons:
    def test_an_int_with_reasons(self):
        pool, (first, second) = segments([4 * MIB, 8 * MIB])
        with pool:
            pool.deallocate(first)
            trimmed = pool.trim()
            assert (trimmed, type(trimmed + 1)) == (4 * MIB, int)
            assert kept(trimmed) == {LIVE: 8 * MIB}
            check(pool, trimmed)
            pool.deallocate(second)
            assert pool.trim().kept == ()

    def test_what_is_kept_as_asked(self):
        pool, ptrs = segments([4 * MIB, 4 * MIB, 8 * MIB])
        with pool:
            for ptr in ptrs[:2]:
                pool.deallocate(ptr)
            trimmed = pool.trim(keep=12 * MIB)
            assert (trimmed, kept(trimmed)) == (4 * MIB, {LIVE: 8 * MIB, ASKED: 4 * MIB})
            check(pool, trimmed)

    def test_queued_work(self):
        """A budget waits for nothing; without one the device is waited for."""
        pool, (ptr,) = segments([4 * MIB])
        with pool:
            driver = pool.source.driver
            stream = driver.create_stream()
            pool.record_stream(ptr, stream)
            driver.queue_work(stream)
            pool.deallocate(ptr)
            trimmed = pool.trim(budget=1)
            assert (trimmed, kept(trimmed)) == (0, {PENDING: 4 * MIB})
            check(pool, trimmed)
            assert pool.trim() == 4 * MIB

    def test_a_fixed_core(self):
        with vpool.Pool(vpool.Hybrid("8MiB", dynamic=vpool.Dynamic(initial=0, growth=MIB)), "simulated") as pool:
            pool.deallocate(pool.allocate(16 * MIB))
            for trimmed in (pool.trim(budget=1), pool.trim()):
                assert kept(trimmed) == {CORE: 8 * MIB}
                check(pool, trimmed)
        with vpool.Pool(vpool.Fixed("8MiB"), "simulated") as pool:
            assert kept(pool.trim(budget=0)) == {CORE: 8 * MIB}

    def test_a_capture(self):
        """What a graph may use stays, and says so."""
        with vpool.Pool(vpool.Dynamic(initial=0, growth=MIB), "simulated") as pool:
            driver = pool.source.driver
            stream = driver.create_stream()
            graph = driver.begin_capture(stream)
            pool.deallocate(pool.allocate(4 * MIB, stream), stream)
            driver.end_capture(stream)
            trimmed = pool.trim()
            assert trimmed == 0
            assert set(kept(trimmed)) == {ELSEWHERE}
            check(pool, trimmed)
            driver.destroy_graph(graph)


@pytest.mark.parametrize("source", ["simulated", "simulated-vmm", "host"])
def test_reasons_add_up(source):
    """Whatever the source, and however much time there is."""
    with vpool.Pool(vpool.Dynamic(initial=0, growth=MIB), source=source) as pool:
        ptrs = [pool.allocate((number % 7 + 1) * 5 * MIB + 300) for number in range(20)]
        for ptr in ptrs[::2] + ptrs[1::4]:
            pool.deallocate(ptr)
        total = 0
        for budget in (0, 1e-5, 1, None):
            before = pool.stats.reserved_bytes
            trimmed = pool.trim(budget=budget)
            assert trimmed == before - pool.stats.reserved_bytes
            check(pool, trimmed)
            total += trimmed
        assert total > 0


class TestBudget:
    def test_no_time(self):
        pool, (ptr,) = segments([4 * MIB])
        with pool:
            pool.deallocate(ptr)
            trimmed = pool.trim(budget=0)
            assert (trimmed, kept(trimmed)) == (0, {LATE: 4 * MIB})
            check(pool, trimmed)

    @pytest.mark.parametrize("keep", [0, 20 * MIB, 300 * MIB])
    def test_enough_time_gives_back_what_a_trim_does(self, keep):
        sizes = [MIB, 200 * MIB, 3 * MIB, 50 * MIB, 500 * MIB, 2 * MIB]
        pool, ptrs = segments(sizes)
        other, others = segments(sizes)
        with pool, other:
            for ptr, twin in zip(ptrs[1:], others[1:], strict=True):
                pool.deallocate(ptr)
                other.deallocate(twin)
            trimmed = pool.trim(keep, budget=60)
            check(pool, trimmed)
            # In small slices the small segments go first, so that at least as much of what is asked for can stay.
            assert keep <= pool.stats.reserved_bytes
            if keep == 0:
                assert trimmed == other.trim(keep)
            else:
                assert trimmed > 0

    def test_the_rest_goes_another_time(self):
        """Of 32 segments of real memory a trim without time gives back one slice at most, and later ones the rest."""
        import ctypes

        pool, ptrs = segments([64 * MIB] * 32, source="host")
        with pool:
            for ptr in ptrs:
                ctypes.memset(ptr, 1, 4 * MIB)
                pool.deallocate(ptr)
            began = time.perf_counter()
            trimmed = pool.trim(budget=1e-9)
            assert time.perf_counter() - began < 5
            assert trimmed + pool.stats.reserved_bytes == 2 * GIB
            assert trimmed <= 64 * MIB
            total = int(trimmed)
            while pool.stats.reserved_bytes:
                part = pool.trim(budget=0.0005)
                check(pool, part)
                total += part
            assert total == 2 * GIB

    def test_others_go_on(self):
        """While one thread trims without end, another allocates and frees, and never meets an error."""
        pool, ptrs = segments([2 * MIB] * 400)
        done = threading.Event()
        failed = []

        def trims():
            try:
                while not done.is_set():
                    pool.trim(budget=0.001)
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=trims)
        thread.start()
        for ptr in ptrs:
            pool.deallocate(ptr)
            pool.deallocate(pool.allocate(3 * MIB))
        done.set()
        thread.join()
        assert not failed
        assert pool.trim() >= 0
        assert pool.stats.reserved_bytes == 0
        pool.check()
        pool.close()

    def test_a_refusal_is_told(self):
        pool, (first, second) = segments([4 * MIB, 4 * MIB])
        with pool:
            pool.deallocate(first)
            pool.deallocate(second)
            pool.source.driver.fail("free", times=1)
            with pytest.raises(vpool.SourceError):
                pool.trim(budget=1)
            pool.check()
            pool.trim(budget=1)
            assert pool.stats.reserved_bytes == 0

    @pytest.mark.parametrize(
        ("budget", "error"), [(-1, ValueError), ("1", TypeError), (True, TypeError), (float("nan"), ValueError)]
    )
    def test_what_is_no_time(self, budget, error, pool):
        with pytest.raises(error, match="budget"):
            pool.trim(budget=budget)


class TestMarks:
    """A pool that trims itself."""

    def until(self, holds):
        deadline = time.monotonic() + 20
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def test_down_to_the_low_mark(self):
        pool, ptrs = segments([4 * MIB] * 16, maintain_every=0.002, trim_marks=("8MiB", "32MiB"))
        with pool:
            for ptr in ptrs[:8]:
                pool.deallocate(ptr)
            time.sleep(0.1)
            assert pool.stats.reserved_bytes == 64 * MIB  # 32 MiB idle: not above the high mark
            pool.deallocate(ptrs[8])
            self.until(lambda: pool.stats.reserved_bytes == 36 * MIB)  # 28 live, and the low mark
            assert pool.stats.allocated_bytes == 28 * MIB
            time.sleep(0.05)
            assert pool.stats.reserved_bytes == 36 * MIB
            pool.check()

    @pytest.mark.parametrize(
        ("marks", "error"),
        [(("2MiB", "1MiB"), ValueError), ("1MiB", TypeError), ((1,), TypeError), ((1, "x"), ValueError)],
    )
    def test_what_are_no_marks(self, marks, error):
        with pytest.raises(error):
            vpool.Pool(source="simulated", maintain_every=1, trim_marks=marks)

    def test_marks_without_a_thread(self):
        with pytest.raises(ValueError, match="maintain_every"):
            vpool.Pool(source="simulated", trim_marks=(0, 0))


@pytest.mark.parametrize("ahead", [0, 1 << 30])
def test_a_free_where_memory_went_back_says_what_is_known(ahead):
    with vpool.Pool(vpool.Dynamic(limit=GIB), source="simulated-vmm") as pool:
        ptr = pool.allocate(MIB)
        pool.deallocate(ptr)
        assert pool.trim() > 0
        with pytest.raises(vpool.DoubleFreeError, match="no memory, since it is free already or never was lent"):
            pool.deallocate(ptr + ahead)

"""Tags: what blocks are for, counted and limited."""

import gc
import subprocess
import sys
import threading

import pytest

import vpool
from tests.helpers.pools import GIB, KIB, MIB, host_pool, simulated_pool, unchanged
from tests.helpers.traces import recorded
from vpool._interface.replay import Replayer


def row_of(pool, name):
    return next((row for row in pool.inspect().tags if row["tag"] == name), None)


class TestAttribution:
    """Which tag a block gets."""

    def test_within_and_behind(self, pool):
        pool.allocate(1000)
        with vpool.tag("weights"):
            pool.allocate(2000)
        pool.allocate(3000)
        assert row_of(pool, "weights")["requested_bytes"] == 2000
        assert row_of(pool, None)["requested_bytes"] == 4000

    def test_the_innermost_counts(self, pool):
        with vpool.tag("outer"):
            with vpool.tag("inner"):
                pool.allocate(1000)
                assert vpool.tag.current() == "inner"
                with vpool.tag(None):
                    pool.allocate(5000)
                    assert vpool.tag.current() is None
            pool.allocate(2000)
            assert vpool.tag.current() == "outer"
        assert vpool.tag.current() is None
        assert [row_of(pool, name)["requested_bytes"] for name in ("outer", "inner", None)] == [2000, 1000, 5000]

    def test_one_object_many_times(self, pool):
        tag = vpool.tag("again")
        with tag, tag:
            pool.allocate(1000)
        assert vpool.tag.current() is None
        assert repr(tag) == "vpool.tag('again')"
        assert row_of(pool, "again")["live_blocks"] == 1

    def test_an_exception_ends_it(self):
        with pytest.raises(KeyError), vpool.tag("broken"):
            raise KeyError
        assert vpool.tag.current() is None

    def test_it_is_left_on_the_thread_that_entered_it(self):
        """Another thread cannot end what this one's blocks are named."""
        tag = vpool.tag("mine")
        refused = []

        def leave():
            try:
                tag.__exit__(None, None, None)
            except RuntimeError as error:
                refused.append(str(error))

        with tag:
            thread = threading.Thread(target=leave)
            thread.start()
            thread.join()
            assert vpool.tag.current() == "mine"
        assert refused == ["vpool.tag: this block was entered on another thread, whose blocks it still names"]
        with pytest.raises(RuntimeError):
            tag.__exit__(None, None, None)

    def test_threads_have_their_own(self, pool):
        seen = []

        def work(name):
            seen.append(vpool.tag.current())
            with vpool.tag(name):
                pool.allocate(1000)

        with vpool.tag("parent"):
            for name in ("other", vpool.tag.current()):
                thread = threading.Thread(target=work, args=(name,))
                thread.start()
                thread.join()
        assert seen == [None, None]
        assert row_of(pool, "other")["live_blocks"] == row_of(pool, "parent")["live_blocks"] == 1

    def test_buffers_and_the_fixed_core(self):
        with vpool.Pool(vpool.Fixed(16 * MIB, block=MIB), source="simulated") as pool:
            with vpool.tag("core"):
                buffer = pool.empty(1000)
            assert row_of(pool, "core")["live_bytes"] == MIB
            buffer.close()
            pool.allocate(1000)
            assert row_of(pool, "core")["live_bytes"] == 0
            assert row_of(pool, None)["live_bytes"] == MIB
            pool.check()

    def test_pools_that_come_later(self, pool):
        with vpool.tag("later"), simulated_pool() as later:
            later.allocate(1000)
            assert row_of(later, "later")["live_blocks"] == 1
            assert row_of(pool, "later") is None

    def test_compiled_callers(self):
        with simulated_pool() as pool:
            trace = recorded("two_streams")
            streams = {0: 0, 1: pool.source.driver.create_stream()}
            with vpool.tag("replayed"):
                Replayer(pool, trace, streams).run(0, trace.peak_event + 1)
            row = row_of(pool, "replayed")
            assert row["requested_bytes"] == row["peak_bytes"] - (row["live_bytes"] - row["requested_bytes"])
            assert row["requested_bytes"] == trace.peak_live_bytes
            pool.check()

    def test_names_that_are_none(self):
        with pytest.raises(ValueError, match="must have a name"):
            vpool.tag("")
        for name in (1, b"bytes", ["list"]):
            with pytest.raises(TypeError, match="named by a string"):
                vpool.tag(name)

    def test_the_first_tag_of_a_process(self):
        """Pools that are there already count by tag from then on, and their older blocks have none."""
        code = (
            "import vpool\n"
            "pool = vpool.Pool(source='simulated')\n"
            "before = pool.allocate(1000)\n"
            "assert [row['tag'] for row in pool.inspect().tags] == [None]\n"
            "with vpool.tag('some'): ptr = pool.allocate(2000)\n"
            "found = {row['tag']: row['live_bytes'] for row in pool.inspect().tags}\n"
            "assert found == {None: 1024, 'some': 2048}, found\n"
            "pool.deallocate(before)\n"
            "pool.deallocate(ptr)\n"
            "assert [row['live_bytes'] for row in pool.inspect().tags] == [0]\n"
            "pool.check()\n"
        )
        subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)

    def test_too_many_share_one(self):
        code = (
            "import vpool\n"
            "from vpool._interface import tags\n"
            "for number in range(66_000): tags.number_of(f'request {number}')\n"
            "pool = vpool.Pool(source='simulated')\n"
            "for name in ('request 7', 'one more'):\n"
            "    with vpool.tag(name): pool.allocate(1000)\n"
            "found = {row['tag']: row['live_blocks'] for row in pool.inspect().tags}\n"
            "assert found == {'request 7': 1, tags.TOO_MANY_TAGS: 1}, found\n"
        )
        subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


class TestPeaks:
    """The most that was live of each tag."""

    def test_peak(self, pool):
        with vpool.tag("steps"):
            blocks = [pool.allocate(MIB) for _ in range(5)]
        for ptr in blocks[1:]:
            pool.deallocate(ptr)
        assert row_of(pool, "steps")["peak_bytes"] == 5 * MIB
        pool.reset_peaks()
        assert row_of(pool, "steps")["peak_bytes"] == MIB

    def test_threads(self):
        """Every block is counted once, whoever frees it."""
        with host_pool(limit=256 * MIB) as pool:
            handed = []

            def work(name):
                for number in range(400):
                    with vpool.tag(name):
                        handed.append(pool.allocate(1000 + number))
                    if number % 2:
                        pool.deallocate(handed.pop())

            threads = [threading.Thread(target=work, args=(f"thread {number % 3}",)) for number in range(12)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            blocks = pool.inspect()
            assert sum(row["live_blocks"] for row in blocks.tags) == blocks.live_blocks == len(handed)
            for ptr in handed:
                pool.deallocate(ptr)
            assert {row["live_bytes"] for row in pool.inspect().tags} == {0}
            assert all(row["peak_bytes"] > 0 for row in pool.inspect().tags)
            pool.check()


class TestLimits:
    """`Pool.limit`."""

    def test_beyond_it(self, pool):
        pool.limit("kv-cache", "1MiB")
        with vpool.tag("kv-cache"):
            kept = pool.allocate(700 * KIB)
            with unchanged(pool), pytest.raises(vpool.OutOfMemoryError) as caught:
                pool.allocate(400 * KIB)
            assert "'kv-cache'" in str(caught.value)
            assert "1.00 MiB (1,048,576 bytes)" in str(caught.value)
            assert caught.value.requested == 400 * KIB
            pool.allocate(324 * KIB)
            pool.deallocate(kept)
            pool.allocate(700 * KIB)
        pool.allocate(400 * KIB)

    def test_the_steps_that_are_named_work(self, pool):
        pool.limit("kv-cache", MIB)
        with vpool.tag("kv-cache"):
            blocks = [pool.allocate(nbytes) for nbytes in (100_000, 300_000, 500_000)]
            with pytest.raises(vpool.OutOfMemoryError) as caught:
                pool.allocate(200_000)
            raising, freeing = caught.value.shortage.remedies
            assert (raising.kind, freeing.kind) == ("raise_tag_limit", "free")
            assert freeing.addresses == (blocks[2],)
            pool.limit("kv-cache", raising.nbytes)
            pool.deallocate(pool.allocate(200_000))
            pool.limit("kv-cache", MIB)
            pool.deallocate(freeing.addresses[0])
            pool.allocate(200_000)

    def test_what_is_suspended_counts_in_the_steps_too(self):
        with vpool.Pool(source="simulated-vmm") as pool, vpool.tag("kv"):
            pool.allocate(100 * MIB)
            pool.limit("kv", 101 * MIB)
            pool.suspend("kv")
            assert any("Tag 'kv' has 100 MiB of its limit of 101 MiB" in one for one in pool.inspect().advice)
            with pytest.raises(vpool.OutOfMemoryError) as caught:
                pool.allocate(2 * MIB)
            (step,) = caught.value.shortage.remedies
            pool.limit("kv", step.nbytes)
            assert pool.allocate(2 * MIB)

    def test_what_is_taken_away(self, pool):
        pool.limit("activations", 1000)
        with vpool.tag("activations"):
            with pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(1001)
            pool.limit("activations", None)
            pool.allocate(1001)
        assert row_of(pool, "activations")["limit_bytes"] is None

    def test_below_what_is_live(self, pool):
        with vpool.tag("live"):
            pool.allocate(1000)
        with pytest.raises(ValueError, match=r"1,000 bytes live for tag 'live'"):
            pool.limit("live", 999)
        pool.limit("live", 1000)
        with pytest.raises(ValueError, match="no limit of its own"):
            pool.limit(None, 1000)

    def test_garbage_is_collected_first(self, pool):
        pool.limit("garbage", MIB)
        with vpool.tag("garbage"):
            cycle = [pool.empty(MIB)]
            cycle.append(cycle)
            del cycle
            pool.allocate(MIB)

    def test_callbacks_are_asked_first(self, pool):
        pool.limit("cache", MIB)
        with vpool.tag("cache"):
            kept = [pool.allocate(MIB)]
            pool.on_pressure(lambda needed: pool.deallocate(kept.pop()))
            pool.allocate(MIB)
        assert kept == []

    def test_callbacks_are_asked_in_their_order_until_the_request_fits(self, pool):
        asked, kept = [], []

        def frees(needed):
            asked.append("frees")
            kept.clear()
            pool.on_pressure(lambda needed: asked.append("late"), priority=9)

        pool.limit("ordered", 4000)
        with vpool.tag("ordered"):
            kept.append(pool.empty(3000))
            pool.on_pressure(lambda needed: asked.append("last"), priority=-1)
            pool.on_pressure(frees)
            pool.on_pressure(lambda needed: asked.append("first"), priority=1)
            kept.append(pool.empty(3000))
        assert asked == ["first", "frees"]

    @pytest.mark.parametrize("nbytes", [1000, 4000])
    def test_a_callback_that_closes_the_pool(self, nbytes):
        with simulated_pool() as pool:
            kept = []
            pool.limit("closed", 2000)
            with vpool.tag("closed"):
                kept.append(pool.empty(1500))
                pool.on_pressure(lambda needed: (kept.clear(), pool.close()))
                with pytest.raises(vpool.ClosedPoolError):
                    pool.allocate(nbytes)
            assert pool.stats.reserved_bytes == 0

    def test_what_waits_in_quarantine_makes_room(self):
        with vpool.Pool(source="host", debug="quarantine") as pool:
            pool.limit("waiting", 4000)
            with vpool.tag("waiting"):
                for _ in range(3):
                    pool.deallocate(pool.allocate(3000))

    def test_a_recording_tells_of_it(self, pool):
        pool.limit("recorded", 1000)
        with pool.record() as recording, vpool.tag("recorded"):
            pool.allocate(600)
            with pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(700)
        assert recording.failures.tolist() == [[1, 700]]

    def test_a_request_that_fails_for_another_reason(self):
        """It leaves nothing counted."""
        with simulated_pool(16 * MIB, initial=MIB) as pool:
            pool.limit("large", GIB)
            with vpool.tag("large"):
                for _ in range(3):
                    with pytest.raises(vpool.OutOfMemoryError, match="growing would pass the limit"):
                        pool.allocate(900 * MIB)
                pool.limit("large", 1000)
                pool.allocate(1000)

    def test_compiled_callers(self):
        with simulated_pool() as pool:
            trace = recorded("two_streams")
            most = trace.peak_live_bytes // 2
            pool.limit("replayed", most)
            streams = {0: 0, 1: pool.source.driver.create_stream()}
            with vpool.tag("replayed"):
                event = Replayer(pool, trace, streams).run(0, len(trace))
            assert event == int((trace.live_bytes > most).argmax())
            assert row_of(pool, "replayed")["requested_bytes"] == trace.live_bytes[event - 1]

    def test_threads_never_pass_it(self):
        with host_pool(limit=256 * MIB) as pool:
            pool.limit("shared", MIB)
            seen = []

            def work():
                with vpool.tag("shared"):
                    for _ in range(150):
                        try:
                            ptr = pool.allocate(100 * KIB)
                        except vpool.OutOfMemoryError:
                            continue
                        seen.append(row_of(pool, "shared"))
                        pool.deallocate(ptr)

            gc.disable()
            try:
                threads = [threading.Thread(target=work) for _ in range(16)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            finally:
                gc.enable()
            assert max(row["requested_bytes"] for row in seen) <= MIB
            assert len(seen) > 100
            assert row_of(pool, "shared")["live_blocks"] == 0

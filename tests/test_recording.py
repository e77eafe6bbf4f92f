"""Recordings: what happens in a pool becomes a trace, whoever calls and whatever the ring holds."""

import contextlib
import itertools
import threading

import numpy as np
import pytest

import vpool
from tests.helpers.pools import GIB, KIB, MIB, host_pool, live_rows, simulated_pool, unchanged
from tests.helpers.traces import recorded
from vpool._interface.replay import Replayer
from vpool.details import Details
from vpool.moments import moment
from vpool.trace import ALLOCATE, FREE

EVENTS = ("op", "id", "bytes", "stream", "t_us", "marks_us", "failures")


def replayed(trace, pool):
    """Replay a trace into a pool, up to its end."""
    driver = pool.source.driver
    streams = {int(index): driver.create_stream() if index else 0 for index in np.unique(trace.stream)}
    return Replayer(pool, trace, streams).run(0, len(trace))


def calls_of(source, call):
    return source.driver.calls()[call][0]


def assert_sound(trace):
    """A trace whose blocks never overlap: at each event the address is free, or the allocation's own."""
    live = {}
    for op, number, address, nbytes in zip(
        trace.op.tolist(), trace.id.tolist(), trace.details.address.tolist(), trace.details.allocated.tolist(),
        strict=True,
    ):  # fmt: skip
        if op == ALLOCATE:
            assert address not in live
            live[address] = (number, nbytes)
        else:
            assert live.pop(address) == (number, nbytes)
    spans = sorted((address, address + nbytes) for address, (_, nbytes) in live.items())
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    return live


class TestEvents:
    """Each kind of call, by hand."""

    def test_allocations_and_frees(self, pool):
        with pool.record() as recording:
            assert len(recording) == 0
            first = pool.allocate(1000)
            second = pool.allocate(2000, stream=7)
            pool.deallocate(first)
            pool.deallocate(second)
        assert isinstance(recording, vpool.Trace)
        assert recording.op.tolist() == [ALLOCATE, ALLOCATE, FREE, FREE]
        assert recording.id.tolist() == [0, 1, 0, 1]
        assert recording.bytes.tolist() == [1000, 2000, 1000, 2000]
        assert recording.stream.tolist() == [0, 1, 0, 1]
        assert recording.details.address.tolist() == [first, second, first, second]
        assert recording.details.allocated.tolist() == [1024, 2048, 1024, 2048]
        assert (np.diff(recording.t_us) >= 0).all()
        assert recording.t_us[0] == 0
        assert recording.notes == []

    def test_nothing(self, pool):
        with pool.record() as recording:
            pool.deallocate(pool.allocate(0))
        assert (len(recording), recording.peak_event, recording.notes) == (0, -1, [])

    def test_buffers_that_are_closed_and_dropped(self, pool):
        with pool.record() as recording:
            kept, dropped = pool.empty(1000), pool.empty(2000)
            del dropped
            kept.close()
        assert recording.id.tolist() == [0, 1, 1, 0]

    def test_a_free_on_another_stream(self, pool):
        with pool.record() as recording:
            pool.deallocate(pool.allocate(1000, stream=7), stream=9)
            pool.deallocate(pool.allocate(1000), stream=9)
        assert recording.stream.tolist() == [1, 2, 0, 2]
        assert_sound(recording)

    def test_marks(self, pool):
        with pool.record() as recording:
            pool.allocate(1)
            recording.mark()
            pool.allocate(1)
            recording.mark()
        assert len(recording.marks_us) == 2
        assert recording.t_us[0] <= recording.marks_us[0] <= recording.t_us[1] <= recording.marks_us[1]

    def test_failures(self):
        with simulated_pool(16 * MIB, initial=MIB) as pool, pool.record() as recording:
            pool.allocate(1000)
            with pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(GIB)
            pool.allocate(1000)
        assert recording.failures.tolist() == [[1, GIB]]

    def test_segments(self):
        with simulated_pool(initial=0) as pool:
            first = pool.allocate(MIB)
            with pool.record() as recording:
                pool.allocate(2 * MIB)
                pool.deallocate(first)
                pool.trim()
            segments = recording.details.segments
            assert segments.nbytes.tolist() == [MIB, 2 * MIB, -MIB]
            assert segments.event.tolist() == [0, 1, 3]
            assert segments.address[0] == segments.address[2] == first

    def test_segments_that_no_whole_granules_cover(self):
        """A base that is no multiple of the granule costs bytes, which are reserved too, before and after."""
        with simulated_pool(initial=0, base_offset=100) as pool:
            first = pool.allocate(MIB)
            with pool.record() as recording:
                pool.allocate(2 * MIB)
                pool.deallocate(first)
                pool.trim()
                reserved = pool.stats.reserved_bytes
        nbytes = recording.details.segments.nbytes
        assert nbytes.tolist() == [MIB + 256, reserved, -MIB - 256]

    def test_frees_that_are_errors_are_no_events(self, pool):
        ptr = pool.allocate(1000)
        with pool.record() as recording:
            pool.deallocate(ptr)
            with pytest.raises(vpool.DoubleFreeError):
                pool.deallocate(ptr)
            with pytest.raises(vpool.ForeignPointerError):
                pool.deallocate(12345)
        assert recording.op.tolist() == [ALLOCATE, FREE]

    def test_of_a_fixed_core(self):
        with vpool.Pool(vpool.Hybrid(16 * MIB, block=[MIB, 2 * MIB]), source="simulated") as pool:
            before = pool.allocate(MIB)
            with pool.record() as recording:
                common, large = pool.allocate(2 * MIB), pool.allocate(20 * MIB)
                pool.deallocate(common)
                pool.deallocate(before)
            assert recording.details.address.tolist() == [before, common, large, common, before]
            assert moment(recording, 2).report.live_blocks == 3
            pool.check()

    def test_in_a_pool_with_debug_modes(self):
        """A block is freed when it leaves quarantine: until then its memory is nobody else's."""
        with vpool.Pool(source="host", debug="guard,quarantine=1MiB") as pool:
            with pool.record() as recording:
                kept, freed = pool.allocate(1000), pool.allocate(5000)
                pool.deallocate(freed)
            assert recording.bytes.tolist() == [1000, 5000]
            with pool.record() as recording:
                pool.trim()
                pool.deallocate(kept)
            assert recording.bytes.tolist() == [1000, 5000, 5000]
            assert_sound(recording)

    def test_compiled_callers(self):
        """A replay calls as compiled code does; the recording of it is the trace that it replayed."""
        trace = recorded("two_streams")
        with simulated_pool() as pool:
            with pool.record() as recording:
                assert replayed(trace, pool) == len(trace)
            assert np.array_equal(recording.op, trace.op)
            assert np.array_equal(recording.id, trace.number)
            assert np.array_equal(recording.bytes, trace.bytes)
            assert np.array_equal(recording.stream, trace.stream)
            assert len(assert_sound(recording)) == pool.inspect().live_blocks
            again = vpool.replay(recording)
            assert again.peak_reserved_bytes == vpool.replay(trace).peak_reserved_bytes


class TestSites:
    """The lines that allocate, for those who want them."""

    def test_lines(self, pool):
        with pool.record(sites=True) as recording:
            ptr = pool.allocate(1000)
            for _ in range(3):
                pool.allocate(2000)
            pool.deallocate(ptr)
        details = recording.details
        assert len(details.sites) == 3
        assert details.sites[0] == ""
        assert all("test_recording.py:" in site and "in test_lines" in site for site in details.sites[1:])
        assert details.site.tolist() == [1, 2, 2, 2, 0]

    def test_some_of_them_and_their_callers(self, pool):
        def allocate():
            pool.allocate(1000)

        with pool.record(sites=2, depth=2) as recording:
            for _ in range(4):
                allocate()
        assert recording.details.site.tolist() == [1, 0, 1, 0]
        assert " < " in recording.details.sites[1]

    def test_none_unless_asked(self, pool):
        with pool.record() as recording:
            pool.allocate(1000)
        assert recording.details.sites == [""]


class TestBefore:
    """Blocks that were there before."""

    def test_they_come_first(self, pool):
        blocks = [pool.allocate(nbytes) for nbytes in (1000, 2000, 3000)]
        with pool.record() as recording:
            pool.deallocate(blocks[1])
            new = pool.allocate(4000)
        assert recording.op.tolist() == [ALLOCATE, ALLOCATE, ALLOCATE, FREE, ALLOCATE]
        assert recording.details.address.tolist() == [*blocks, blocks[1], new]
        assert "3 blocks were live" in recording.notes[0]
        assert recording.t_us[:3].tolist() == [0, 0, 0]

    def test_a_pool_in_use(self):
        with simulated_pool() as pool:
            blocks = [pool.allocate(1000 * number) for number in range(1, 50)]
            with pool.record() as recording:
                for ptr in blocks[::3]:
                    pool.deallocate(ptr)
            assert int(recording.live_bytes[-1]) == pool.stats.requested_bytes
            live = assert_sound(recording)
            assert sorted(live) == live_rows(pool)["address"].tolist()


class TestRing:
    """What is lost where more happens than the ring holds."""

    @pytest.mark.parametrize("capacity", [1, 2, 64, 1000])
    def test_the_oldest_are_lost(self, pool, capacity):
        blocks = []
        with pool.record(capacity=capacity) as recording:
            for number in range(3000):
                if number % 3 == 2:
                    pool.deallocate(blocks.pop(number % len(blocks)))
                else:
                    blocks.append(pool.allocate(1 + number % 5000))
        lost = 3000 + pool.stats.source_calls - (held := 1 << (capacity - 1).bit_length())
        assert f"{lost:,} events at the beginning are lost: the ring holds {held:,}" in recording.notes[0]
        assert any("live where what is left of the recording of" in note for note in recording.notes[1:])
        assert sorted(assert_sound(recording)) == sorted(blocks)
        assert int(recording.live_bytes[-1]) == pool.stats.requested_bytes

    @pytest.mark.parametrize("capacity", [0, -1, 2**40, 2**70])
    def test_sizes_that_are_none(self, pool, capacity):
        with pytest.raises(ValueError, match="a recording holds"):
            pool.record(capacity=capacity)

    @pytest.mark.parametrize("capacity", [1.5, "many", True, None])
    def test_what_is_no_size(self, pool, capacity):
        with pytest.raises((TypeError, ValueError)):
            pool.record(capacity=capacity)


class TestOneAtATime:
    """Beginnings and ends."""

    def test_two_at_once(self, pool):
        with pool.record() as recording:
            with pytest.raises(vpool.Error, match="recorded already"), pool.record():
                pass
            pool.allocate(1000)
        assert len(recording) == 1

    def test_one_that_is_not_going_on_ends_no_other(self, pool):
        first = pool.record()
        with first:
            pool.allocate(1000)
        with pytest.raises(RuntimeError, match="entered once"):
            first.__enter__()
        with pool.record() as recording:
            for other in (first, pool.record()):
                with pytest.raises(RuntimeError, match="not going on"):
                    other.__exit__(None, None, None)
            pool.allocate(1000)
        assert len(first) == 1
        assert len(recording) == 2

    def test_one_after_another(self, pool):
        for _ in range(3):
            with pool.record() as recording:
                pool.deallocate(pool.allocate(1000))
            assert len(recording) == 2

    def test_an_exception_inside(self, pool):
        recording = pool.record()
        with contextlib.suppress(KeyError), recording:
            pool.allocate(1000)
            raise KeyError
        assert len(recording) == 1

    def test_it_changes_nothing(self, pool):
        pool.allocate(1000)
        with unchanged(pool), pool.record():
            pass

    def test_a_closed_pool(self, pool):
        pool.close()
        with pytest.raises(vpool.ClosedPoolError):
            pool.record()

    def test_a_pool_that_is_closed_meanwhile(self):
        pool = simulated_pool()
        with pool.record() as recording:
            ptr = pool.allocate(1000)
            pool.close()
            pool.deallocate(ptr)
        assert recording.op.tolist() == [ALLOCATE, FREE]

    def test_a_pool_that_is_dropped_meanwhile(self):
        recording = simulated_pool().record().__enter__()
        recording.__exit__(None, None, None)
        assert len(recording) == 0


class TestThreads:
    """Sixteen threads at work."""

    def work(self, pool, seed, rounds):
        generator = np.random.default_rng(seed)
        live = []
        for nbytes in generator.integers(1, 20 * KIB, rounds).tolist():
            if len(live) > 8:
                pool.deallocate(live.pop(nbytes % len(live)), stream=(None, 3)[nbytes % 2])
            live.append(pool.allocate(nbytes, stream=seed % 4))
        for ptr in live[2:]:
            pool.deallocate(ptr)

    @pytest.mark.parametrize("capacity", [1 << 20, 4096])
    def test_each_event_has_its_place(self, capacity):
        with host_pool(limit=256 * MIB) as pool:
            threads = [threading.Thread(target=self.work, args=(pool, seed, 600)) for seed in range(16)]
            for thread in threads[:8]:
                thread.start()
            with pool.record(capacity=capacity) as recording:
                for thread in threads[8:]:
                    thread.start()
                for thread in threads:
                    thread.join()
            assert sorted(assert_sound(recording)) == live_rows(pool)["address"].tolist()
            assert int(recording.live_bytes[-1]) == pool.stats.requested_bytes
            assert len(np.unique(recording.details.thread)) > 8 if capacity > 4096 else True
            pool.check()

    def test_recordings_that_begin_and_end_meanwhile(self):
        stop = threading.Event()

        def work(pool, seed):
            while not stop.is_set():
                self.work(pool, seed, 50)

        with simulated_pool() as pool:
            threads = [threading.Thread(target=work, args=(pool, seed)) for seed in range(8)]
            for thread in threads:
                thread.start()
            try:
                for _ in range(5):
                    with pool.record(capacity=8192) as recording:
                        stop.wait(0.02)
                    assert_sound(recording)
                    assert len(recording) > 100
            finally:
                stop.set()
                for thread in threads:
                    thread.join()
            pool.check()


class TestFiles:
    """Saved and loaded, with all that a recording knows."""

    @pytest.fixture
    def recording(self, pool):
        with pool.record(sites=True) as recording:
            with vpool.tag("kept"):
                pool.allocate(1000, stream=7)
            pool.deallocate(pool.allocate(2000))
            recording.mark()
        return recording

    def test_round_trip(self, recording, tmp_path):
        recording.save(tmp_path / "recording.npz")
        loaded = vpool.Trace.load(tmp_path / "recording.npz")
        for array in EVENTS:
            assert np.array_equal(getattr(loaded, array), getattr(recording, array)), array
        for name, value in recording.details._asdict().items():
            if name == "segments":
                assert all(np.array_equal(*pair) for pair in zip(value, loaded.details.segments, strict=True))
            else:
                assert np.array_equal(getattr(loaded.details, name), value), name
        assert loaded.details.tags == ["", "kept"]

    def test_arrays_that_do_not_fit(self, recording, tmp_path):
        recording.save(path := tmp_path / "recording.npz")
        whole = dict(np.load(path))
        changes = {
            "tag": np.array([9] * len(recording), "u2"),
            "address": whole["address"][1:],
            "site": whole["site"].astype("f8"),
            "segment_bytes": whole["segment_bytes"][:0],
            "segment_event": whole["segment_event"] - 1,
            "tags": np.array("[1]"),
            "sites": np.array("[" * 100_000),
        }
        for name, array in changes.items():
            np.savez(path, **{**whole, name: array})
            with pytest.raises(vpool.FormatError, match=name):
                vpool.Trace.load(path)
        np.savez(path, **{name: array for name, array in whole.items() if name != "tags"})
        with pytest.raises(vpool.FormatError, match="no array named tags"):
            vpool.Trace.load(path)

    def test_names_of_any_characters_and_lengths(self, tmp_path):
        path = tmp_path / "recording.npz"
        names = ["a", "a\0", "\0", "\ud800</script>", "x" * 20_000, *map(str, range(1500))]
        with host_pool() as pool:
            with pool.record() as recording:
                for name in names:
                    with vpool.tag(name):
                        pool.allocate(1)
            pool.snapshot().save(tmp_path / "snapshot.npz")
        recording.save(path)
        assert sorted(vpool.Trace.load(path).details.tags) == sorted(["", *names])
        report = vpool.Snapshot.load(tmp_path / "snapshot.npz").report
        assert {row["tag"] for row in report.tags if row["live_blocks"]} == set(names)

    def test_names_that_stand_in_rows(self, recording, tmp_path):
        path, details = tmp_path / "earlier.npz", recording.details
        recording.save(path)
        rows = {"tags": np.array(details.tags, str), "sites": np.array(details.sites, str)}
        np.savez(path, **{**dict(np.load(path)), **rows})
        loaded = vpool.Trace.load(path).details
        assert (loaded.tags, loaded.sites) == (details.tags, details.sites)

    def test_a_plain_trace_has_no_details(self, tmp_path):
        trace = recorded("two_streams")
        assert trace.details is None
        assert Details.from_arrays({}, 0) is None

    def test_other_formats_take_it(self, recording, tmp_path):
        recording.save(tmp_path / "out.csv", "rmm")
        assert len(vpool.Trace.load(tmp_path / "out.csv")) == len(recording)


class TestMoments:
    """Blocks and segments after an event are those that the pool had."""

    def test_against_the_pool(self):
        with simulated_pool(initial=64 * KIB) as pool:
            generator = np.random.default_rng(3)
            blocks = [pool.allocate(nbytes) for nbytes in generator.integers(1, 90_000, 20).tolist()]
            taken = []
            with pool.record(sites=True) as recording:
                for nbytes in generator.integers(1, 200_000, 60).tolist():
                    if nbytes % 3 == 0:
                        pool.deallocate(blocks.pop(nbytes % len(blocks)))
                    else:
                        with vpool.tag(f"tag {nbytes % 4}"):
                            blocks.append(pool.allocate(nbytes))
                    taken.append(pool.inspect())
            for number, then in enumerate(taken):
                shown = moment(recording, len(recording) - len(taken) + number).report
                assert shown.segments == then.segments
                for name in ("reserved_bytes", "allocated_bytes", "requested_bytes", "free_bytes", "live_blocks"):
                    assert getattr(shown, name) == getattr(then, name), name
                assert {row["tag"]: row["live_bytes"] for row in shown.tags if row["live_bytes"]} == {
                    row["tag"]: row["live_bytes"] for row in then.tags if row["live_bytes"]
                }
                assert [row["address"] for row in shown.segment_rows] == sorted(
                    row["address"] for row in then.segment_rows
                )

    @pytest.mark.parametrize("capacity", [1 << 16, 1 << 8])
    def test_memory_that_is_mapped_in_pieces(self, capacity):
        """What is reserved after an event, and where, is what the pool had then, as memory comes, moves and goes."""
        source = vpool.sources.SimulatedVmm(GIB, handle=2 * MIB)
        with vpool.Pool(vpool.Dynamic(limit="200MiB"), source=source) as pool:
            generator = np.random.default_rng(5)
            held = [pool.allocate(nbytes) for nbytes in (5 * MIB, 7 * MIB)]
            taken = []
            with pool.record(capacity=capacity) as recording:
                for nbytes in generator.integers(100_000, 20_000_000, 200).tolist():
                    while pool.stats.allocated_bytes > 150 * MIB:
                        pool.deallocate(held.pop(nbytes % len(held)))
                    if nbytes % 5 == 0:
                        pool.trim()
                    held.append(pool.allocate(nbytes))
                    taken.append(pool.snapshot())
                assert calls_of(source, "handle_map") > calls_of(source, "handle_create"), "some moved"
                pool.trim()
                end = pool.snapshot()
        segments = recording.details.segments
        assert segments.nbytes.sum() == end.report.reserved_bytes
        seen = (recording.op == ALLOCATE) & (recording.details.thread > 0)  # not what was there before
        births = np.flatnonzero(seen)
        taken = taken[-len(births) :]
        assert (len(taken) < 200) == (capacity == 1 << 8), "some are lost"
        assert len({then.report.reserved_bytes for then in taken}) > 3
        reserved = recording.details.segments.reserved_bytes(len(recording))
        assert reserved[births].tolist() == [then.report.reserved_bytes for then in taken]
        for event, then in zip(births.tolist(), taken, strict=True):
            shown = moment(recording, event)
            for name in ("reserved_bytes", "free_bytes", "allocated_bytes", "live_blocks"):
                assert getattr(shown.report, name) == getattr(then.report, name), name
            assert shown.report.peak_reserved_bytes <= then.report.peak_reserved_bytes
            mapped = then.blocks[then.blocks["state"] != "unmapped"]
            assert shown.blocks["address"].tolist() == mapped["address"].tolist()
            assert shown.blocks["nbytes"].tolist() == mapped["nbytes"].tolist()

    def test_mapped_memory_of_many_threads(self):
        """A recording that begins while memory comes and goes knows what there was, and misses none of it."""
        limit = 100 * MIB
        source = vpool.sources.SimulatedVmm(GIB, handle=2 * MIB)
        with vpool.Pool(vpool.Dynamic(limit=limit), source=source) as pool:
            started, over = threading.Barrier(4), threading.Event()

            def work(seed):
                generator = np.random.default_rng(seed)
                started.wait()
                while not over.is_set():
                    with contextlib.suppress(vpool.OutOfMemoryError):
                        pool.deallocate(pool.allocate(int(generator.integers(1, limit // 2))))
                    pool.trim()

            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
            for thread in threads:
                thread.start()
            started.wait()
            with pool.record() as recording:
                while pool.stats.allocations < 300:
                    pool.trim()
                over.set()
                for thread in threads:
                    thread.join()
                pool.allocate(3 * MIB)
                reserved = pool.stats.reserved_bytes
        event, _, nbytes = recording.details.segments
        after = np.cumsum(nbytes)[np.append(event[1:] != event[:-1], True)]
        assert after[-1] == reserved > 0
        assert after.min() >= 0
        assert limit // 4 < after.max() <= limit
        assert (np.diff(event) >= 0).all()

    def test_memory_that_is_mapped_nowhere(self):
        """The driver gave it and could not map it: it is reserved all the same."""
        source = vpool.sources.SimulatedVmm(GIB, handle=2 * MIB)
        with vpool.Pool(vpool.Dynamic(), source=source) as pool, pool.record() as recording:
            pool.allocate(MIB)
            source.driver.fail("handle_map", 999, times=1)
            with pytest.raises(vpool.SourceError):
                pool.allocate(3 * MIB)
            spare = pool.stats.reserved_bytes - 2 * MIB
            pool.allocate(100)
            source.driver.fail("handle_map", times=0)
            pool.allocate(3 * MIB)
        assert spare > 0
        assert moment(recording, 1).report.reserved_bytes == 2 * MIB + spare

    def test_there_is_no_other_one(self, pool):
        with pool.record() as recording:
            pool.allocate(1000)
        assert moment(recording, -1).report.live_blocks == 0
        for event in (-2, 1):
            with pytest.raises(ValueError, match="no event"):
                moment(recording, event)
        with pytest.raises(ValueError, match="only a recording"):
            moment(recorded("two_streams"), 0)


def test_a_moment_of_many_tags_and_segments():
    """Peaks of tags are the highest sums of their blocks so far, and blocks and gaps tile the segments."""
    random = np.random.default_rng(3)
    held = []
    with simulated_pool(growth=2 * MIB) as pool, pool.record() as recording:
        for _ in range(400):
            with vpool.tag(f"tag-{random.integers(30)}"):
                held.append(pool.empty(int(random.integers(1, 900_000))))
            held = held[int(random.integers(2)) if len(held) > 40 else 0 :]
        held.clear()
    details, live, peaks = recording.details, {}, {}
    for event, birth in enumerate((recording.op == 0).tolist()):
        name = details.tags[details.tag[event]]
        live[name] = live.get(name, 0) + (1 if birth else -1) * int(details.allocated[event])
        peaks[name] = max(peaks.get(name, 0), live[name])
        if event % 97 == 0:
            report = moment(recording, event).report
            assert {row["tag"]: row["peak_bytes"] for row in report.tags if row["peak_bytes"]} == peaks
            assert {row["tag"]: row["live_bytes"] for row in report.tags if row["live_bytes"]} == {
                name: nbytes for name, nbytes in live.items() if nbytes
            }
            assert report.reserved_bytes == report.allocated_bytes + report.free_bytes
            assert all(row["live_bytes"] + row["free_bytes"] == row["nbytes"] for row in report.segment_rows)

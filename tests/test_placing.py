"""Addresses for traces that have none, and what reports say of such moments."""

import numpy as np
import pytest

import vpool
from tests.helpers.pools import MIB
from tests.helpers.traces import made, recorded
from vpool import placing
from vpool.moments import moment
from vpool.placing import placed


@pytest.mark.parametrize("source", ["simulated", "simulated-vmm"])
def test_what_memory_came_for_is_no_reuse(source):
    strategy = vpool.Dynamic(initial=2 * MIB, growth=2 * MIB, limit=64 * MIB)
    with vpool.Pool(strategy, source=source) as pool, pool.record() as recording:
        held = [pool.allocate(900_000) for _ in range(20)]
        for ptr in held[::2]:
            pool.deallocate(ptr)
        del held[::2]
        pool.trim()
        held += [pool.allocate(nbytes) for nbytes in (1_500_000, 300_000, 5 * MIB, 1_500_000)]
        report = pool.inspect()
    assert 0 < moment(recording, len(recording) - 1).report.reuse_ratio == report.reuse_ratio < 1


def test_a_placed_trace_reuses_what_its_replay_does():
    trace = recorded("two_streams")
    report = vpool.replay(trace).report  # of the moment when the most is live
    shown = moment(placed(trace), trace.peak_event).report
    for name in ("reuse_ratio", "sharing", "source_calls", "reserved_bytes", "requested_bytes"):
        assert getattr(shown, name) == getattr(report, name), name


def test_what_reuse_saves_is_over_the_step_of_the_moment_where_steps_are_known():
    """Of a run it would only be the closer to 1 the longer the run is."""
    trace = recorded("two_streams")
    begin, end = next((begin, end) for begin, end in trace.steps if begin <= trace.peak_event < end)
    asked = int(trace.bytes[begin:end][trace.op[begin:end] == 0].sum()) + int(trace.live_bytes[begin - 1])
    report = vpool.replay(trace).report
    assert report.sharing == pytest.approx(1 - report.peak_reserved_bytes / asked)
    without = vpool.Trace(trace.op, trace.id, trace.bytes, trace.stream, trace.t_us)
    until = slice(trace.peak_event + 1)
    served = int(trace.bytes[until][trace.op[until] == 0].sum())
    whole = vpool.replay(without).report
    assert whole.sharing == pytest.approx(1 - whole.peak_reserved_bytes / served)
    assert whole.sharing > report.sharing > 0
    assert moment(placed(trace), begin - 1).report.sharing != moment(placed(trace), begin).report.sharing


def _suspending(order):
    """A recording in which the blocks of one tag are suspended, and each event's report of its pool."""
    with vpool.Pool(vpool.Dynamic(initial=0), source="simulated-vmm") as pool, pool.record() as recording:
        held, reports = {"kv": [], "w": []}, []
        for tag, nbytes in order:
            with vpool.tag(tag):
                held[tag].append(pool.allocate(nbytes))
            reports.append(pool.inspect())
        for suspended in ("kv", None):
            pool.suspend(tag=suspended)
            pool.deallocate(held["w"].pop(0))
            reports.append(pool.inspect())
        pool.resume()
        pool.allocate(100)
        reports.append(pool.inspect())
    return recording, reports


@pytest.mark.parametrize(
    "order",
    [
        [("w", 2 * MIB), ("kv", 4 * MIB), ("w", 2 * MIB), ("w", MIB)],
        [("kv", 4 * MIB), ("w", 2 * MIB), ("w", 2 * MIB)],
        [("w", MIB), ("w", MIB), ("kv", 3 * MIB)],  # which shares a handle with what is before it
    ],
)
def test_what_is_suspended_is_neither_live_nor_free(order):
    recording, reports = _suspending(order)
    for event, then in enumerate(reports):
        shown = moment(recording, event).report
        for name in ("reserved_bytes", "allocated_bytes", "free_bytes", "suspended_bytes", "live_blocks"):
            assert getattr(shown, name) == getattr(then, name), (event, name)
    assert any(then.suspended_bytes for then in reports)


def test_more_segments_come_and_go_than_a_ring_was_made_for(monkeypatch):
    """All of them are told, and each block has its own address."""
    random = np.random.default_rng(1)
    sizes = random.integers(1, 9000, 240).tolist()
    trace = made(*((number, size) for number, size in enumerate(sizes, start=1)), *(-n for n in range(1, 17)))
    strategy = vpool.Dynamic(initial=0, growth=4096, limit=64 * MIB)
    expected = placed(trace, strategy).details
    monkeypatch.setattr(placing, "_SEGMENT_EVENTS", 0)
    found = placed(trace, strategy).details
    assert len(expected.segments.event) > 190
    for name in ("address", "allocated"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    assert all(map(np.array_equal, found.segments, expected.segments))

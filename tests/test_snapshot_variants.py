"""Variants of PyTorch's memory snapshots, as releases and users' tools differ."""

import json
import pickle
import pickletools

import pytest

import vpool
from tests.helpers.samples import events_of, load, noted

PLAIN = [(1, 100), (2, 50), -1]


def entry(action, address=0, size=0, t=0, stream=0):
    return {"action": action, "addr": address, "size": size, "stream": stream, "time_us": t, "frames": []}


def block(size, state="active_allocated", **more):
    return {"size": size, "state": state, **more}


def segment(address, *blocks, **more):
    size = sum(one["size"] for one in blocks)
    return {"address": address, "total_size": size, "allocated_size": 0, "stream": 0, "blocks": list(blocks), **more}


FRAME = {"name": "f", "filename": "a.py", "line": 1}
SNAPSHOT = {
    "segments": [segment(0x1000, block(512, requested_size=100), block(512, "inactive"), device=0, frames=[FRAME])],
    "device_traces": [
        [
            {**entry("segment_alloc", 0x1000, 1024), "frames": [FRAME, FRAME]},
            {**entry("alloc", 0x1000, 100, 10), "frames": [FRAME]},
            entry("alloc", 0x1200, 50, 20),
            entry("free_requested", 0x1000, 100, 25),
            entry("free_completed", 0x1000, 100, 30),
        ]
    ],
}


class TestTorchSnapshot:
    @pytest.fixture(params=["json", *range(pickle.HIGHEST_PROTOCOL + 1), "optimized"])
    def load_snapshot(self, request):
        """A function that loads a snapshot, written in one of the ways that there are."""

        def load_it(snapshot, device=None):
            if request.param == "json":
                return load(json.dumps(snapshot), device)
            if request.param == "optimized":
                return load(pickletools.optimize(pickle.dumps(snapshot, 2)), device)
            return load(pickle.dumps(snapshot, request.param), device)

        return load_it

    @pytest.mark.parametrize(
        "wrong", [{"size": -1}, {"requested_size": -5}, {"size": 2**63}, {"requested_size": 2**70}]
    )
    def test_a_picture_of_blocks_of_impossible_sizes(self, load_snapshot, wrong):
        snapshot = {"segments": [segment(0x1000, block(512) | wrong)], "device_traces": []}
        with pytest.raises(vpool.FormatError, match=str(next(iter(wrong.values())))):
            load_snapshot(snapshot)

    def test_plain(self, load_snapshot):
        trace = load_snapshot(SNAPSHOT)
        assert events_of(trace) == PLAIN
        assert trace.t_us.tolist() == [0, 10, 20]
        assert trace.figures["actions"] == {"segment_alloc": 1, "alloc": 2, "free_requested": 1, "free_completed": 1}
        assert (trace.figures["segments"], trace.figures["reserved_bytes"]) == (1, 1024)

    def test_no_history(self, load_snapshot):
        trace = load_snapshot({**SNAPSHOT, "device_traces": [[]]})
        assert events_of(trace) == [(1, 100)]
        assert noted(trace, "no events", "1 active block")
        assert events_of(load_snapshot({"segments": SNAPSHOT["segments"]})) == [(1, 100)]

    def test_segments_alone(self, load_snapshot):
        """As `torch.cuda.memory_snapshot()` returns them; releases had the size that was asked for elsewhere."""
        old = segment(0x1000, block(512, history=[{"addr": 0x1000, "real_size": 300, "frames": []}]), block(1024))
        trace = load_snapshot(
            [old, segment(0x900, block(256, "active_pending_free"), block(256, "active_awaiting_free"))]
        )
        assert events_of(trace) == [(1, 256), (2, 256), (3, 300), (4, 1024)]
        assert trace.figures["active_blocks"] == 4

    def test_blocks_older_than_the_history(self, load_snapshot):
        snapshot = {**SNAPSHOT, "segments": [segment(0x9000, block(512, requested_size=400))]}
        trace = load_snapshot(snapshot)
        assert events_of(trace) == PLAIN
        assert noted(trace, "1 block of 400 bytes", "older")

    def test_frees_before_their_allocation(self, load_snapshot):
        trace = load_snapshot(
            {"segments": [], "device_traces": [[entry("free_completed", 9, 5), *SNAPSHOT["device_traces"][0]]]}
        )
        assert events_of(trace) == PLAIN
        assert trace.figures["orphan_frees"] == 1
        assert noted(trace, "1 free", "left out")

    def test_frees_that_are_not_completed(self, load_snapshot):
        entries = [
            entry("alloc", 1, 5, 1),
            entry("alloc", 2, 6, 2),
            entry("free_requested", 1, 5),
            entry("free_requested", 2, 6),
        ]
        trace = load_snapshot({"device_traces": [[*entries, entry("alloc", 1, 7, 3)]]})
        # The address is in use again.
        assert events_of(trace) == [(1, 5), (2, 6), -1, (3, 7)]
        assert noted(trace, "1 free requested and not completed")

    def test_failures_and_other_actions(self, load_snapshot):
        entries = [entry("alloc", 1, 5, 1), {"action": "oom", "device_free": 5, "size": 99, "stream": 0, "time_us": 2}]
        trace = load_snapshot({"device_traces": [[*entries, {"action": "snapshot"}, entry("workspace", 1, 1)]]})
        assert events_of(trace) == [(1, 5)]
        assert trace.failures.tolist() == [[1, 99]]
        assert trace.figures["actions"] == {"alloc": 1, "oom": 1, "snapshot": 1, "workspace": 1}

    def test_devices(self, load_snapshot):
        snapshot = {
            "segments": [segment(0x1000, block(512), device=1), segment(0x1000, block(256), device=2)],
            "device_traces": [[], [entry("alloc", 1, 5)], [entry("alloc", 1, 6), entry("alloc", 2, 7)]],
        }
        trace = load_snapshot(snapshot)
        assert events_of(trace) == [(1, 6), (2, 7)]
        assert noted(trace, "device 2", "not 1")
        assert events_of(load_snapshot(snapshot, 1)) == [(1, 5)]
        with pytest.raises(vpool.FormatError, match="device 0"):
            load_snapshot(snapshot, 0)

    @pytest.mark.parametrize("frames", [999, 1000, 1001, 2500])
    def test_deep_stacks(self, load_snapshot, frames):
        """Picklers write long lists in parts of a thousand."""
        stack = [{**FRAME, "line": line} for line in range(frames)]
        entries = [{**one, "frames": stack} for one in SNAPSHOT["device_traces"][0]]
        assert events_of(load_snapshot({**SNAPSHOT, "device_traces": [entries]})) == PLAIN

    def test_a_device_without_a_history(self, load_snapshot):
        trace = load_snapshot({"segments": [], "device_traces": [None, SNAPSHOT["device_traces"][0]]})
        assert events_of(trace) == PLAIN

    def test_steps(self, load_snapshot):
        def annotation(name, stage, t):
            return {"name": name, "stage": stage, "device": 0, "time_us": t}

        entries = [[entry("alloc", 1, 5, 100)]]
        optimizer = [
            annotation("Optimizer.step#Adam.step", "START", 110),
            annotation("Optimizer.step#Adam.step", "END", 120),
        ]
        steps = [annotation("ProfilerStep#1", "START", 105), annotation("ProfilerStep#1", "END", 130)]
        assert load_snapshot({"device_traces": entries, "external_annotations": optimizer}).marks_us.tolist() == [20]
        assert load_snapshot(
            {"device_traces": entries, "external_annotations": optimizer + steps}
        ).marks_us.tolist() == [5]

    def test_streams(self, load_snapshot):
        entries = [
            entry("alloc", 1, 5, 1, 0),
            entry("alloc", 2, 6, 2, 94_000_000_000_000),
            entry("free_completed", 2, 6, 3, 94_000_000_000_000),
        ]
        assert load_snapshot({"device_traces": [entries]}).stream.tolist() == [0, 1, 1]

    def test_an_event_that_stands_there_twice_is_two_events(self):
        one, other = entry("alloc", 1, 5), entry("free_completed", 1, 5)
        snapshot = {"segments": [], "device_traces": [[one, other, one, other]]}
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            assert events_of(load(pickle.dumps(snapshot, protocol))) == [(1, 5), -1, (2, 5), -2]

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"device_traces": [[{"action": "alloc", "addr": 1}]]}, "size"),
            ({"device_traces": [[entry("alloc", -1, 5)]]}, ""),
            ({"device_traces": [[entry("alloc", 1, -5)]]}, ""),
            ({"device_traces": [[entry("alloc", 1, 5.5)]]}, "5.5"),
            ({"device_traces": [[entry("alloc", 1, "many")]]}, "many"),
            ({"device_traces": [[entry(5, 1, 5)]]}, "action"),
            ({"device_traces": [[7]]}, ""),
            ({"device_traces": [[entry("alloc", 1, 2**64)]]}, ""),
            ({"device_traces": [[entry("alloc", 1, 5, 2**63)]]}, ""),
            ({"segments": [segment(1, block(5, "lost"))]}, "lost"),
            ({"segments": [{"total_size": 5, "blocks": [block("5 MiB")]}]}, ""),
            ({"segments": [{"blocks": []}]}, "total_size"),
            ({"segments": [7]}, ""),
        ],
    )
    def test_damaged_events(self, load_snapshot, change, reason):
        with pytest.raises(vpool.FormatError, match=reason or None):
            load_snapshot({**SNAPSHOT, **change})

    @pytest.mark.parametrize("value", [{}, {"weights": [1.0]}, 5, "text", None])
    def test_pickles_of_something_else(self, value):
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            with pytest.raises(vpool.FormatError, match="no memory snapshot"):
                load(pickle.dumps(value, protocol))


def test_annotations_that_tell_nothing_are_left_out():
    odd = [7, None, {}, {"name": "ProfilerStep#1", "stage": "START"}, {"name": 5, "stage": "START", "time_us": 1}]
    odd.append({"name": "ProfilerStep#1", "stage": "START", "time_us": 2**70})
    for written in (json.dumps, lambda value: pickle.dumps(value, 4)):
        trace = load(written({**SNAPSHOT, "external_annotations": odd}))
        assert events_of(trace) == PLAIN
        assert len(trace.marks_us) == 0

"""Reported cases about trace files that only words describe; each test has the name of its case in `tests/cases`."""

import json

import numpy as np

import vpool
from tests.helpers.samples import SAMPLES, content, events_of, live_at_end, load, noted
from vpool.commands import main


def test_failure_rows_in_rmm_logs():
    small = load(content("rmm_csv/format_modern_min.csv"))
    assert events_of(small) == [(1, 1 << 20), -1]
    assert small.failures.tolist() == [[2, 68719476736]]
    assert noted(small, "1 request failed", "68,719,476,736 bytes", "0 bytes live", "before event 2")
    assert noted(small, "line 4")
    large = load(content("rmm_csv/derived_training_512_two_threads.csv"))
    assert (large.allocations, len(large.failures)) == (4146, 5)
    assert (large.failures[:, 1] == 17179869184).all()
    # The pressure point: what was live when the first request failed.
    event = int(large.failures[0, 0])
    assert noted(large, "5 requests failed", f"{large.live_bytes[event - 1]:,} bytes live", f"before event {event:,}")
    # The older form has no pointer at all.
    rows = content("rmm_csv/format_modern_min.csv").replace(b"(nil)", b"")
    assert load(rows).failures.tolist() == small.failures.tolist()


def test_profiler_trace_signs_and_devices():
    text = content("kineto_trace/rank1_memory_events.json")
    trace = load(text)
    memory = [
        event["args"] | {"ts": event["ts"]} for event in json.loads(text)["traceEvents"] if event["name"] == "[memory]"
    ]
    cuda = sorted((event for event in memory if event["Device Type"] == 1), key=lambda event: event["ts"])
    assert (len(memory), len(cuda), len(trace)) == (7000, 6632, 6632)
    assert [event["ts"] for event in memory] != sorted(event["ts"] for event in memory)
    assert trace.t_us.tolist() == [event["ts"] - cuda[0]["ts"] for event in cuda]
    assert np.array_equal(np.where(trace.op == 0, 1, -1) * trace.bytes.astype(int), [event["Bytes"] for event in cuda])
    # A free ends the allocation at its address.
    living = {}
    for one, event in zip(trace.number.tolist(), cuda, strict=True):
        if event["Bytes"] > 0:
            living[event["Addr"]] = one
        else:
            assert living.pop(event["Addr"]) == one
    assert len(living) == live_at_end(trace) == 292
    # Another device only where it is asked for.
    host = load(text, "cpu")
    assert len(host) + host.figures["orphan_frees"] == 368
    # Fields that not all releases have.
    fewer = json.loads(text)
    for event in fewer["traceEvents"]:
        for field in ("Total Allocated", "Total Reserved", "Ev Idx"):
            event["args"].pop(field, None)
    assert events_of(load(json.dumps(fewer))) == events_of(trace)


def test_trace_starts_mid_life(capsys):
    path = SAMPLES / "torch_snapshot" / "training_512.pickle.gz"
    trace = vpool.Trace.load(path)
    assert (trace.allocations, len(trace)) == (7591, 7591 + 7370 - 438)
    assert (trace.figures["orphan_frees"], live_at_end(trace)) == (438, 659)
    assert noted(trace, "438 frees", "left out")
    assert noted(trace, "659 allocations", "live at the end")
    result = vpool.replay(trace)
    assert result.allocations == 7591
    assert result.notes == trace.notes
    assert main(["replay", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "438 frees" in shown
    assert "659 allocations" in shown


def test_two_records_for_one_event():
    text = content("umpire_replay/tut_replay_log.json")
    assert b"\n#" in text
    trace = load(text)
    assert (trace.allocations, live_at_end(trace)) == (64, 0)
    assert trace.figures["records"]["allocate"] == trace.figures["records"]["allocate (intention)"] == 64
    # The first block is of 0 bytes and shares its address with the second.
    assert events_of(trace)[:2] == [(1, 0), (2, 134)]
    assert noted(trace, "1 allocation at an address that was live already")
    assert trace.peak_live_bytes == 32880
    assert vpool.replay(trace).oom is None

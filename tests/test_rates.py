"""What is promised in nanoseconds, as differences and medians within one run; for a machine that does nothing else.

pytest -m long tests/test_rates.py
"""

import contextlib
import statistics

import pytest

import vpool
from tests.helpers.traces import recorded
from vpool._interface.replay import Replayer
from vpool.runs import streams_of

pytestmark = pytest.mark.long


def event_ns(trace, record):
    """Nanoseconds of an event of a trace in a fresh pool."""
    with vpool.Pool(source="simulated", debug=()) as pool, streams_of(pool.source.driver, trace) as streams:
        replayer = Replayer(pool, trace, streams)
        with pool.record() if record else contextlib.nullcontext() as recording:
            assert replayer.run(0, len(trace)) == len(trace)
        assert recording is None or len(recording) == len(trace)
        replayer.finish()
    return replayer.nanoseconds / len(trace)


def test_recording_costs_at_most_50_ns_an_event():
    trace = recorded("llm_train")
    both = [(event_ns(trace, False), event_ns(trace, True)) for _ in range(40)]
    without, with_recording = map(statistics.median, zip(*both, strict=True))
    print(f"{without:.1f} ns an event, {with_recording:.1f} recorded")
    assert with_recording - without <= 50


def test_twenty_million_events_are_replayed_in_a_second():
    warm = vpool.replay(recorded("llm_generate"), passes=3).warm_ns_per_event
    print(f"{1e3 / statistics.median(warm):.1f} million events a second")
    assert statistics.median(warm) <= 50

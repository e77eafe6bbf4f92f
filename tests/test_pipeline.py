"""Programs of several streams: a generated pipeline, and the recorded traces that have more than one."""

import numpy as np
import pytest

import vpool
from tests.helpers import pipeline
from tests.helpers.order import Checker
from tests.helpers.traces import recorded


@pytest.mark.parametrize("pessimistic", [False, True])
def test_the_pipeline_shares_its_memory(pessimistic):
    shared, alone = pipeline.figures(pipeline.trace_of(pipeline.program()), pessimistic=pessimistic)
    assert shared <= 0.6 * alone


@pytest.mark.parametrize("pessimistic", [False, True])
def test_the_pipeline_is_never_given_what_is_in_use(pessimistic):
    checker = pipeline.drive(pipeline.program(4), pessimistic=pessimistic)
    assert (checker.unordered > 0) == pessimistic


def drive(trace, events, pessimistic):
    """A recorded trace on a checked pool; work is queued at each allocation and free."""
    source = vpool.sources.Simulated()
    checker = Checker(vpool.Pool(vpool.Dynamic(limit=1.0), source))
    streams = [source.driver.create_stream() for _ in range(int(trace.stream.max()) + 1)]
    marks = set(np.searchsorted(trace.t_us, trace.marks_us).tolist())
    live = {}
    for at in range(min(events, len(trace))):
        number, stream = int(trace.id[at]), streams[int(trace.stream[at])]
        if not pessimistic or at in marks:
            source.driver.complete()
        if trace.op[at]:
            if number in live:
                checker.use(live[number], stream)
                checker.free(live.pop(number))
        elif trace.bytes[at]:
            live[number] = checker.allocate(int(trace.bytes[at]), stream)
            checker.use(live[number], stream)
    checker.finish()


@pytest.mark.parametrize("pessimistic", [False, True])
@pytest.mark.parametrize("name", ["two_streams", "fsdp_train"])
def test_recorded_streams_are_never_given_what_is_in_use(name, pessimistic):
    drive(recorded(name), 2500, pessimistic)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("pessimistic", [False, True])
@pytest.mark.parametrize("name", ["two_streams", "fsdp_train"])
def test_whole_recorded_streams_are_never_given_what_is_in_use(name, pessimistic):
    drive(recorded(name), 10**9, pessimistic)

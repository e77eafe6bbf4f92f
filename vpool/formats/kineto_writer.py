"""Traces of events in Chrome's JSON, as PyTorch's profiler writes them: Perfetto and chrome://tracing open them."""

import json

import numpy as np

from vpool.formats.placement import Placement, failed_before

__all__ = ["write"]

_PROCESS, _BLOCKS, _STEPS = 1, 1, 2


def write(trace, file):
    """Instants of each event, as the profiler has them; and curves and steps, which one sees."""
    file.write(b'{"schemaVersion": 1, "profile_memory": 1, "displayTimeUnit": "ms", "traceEvents": [\n')
    for number, event in enumerate(_events(trace)):
        file.write((b",\n" if number else b"") + json.dumps(event).encode())
    file.write(b"\n]}\n")


def _events(trace):
    yield {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": "vpool"}}
    yield {"ph": "M", "pid": _PROCESS, "tid": _BLOCKS, "name": "thread_name", "args": {"name": "allocations and frees"}}
    yield {"ph": "M", "pid": _PROCESS, "tid": _STEPS, "name": "thread_name", "args": {"name": "steps"}}
    clock = np.maximum.accumulate(trace.t_us).tolist()
    marks = trace.marks_us.tolist()
    for step, t in enumerate(marks):
        end = marks[step + 1] if step + 1 < len(marks) else max(clock[-1:], default=t)
        step_event = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": _PROCESS}
        yield {**step_event, "tid": _STEPS, "ts": t, "dur": max(0, end - t)}
    placed, before, live = Placement(trace), failed_before(trace), trace.live_bytes.tolist()
    tags = _Tags(trace)
    reserved = 0
    for event, (op, one, nbytes, _, _) in enumerate(placed.events):
        t = clock[event]
        for failed in before.get(event, ()):
            yield _instant("[OutOfMemory]", t, {"Bytes": failed})
        told = {"Addr": placed.addresses[one], "Bytes": -nbytes if op else nbytes, "Total Allocated": live[event]}
        if placed.changes:
            reserved += sum(moved for _, moved in placed.changes.get(event, ()))
            told["Total Reserved"] = reserved
        yield _instant("[memory]", t, told)
        if event + 1 == len(clock) or clock[event + 1] > t:
            # Once for a time: a curve shows the last one only.
            yield _counter("requested bytes", t, live[event])
            if placed.changes:
                yield _counter("reserved bytes", t, reserved)
        yield from tags.counters(event, t)
    for failed in before.get(len(clock), ()):
        yield _instant("[OutOfMemory]", clock[-1] if clock else 0, {"Bytes": failed})


def _instant(name, t, told):
    what = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": name, "pid": _PROCESS, "tid": _BLOCKS, "ts": t}
    return {**what, "args": {"Device Type": 1, "Device Id": 0, **told}}


def _counter(name, t, value):
    return {"ph": "C", "name": name, "pid": _PROCESS, "ts": t, "args": {"bytes": value}}


class _Tags:
    """A curve for each tag."""

    def __init__(self, trace):
        details = trace.details
        self.names = details.tags if details is not None and any(details.tags) else []
        if self.names:
            self._tag = details.tag.tolist()
            sizes = trace.bytes.astype(np.int64)
            self._change = np.where(trace.op == 0, sizes, -sizes).tolist()
            self._live = [0] * len(self.names)

    def counters(self, event, t):
        """What an event changes."""
        if self.names and self._tag[event]:
            tag = self._tag[event]
            self._live[tag] += self._change[event]
            yield _counter(f"tag {self.names[tag]}", t, self._live[tag])

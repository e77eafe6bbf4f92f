"""What memory that moves costs on the recorded traces: the figures of docs/virtual_memory.rst.

``python -m tests.helpers.memory_that_moves`` prints them; no device is needed.
"""

import numpy as np

import vpool
from tests.helpers import pipeline
from tests.helpers.traces import ALL, recorded

LAGS = (0, 10, 100, 300)
DROPS = (0, 3, 7, 20, 50, 100)
CAPACITIES = (1.01, 1.005)


def without_first(trace, count):
    """The trace as it were had its first events never been, or what they allocated."""
    gone = trace.id[:count][trace.op[:count] == 0]
    kept = (np.arange(len(trace)) >= count) & ~np.isin(trace.id, gone)
    ids, numbers = np.unique(trace.id[kept], return_inverse=True)
    order = np.empty(len(ids), np.int64)
    order[numbers[trace.op[kept] == 0]] = np.arange(len(ids))
    columns = {name: getattr(trace, name)[kept] for name in ("op", "bytes", "stream", "t_us")}
    return vpool.Trace(id=order[numbers], marks_us=trace.marks_us, **columns)


def replay(trace, share=None, *, tight=False, **options):
    capacity = None if share is None else int(share * trace.peak_live_bytes)
    source = vpool.sources.SimulatedVmm(capacity, tight=tight)
    strategy = vpool.Dynamic(limit=1.0) if capacity is None else None
    return vpool.replay(trace, strategy, source=source, capacity=capacity, **options)


def mean(ratios):
    return np.exp(np.mean(np.log(ratios)))


def per_pass(result):
    milliseconds = " / ".join(f"{ns / 1e6:.1f}" for ns in result.driver_ns)
    worst = max(result.worst_driver_ns) / 1e6
    return f"{milliseconds} ms, {' / '.join(map(str, result.driver_calls))} calls, at most {worst:.1f} ms at once"


def print_passes(traces):
    for name, trace in traces.items():
        result = replay(trace, passes=3)
        tight = replay(trace, tight=True)
        print(f"{name:15} {result.reserved_over_live:.4f}  {per_pass(result)};", end=" ")
        print(f"tight {tight.reserved_over_live:.4f} {tight.driver_ns[0] / 1e6:.0f} ms")


def print_lags(traces):
    for options in (*({"lag": lag} for lag in LAGS), {"pessimistic": True}):
        results = [replay(trace, passes=3, **options) for trace in traces.values()]
        ratios = [result.reserved_over_live for result in results]
        later = max(max(result.driver_calls[1:]) / result.driver_calls[0] for result in results[:-1])
        print(options, *(f"{ratio:.4f}" for ratio in ratios), f"mean {mean(ratios[:-1]):.4f}, later calls {later:.2f}")


def print_drops(traces):
    found = []
    for count in DROPS:
        results = [replay(without_first(trace, count), passes=3) for trace in traces.values()]
        found.append([result.reserved_over_live for result in results])
        print(f"without {count}:", *(f"{ratio:.4f}" for ratio in found[-1]), f"mean {mean(found[-1]):.4f}")
    print(f"mean of all {mean(found):.4f}, of each", *(f"{mean(ratios):.4f}" for ratios in zip(*found, strict=True)))


def print_capacities(traces):
    for share in CAPACITIES:
        for name, trace in traces.items():
            result = replay(trace, share, passes=3)
            print(f"{share} {name:15} {'completes' if result.oom is None else result.oom} {per_pass(result)}")


def main():
    traces = {name: recorded(name) for name in ALL}
    everything = {**traces, "pipeline": pipeline.trace_of(pipeline.program())}
    print_passes(everything)
    print_lags(everything)
    print_drops(traces)
    print_capacities(traces)


if __name__ == "__main__":
    main()

"""A pipeline of four streams: images are decoded, resized, augmented and inferred, each on a stream of its own.

``python -m tests.helpers.pipeline [FILE]`` replays it, and writes its trace to the file if one is named.
"""

import random
import sys
from collections import deque

import numpy as np

import vpool
from tests.helpers.order import Checker

STAGES = ("decode", "resize", "augment", "infer")


def program(batches=60, images=16, seed=1):
    """Yield ``("allocate", id, bytes, stage)``, ``("pass", id, stage)``, ``("free", id)`` and ``("mark",)``.

    A batch passes the stages one after another, as in a loader that decodes ahead by bursts: JPEGs of 1 to 24
    megapixels become 8-bit images, then 512 x 512 ones of floats, then several crops of each, then features.
    """
    chance = random.Random(seed)
    number = 0

    def lend(nbytes, stage):
        nonlocal number
        number += 1
        return ("allocate", number, nbytes, stage)

    for _ in range(batches):
        yield ("mark",)
        passed = []
        for _ in range(chance.randint(images // 2, images)):
            pixels = int(1e6 * 24 ** chance.random())
            bits = lend(pixels // chance.randint(4, 12), 0)
            image = lend(3 * pixels, 0)
            yield bits
            yield image
            yield ("free", bits[1])
            passed.append(image[1])
        for stage, results in ((1, 1), (2, chance.randint(2, 6)), (3, 1)):
            waiting, passed = deque(passed), []
            while waiting:
                taken = waiting.popleft()
                yield ("pass", taken, stage)
                for _ in range(results):
                    made = lend(
                        (512 * 512 * 3 * 4, 448 * 448 * 3 * 4, 64 * chance.randint(100, 40_000))[stage - 1], stage
                    )
                    yield made
                    passed.append(made[1])
                scratch = lend(chance.randint(1, 16) << 20, stage)
                yield scratch
                yield ("free", scratch[1])
                yield ("free", taken)
        for made in passed:
            yield ("free", made)


def trace_of(events):
    """The program as a trace: what was recorded for a stream is free for it once its work is over."""
    rows, marks, live = [], [], {}
    for event in events:
        if event[0] == "mark":
            marks.append(len(rows) * 10)
        elif event[0] == "allocate":
            live[event[1]] = event[2:]
            rows.append((0, event[1], *event[2:]))
        elif event[0] == "free":
            rows.append((1, event[1], *live.pop(event[1])))
    op, number, nbytes, stream = (np.array(column) for column in zip(*rows, strict=True))
    return vpool.Trace(
        op=op, id=number - 1, bytes=nbytes, stream=stream, t_us=np.arange(len(rows)) * 10, marks_us=marks
    )


def of_stream(trace, stream):
    """The part of a trace that one stream would ask for, with a pool for itself."""
    mine = trace.stream == stream
    ids, numbers = np.unique(trace.id[mine], return_inverse=True)
    order = np.empty(len(ids), np.int64)
    first = numbers[trace.op[mine] == 0]
    order[first] = np.arange(len(ids))
    return vpool.Trace(
        op=trace.op[mine], id=order[numbers], bytes=trace.bytes[mine], stream=np.zeros(mine.sum(), np.uint16),
        t_us=trace.t_us[mine], marks_us=trace.marks_us,
    )  # fmt: skip


def drive(events, *, pessimistic, strategy=None):
    """The program on a checked pool, work completing at once or only at marks; the checker."""
    source = vpool.sources.Simulated()
    pool = vpool.Pool(strategy or vpool.Dynamic(limit=1.0), source)
    checker = Checker(pool)
    streams = [source.driver.create_stream() for _ in STAGES]
    live = {}
    for event in events:
        if event[0] == "mark":
            source.driver.complete()
            checker.check()
        elif event[0] == "allocate":
            live[event[1]] = checker.allocate(event[2], streams[event[3]])
            checker.use(live[event[1]], streams[event[3]])
        elif event[0] == "pass":
            checker.record_stream(live[event[1]], streams[event[2]])
            checker.use(live[event[1]], streams[event[2]])
        else:
            checker.free(live.pop(event[1]))
        if not pessimistic:
            source.driver.complete()
    checker.peak = pool.stats.peak_reserved_bytes
    checker.finish()
    return checker


def figures(trace, **options):
    """Peak reserved bytes with streams sharing one pool, and the sum of those of a pool for each."""
    shared = vpool.replay(trace, **options)
    alone = [vpool.replay(of_stream(trace, stream), **options) for stream in range(len(STAGES))]
    assert shared.oom is None
    return shared.peak_reserved_bytes, sum(one.peak_reserved_bytes for one in alone)


def main(arguments):
    trace = trace_of(program())
    if arguments:
        trace.save(arguments[0])
    for pessimistic in (False, True):
        shared, alone = figures(trace, pessimistic=pessimistic)
        print(f"{pessimistic=}: {len(trace)} events, peak live {trace.peak_live_bytes >> 20} MiB,", end=" ")
        print(f"reserved {shared >> 20} MiB with sharing, {alone >> 20} MiB without: {shared / alone:.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])

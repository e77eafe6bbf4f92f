"""Reports while sixteen threads are at work: every one of them adds up."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import vpool
from tests.helpers.pools import KIB, MIB
from tests.helpers.traces import recorded
from vpool._interface.replay import Replayer

THREADS = 16
READERS = 4  # take reports meanwhile: each gets as little of the processor as those who allocate
LIMIT = 768 * MIB  # about what is live at most
STRATEGIES = {
    "dynamic": vpool.Dynamic(initial=MIB, limit=LIMIT),
    "adaptive": vpool.Dynamic(initial=MIB, limit=LIMIT, adaptive=True),
    "hybrid": vpool.Hybrid(128 * MIB, block=[256 * KIB, 2 * MIB], dynamic=vpool.Dynamic(initial=MIB, limit=LIMIT)),
    "slab": vpool.Hybrid(128 * MIB, dynamic=vpool.Dynamic(initial=MIB, limit=LIMIT)),
}


def assert_adds_up(report):
    """Every figure of a report agrees with its blocks, and the blocks tile the segments."""
    assert report.reserved_bytes == report.allocated_bytes + report.free_bytes + report.pending_bytes
    blocks = report.blocks
    first = np.ones(len(blocks), bool)
    first[1:] = blocks["segment"][1:] != blocks["segment"][:-1]
    ends = blocks["address"] + blocks["nbytes"]
    last = np.append(first[1:], True)
    assert first.sum() == report.segments
    assert np.array_equal(blocks["segment"][first], np.arange(report.segments))
    assert np.array_equal(blocks["address"][first], report.segment_table["address"])
    assert np.array_equal(ends[last], report.segment_table["address"] + report.segment_table["nbytes"])
    assert np.array_equal(blocks["address"][~first], ends[~last])
    assert (blocks["nbytes"] > 0).all()
    assert set(np.unique(blocks["state"])) <= {"live", "free", "pending"}
    for name in ("live_bytes", "free_bytes", "pending_bytes"):
        total = report.allocated_bytes if name == "live_bytes" else getattr(report, name)
        assert sum(row[name] for row in report.streams) == total
        assert sum(row[name] for row in report.segment_rows) == total
    assert sum(row.live_bytes for row in report.size_classes) == report.allocated_bytes
    assert sum(row["live_bytes"] for row in report.tags) == report.allocated_bytes
    assert sum(row["pending_bytes"] for row in report.pending) == report.pending_bytes
    assert report.requested_bytes <= report.allocated_bytes <= report.reserved_bytes


class Work:
    """Sixteen threads that allocate on four streams until they are told to stop.

    Half of them without the GIL, as compiled code does, and half in Python, with blocks that several streams use.
    """

    def __init__(self, pool):
        self.pool = pool
        self.stop = threading.Event()
        self.failed = []
        driver = pool.source.driver
        self.streams = [0, *(driver.create_stream() for _ in range(3))]
        self.threads = [
            threading.Thread(target=self.guarded, args=(self.compiled if number % 2 else self.interpreted, number))
            for number in range(THREADS)
        ]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *exc_info):
        self.stop.set()
        for thread in self.threads:
            thread.join()
        assert self.failed == []

    def guarded(self, work, number):
        try:
            work(number)
        except Exception as error:
            self.failed.append(error)

    def compiled(self, number):
        trace = recorded("two_streams").scaled(64 * MIB)
        streams = {0: self.streams[number % 4], 1: self.streams[(number + 1) % 4]}
        with vpool.tag(f"compiled {number % 3}"):
            while not self.stop.is_set():
                replayer = Replayer(self.pool, trace, streams)
                replayer.run(0, 300)
                replayer.finish()

    def interpreted(self, number):
        generator = np.random.default_rng(number)
        live = []
        while not self.stop.is_set():
            for nbytes in generator.integers(1, 3 * MIB, 50).tolist():
                stream = self.streams[nbytes % 4]
                if len(live) > 20:
                    self.pool.deallocate(live.pop(nbytes % len(live)), stream if nbytes % 3 else None)
                try:
                    live.append(self.pool.allocate(nbytes % (100 * KIB) if nbytes % 5 else nbytes, stream))
                except vpool.OutOfMemoryError:
                    continue
                if nbytes % 7 == 0:
                    self.pool.record_stream(live[-1], self.streams[(nbytes + 1) % 4])
        for ptr in live:
            self.pool.deallocate(ptr)


def look(reports, strategy):
    """Take so many reports of a pool at work, in several threads."""

    def read():
        for number in range(reports // READERS):
            report = pool.inspect()
            assert_adds_up(report)
            if number % 100 == 0:
                pool.check()
                assert pool.snapshot().report.live_blocks > 0

    with vpool.Pool(STRATEGIES[strategy], source="simulated", debug=()) as pool:
        with Work(pool):
            while pool.stats.allocations < 10_000:
                time.sleep(0.001)
            before = pool.stats.allocations
            with ThreadPoolExecutor(READERS) as readers:
                for reading in [readers.submit(read) for _ in range(READERS)]:
                    reading.result()
            assert pool.stats.allocations > before, "the pool was at work"
        pool.check()
        assert_adds_up(pool.inspect())
        assert pool.inspect().live_blocks == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_report_adds_up(strategy):
    look(60, strategy)


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ten_thousand_reports(strategy):
    look(10_000, strategy)

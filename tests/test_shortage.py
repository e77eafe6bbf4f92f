"""What an out-of-memory error says: who holds memory, and steps that help when they are taken."""

import time

import numpy as np
import pytest

import vpool
from tests.helpers.pools import KIB, MIB, WIDE_NAMES, columns, simulated_pool, unchanged
from tests.helpers.traces import ALL, recorded
from vpool._interface.replay import Replayer
from vpool.report import BLOCK_DTYPE
from vpool.shortage import _window
from vpool.trace import ALLOCATE

MOST_LINES = 30
WIDEST_LINE = 100


def at_its_end(trace, limit, device):
    """A pool that has replayed a trace until a request failed: the pool, the event and the error."""
    pool = vpool.Pool(vpool.Dynamic(limit=limit), source=vpool.sources.Simulated(device), debug=())
    driver = pool.source.driver
    streams = {int(index): driver.create_stream() if index else 0 for index in np.unique(trace.stream)}
    event = Replayer(pool, trace, streams).run(0, len(trace))
    assert event < len(trace)
    stream = streams[int(trace.stream[event])]
    with pytest.raises(vpool.OutOfMemoryError) as caught:
        pool.allocate(int(trace.bytes[event]), stream)
    return pool, event, stream, caught.value


def live_sizes(trace, event):
    """Bytes and number of the live blocks of each size before an event of a trace."""
    sizes = {}
    for op, nbytes in zip(trace.op[:event].tolist(), trace.bytes[:event].tolist(), strict=True):
        row = sizes.setdefault(nbytes, [0, 0])
        sign = 1 if op == ALLOCATE else -1
        row[0] += sign * nbytes
        row[1] += sign
    return sizes


def take(pool, remedy):
    """Do what a remedy says."""
    if remedy.kind == "raise_limit":
        pool.set_limit(remedy.nbytes)
    elif remedy.kind == "free":
        for address in remedy.addresses:
            pool.deallocate(address)
    else:
        raise AssertionError(f"{remedy.kind} is no step that this pool could take")


class TestTraces:
    """Each shared trace at 90 % of its peak."""

    @pytest.mark.parametrize("name", ALL)
    @pytest.mark.parametrize("bound", ["limit", "device"])
    def test_the_step_that_is_named_works(self, name, bound):
        trace = recorded(name)
        most = int(0.9 * trace.peak_live_bytes)
        pool, event, stream, error = at_its_end(trace, most, None if bound == "limit" else most)
        with pool:
            text = str(error)
            print(f"{name}: {text}")
            self.check_text(text, trace, event, error)
            remedies = {remedy.kind: remedy for remedy in error.shortage.remedies}
            assert ("raise_limit" in remedies) == (bound == "limit")
            assert "free" in remedies
            assert ("capacity" in remedies) == (bound == "device")
            if bound == "device":
                self.check_capacity(trace, event, remedies["capacity"].nbytes)
            first = error.shortage.remedies[0]
            requested = int(trace.bytes[event])
            if first.kind == "raise_limit":
                with unchanged(pool):
                    pool.set_limit(first.nbytes - KIB)
                    with pytest.raises(vpool.OutOfMemoryError):
                        pool.allocate(requested, stream)
                    pool.set_limit(most)
            take(pool, first)
            assert pool.allocate(requested, stream)
            pool.check()

    def check_text(self, text, trace, event, error):
        lines = text.splitlines()
        assert len(lines) <= MOST_LINES
        assert max(map(len, lines[1:])) <= WIDEST_LINE
        sizes = live_sizes(trace, event)
        largest = max(sizes, key=lambda size: sizes[size][0])
        holder = next(one for one in error.shortage.holders if one.kind == "size")
        assert sizes[holder.name][1] == holder.blocks
        # By bytes after rounding, which may put another size of nearly as much first.
        assert sizes[holder.name][0] > 0.99 * sizes[largest][0]
        assert f"{holder.blocks:,} x {holder.name:,} bytes" in text

    def check_capacity(self, trace, event, nbytes):
        """With that much the same run gets past the request."""
        strategy = vpool.Dynamic(limit=nbytes)
        again = vpool.replay(trace, strategy, source=vpool.sources.Simulated(nbytes))
        assert again.oom is None or again.oom["event"] > event

    @pytest.mark.parametrize("name", ALL)
    def test_freeing_what_is_named_works_too(self, name):
        trace = recorded(name)
        pool, event, stream, error = at_its_end(trace, int(0.9 * trace.peak_live_bytes), None)
        with pool:
            (remedy,) = [one for one in error.shortage.remedies if one.kind == "free"]
            take(pool, remedy)
            assert pool.allocate(int(trace.bytes[event]), stream)
            pool.check()


@pytest.mark.parametrize("name", WIDE_NAMES.values(), ids=WIDE_NAMES)
def test_wide_names_fit(name):
    """Of a tag and of a file, in both kinds of errors."""
    with simulated_pool(4 * MIB, name=name) as pool, pool.record(sites=True):
        pool.limit(name, 5000)
        code = compile("kept.append(pool.empty(2000))", name.replace("\0", "\n"), "exec")
        kept = []
        with vpool.tag(name):
            exec(code, {"pool": pool, "kept": kept})
            for nbytes in (4000, 5 * MIB):
                with pytest.raises(vpool.OutOfMemoryError) as caught:
                    pool.allocate(nbytes)
                first, *lines = str(caught.value).splitlines()
                assert len(lines) < MOST_LINES
                assert columns("\n".join(lines)) <= WIDEST_LINE
                assert first.isprintable()
        assert all(line.isprintable() for line in str(vpool.explain(kept[0])).splitlines())
        assert len(str(vpool.explain(kept[0])).splitlines()) == 7
        assert len(str(pool.leaks()).splitlines()) == 2


@pytest.mark.parametrize(
    "strategy",
    [vpool.Dynamic(initial=0, limit="8MiB"), vpool.Hybrid("2MiB", dynamic=vpool.Dynamic(initial=0, limit="6MiB"))],
)
def test_a_limit_for_memory_that_comes_in_handles(strategy):
    """The one that is named has room for whole handles."""
    with vpool.Pool(strategy, source=vpool.sources.SimulatedVmm("64MiB"), debug=()) as pool:
        for _ in range(int(pool.inspect().limit_bytes // (3 * MIB + 1000))):
            pool.allocate(3 * MIB + 1000)
        with pytest.raises(vpool.OutOfMemoryError) as caught:
            pool.allocate(3 * MIB + 1000)
        (raising,) = [one for one in caught.value.shortage.remedies if one.kind == "raise_limit"]
        take(pool, raising)
        pool.allocate(3 * MIB + 1000)


@pytest.mark.parametrize("alignment", [256, 128 * KIB, 2 * MIB])
def test_equal_blocks_at_aligned_addresses(alignment):
    """One of equal blocks serves where it lies so, however far it has to be aligned."""
    with vpool.Pool(vpool.Fixed("4MiB", block="64KiB"), source="simulated", debug=()) as pool:
        blocks = [pool.allocate(1000 + number) for number in range(64)]
        with pytest.raises(vpool.OutOfMemoryError) as caught:
            pool.allocate(5000, alignment=alignment)
        (freeing,) = caught.value.shortage.remedies
        assert len(freeing.addresses) == 1
        assert set(freeing.addresses) < set(blocks)
        take(pool, freeing)
        assert pool.allocate(5000, alignment=alignment) == freeing.addresses[0]


def test_a_range_does_not_lie_across_gaps_however_many_there_are():
    """A device of virtual memory has tens of thousands of them, and who waits for the message has memory to free."""
    blocks = np.zeros(90_001, BLOCK_DTYPE)
    blocks["nbytes"] = 2 * MIB
    blocks["address"] = np.arange(len(blocks), dtype=np.uint64) * np.uint64(2 * MIB)
    blocks["state"] = np.resize(["unmapped", "live", "free"], len(blocks))
    begin = time.process_time()
    window, live = _window(blocks, 4 * MIB)
    assert time.process_time() - begin < 6
    assert (window["address"].tolist(), live) == ([2 * MIB, 4 * MIB], 2 * MIB)
    assert _window(blocks, 4 * MIB + 256) is None


def test_a_capacity_that_would_hold_the_request():
    said = pytest.raises(vpool.OutOfMemoryError, match="a capacity of 2,000,128 bytes would hold it")
    with vpool.Pool(vpool.Fixed("1MiB"), source="simulated", debug=()) as pool, said:
        pool.allocate(2_000_000)
    with vpool.Pool(vpool.Fixed(2_000_128), source="simulated", debug=()) as pool:
        pool.allocate(2_000_000)


def test_one_live_block_is_one_block():
    pool = simulated_pool(limit=MIB)
    ptr = pool.allocate(MIB)
    with pytest.raises(vpool.OutOfMemoryError, match=r"holders of 1\.00 MiB in 1 live block:"):
        pool.allocate(KIB)
    pool.deallocate(ptr)

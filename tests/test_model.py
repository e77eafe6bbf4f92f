"""Random programs against a pool and a naive model side by side, every invariant checked at each step."""

import gc

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import vpool
from tests.helpers.model import Model
from tests.helpers.pools import GRANULE, KIB, MIB, unchanged

CAPACITIES = (MIB, 4 * MIB, 4 * MIB + 300, 16 * MIB)
STREAMS = (0, 0, 0, 7, 9)
SIZES = st.one_of(
    st.integers(1, 2 * KIB),
    st.integers(1, 300 * KIB),
    st.integers(1, 64).map(lambda granules: granules * GRANULE),
    st.sampled_from([MIB - GRANULE, MIB, MIB + 1, 2 * MIB, 5 * MIB]),
)
ALIGNMENTS = st.sampled_from([256] * 6 + [1, 512, 4096, 64 * KIB, MIB, 2 * MIB])


class PoolMachine(RuleBasedStateMachine):
    """A pool small enough that it runs out, with several segments and streams."""

    def __init__(self):
        super().__init__()
        self.model = Model()
        self.gone = []
        self.buffers = []
        self.closed = False
        self.picky = False  # the core does not serve every size

    @initialize(
        capacity=st.sampled_from(CAPACITIES),
        initial=st.sampled_from([0, 4 * KIB, 100 * KIB, MIB]),
        growth=st.sampled_from([1.1, 1.5, 2.0, "64KiB", "1MiB", 5000]),
        limit=st.sampled_from([1.0, 0.9]),
        base_offset=st.sampled_from([0, 0, GRANULE, 100]),
    )
    def open(self, capacity, initial, growth, limit, base_offset):
        # A request that fails makes a collection, which need not look at all that hypothesis keeps.
        gc.freeze()
        initial = min(initial, int(capacity * limit))
        source = vpool.sources.Simulated(capacity, base_offset=base_offset)
        self.base_slack = GRANULE if base_offset % GRANULE else 0
        self.pool = vpool.Pool(vpool.Dynamic(initial=initial, growth=growth, limit=limit), source=source)

    def pick(self, choice):
        return sorted(self.model.live)[choice % len(self.model.live)]

    @rule(nbytes=SIZES, alignment=ALIGNMENTS, stream=st.sampled_from(STREAMS))
    @precondition(lambda self: not self.closed)
    def allocate(self, nbytes, alignment, stream):
        report = self.pool.inspect()
        try:
            ptr = self.pool.allocate(nbytes, stream=stream, alignment=alignment)
        except vpool.OutOfMemoryError:
            mine = report.blocks[(report.blocks["state"] == "free") & (report.blocks["stream"] == stream)]
            padding = max(alignment, GRANULE) - GRANULE
            fits = mine["nbytes"] >= nbytes + padding + GRANULE - 1
            assert not (fits & self.may_serve(report, mine, nbytes, alignment)).any(), (
                "a block that fits was passed over"
            )
        else:
            assert ptr % alignment == 0
            self.model.allocated(ptr, nbytes, stream)
            self.gone = [old for old in self.gone if not ptr <= old < ptr + nbytes]

    def may_serve(self, report, blocks, nbytes, alignment):
        """Which of the free blocks a request may have."""
        return np.ones(len(blocks), bool)

    @rule(nbytes=SIZES, stream=st.sampled_from(STREAMS))
    @precondition(lambda self: not self.closed and len(self.buffers) < 8)
    def empty(self, nbytes, stream):
        try:
            buffer = self.pool.empty(nbytes, stream=stream)
        except vpool.OutOfMemoryError:
            return
        self.model.allocated(buffer.ptr, nbytes, stream)
        self.buffers.append(buffer)

    def forget_buffer(self, ptr):
        """Buffers whose address was freed by hand own nothing any more; dropping them must do nothing."""
        self.buffers = [buffer for buffer in self.buffers if buffer.ptr != ptr]

    @rule(choice=st.integers(0, 2**16), freed_on=st.sampled_from([None, None, 0, 7, 9]))
    @precondition(lambda self: self.model.live)
    def free(self, choice, freed_on):
        ptr = self.pick(choice)
        self.pool.deallocate(ptr, stream=freed_on)
        self.model.freed(ptr)
        self.gone = [*self.gone[-8:], ptr]
        self.forget_buffer(ptr)

    @rule(choice=st.integers(0, 2**16), how=st.sampled_from(["close", "drop", "deallocate"]))
    @precondition(lambda self: self.buffers)
    def end_buffer(self, choice, how):
        buffer = self.buffers.pop(choice % len(self.buffers))
        self.model.freed(buffer.ptr)
        if how == "close":
            buffer.close()
        elif how == "deallocate":
            self.pool.deallocate(buffer)

    @rule(choice=st.integers(0, 2**16))
    @precondition(lambda self: self.gone)
    def free_again(self, choice):
        ptr = self.gone[choice % len(self.gone)]
        if ptr not in self.model.live:
            with unchanged(self.pool), pytest.raises(vpool.InvalidPointerError):
                self.pool.deallocate(ptr)

    @rule(choice=st.integers(0, 2**16), offset=st.integers(1, 2**16))
    @precondition(lambda self: self.model.live)
    def free_inside(self, choice, offset):
        ptr = self.pick(choice)
        nbytes, _ = self.model.live[ptr]
        inside = ptr + offset % nbytes
        if inside != ptr:
            with unchanged(self.pool), pytest.raises(vpool.ForeignPointerError):
                self.pool.deallocate(inside)

    @rule()
    @precondition(lambda self: not self.closed)
    def largest_allocatable_is_true(self):
        """The report's promise holds, and is the largest that does."""
        if self.base_slack or self.picky:
            return
        most = self.pool.inspect().largest_allocatable()
        with pytest.raises(vpool.OutOfMemoryError):
            self.pool.allocate(most + GRANULE)
        if most:
            ptr = self.pool.allocate(most)
            self.model.allocated(ptr, most)
            self.pool.deallocate(ptr)
            self.model.freed(ptr)

    @rule(nbytes=st.integers(0, 16 * MIB))
    def others_take_memory(self, nbytes):
        self.pool.source.driver.set_free(nbytes)

    @rule()
    @precondition(lambda self: len(self.model.live) > 4)
    def close(self):
        self.pool.close()
        self.closed = True

    @invariant()
    def agrees_with_the_model(self):
        if hasattr(self, "pool"):
            self.model.assert_agrees(self.pool, self.base_slack)

    def teardown(self):
        if hasattr(self, "pool"):
            self.buffers.clear()
            for ptr in self.pool.inspect().blocks:
                if ptr["state"] == "live":
                    self.pool.deallocate(int(ptr["address"]))
            self.pool.close()
            assert self.pool.source.driver.used == self.pool.stats.reserved_bytes == 0


class CoreMachine(PoolMachine):
    """A pool with a fixed core: equal blocks of one or several sizes, or a slab, and perhaps an area that grows."""

    open = None

    @initialize(
        core=st.sampled_from([KIB * 64, MIB, 3 * MIB]),
        block=st.sampled_from([None, 256, 4 * KIB, 10_000, [512, 16 * KIB], [(256, 8), (20 * KIB, 2)], [700, 1400]]),
        kind=st.sampled_from(["error", "direct", "hybrid", "banded"]),
        base_offset=st.sampled_from([0, 0, GRANULE]),
    )
    def open_with_core(self, core, block, kind, base_offset):
        gc.freeze()
        source = vpool.sources.Simulated(8 * MIB, base_offset=base_offset)
        self.base_slack = 0
        if kind == "hybrid":
            strategy = vpool.Hybrid(core, block, dynamic=vpool.Dynamic(initial="1MiB", limit=1.0))
        elif kind == "banded":
            strategy = vpool.Hybrid(
                core, block, smallest=200, largest=6000, dynamic=vpool.Dynamic(initial=0, growth="64KiB", limit=0.9)
            )
        else:
            strategy = vpool.Fixed(core, block, oversize=kind, limit=1.0)
        self.picky = kind == "banded"
        self.pool = vpool.Pool(strategy, source=source)

    def may_serve(self, report, blocks, nbytes, alignment):
        # Equal blocks lie where they lie.
        common = alignment <= GRANULE or not report.core["block_sizes"]
        common &= report.core["smallest"] <= nbytes <= report.core["largest"]
        if report.core["exclusive"] and alignment <= GRANULE:
            return (blocks["segment"] > 0) != common
        return (blocks["segment"] > 0) | common

    @rule()
    @precondition(lambda self: not self.closed)
    def maintain(self):
        self.pool.maintain()

    @rule(nbytes=st.integers(1, 2 * MIB))
    @precondition(lambda self: not self.closed)
    def reserve(self, nbytes):
        before = self.pool.stats
        try:
            self.pool.reserve(nbytes)
        except vpool.OutOfMemoryError:
            pass
        else:
            if getattr(self.pool.strategy, "oversize", "direct") == "direct":
                assert self.pool.inspect().largest_free_bytes >= nbytes
        after = self.pool.stats
        assert (after.allocated_bytes, after.allocations) == (before.allocated_bytes, before.allocations)
        assert after.peak_allocated_bytes == before.peak_allocated_bytes

    @rule()
    @precondition(lambda self: not self.closed)
    def trim(self):
        self.pool.trim()
        assert self.pool.stats.reserved_bytes >= self.pool.inspect().core["reserved_bytes"]

    @invariant()
    def core_stays(self):
        if hasattr(self, "pool") and not self.closed:
            report = self.pool.inspect()
            assert report.core["allocated_bytes"] <= report.core["reserved_bytes"] <= report.reserved_bytes
            sizes = {size for size, _ in report.core["block_sizes"]}
            in_core = report.blocks[report.blocks["segment"] == 0]
            assert not sizes or set(in_core["nbytes"].tolist()) <= sizes


COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much]}


class TestRandomPrograms(PoolMachine.TestCase):
    settings = settings(max_examples=300, stateful_step_count=40, **COMMON)


class TestRandomProgramsWithCore(CoreMachine.TestCase):
    settings = settings(max_examples=300, stateful_step_count=40, **COMMON)


@pytest.mark.long
class TestManyRandomProgramsWithCore(CoreMachine.TestCase):
    settings = settings(max_examples=3000, stateful_step_count=100, **COMMON)


@pytest.mark.long
class TestManyRandomPrograms(PoolMachine.TestCase):
    settings = settings(max_examples=3000, stateful_step_count=100, **COMMON)

"""Every strategy on a real device."""

import pytest

import vpool
from tests.helpers.device import held
from tests.helpers.pools import MIB
from tests.helpers.traces import recorded

pytestmark = pytest.mark.gpu

try:
    vpool.sources.Cuda()
except vpool.SourceError as missing:
    pytest.skip(str(missing), allow_module_level=True)


@pytest.fixture(scope="module")
def trace():
    return recorded("two_streams").scaled(256 * MIB)


STRATEGIES = {
    "fixed": "fixed",
    "hybrid": "hybrid",
    "adaptive": vpool.Dynamic(adaptive=True),
    "small core": vpool.Hybrid("256MiB", dynamic=vpool.Dynamic(initial="64MiB", adaptive=True)),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_byte_holds(trace, name):
    strategy = STRATEGIES[name]
    result = vpool.replay(trace, strategy, "cuda", passes=2, patterns=True, maintain=True)
    assert result.oom is None
    assert result.verified_bytes > trace.peak_live_bytes
    simulated = vpool.replay(trace, strategy, "simulated", passes=2)
    if name in ("fixed", "hybrid"):
        assert result.peak_reserved_bytes == simulated.peak_reserved_bytes


def test_a_fixed_pool_takes_all_at_once_and_calls_no_more():
    with vpool.Pool(vpool.Fixed("256MiB", block="1MiB"), "cuda") as pool:
        calls = pool.source.driver.calls()
        blocks = [pool.allocate(MIB) for _ in range(256)]
        assert len({block % MIB for block in blocks}) == 1
        with pytest.raises(vpool.OutOfMemoryError):
            pool.allocate(2 * MIB)
        for block in blocks:
            pool.deallocate(block)
        assert pool.source.driver.calls()["malloc"] == calls["malloc"]
        assert pool.stats.source_calls == 1
        pool.check()


def test_what_the_device_does_not_have_is_refused_at_construction():
    source = vpool.sources.Cuda()
    total = source.memory()[1]
    before = held(source.driver)
    with pytest.raises(vpool.OutOfMemoryError, match="at construction"):
        vpool.Pool(vpool.Fixed(total - MIB, limit=1.0), source)
    assert held(source.driver) == before


def test_equal_blocks_cross_streams():
    cupy = pytest.importorskip("cupy")
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    with vpool.Pool(vpool.Fixed("16MiB", block="1MiB"), "cuda") as pool:
        for turn in range(200):
            first, second = streams[turn % 4], streams[(turn + 1) % 4]
            blocks = [pool.allocate(MIB, stream=first) for _ in range(12)]
            for number, block in enumerate(blocks):
                pool.deallocate(block, stream=second if number % 2 else None)
            pool.check()
        assert pool.crossings["crossings"] > 0
        assert pool.stats.allocated_bytes == 0

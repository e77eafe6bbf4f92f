"""What reports and errors say of memory that is kept for the graphs of captures: nobody else gets it."""

import pytest

import vpool
from tests.helpers.pools import MIB
from tests.test_captures import Graph, fake_pool
from vpool._storage.fake_cuda import FakeCudaDriver
from vpool._storage.mapped_source import MappedSource
from vpool.sizes import format_bytes

STRATEGIES = {
    "dynamic": vpool.Dynamic(initial=4 * MIB, limit=8 * MIB),
    "slab": vpool.Fixed(8 * MIB),
    "equal blocks": vpool.Fixed(8 * MIB, block=4 * MIB),
    "hybrid": vpool.Hybrid(4 * MIB, block=4 * MIB, dynamic=vpool.Dynamic(initial=0, limit=8 * MIB)),
}


def kept(strategy, count, nbytes=4 * MIB, *, freed="in it"):
    """A pool that keeps so many blocks for a graph, the driver and the graph; `freed` in the capture or after it."""
    pool, driver = fake_pool(8 * MIB, STRATEGIES[strategy])
    with Graph(driver) as graph:
        blocks = [pool.allocate(nbytes, stream=graph.stream) for _ in range(count)]
        for ptr in blocks if freed == "in it" else ():
            pool.deallocate(ptr)
    for ptr in blocks if freed == "after it" else ():
        pool.deallocate(ptr)
    return pool, driver, graph


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("freed", ["in it", "after it"])
@pytest.mark.parametrize("count", [1, 2])
def test_the_largest_request_is_what_the_graph_leaves(strategy, freed, count):
    pool, _, graph = kept(strategy, count, freed=freed)
    report = pool.inspect()
    assert report.captured_bytes == count * 4 * MIB
    most = report.largest_allocatable()
    assert most == (2 - count) * 4 * MIB
    with pytest.raises(vpool.OutOfMemoryError):
        pool.allocate(most + 1)
    if most:
        pool.deallocate(pool.allocate(most))
    pool.release_capture(graph.id)
    assert pool.inspect().captured_bytes == 0
    assert pool.allocate(pool.inspect().largest_allocatable())
    pool.check()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_letting_the_graph_go_is_named_and_works(strategy):
    pool, _, graph = kept(strategy, 2)
    with pytest.raises(vpool.OutOfMemoryError) as caught:
        pool.allocate(3 * MIB)
    assert "8.00 MiB that are free or pending are kept for captures." in str(caught.value)
    remedies = caught.value.shortage.remedies
    (release,) = [one for one in remedies if one.kind == "release"]
    assert release.nbytes == 8 * MIB
    assert "wait" not in {one.kind for one in remedies}, "no wait gives it"
    assert "release_capture()" in release.text
    pool.release_capture(graph.id)
    assert pool.allocate(3 * MIB)
    pool.check()


@pytest.mark.parametrize(("kind", "count", "nbytes"), [("release", 2, 10 * MIB), ("free", 1, 12 * MIB)])
def test_of_memory_in_handles(kind, count, nbytes):
    """What lies in handles that are kept for a graph is nowhere else."""
    driver = FakeCudaDriver(64 * MIB)
    source = MappedSource(driver, "cuda-vmm", handle_bytes=2 * MIB)
    with vpool.Pool(vpool.Dynamic(initial=0, limit=16 * MIB), source=source) as pool:
        live = [pool.allocate(2 * MIB), pool.allocate(4 * MIB)]
        with Graph(driver) as graph:
            for ptr in [pool.allocate(4 * MIB, stream=graph.stream) for _ in range(count)]:
                pool.deallocate(ptr)
        pool.deallocate(live[1])
        report = pool.inspect()
        assert report.captured_bytes == count * 4 * MIB
        with pytest.raises(vpool.OutOfMemoryError) as caught:
            pool.allocate(nbytes)
        (remedy,) = [one for one in caught.value.shortage.remedies if one.kind == kind]
        for ptr in remedy.addresses:
            pool.deallocate(ptr)
        if kind == "release":
            pool.release_capture(graph.id)
        assert pool.allocate(nbytes)
        pool.check()


def test_it_is_advised_and_trim_is_not():
    pool, driver, graph = kept("dynamic", 3, 2 * MIB)
    pool.allocate(MIB)
    report = pool.inspect()
    (sentence,) = [one for one in report.advice if "captures" in one]
    assert sentence.startswith(
        f"{format_bytes(report.captured_bytes)} that are free or pending are kept for the graphs"
    )
    assert report.captured_bytes >= 6 * MIB
    assert not [one for one in report.advice if "trim()" in one]
    assert pool.trim() == 0
    assert "kept for graphs" in str(report)
    driver.destroy_graph(graph.id)
    assert pool.captures == ()
    assert not [one for one in pool.inspect().advice if "captures" in one]


def test_a_snapshot_keeps_it(tmp_path):
    pool, _, _ = kept("dynamic", 1)
    pool.snapshot().save(tmp_path / "snapshot.npz")
    loaded = vpool.Snapshot.load(tmp_path / "snapshot.npz").report
    assert loaded.to_dict() == pool.inspect().to_dict()
    assert loaded.captured_bytes == 4 * MIB
    assert loaded.largest_allocatable() == 4 * MIB

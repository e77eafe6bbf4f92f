"""vpool bench with the real peers, on a real device."""

import importlib.util

import pytest

import vpool
from vpool.bench import bench
from vpool.bench.build import BuildError, program
from vpool.bench.goals import goals
from vpool.bench.peers import PEERS
from vpool.errors import SourceError

pytestmark = pytest.mark.gpu

try:
    vpool.sources.Cuda()
except SourceError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(scope="module")
def results():
    """One short run of everything."""
    return bench(rounds=2, scale=0.2)


def buildable(flavour):
    try:
        return flavour is None or bool(program(flavour))
    except BuildError:
        return False


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: f"{peer.title}, {'compiled' if peer.flavour else 'Python'}")
def test_every_peer_that_is_installed_is_measured(results, peer):
    if peer.missing() or not buildable(peer.flavour):
        pytest.skip("not installed")
    measured = {row.case for row in results.rows if row.who == peer.title}
    expected = {case for case in peer.cases if results.places(case)}
    assert expected <= measured, [note for note in results.notes if peer.title in note]


@pytest.mark.parametrize("package", ["cupy", "rmm", "torch"])
def test_nothing_of_an_installed_peer_fails(results, package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    titles = {"cupy": "CuPy", "rmm": "RMM", "torch": "PyTorch"}
    assert [note for note in results.notes if note.startswith(titles[package])] == []


def test_vpool_is_measured_on_the_device(results):
    assert results.settings["source"] == "cuda"
    assert {row.who for row in results.having("trace", "warm_ns", kind="own")} >= {"vpool on cuda", "vpool on cuda-vmm"}
    assert results.machine["devices"]


def test_every_goal_of_one_thread_is_judged(results):
    for goal in goals(results):
        threads = goal.text.startswith("16 threads")
        lacking = ("there is no such front", "CuPy pool: not measured", "PyTorch expandable: not measured")
        assert goal.figure is not None or threads or goal.why in lacking, goal


def test_a_hit_is_cheaper_than_any_peer(results):
    """Far below what is asked of a quiet machine: only that the figures are what they say."""
    for at in results.places("pair"):
        mine = results.find("pair", at=at)
        for row in results.having("pair", at=at, kind="peer"):
            assert row.who == "malloc" or mine.best < row.best, row

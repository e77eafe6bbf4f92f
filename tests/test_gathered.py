"""The reports of many processes: as one table, by Dask, and by torch.distributed."""

import json
import os
import pickle
import sys
import types

import pytest

import vpool
from tests.helpers.frameworks import without
from tests.helpers.pools import KIB, MIB, host_pool, simulated_pool
from vpool.gathered import Gathered, reports_here
from vpool.integrations import dask as plugin

# The table.


def test_one_table():
    with host_pool(name="first") as first, simulated_pool(name="second") as second:
        first.allocate(KIB)
        second.allocate(3 * MIB)
        reports = [pool.inspect().to_dict() for pool in (first, second)]
    gathered = Gathered({"here": reports[:1], "there": reports[1:], "nowhere": []}, {"gone": "it ended"})
    header, *rows = str(gathered).splitlines()
    assert header.split()[:3] == ["where", "pool", "device"]
    assert [row.split()[:2] for row in rows] == [
        *(["here", "first"], ["there", "second"], ["all", "3.00"], ["nowhere", "no"], ["gone", "no"]),
    ]
    assert gathered.total["allocated_bytes"] == KIB + 3 * MIB
    assert gathered.total["live_blocks"] == 2
    assert json.loads(gathered.to_json()) == gathered.to_dict()
    assert [row["where"] for row in gathered.rows] == ["here", "there"]
    assert gathered.failed == {"gone": "it ended"}


def test_a_table_of_nothing():
    assert str(Gathered({})).startswith("where")
    assert Gathered({}).total["reserved_bytes"] == 0


def test_the_pools_here():
    with host_pool(name="b") as second, host_pool(name="a") as first:
        assert [row["name"] for row in reports_here() if row["name"] in "ab"] == ["a", "b"]
        second.close()
        assert "b" not in [row["name"] for row in reports_here()]
        assert not first.closed


# Dask.


def test_a_plugin_travels():
    pytest.importorskip("distributed")
    policy = vpool.Policy(vpool.Dynamic(initial=MIB), source="host")
    sent = pickle.loads(pickle.dumps(plugin.worker_plugin(policy, "cupy")))
    assert type(sent) is type(plugin.worker_plugin())
    assert (sent.frameworks, vpool.Policy.loads(sent.text)) == (("cupy",), policy)


def test_what_is_no_framework_or_policy(tmp_path):
    pytest.importorskip("distributed")
    with pytest.raises(ValueError, match="no framework 'tensorflow'"):
        plugin.worker_plugin(frameworks=["tensorflow"])
    with pytest.raises(OSError, match="nothing"):
        plugin.worker_plugin(tmp_path / "nothing.toml")


def test_without_dask(monkeypatch):
    without(monkeypatch, "distributed")
    plugin._plugin_class.cache_clear()
    with pytest.raises(ImportError, match=r"vpool\[dask\]"):
        plugin.worker_plugin()


def _work(nbytes):
    pool = vpool.default_pool()
    pool.allocate(nbytes)
    return os.getpid(), pool.name, pool.strategy.initial


def test_a_worker_installs_frameworks_once(monkeypatch, no_default_pools):
    pytest.importorskip("distributed")
    installed = []
    plugin_of_numba = types.SimpleNamespace(install=installed.append)  # the real one takes a GPU's memory alone
    monkeypatch.setitem(sys.modules, "vpool.integrations.numba", plugin_of_numba)
    monkeypatch.setattr(plugin, "_pools", {})
    sent = plugin.worker_plugin(vpool.Policy(vpool.Dynamic(initial=MIB), source="host"), "numba")
    for _ in range(2):
        sent.setup(None)
    with vpool.default_pool() as pool:
        assert installed == [pool]


def test_two_workers():
    """Each has a pool by the policy, also one that comes later; the table tells of all."""
    distributed = pytest.importorskip("distributed")
    policy = vpool.Policy(vpool.Dynamic(initial=2 * MIB, limit=64 * MIB), source="host")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        assert str(plugin.inspect_cluster(client)).count("no pool") == 2
        client.register_plugin(plugin.worker_plugin(policy))
        workers = client.run(_work, 3 * MIB)
        assert len({pid for pid, *_ in workers.values()}) == 2
        assert {(name, initial) for _, name, initial in workers.values()} == {("dask-worker", 2 * MIB)}
        cluster.scale(3)
        client.wait_for_workers(3, timeout=60)
        gathered = plugin.inspect_cluster(client)
        assert {row["where"] for row in gathered.rows} == set(client.scheduler_info(n_workers=-1)["workers"])
        assert sorted(row["allocated_bytes"] for row in gathered.rows) == [0, 3 * MIB, 3 * MIB]
        assert len(str(gathered).splitlines()) == 5


def test_workers_that_are_threads_share_a_pool(no_default_pools):
    distributed = pytest.importorskip("distributed")
    policy = vpool.Policy(vpool.Dynamic(initial=MIB, limit=8 * MIB), source="host")
    with (
        distributed.LocalCluster(n_workers=2, processes=False, dashboard_address=":0") as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        client.register_plugin(plugin.worker_plugin(policy))
        pool = vpool.default_pool()
        assert client.submit(lambda: vpool.default_pool().name).result() == pool.name == "dask-worker"
        gathered = plugin.inspect_cluster(client)
        assert len({row["where"] for row in gathered.rows}) == 2
        pool.close()


class Client:
    """One that has a worker that answers and one that does not."""

    asynchronous = False

    def run(self, function, on_error):
        return {"tcp://1": function(), "tcp://2": OSError("lost")}


def test_a_worker_that_does_not_answer():
    with host_pool():
        gathered = plugin.inspect_cluster(Client())
    assert gathered.failed == {"tcp://2": "lost"}
    assert {row["where"] for row in gathered.rows} == {"tcp://1"}


def test_an_asynchronous_client():
    client = Client()
    client.asynchronous = True
    with pytest.raises(TypeError, match="asynchronous"):
        plugin.inspect_cluster(client)

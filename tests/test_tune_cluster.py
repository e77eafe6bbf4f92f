"""Tuning on Dask: the same results from other processes, also where one of them dies."""

import gc
import json
import os
import signal
import subprocess
import sys
import time

import pytest

import vpool
from tests.helpers.traces import FOLDER, SMALL, made
from vpool.cluster import on_dask
from vpool.commands import main
from vpool.trials import Workload

distributed = pytest.importorskip("distributed")
dask = pytest.importorskip("dask")

TRACE = str(FOLDER / "two_streams.npz")
TRIALS = 600


@pytest.fixture(scope="module")
def expected():
    """What one process finds."""
    return vpool.tune(TRACE, trials=TRIALS).to_dict()


@pytest.fixture(scope="module")
def cluster():
    """Two worker processes of one thread on this machine."""
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster:
        yield cluster


def test_two_workers_find_what_one_process_finds(cluster, expected):
    assert vpool.tune(TRACE, trials=TRIALS, scheduler=cluster.scheduler_address).to_dict() == expected


def test_a_worker_that_is_killed_costs_time_and_no_result(cluster, expected):
    with distributed.Client(cluster, set_as_default=False) as client:
        workers = client.run(os.getpid)
        assert len(workers) == 2
        killed = []

        def kill_one(done, of):
            if done > of // 2 and not killed:
                killed.append(next(iter(workers.values())))
                os.kill(killed[0], signal.SIGKILL)

        found = vpool.tune(TRACE, trials=TRIALS, scheduler=client, progress=kill_one).to_dict()
        assert killed
        assert found == expected
        # The cluster starts another in its place.
        deadline = time.monotonic() + 30
        while set(client.run(os.getpid).values()) & set(killed):
            assert time.monotonic() < deadline


def test_of_the_command(cluster, expected, capsys, tmp_path):
    address = cluster.scheduler_address
    path = tmp_path / "policy.toml"
    assert main(["tune", TRACE, "--trials", str(TRIALS), "--scheduler", address, "-o", str(path)]) == 0
    assert vpool.Policy.load(path).dumps() == expected["policy"]


def test_a_cluster_of_its_own():
    """In a process of its own, as whoever calls it has."""
    code = (
        "import vpool\n"
        "if __name__ == '__main__':\n"
        f"    found = vpool.tune({TRACE!r}, trials=32, scheduler='local', workers=2)\n"
        "    print(found.policy == vpool.tune("
        f"{TRACE!r}, trials=32).policy)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"


def test_an_exception_of_a_worker_arrives(cluster):
    workload = Workload({"one": made(*SMALL)})
    with on_dask(cluster.scheduler_address, workloads=[workload]) as evaluate:
        assert evaluate(workload, [vpool.Policy().dumps()]) == [workload.measure(vpool.Policy())]
        with pytest.raises(vpool.FormatError):
            evaluate(workload, ["no policy"])


def test_nobody_at_the_address(monkeypatch):
    monkeypatch.setattr("vpool.cluster._CONNECT", "1s")
    with pytest.raises(vpool.Error, match=r"tcp://127\.0\.0\.1:9 cannot be reached"):
        vpool.tune(made(*SMALL), trials=4, scheduler="tcp://127.0.0.1:9")


@pytest.mark.parametrize(
    "address", ["nowhere", "tcp://nowhere", "gopher://here:1", "here:port", "", "inproc://x", "inproc://here/1/1"]
)
def test_what_is_no_address(address):
    begin = time.monotonic()
    with pytest.raises(vpool.Error, match=f"the scheduler at {address} cannot be reached: "):
        vpool.tune(made(*SMALL), trials=4, scheduler=address)
    gc.collect()  # a client that is left over would wait
    assert time.monotonic() - begin < 10


def test_no_worker():
    with (
        distributed.LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as empty,
        pytest.raises(vpool.Error, match="no worker"),
    ):
        vpool.tune(made(*SMALL), trials=4, scheduler=empty.scheduler_address)


def test_a_worker_without_this_vpool_is_named(cluster, monkeypatch):
    def _version():
        raise ModuleNotFoundError("No module named 'vpool'")

    monkeypatch.setattr("vpool.cluster._version", _version)
    with pytest.raises(vpool.Error, match=r"worker tcp://.* cannot load vpool .*: .*No module named 'vpool'"):
        vpool.tune(made(*SMALL), trials=4, scheduler=cluster.scheduler_address)


def test_a_trial_that_ends_each_worker_is_given_up(monkeypatch):
    monkeypatch.setattr("vpool.cluster._measured", lambda workload, texts: os._exit(1))
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as fragile,
        pytest.raises(vpool.Error, match="a trial ended each worker that it came to: "),
    ):
        vpool.tune(made(*SMALL), trials=4, scheduler=fragile.scheduler_address)


def test_a_scheduler_that_is_lost_is_said(tmp_path):
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--port", "0", "--no-dashboard"]
    file = tmp_path / "scheduler.json"
    scheduler = subprocess.Popen([*command, "--scheduler-file", str(file)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not file.exists() or not file.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        address = json.loads(file.read_text())["address"]
        worker = subprocess.Popen(
            [sys.executable, "-m", "distributed.cli.dask_worker", address, "--no-nanny", "--no-dashboard"],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, stderr=subprocess.DEVNULL
        )  # fmt: skip
        try:
            with distributed.Client(address, timeout="10s", set_as_default=False) as client:
                client.wait_for_workers(1, timeout=60)
                with pytest.raises(vpool.Error, match="the cluster was lost while it measured: "):
                    vpool.tune(TRACE, trials=TRIALS, scheduler=client, progress=lambda done, of: scheduler.kill())
        finally:
            worker.kill()
            worker.wait()
    finally:
        scheduler.kill()
        scheduler.wait()


def test_another_version_is_refused(cluster, monkeypatch):
    monkeypatch.setattr("vpool.cluster.__version__", "0.0.0")
    with pytest.raises(vpool.Error, match=r"and this is 0\.0\.0"):
        vpool.tune(made(*SMALL), trials=4, scheduler=cluster.scheduler_address)


def test_without_dask(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert main(["tune", TRACE, "--scheduler", "local"]) == 1
    assert "vpool[dask]" in capsys.readouterr().err

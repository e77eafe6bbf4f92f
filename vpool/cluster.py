"""Trials on a Dask cluster: the same figures as in this process, from as many machines as there are."""

import contextlib
import hashlib

from vpool.errors import Error
from vpool.trials import Workload
from vpool.version import __version__

__all__ = ["on_dask"]

_CONNECT = "20s"
_RETRIES = 5  # of a trial whose worker was lost while it ran
_CHUNK = 4  # policies a task: a replay takes milliseconds, as long as Dask needs to send one


@contextlib.contextmanager
def on_dask(scheduler, workers=None, workloads=()):
    """A function that measures policies on a workload, on Dask's workers.

    Parameters
    ----------
    scheduler : str or distributed.Client
        A scheduler's address; ``"local"`` for a cluster of processes on this machine; or a client.
    workers : int, optional
        Processes of a local cluster; as many as there are cores if not given.
    workloads : iterable of Workload
        What will be measured.

    Raises
    ------
    Error
        Where Dask is not installed, the scheduler cannot be reached or has no worker, a worker has no vpool or another
        one, or, of the function, where the scheduler is lost or a trial is given up since it ends every worker.

    Notes
    -----
    A workload travels as an argument of a task, which the scheduler keeps, and not as data that was scattered,
    which is lost with the worker that holds it.  So a worker that dies takes time with it and no result: its
    tasks, that one included, run again elsewhere.
    """
    with contextlib.ExitStack() as stack:
        client = _client(stack, scheduler, workers)
        from distributed.client import FutureCancelledError
        from distributed.scheduler import KilledWorker

        _check_versions(client)
        unpacked = {}
        for workload in workloads:
            packed = workload.pack()
            # The key is the content's: several tunings of one trace share what a worker has.
            key = f"vpool-workload-{hashlib.sha256(packed).hexdigest()}"
            unpacked[id(workload)] = client.submit(Workload.unpack, packed, key=key, retries=_RETRIES)

        def evaluate(workload, texts):
            chunks = [texts[begin : begin + _CHUNK] for begin in range(0, len(texts), _CHUNK)]
            try:
                futures = [
                    client.submit(_measured, unpacked[id(workload)], chunk, pure=False, retries=_RETRIES)
                    for chunk in chunks
                ]
                return [figures for chunk in client.gather(futures) for figures in chunk]
            except KilledWorker as reason:
                raise Error(f"a trial ended each worker that it came to: {_first_line(reason)}") from None
            except Exception as reason:  # a trial's own, or what a client without a scheduler raises
                if client.status == "running" and not isinstance(reason, FutureCancelledError):
                    raise
                raise Error(f"the cluster was lost while it measured: {_first_line(reason)}") from None

        yield evaluate


def _first_line(reason):
    return str(reason).partition("\n")[0] or type(reason).__name__


def _measured(workload, texts):
    return [workload.measure_text(text) for text in texts]


def _client(stack, scheduler, workers):
    try:
        from distributed import Client, LocalCluster
        from distributed.comm import get_address_host_port
        from distributed.comm.inproc import global_manager
    except ImportError:
        raise Error('a scheduler needs Dask: pip install "vpool[dask]"') from None
    if isinstance(scheduler, Client):
        return scheduler
    if not isinstance(scheduler, str):
        raise TypeError(f"scheduler must be an address or a distributed.Client, not {type(scheduler).__name__}")
    try:
        if scheduler == "local":
            cluster = LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0")
            scheduler = stack.enter_context(cluster)
        elif scheduler.startswith("inproc://"):  # of what is no address, a client only says so, and hangs when dropped
            global_manager.validate_address(scheduler.removeprefix("inproc://"))
        else:
            get_address_host_port(scheduler)
        return stack.enter_context(Client(scheduler, timeout=_CONNECT, set_as_default=False))
    except (OSError, ValueError) as reason:
        raise Error(f"the scheduler at {scheduler} cannot be reached: {reason}") from None


def _check_versions(client):
    # Where vpool is not there, the function is not either, and a worker says so as an Exception that is of no kind.
    found = client.run(_version, on_error="return")
    if not found:
        raise Error("the scheduler has no worker")
    for worker, version in found.items():
        if isinstance(version, BaseException):
            raise Error(f"worker {worker} cannot load vpool {__version__}: {_first_line(version)}")
        if version != __version__:
            raise Error(f"worker {worker} has vpool {version}, and this is {__version__}")


def _version():
    return __version__

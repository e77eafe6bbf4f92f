"""The counters of pools for Prometheus, in its own format or as OpenMetrics, through ``prometheus-client``."""

from vpool._interface.lender import pools
from vpool.errors import ClosedPoolError, Error, ForkedProcessError

__all__ = ["Collector", "register", "text"]

_LABELS = ("pool", "device", "source")
# Of `vpool.stats.PoolStats`: what is now or was highest, and what only rises.
_GAUGES = {
    "allocated_bytes": "Bytes lent now, after rounding.",
    "requested_bytes": "Bytes lent now, as asked for.",
    "reserved_bytes": "Bytes held from the source.",
    "pending_bytes": "Bytes freed that some stream may still use.",
    "suspended_bytes": "Bytes lent that have no memory until the pool is resumed.",
    "peak_allocated_bytes": "The most bytes lent so far.",
    "peak_reserved_bytes": "The most bytes held so far.",
}
_COUNTERS = {
    "allocations": "Blocks lent.",
    "frees": "Blocks taken back.",
    "hits": "Allocations that needed no call to the source.",
    "source_calls": "Segments asked of the source and given back.",
    "ooms": "Requests that failed.",
}


class Collector:
    """What a registry of prometheus-client asks for the counters of pools.

    Each has the labels ``pool``, ``device`` and ``source``; pools that have all three in common count together.

    Parameters
    ----------
    pools : iterable of Pool, optional
        The pools to tell of; all that are open in this process if not given, whenever they were made.

    Notes
    -----
    Reads `Pool.stats`, so it takes no lock of a pool and does not wait for one.  Any thread may collect.
    """

    def __init__(self, pools=None):
        self._pools = None if pools is None else list(pools)

    def describe(self):
        """The families that `collect` fills, by which a registry refuses to tell of them twice."""
        for _, family in _families():
            yield family

    def collect(self):
        """A family of metrics for each counter.

        Raises
        ------
        Error
            Where prometheus-client is not installed; ``pip install "vpool[metrics]"`` has it.
        """
        rows = sorted(self._rows().items())
        for name, family in _families():
            for labels, stats in rows:
                family.add_metric(labels, sum(getattr(one, name) for one in stats))
            yield family

    def _rows(self):
        """The counters of all pools with the same labels, by these."""
        rows: dict[tuple, list] = {}
        for pool in pools() if self._pools is None else self._pools:
            try:
                # A name that came from the file system may hold what UTF-8 cannot.
                name = pool.name.encode(errors="backslashreplace").decode()
                rows.setdefault((name, str(pool.device), pool.source.name), []).append(pool.stats)
            except (ClosedPoolError, ForkedProcessError):
                continue
        return rows


def register(registry=None):
    """Have a registry tell of every pool of this process, from now on.

    Parameters
    ----------
    registry : prometheus_client.CollectorRegistry, optional
        prometheus-client's own one if not given.

    Returns
    -------
    Collector
        What was registered, for ``registry.unregister``.

    Raises
    ------
    Error
        Where prometheus-client is not installed; ``pip install "vpool[metrics]"`` has it.
    ValueError
        Where the registry tells of pools already.
    """
    collector = Collector()
    (registry or _client().REGISTRY).register(collector)
    return collector


def text():
    """The counters of every pool of this process as OpenMetrics text.

    Raises
    ------
    Error
        Where prometheus-client is not installed; ``pip install "vpool[metrics]"`` has it.
    """
    client = _client()
    from prometheus_client.openmetrics.exposition import generate_latest

    registry = client.CollectorRegistry()
    register(registry)
    return generate_latest(registry).decode()


def _families():
    """A new family of metrics for each counter, behind the counter's name."""
    core = _client().core
    for names, kind in ((_GAUGES, core.GaugeMetricFamily), (_COUNTERS, core.CounterMetricFamily)):
        for name, meaning in names.items():
            yield name, kind(f"vpool_{name}", meaning, labels=_LABELS)


def _client():
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError:
        raise Error('metrics need prometheus-client: pip install "vpool[metrics]"') from None
    return prometheus_client

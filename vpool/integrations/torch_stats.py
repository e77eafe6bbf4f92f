"""PyTorch's memory statistics, of a pool that serves it."""

from vpool._interface import numbered
from vpool.defaults import default_pool
from vpool.integrations.packages import required

__all__ = ["memory_stats", "patch_statistics"]


def memory_stats(device=None):
    """The figures of ``torch.cuda.memory_stats``, of the pool that serves a device.

    Parameters
    ----------
    device : optional
        As for ``torch.cuda.memory_stats``.

    Returns
    -------
    dict
        PyTorch's keys: those that a pool knows.  All of a pool is one class of blocks, ``all``.
    """
    pool = _pool_of(device)
    stats = pool.stats
    report = {
        "allocated_bytes": (stats.allocated_bytes, stats.peak_allocated_bytes),
        "active_bytes": (stats.allocated_bytes + stats.pending_bytes, None),
        "reserved_bytes": (stats.reserved_bytes, stats.peak_reserved_bytes),
        "requested_bytes": (stats.requested_bytes, None),
        "allocation": (stats.allocations - stats.frees, None),
    }
    figures = {}
    for name, (current, peak) in report.items():
        figures[f"{name}.all.current"] = current
        if peak is not None:
            figures[f"{name}.all.peak"] = peak
    figures["allocation.all.allocated"] = stats.allocations
    figures["allocation.all.freed"] = stats.frees
    figures["num_ooms"] = stats.ooms
    figures["num_device_alloc"] = stats.source_calls
    return figures


def _pool_of(device):
    torch = required("torch", "torch")
    ordinal = torch.cuda._utils._get_device_index(device, optional=True)
    return numbered.served(ordinal) or default_pool(ordinal)


def _reset_peaks(device=None):
    """As ``torch.cuda.reset_peak_memory_stats``."""
    _pool_of(device).reset_peaks()


def patch_statistics(torch):
    """Have PyTorch's own functions tell of the pools that serve it."""
    for module in (torch.cuda, torch.cuda.memory):
        module.memory_stats = memory_stats
        module.reset_peak_memory_stats = _reset_peaks

"""PyTorch's memory statistics, of a pool that serves it."""

from vpool._interface import numbered
from vpool.defaults import default_pool
from vpool.integrations.packages import required

__all__ = ["memory_stats", "patch_statistics"]

# What PyTorch counts: by the size of its segments, as a whole, and as one number.  `torch.cuda.memory_summary` takes
# each key to be there.
_BY_SIZE = (
    *("allocation", "segment", "active", "inactive_split"),
    *("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes"),
)
_AS_A_WHOLE = ("oversize_allocations", "oversize_segments")
_NUMBERS = (
    *("num_alloc_retries", "num_ooms", "num_oom_rejections", "num_sync_all_streams"),
    *("num_device_alloc", "num_device_free", "max_split_size"),
)
_WHATS = ("current", "peak", "allocated", "freed")


def memory_stats(device=None):
    """The figures of ``torch.cuda.memory_stats``, of the pool that serves a device.

    Parameters
    ----------
    device : optional
        As for ``torch.cuda.memory_stats``.

    Returns
    -------
    dict
        PyTorch's keys.  A pool has no small and large segments apart: its figures are those of ``all``.  What it does
        not count is 0, and the peak of what has none is its value now.
    """
    pool = _pool_of(device)
    stats = pool.stats
    known = {
        "allocated_bytes": (stats.allocated_bytes, stats.peak_allocated_bytes),
        "active_bytes": (stats.allocated_bytes + stats.pending_bytes, None),
        "inactive_split_bytes": (stats.reserved_bytes - stats.allocated_bytes - stats.pending_bytes, None),
        "reserved_bytes": (stats.reserved_bytes, stats.peak_reserved_bytes),
        "requested_bytes": (stats.requested_bytes, None),
        "allocation": (stats.allocations - stats.frees, None),
    }
    counted = [*_AS_A_WHOLE, *(f"{name}.{size}" for name in _BY_SIZE for size in ("all", "large_pool", "small_pool"))]
    figures = dict.fromkeys([f"{name}.{what}" for name in counted for what in _WHATS] + [*_NUMBERS], 0)
    for name, (current, peak) in known.items():
        figures[f"{name}.all.current"] = current
        figures[f"{name}.all.peak"] = current if peak is None else peak
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

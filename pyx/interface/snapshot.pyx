"""Copies of a pool's records, as arrays and plain figures: all that reports ever see of a pool."""
import numpy as np

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from vpool._base.lock cimport atomic_read
from vpool._base.types cimport BLOCK_FREE, BLOCK_LIVE, BLOCK_PENDING, BLOCK_UNMAPPED
from vpool._management.core cimport Core
from vpool._management.state cimport slot_count
from vpool._management.walk cimport BlockCopy, SegmentCopy, Totals, walk_copy, walk_totals

from vpool._management.core import RUNG_NAMES
from vpool.errors import SourceError
from vpool.report import BLOCK_DTYPE, SEGMENT_DTYPE
from vpool.stats import PoolStats

# The layout of BlockCopy and SegmentCopy.
_COPY_DTYPE = np.dtype([
    ("address", "u8"), ("nbytes", "u8"), ("requested", "u8"), ("segment", "u4"), ("slot", "u2"), ("tag", "u2"),
    ("state", "u1"),
])
_SPAN_DTYPE = np.dtype([("address", "u8"), ("nbytes", "u8"), ("slot", "u2")])

_STATE_NAMES = np.zeros(8, "U8")
_STATE_NAMES[<int> BLOCK_LIVE] = "live"
_STATE_NAMES[<int> BLOCK_FREE] = "free"
_STATE_NAMES[<int> BLOCK_PENDING] = "pending"
_STATE_NAMES[<int> BLOCK_UNMAPPED] = "unmapped"


cdef tuple copy_records(Core core, str name):
    """Figures, blocks and segments of one moment."""
    cdef uint64_t count = 1
    cdef uint32_t span_count = 1
    cdef uint8_t[::1] block_bytes
    cdef uint8_t[::1] span_bytes
    cdef uint64_t capacity = 0
    cdef uint32_t span_capacity = 0
    cdef Totals totals
    while count > capacity or span_count > span_capacity:
        # Memory is taken outside the locks, with room for what is allocated meanwhile.
        capacity = count + count // 8 + 64
        span_capacity = span_count + 16
        copies = np.empty(capacity, _COPY_DTYPE)
        spans = np.empty(span_capacity, _SPAN_DTYPE)
        block_bytes = copies.view(np.uint8)
        span_bytes = spans.view(np.uint8)
        with nogil:
            count = walk_copy(core, <BlockCopy*> &block_bytes[0], capacity, <SegmentCopy*> &span_bytes[0],
                              span_capacity, &span_count, &totals)
    copies = copies[:count]
    spans = spans[:span_count]
    slots = range(slot_count(&core.state))
    by_slot = np.array([atomic_read(core.state.table[slot].stream) for slot in slots], np.uint64)
    blocks = np.empty(count, BLOCK_DTYPE)
    for field in ("address", "nbytes", "requested", "segment", "tag"):
        blocks[field] = copies[field]
    blocks["state"] = _STATE_NAMES[copies["state"]]
    blocks["stream"] = by_slot[copies["slot"]]
    segments = np.empty(span_count, SEGMENT_DTYPE)
    segments["address"] = spans["address"]
    segments["nbytes"] = spans["nbytes"]
    segments["stream"] = by_slot[spans["slot"]]
    try:
        device_free, device_total = core.source.memory()
    except SourceError:
        device_free = device_total = None         # a report is wanted most when the device does not answer
    figures = {
        "name": name,
        "source": core.source.name,
        "device": core.source.device,
        "limit_bytes": core.state.limit,
        "device_free_bytes": device_free,
        "device_total_bytes": device_total,
        "base_slack_bytes": atomic_read(core.state.base_slack),
        "reserved_bytes": totals.reserved_bytes,
        "peak_reserved_bytes": totals.peak_reserved_bytes,
        "peak_allocated_bytes": totals.peak_allocated_bytes,
        "peak_requested_bytes": totals.peak_requested_bytes,
        "served_bytes": totals.served_bytes,
        "missed_bytes": atomic_read(core.state.missed_bytes),
        "source_calls": atomic_read(core.state.source_calls),
    }
    return figures, blocks, segments


cdef read_stats(Core core):
    cdef Totals totals
    walk_totals(core, &totals)
    misses = atomic_read(core.state.misses)
    return PoolStats(
        allocated_bytes=totals.allocated_bytes,
        requested_bytes=totals.requested_bytes,
        reserved_bytes=totals.reserved_bytes,
        pending_bytes=totals.pending_bytes,
        peak_allocated_bytes=totals.peak_allocated_bytes,
        peak_reserved_bytes=totals.peak_reserved_bytes,
        allocations=totals.allocations,
        frees=totals.allocations - totals.live_blocks,
        hits=totals.allocations - misses,
        source_calls=atomic_read(core.state.source_calls),
        ooms=atomic_read(core.state.ooms),
    )


cdef read_ladder(Core core):
    return {
        name: (atomic_read(core.state.rung_tries[rung]), atomic_read(core.state.rung_hits[rung]))
        for rung, name in enumerate(RUNG_NAMES)
    }


cdef read_crossings(Core core):
    return {
        "crossings": atomic_read(core.state.crossings),
        "waits": atomic_read(core.state.waits),
        "overwaits": atomic_read(core.state.overwaits),
        "drains": atomic_read(core.state.drains),
    }

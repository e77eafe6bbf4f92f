"""Copies of a pool's records, as arrays and plain figures: all that reports ever see of a pool."""
import numpy as np

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from vpool._base.lock cimport atomic_read
from vpool._base.types cimport BLOCK_FREE, BLOCK_LIVE, BLOCK_PENDING, BLOCK_SUSPENDED, BLOCK_UNMAPPED
from vpool._management.areas cimport Areas
from vpool._management.core cimport Core
from vpool._management.idle cimport idle_movable
from vpool._management.journal cimport Journal
from vpool._management.state cimport STATE_ADAPTIVE, STATE_MAPPED, CoreState, slot_count
from vpool._management.walk cimport WAITS_FOR_NOTHING, BlockCopy, SegmentCopy, Totals, walk_copy, walk_totals

from vpool._interface.tags import name_of
from vpool._management.ladder import RUNG_NAMES
from vpool.arrays import among
from vpool.errors import SourceError
from vpool.report import BLOCK_DTYPE, SEGMENT_DTYPE
from vpool.stats import PoolStats

# The layout of BlockCopy and SegmentCopy.
_COPY_DTYPE = np.dtype([
    ("address", "u8"), ("nbytes", "u8"), ("requested", "u8"), ("serial", "u8"), ("segment", "u4"), ("slot", "u2"),
    ("tag", "u2"), ("waits_for", "u2"), ("state", "u1"),
])
_SPAN_DTYPE = np.dtype([("address", "u8"), ("nbytes", "u8"), ("slot", "u2")])

_STATE_NAMES = np.zeros(8, "U9")
_STATE_NAMES[<int> BLOCK_LIVE] = "live"
_STATE_NAMES[<int> BLOCK_FREE] = "free"
_STATE_NAMES[<int> BLOCK_PENDING] = "pending"
_STATE_NAMES[<int> BLOCK_UNMAPPED] = "unmapped"
_STATE_NAMES[<int> BLOCK_SUSPENDED] = "suspended"


# What two areas have together.
_SUMS = (
    "limit_bytes", "base_slack_bytes", "reserved_bytes", "peak_reserved_bytes", "served_bytes", "missed_bytes",
    "allocations", "source_calls", "pending",
)


cdef tuple copy_records(Areas areas, str name):
    """Figures, blocks and segments of one moment; a fixed core's of the moment before."""
    cdef Core core = areas.core
    cdef Totals totals
    cdef uint64_t movable
    figures, blocks, segments = _copy_area(core)
    figures["core"] = None
    figures["movable_bytes"] = None
    if core.state.word & STATE_MAPPED:
        with nogil:
            movable = idle_movable(core)
        figures["movable_bytes"] = movable
    if areas.fixed is not None:
        fixed, fixed_blocks, fixed_segments = _copy_area(areas.fixed)
        for key in figures:
            if key in _SUMS:
                figures[key] += fixed[key]
        figures["captured"] = fixed["captured"] + [len(fixed_blocks) + index for index in figures["captured"]]
        blocks["segment"] += len(fixed_segments)
        blocks = np.concatenate([fixed_blocks, blocks])
        figures["fixed_noted"] = fixed["noted"]
        for key in ("serials", "slots"):
            figures[key] = np.concatenate([fixed[key], figures[key]])
        segments = np.concatenate([fixed_segments, segments])
        walk_totals(areas.fixed, &totals)
        figures["core"] = {
            "reserved_bytes": fixed["reserved_bytes"],
            "allocated_bytes": totals.allocated_bytes,
            "allocations": totals.allocations,
            "share": read_core_share(areas),
            "smallest": areas.smallest,
            "largest": min(areas.smallest + areas.band, areas.fixed_bytes),
            "block_sizes": areas.block_sizes,
            "exclusive": areas.core_only,
            "oversize": atomic_read(areas.oversize),
            "largest_oversize": atomic_read(areas.largest_oversize),
        }
    try:
        device_free, device_total = core.source.memory()
    except SourceError:
        device_free = device_total = None         # a report is wanted most when the device does not answer
    figures.update(
        tags=read_tags(areas), grows=areas.grows, adaptive=(core.state.word & STATE_ADAPTIVE) != 0,
        rounding=core.rounding, minimum_remainder=core.minimum_remainder,
        name=name, source=core.source.name, device=core.source.device,
        device_free_bytes=device_free, device_total_bytes=device_total,
    )
    return figures, blocks, segments


cdef tuple told_records(Areas areas, str name, measures, debugger):
    """The same as a report tells them: with peaks over all measures, and with what a debugger keeps as pending."""
    records = copy_records(areas, name)
    if measures is not None:
        measures.figures(records[0])
    return records if debugger is None else debugger.records(*records)


cdef tuple _copy_area(Core core):
    """Figures, blocks and segments of one area at one moment."""
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
    figures = {
        "limit_bytes": core.state.limit,
        "base_slack_bytes": atomic_read(core.state.base_slack),
        "reserved_bytes": totals.reserved_bytes,
        "peak_reserved_bytes": totals.peak_reserved_bytes,
        "peak_allocated_bytes": totals.peak_allocated_bytes,
        "peak_requested_bytes": totals.peak_requested_bytes,
        "served_bytes": totals.served_bytes,
        "missed_bytes": atomic_read(core.state.missed_bytes),
        "allocations": totals.allocations,
        "source_calls": atomic_read(core.state.source_calls),
        "noted": totals.noted,
        "serials": copies["serial"],
        "slots": copies["slot"],
        "captured": _captured_rows(core, copies),
        "pending": _pending_rows(copies[copies["state"] == BLOCK_PENDING], by_slot),
    }
    return figures, blocks, segments


cdef list _captured_rows(Core core, copies):
    """Indices of the blocks that are not live and that nobody gets but a capture, or its graph, which may use them."""
    captured = np.zeros(WAITS_FOR_NOTHING + 1, bool)
    for slot in range(slot_count(&core.state)):
        captured[slot] = atomic_read(core.state.arenas[slot].captured) != 0
    if not captured.any():
        return []
    given_back = among(copies["state"], (BLOCK_FREE, BLOCK_PENDING))
    waits = (copies["state"] == BLOCK_PENDING) & captured[copies["waits_for"]]
    return np.flatnonzero(given_back & (captured[copies["slot"]] | waits)).tolist()


cdef list _pending_rows(copies, by_slot):
    """What is pending, and the stream whose work it waits for; None where that is complete, so that nothing is."""
    rows = {}
    columns = (copies[name].tolist() for name in ("slot", "waits_for", "nbytes"))
    for slot, waits_for, nbytes in zip(*columns, strict=True):
        row = rows.setdefault((slot, waits_for), [0, 0])
        row[0] += 1
        row[1] += nbytes
    return [
        {
            "stream": int(by_slot[slot]),
            "waits_for": None if waits_for == WAITS_FOR_NOTHING else int(by_slot[waits_for]),
            "blocks": blocks,
            "pending_bytes": nbytes,
        }
        for (slot, waits_for), (blocks, nbytes) in sorted(rows.items())
    ]


cdef dict read_tags(Areas areas):
    """Name, peak and limit of each tag that was ever used here, by its number."""
    cdef Journal* journal = &areas.journal
    cdef uint32_t number
    if journal.tags == NULL:
        return {}
    return {
        number: {
            "tag": name_of(number),
            "peak_bytes": atomic_read(journal.tags[number].peak_bytes),
            "limit_bytes": journal.tags[number].limit if journal.tags[number].limited else None,
        }
        for number in range(1, journal.highest + 1)
        if journal.tags[number].peak_bytes or journal.tags[number].limited
    }


cdef read_stats(Areas areas):
    cdef Totals totals
    cdef Totals fixed
    walk_totals(areas.core, &totals)
    if areas.fixed is not None:
        walk_totals(areas.fixed, &fixed)
        totals.allocated_bytes += fixed.allocated_bytes
        totals.requested_bytes += fixed.requested_bytes
        totals.reserved_bytes += fixed.reserved_bytes
        totals.peak_reserved_bytes += fixed.peak_reserved_bytes
        totals.pending_bytes += fixed.pending_bytes
        totals.allocations += fixed.allocations
        totals.live_blocks += fixed.live_blocks
    misses = atomic_read(areas.state.misses)
    return PoolStats(
        allocated_bytes=totals.allocated_bytes,
        requested_bytes=totals.requested_bytes,
        reserved_bytes=totals.reserved_bytes,
        pending_bytes=totals.pending_bytes,
        suspended_bytes=atomic_read(areas.state.suspended.nbytes),
        peak_allocated_bytes=totals.peak_allocated_bytes,
        peak_reserved_bytes=totals.peak_reserved_bytes,
        allocations=totals.allocations,
        frees=totals.allocations - totals.live_blocks - atomic_read(areas.state.suspended.blocks),
        hits=totals.allocations - misses,
        source_calls=_both(areas, atomic_read(areas.state.source_calls), atomic_read(areas.fixed_state.source_calls)),
        ooms=atomic_read(areas.state.ooms),
    )


cdef read_limit(Areas areas):
    """The most that the pool reserves."""
    return _both(areas, areas.state.limit, areas.fixed_state.limit)


cdef read_core_share(Areas areas):
    cdef Totals totals
    cdef Totals fixed
    if areas.fixed is None:
        return None
    walk_totals(areas.core, &totals)
    walk_totals(areas.fixed, &fixed)
    served = totals.allocations + fixed.allocations
    return fixed.allocations / served if served else 1.0


cdef _both(Areas areas, first, second):
    """A figure of the pool from those of its areas."""
    return first if areas.fixed is None else first + second


cdef read_ladder(Areas areas):
    return {
        name: (
            _both(areas, atomic_read(areas.state.rung_tries[rung]), atomic_read(areas.fixed_state.rung_tries[rung])),
            _both(areas, atomic_read(areas.state.rung_hits[rung]), atomic_read(areas.fixed_state.rung_hits[rung])),
        )
        for rung, name in enumerate(RUNG_NAMES)
    }


cdef read_crossings(Areas areas):
    cdef CoreState* state = areas.state
    cdef CoreState* fixed = areas.fixed_state
    return {
        "crossings": _both(areas, atomic_read(state.crossings), atomic_read(fixed.crossings)),
        "waits": _both(areas, atomic_read(state.waits), atomic_read(fixed.waits)),
        "overwaits": _both(areas, atomic_read(state.overwaits), atomic_read(fixed.overwaits)),
        "drains": _both(areas, atomic_read(state.drains), atomic_read(fixed.drains)),
    }

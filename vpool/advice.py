"""What a user can do about a report: sentences, each with the figure that it rests on."""

from vpool.sizes import format_bytes, plural
from vpool.tables import shortened

__all__ = ["advice"]

_MANY_SOURCE_CALLS = 32
_NAMES = 60  # columns
_FEW_BLOCKS = 8  # that pin a segment


def advice(report):
    """The sentences for a report, the most pressing first."""
    yield from _of_limits(report)
    yield from _of_pending(report)
    yield from _of_captures(report)
    yield from _of_fragmentation(report)
    yield from _of_idle(report)
    yield from _of_rounding(report)
    yield from _of_core(report)


def _of_limits(report):
    takes_all = report.core is not None and report.core["reserved_bytes"] == report.limit_bytes
    if not takes_all and report.limit_bytes - report.reserved_bytes < report.limit_bytes // 20:
        yield (
            f"The pool has reserved {format_bytes(report.reserved_bytes)} of the {format_bytes(report.limit_bytes)} "
            f"that it may take: raise the strategy's limit if the device has more to give."
        )
    elif report.device_free_bytes is not None and report.device_total_bytes:
        others = report.device_total_bytes - report.device_free_bytes - report.reserved_bytes
        room = report.limit_bytes - report.reserved_bytes
        if not takes_all and report.reserved_bytes and report.device_free_bytes < min(room, others) // 4:
            yield (
                f"The device has {format_bytes(report.device_free_bytes)} left, and {format_bytes(others)} are "
                f"taken by others: the pool cannot grow to its limit of {format_bytes(report.limit_bytes)}."
            )
    suspended = report.blocks[report.blocks["state"] == "suspended"]  # which count against limits
    for number, row in report.tag_rows():
        lent = row["requested_bytes"] + int(suspended["requested"][suspended["tag"] == number].sum())
        if row["limit_bytes"] is not None and lent >= row["limit_bytes"] * 0.95:
            yield (
                f"Tag {shortened(repr(row['tag']), _NAMES)} has {format_bytes(lent)} of its limit of "
                f"{format_bytes(row['limit_bytes'])}: the next request for it may fail."
            )


def _of_pending(report):
    if report.pending_bytes <= report.reserved_bytes // 8:
        return
    row = max(report.pending, key=lambda row: row["pending_bytes"], default=None)
    if row is None:
        return
    if row["waits_for"] is None:
        yield (
            f"{format_bytes(report.pending_bytes)} are freed and not free yet, of these "
            f"{format_bytes(row['pending_bytes'])} {row['reason']}."
        )
    else:
        yield (
            f"{format_bytes(report.pending_bytes)} are freed but wait, of these {format_bytes(row['pending_bytes'])} "
            f"for work on stream {row['waits_for']:#x}: free blocks on the stream that uses them last, or let it "
            f"finish before memory is short."
        )


def _of_captures(report):
    if report.captured_bytes > report.reserved_bytes // 8:
        yield (
            f"{format_bytes(report.captured_bytes)} that are free or pending are kept for the graphs of captures: "
            f"destroy graphs that are not launched any more, or call release_capture() with their ids, which "
            f"pool.captures has."
        )


def _of_fragmentation(report):
    equal_blocks = report.core is not None and len(report.core["block_sizes"]) > 0
    if not equal_blocks and report.movable_bytes is None and report.external_fragmentation > 0.5:
        yield (
            f"Free memory is in {report.free_blocks} pieces: {format_bytes(report.free_bytes)} are free, but the "
            f"longest range of them is {format_bytes(report.largest_free_bytes)}."
        )
    # Mapped memory goes back handle by handle, so a block keeps no more than its own.
    if report.segments < 2 or report.movable_bytes is not None:
        return
    pinned = [
        row
        for row in report.segment_rows[1 if report.core else 0 :]
        if 0 < row["live_blocks"] <= _FEW_BLOCKS and row["live_bytes"] < row["nbytes"] // 10
    ]
    held = sum(row["nbytes"] for row in pinned)
    if held > report.reserved_bytes // 8:
        blocks = sum(row["live_blocks"] for row in pinned)
        live = sum(row["live_bytes"] for row in pinned)
        are, hold = ("is", "holds") if len(pinned) == 1 else ("are", "hold")
        yield (
            f"{plural(len(pinned), 'segment')} {are} kept for {plural(blocks, 'block')} of {format_bytes(live)}, and "
            f"{hold} {format_bytes(held)}: allocate what lives long first, or free it and call trim()."
        )


def _of_idle(report):
    never_used = report.reserved_bytes - report.peak_allocated_bytes
    in_handles = report.movable_bytes is not None  # one by one, whatever a first segment and growth are
    known = report.core is None and not report.peaks_anew
    if known and not in_handles and report.reserved_bytes and never_used > report.reserved_bytes // 2:
        yield (
            f"{format_bytes(never_used)} of {format_bytes(report.reserved_bytes)} reserved were never in use at once: "
            f"a smaller first segment, growth or reserve() would do "
            f"(peak allocated {format_bytes(report.peak_allocated_bytes)})."
        )
    elif report.allocated_bytes:
        rows = list(enumerate(report.segment_rows))[1 if report.core else 0 :]
        kept = set(report.blocks["segment"][report.captured].tolist())
        idle = sum(row["nbytes"] for number, row in rows if not row["live_blocks"] and number not in kept)
        if idle > report.reserved_bytes // 4:
            yield (
                f"{format_bytes(idle)} are reserved in segments without a live block: trim() gives them back"
                f"{'' if report.adaptive else ', and Dynamic(adaptive=True) does so by itself'}."
            )
    yield from _of_source_calls(report)


def _of_source_calls(report):
    core = report.core
    # Of a fixed core alone what does not fit is served one by one, and there is no first segment.
    if report.movable_bytes is not None or report.peaks_anew or (core is not None and core["exclusive"]):
        return
    if report.source_calls < _MANY_SOURCE_CALLS or report.reuse_ratio >= 0.9:
        return
    peak = report.peak_reserved_bytes - (0 if core is None else core["reserved_bytes"])
    kept = ""
    if report.source_calls > report.segments:  # some went back, as a first segment would
        kept = f" if it were kept, by trim(keep={report.peak_reserved_bytes}) in place of trim(), or without adaptive="
    yield (
        f"The source was called {report.source_calls:,} times and served {1 - report.reuse_ratio:.0%} of all bytes: a "
        f"first segment of {format_bytes(peak)}, which was the peak{'' if core is None else ' beside the core'}, would "
        f"take one call{kept}."
    )


def _of_rounding(report):
    equal_blocks = report.core is not None and len(report.core["block_sizes"]) > 0
    if not equal_blocks and not report.guarded and report.internal_fragmentation > 0.25:
        yield (
            f"{_rounding(report)} {report.internal_fragmentation:.0%} of what is allocated: "
            f"{plural(report.live_blocks, 'block')} of "
            f"{format_bytes(report.allocated_bytes // report.live_blocks)} on average; "
            f"larger allocations that you cut yourself would waste less."
        )


def _rounding(report):
    """What makes blocks larger than requests, as far as that is known."""
    if report.rounding is None:
        return "Rounding wastes"
    cause = f"Rounding to {report.rounding:,} bytes"
    if report.minimum_remainder > report.rounding:
        return f"{cause} and leaving no less than {report.minimum_remainder:,} bytes of a block waste"
    return f"{cause} wastes"


def _of_core(report):
    core = report.core
    if core is None:
        return
    if core["oversize"]:
        were = "was" if core["oversize"] == 1 else "were"
        yield (
            f"{plural(core['oversize'], 'request')} {were} larger than every block of the core: blocks of "
            f"{format_bytes(core['largest_oversize'])} ({core['largest_oversize']:,} bytes) would have served."
        )
    unused = core["reserved_bytes"] - report.peak_allocated_bytes
    if not report.peaks_anew and report.peak_allocated_bytes and unused > core["reserved_bytes"] // 2:
        yield (
            f"At least {format_bytes(unused)} of the fixed core's {format_bytes(core['reserved_bytes'])} were never in "
            f"use at once: a smaller one would do (peak allocated {format_bytes(report.peak_allocated_bytes)})."
        )

"""What went wrong, as exceptions that say what to do about it."""
from libc.stdint cimport uint64_t

from vpool._base.ending cimport is_finalizing
from vpool._base.lock cimport atomic_read
from vpool._base.types cimport BLOCK_LIVE, BLOCK_SUSPENDED, BLOCK_UNMAPPED, GRANULE, Block, round_up
from vpool._interface.snapshot cimport told_records
from vpool._management.areas cimport Areas
from vpool._management.core cimport STATUS_OVERLAP, Core, request_broken
from vpool._management.journal cimport TagCount
from vpool._management.state cimport RUNG_CALL, RUNG_COLLECT, RUNGS, Request
from vpool._management.walk cimport walk_find
from vpool._storage.driver cimport STATUS_OUT_OF_MEMORY
from vpool._storage.source cimport Range

from vpool._interface.tags import name_of
from vpool._management.ladder import RUNG_NAMES
from vpool.errors import (
    DoubleFreeError,
    ForeignPointerError,
    ForkedProcessError,
    InvalidPointerError,
    OutOfMemoryError,
    SourceError,
)
from vpool.report import Report
from vpool.shortage import Shortage
from vpool.sizes import format_bytes


cdef source_error(Core core, int status, str what):
    """The exception for a driver call that failed."""
    if status == STATUS_OVERLAP:
        return SourceError(f"{what}: it gave memory that the pool has already")
    name = core.source.driver.error_name(status)
    return SourceError(f"{what}: {name}", name)


cdef forked(str name):
    """The exception for a call to a pool of a parent of this process."""
    return ForkedProcessError(
        f'pool {name!r} belongs to the parent of this process and does not survive a fork: start processes by "spawn"'
        ' or "forkserver", or make a pool after the fork'
    )


cdef str _span(Range span):
    return f"{span.nbytes:,} bytes from {span.address:#x} to {span.address + span.nbytes:#x}"


cdef _at_the_end(str name, Request* request, str verb="lend"):
    """The exception for a request that failed when NumPy, which a report is made with, may be half gone."""
    return OutOfMemoryError(
        f"pool {name!r} cannot {verb} {request.requested:,} bytes ({format_bytes(request.requested)}), at the end of"
        " the interpreter", request.requested)


cdef failure(Areas areas, str name, Request* request, measures, debugger, str verb="lend"):
    """The exception for a request that failed; "reserve" for memory that nobody was to have yet.

    Its report is what the pool would tell, with the measures and the debugger that it has, or None.
    """
    cdef bint whole = verb == "lend" or areas.grows
    if request_broken(request):
        what = f"the source failed on a request of {format_bytes(request.requested)}"
        if request.status == STATUS_OVERLAP:
            return SourceError(
                f"{what}: it gave {_span(request.overlaps)}, but the pool has {_span(request.before)} already, and did"
                " not give it back. Nothing of it is lent"
            )
        return source_error(areas.core, request.status, what)
    if is_finalizing():
        return _at_the_end(name, request, verb)
    report = Report(*told_records(areas, name, measures, debugger))
    if not whole:
        reason = "its strategy takes nothing after construction"
    elif areas.only_blocks and request.requested > areas.largest_block:
        reason = (
            f"the pool's largest blocks are {areas.largest_block:,} bytes ({format_bytes(areas.largest_block)}); "
            f"a block of {round_up(request.requested, GRANULE):,} bytes, or oversize=\"direct\", would serve it"
        )
    elif request.no_record:
        reason = "host memory for block records ran out"
    elif request.arena.captured:
        reason = (
            "in a capture the pool waits for nothing and gives nothing back; `trim()` before it would have made"
            " what is free but perhaps in use available"
        )
    elif request.refused:
        reason = f"the device refused {format_bytes(request.refused)}"
    elif areas.core_only and request.common:
        reason = "all its blocks that fit are lent" if areas.largest_block else "its slab has no piece of that size"
    elif not areas.grows:
        reason = (
            "it is larger than all that the pool took at construction; a capacity of"
            f" {request.nbytes + request.alignment - GRANULE:,} bytes would hold it"
        )
    else:
        reason = "growing would pass the limit"
    steps = [RUNG_NAMES[rung] for rung in range(<int> RUNGS) if request.tried >> rung & 1]
    return OutOfMemoryError(
        f"pool {name!r} cannot {verb} {request.requested:,} bytes ({format_bytes(request.requested)}): {reason}."
        f" Limit {format_bytes(report.limit_bytes)}, reserved {format_bytes(report.reserved_bytes)},"
        f" live {format_bytes(report.allocated_bytes)}, free {format_bytes(report.free_bytes)}"
        f" of which {format_bytes(report.largest_free_bytes)} in the largest block,"
        f" pending {format_bytes(report.pending_bytes)}. Tried: {', '.join(steps) or 'nothing, which would not help'}.",
        request.requested, report, steps, Shortage(
            report, request.requested, request.nbytes, request.alignment, captured=request.arena.captured != 0,
        ) if whole else None,
    )


cdef over_limit(Areas areas, str name, Request* request, measures, debugger):
    """The exception for a request beyond the limit of its tag."""
    cdef TagCount* count = &areas.journal.tags[request.tag]
    if is_finalizing():
        return _at_the_end(name, request)
    tag = name_of(request.tag)
    report = Report(*told_records(areas, name, measures, debugger))
    row = next(row for number, row in report.tag_rows() if number == request.tag)
    counted = atomic_read(count.requested_bytes)  # against the limit: suspended blocks too
    return OutOfMemoryError(
        f"pool {name!r} cannot lend {request.requested:,} bytes ({format_bytes(request.requested)}) for tag {tag!r}:"
        f" its limit is {format_bytes(count.limit)} ({count.limit:,} bytes), of which"
        f" {format_bytes(counted)} are lent. Tried: {RUNG_NAMES[<int> RUNG_CALL]},"
        f" {RUNG_NAMES[<int> RUNG_COLLECT]}.",
        request.requested, report, (RUNG_NAMES[<int> RUNG_CALL], RUNG_NAMES[<int> RUNG_COLLECT]),
        Shortage(report, request.requested, tag=row | {"requested_bytes": counted}),
    )


cdef not_taken(source, str name, numbers, int status):
    """The exception for a source that did not give what a strategy takes at construction."""
    error = source.driver.error_name(status)
    what = f"pool {name!r} cannot take {numbers.core:,} bytes ({format_bytes(numbers.core)}) at construction: {error}."
    try:
        free, total = source.memory()
        what += f" Device {source.device} has {format_bytes(free)} free of {format_bytes(total)}."
    except SourceError:
        pass                                      # the device does not answer; the first error says more
    return OutOfMemoryError(what, numbers.core) if status == STATUS_OUT_OF_MEMORY else SourceError(what, error)


cdef stray(Areas areas, str name, uint64_t address, owner):
    """The exception for an address that is no live block; `owner` names the pool that has it, if one does."""
    cdef Block block
    cdef bint inside
    cdef Core area = areas.area_at(address)
    with nogil:
        inside = walk_find(area, address, &block)
    if not inside:
        whose = f"; it is of pool {owner!r}" if owner else ""
        return ForeignPointerError(f"{address:#x} is not of pool {name!r}{whose}")
    if block.state == BLOCK_SUSPENDED and block.stamp and block.address == address:
        return InvalidPointerError(f"the block at {address:#x} is suspended: resume() gives it memory again")
    if (block.state == BLOCK_LIVE or block.state == BLOCK_SUSPENDED and block.stamp) and block.address != address:
        return ForeignPointerError(
            f"{address:#x} lies {address - block.address} bytes inside the live block at {block.address:#x}"
        )
    if block.state == BLOCK_UNMAPPED:
        return DoubleFreeError(
            f"{address:#x} is no live block of pool {name!r}: there is no memory, since it is free already or never was"
            " lent"
        )
    return DoubleFreeError(f"{address:#x} is free already in pool {name!r}")

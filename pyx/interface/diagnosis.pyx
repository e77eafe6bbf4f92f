"""What went wrong, as exceptions that say what to do about it."""
from libc.stdint cimport uint64_t

from vpool._base.types cimport BLOCK_LIVE, Block
from vpool._interface.snapshot cimport copy_records
from vpool._management.core cimport Core, request_broken
from vpool._management.state cimport RUNGS, Request
from vpool._management.walk cimport walk_find

from vpool._management.core import RUNG_NAMES
from vpool.errors import DoubleFreeError, ForeignPointerError, OutOfMemoryError, SourceError
from vpool.report import Report
from vpool.sizes import format_bytes


cdef source_error(Core core, int status, str what):
    """The exception for a driver call that failed."""
    name = core.source.driver.error_name(status)
    return SourceError(f"{what}: {name}", name)


cdef failure(Core core, str name, Request* request):
    """The exception for a request that failed."""
    if request_broken(request):
        what = f"the source failed on a request of {format_bytes(request.requested)}"
        return source_error(core, request.status, what)
    report = Report(*copy_records(core, name))
    if request.no_record:
        reason = "host memory for block records ran out"
    elif request.refused:
        reason = f"the device refused {format_bytes(request.refused)}"
    else:
        reason = "growing would pass the limit"
    steps = [RUNG_NAMES[rung] for rung in range(<int> RUNGS) if request.tried >> rung & 1]
    return OutOfMemoryError(
        f"pool {name!r} cannot lend {request.requested:,} bytes ({format_bytes(request.requested)}): {reason}."
        f" Limit {format_bytes(report.limit_bytes)}, reserved {format_bytes(report.reserved_bytes)},"
        f" live {format_bytes(report.allocated_bytes)}, free {format_bytes(report.free_bytes)}"
        f" of which {format_bytes(report.largest_free_bytes)} in the largest block,"
        f" pending {format_bytes(report.pending_bytes)}. Tried: {', '.join(steps)}.",
        request.requested, report, steps,
    )


cdef stray(Core core, str name, uint64_t address, owner):
    """The exception for an address that is no live block; `owner` names the pool that has it, if one does."""
    cdef Block block
    cdef bint inside
    with nogil:
        inside = walk_find(core, address, &block)
    if not inside:
        whose = f"; it is of pool {owner!r}" if owner else ""
        return ForeignPointerError(f"{address:#x} is not of pool {name!r}{whose}")
    if block.state == BLOCK_LIVE and block.address != address:
        return ForeignPointerError(
            f"{address:#x} lies {address - block.address} bytes inside the live block at {block.address:#x}"
        )
    return DoubleFreeError(f"{address:#x} is free already in pool {name!r}")

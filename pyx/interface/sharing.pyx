"""Blocks for other processes."""
from libc.stdint cimport uint64_t

from vpool._base.types cimport BLOCK_LIVE, Block
from vpool._interface.diagnosis cimport source_error
from vpool._interface.lender cimport Lender
from vpool._management.core cimport Core
from vpool._management.state cimport Segment
from vpool._management.walk cimport walk_find
from vpool._storage.driver cimport STATUS_INVALID_VALUE, STATUS_NOT_SUPPORTED, STATUS_OK

from vpool.errors import SourceError
from vpool.ipc import IpcHandle


cdef handle_of(Lender pool, uint64_t address):
    """What another process opens a live block by.  Its segment stays with the pool from then on."""
    cdef uint64_t base = pool.base_of(address)
    cdef Core area = pool.areas.area_at(base)
    cdef Block block
    cdef Segment segment
    cdef char handle[64]
    cdef int status = STATUS_OK
    cdef bint found
    with nogil:
        found = walk_find(area, base, &block) and block.state == BLOCK_LIVE and block.address == base
        # The block is the caller's, so its segment cannot go meanwhile.
        found = found and area.find_segment(address, &segment)
        if found:
            status = area.source.share(segment.span.address, segment.handle.nbytes, handle)
        if found and status == STATUS_OK:         # one that nobody can open goes back as any other
            area.keep_segment(address)
    if not found:
        raise pool.stray_error(address)
    if status == STATUS_NOT_SUPPORTED or status == STATUS_INVALID_VALUE:
        name = area.source.driver.error_name(status)
        raise SourceError(
            f'memory of source {area.source.name!r} cannot be opened in another process ({name}); that of "cuda" can,'
            " on a device that supports it", name,
        )
    if status != STATUS_OK:
        raise source_error(area, status, "the driver does not share the segment")
    # Behind the bytes that were asked for there may be a guard.
    nbytes = block.stamp if pool.front else block.nbytes
    return IpcHandle(
        handle[:64], segment.span.address, address - segment.span.address, nbytes, area.source.device, area.source.name
    )

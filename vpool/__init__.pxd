"""What a compiled module gets with ``cimport vpool``."""
from vpool._interface.buffer cimport Buffer
from vpool._interface.compiled cimport (
    CLOSED,
    FORKED,
    INVALID_POINTER,
    INVALID_VALUE,
    OK,
    OUT_OF_MEMORY,
    Status,
    Stream,
    allocate,
    allocate_aligned,
    deallocate,
    deallocate_on,
    record_stream,
    stream_of,
)
from vpool._interface.pool cimport Pool

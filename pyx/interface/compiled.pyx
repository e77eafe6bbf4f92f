"""Pools for compiled callers: what they cimport, and the table of C functions in the capsule ``vpool.capi``."""
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport uint32_t, uint64_t

from vpool._base.lock cimport atomic_read
from vpool._base.types cimport GRANULE, MAX_ALIGNMENT
from vpool._interface.pool cimport Pool
from vpool._management.areas cimport areas_allocate, areas_deallocate, request_init
from vpool._management.state cimport STATE_CLOSED, STATE_DEBUG, STATE_FORKED, STATE_NOTED, Request

from vpool.errors import ClosedPoolError, ForkedProcessError, InvalidPointerError, OutOfMemoryError

cdef enum:
    VERSION = 1                   # functions in `Table`, counted by when they came

cdef struct Table:
    # As in vpool/capi.h.  Only ever added to, at the end.
    uint32_t version
    uint32_t nbytes
    void* (*pool_of)(PyObject* pool) except NULL
    void* (*stream_of)(void* pool, PyObject* stream) except NULL
    int (*allocate)(void* pool, void* stream, uint64_t nbytes, uint64_t* address) noexcept nogil
    int (*allocate_aligned)(void* pool, void* stream, uint64_t nbytes, uint64_t alignment,
                            uint64_t* address) noexcept nogil
    int (*deallocate)(void* pool, void* stream, uint64_t address) noexcept nogil
    int (*deallocate_on)(void* pool, void* stream, uint64_t address) noexcept nogil
    int (*record_stream)(void* pool, void* stream, uint64_t address) noexcept nogil


cdef Stream stream_of(Pool pool, stream) except NULL:
    """What a pool knows a stream as; errors are those of `Pool.allocate`."""
    return pool.arena_for(stream)


cdef int _reason(Pool pool) noexcept nogil:
    """Why a request was not served."""
    cdef uint32_t word = atomic_read(pool.areas.state.word)
    if word & STATE_FORKED:
        return FORKED
    return CLOSED if word & STATE_CLOSED else OUT_OF_MEMORY


cdef int allocate(Pool pool, Stream stream, uint64_t nbytes, uint64_t* address) noexcept nogil:
    address[0] = 0
    if nbytes >> 63:
        return INVALID_VALUE
    if nbytes == 0:
        return OK if atomic_read(pool.areas.state.word) & (STATE_FORKED | STATE_CLOSED) == 0 else _reason(pool)
    if areas_allocate(pool.areas, stream, nbytes, address):
        return OK
    address[0] = 0                                # of the record that stands for none
    return _reason(pool)


cdef int allocate_aligned(Pool pool, Stream stream, uint64_t nbytes, uint64_t alignment,
                          uint64_t* address) noexcept nogil:
    cdef Request request
    if alignment == 0 or alignment & (alignment - 1) or alignment > MAX_ALIGNMENT:
        address[0] = 0
        return INVALID_VALUE
    if alignment <= GRANULE or nbytes == 0 or nbytes >> 63:
        return allocate(pool, stream, nbytes, address)
    address[0] = 0
    if atomic_read(pool.areas.state.word) & (STATE_FORKED | STATE_CLOSED):
        return _reason(pool)
    if atomic_read(pool.areas.state.word) & (STATE_DEBUG | STATE_NOTED):
        return _allocate_watched(<void*> pool, stream, nbytes, alignment, address)
    request_init(pool.areas, &request, stream, nbytes, alignment)
    if not pool.areas.take(&request):
        return _reason(pool)
    address[0] = request.address
    return OK


cdef int _allocate_watched(void* pool, Stream stream, uint64_t nbytes, uint64_t alignment,
                           uint64_t* address) noexcept with gil:
    """The same in a pool that watches its blocks."""
    cdef uint64_t found = 0
    try:
        (<Pool> pool).lend(&stream, nbytes, alignment, &found)
    except Exception as error:
        return _status(error)
    address[0] = found
    return OK


cdef int _status(error) except -1:
    """What an exception is to a caller that gets none."""
    for kind, status in (
        (ClosedPoolError, CLOSED), (ForkedProcessError, FORKED), (InvalidPointerError, INVALID_POINTER),
        (OutOfMemoryError, OUT_OF_MEMORY), (MemoryError, OUT_OF_MEMORY),
    ):
        if isinstance(error, kind):
            return status
    return INVALID_VALUE


cdef int deallocate(Pool pool, Stream stream, uint64_t address) noexcept nogil:
    if address == 0 or areas_deallocate(pool.areas, stream, address):
        return OK
    if atomic_read(pool.areas.state.word) & STATE_DEBUG or not pool.areas.take_back(address, -1):
        return INVALID_POINTER
    if atomic_read(pool.areas.state.word):
        pool.areas.after_free()
    return OK


cdef int deallocate_on(Pool pool, Stream stream, uint64_t address) noexcept nogil:
    cdef uint32_t word = atomic_read(pool.areas.state.word)
    if address == 0 or word & STATE_FORKED:
        return OK
    if word & STATE_DEBUG:
        return _deallocate_watched(<void*> pool, stream, address)
    if not pool.areas.take_back(address, stream.slot):
        return INVALID_POINTER
    if atomic_read(pool.areas.state.word):
        pool.areas.after_free()
    return OK


cdef int _deallocate_watched(void* pool, Stream stream, uint64_t address) noexcept with gil:
    """The same in a pool that watches its blocks; damage is reported, as to anybody to whom nothing can be raised."""
    try:
        (<Pool> pool).debugger.free(address, stream.slot, surely=True)
        (<Pool> pool).after_free()
    except Exception:
        return INVALID_POINTER
    return OK


cdef int record_stream(Pool pool, Stream stream, uint64_t address) noexcept nogil:
    cdef uint32_t word = atomic_read(pool.areas.state.word)
    cdef int found
    if word & STATE_FORKED:
        return FORKED
    if address == 0:
        return OK
    if word & STATE_DEBUG:
        return _record_watched(<void*> pool, stream, address)
    found = pool.areas.use_on(address, stream.slot)
    return OK if found > 0 else INVALID_POINTER if found == 0 else OUT_OF_MEMORY


cdef int _record_watched(void* pool, Stream stream, uint64_t address) noexcept with gil:
    cdef int found
    try:
        found = (<Pool> pool).areas.use_on((<Pool> pool).base_of(address), stream.slot)
        if found > 0:
            (<Pool> pool).debugger.use(address, stream.slot)
    except Exception as error:
        return _status(error)
    return OK if found > 0 else INVALID_POINTER if found == 0 else OUT_OF_MEMORY


# The same for who has no types of Cython's.

cdef void* _pool_of(PyObject* pool) except NULL:
    if not isinstance(<object> pool, Pool):
        raise TypeError(f"expected a vpool.Pool, not {type(<object> pool).__name__}")
    return pool


cdef void* _stream_of(void* pool, PyObject* stream) except NULL:
    return stream_of(<Pool> pool, <object> stream)


cdef int _allocate(void* pool, void* stream, uint64_t nbytes, uint64_t* address) noexcept nogil:
    return allocate(<Pool> pool, <Stream> stream, nbytes, address)


cdef int _allocate_aligned(void* pool, void* stream, uint64_t nbytes, uint64_t alignment,
                           uint64_t* address) noexcept nogil:
    return allocate_aligned(<Pool> pool, <Stream> stream, nbytes, alignment, address)


cdef int _deallocate(void* pool, void* stream, uint64_t address) noexcept nogil:
    return deallocate(<Pool> pool, <Stream> stream, address)


cdef int _deallocate_on(void* pool, void* stream, uint64_t address) noexcept nogil:
    return deallocate_on(<Pool> pool, <Stream> stream, address)


cdef int _record_stream(void* pool, void* stream, uint64_t address) noexcept nogil:
    return record_stream(<Pool> pool, <Stream> stream, address)


cdef Table _table
_table.version = VERSION
_table.nbytes = sizeof(Table)
_table.pool_of = _pool_of
_table.stream_of = _stream_of
_table.allocate = _allocate
_table.allocate_aligned = _allocate_aligned
_table.deallocate = _deallocate
_table.deallocate_on = _deallocate_on
_table.record_stream = _record_stream

capi = PyCapsule_New(&_table, b"vpool.capi", NULL)

"""Memory from an allocator of Python's; everything else from the driver of the device that it is of."""
import logging

from libc.stdint cimport uint64_t

from vpool._base.clock cimport now_ns
from vpool._base.lock cimport atomic_add
from vpool._base.types cimport GRANULE
from vpool._storage.driver cimport CALL_FREE, CALL_MALLOC, STATUS_OK, STATUS_OUT_OF_MEMORY, Call, Driver

logger = logging.getLogger("vpool")

cdef enum:
    STATUS_UNKNOWN = 999


cdef class UpstreamDriver(Driver):
    """A driver whose segments somebody else gives.

    Parameters
    ----------
    base : Driver
        Of the device.
    lend : callable
        Bytes to an address, a multiple of 256, that any work may use at once; MemoryError for want of memory.
    take : callable
        Address and bytes: no work uses them any more.

    Notes
    -----
    Both are called with the GIL, from any thread.
    """

    def __cinit__(self, Driver base not None, lend, take):
        self.base = base
        self.lend = lend
        self.take = take
        self.table = base.table
        self.context = base.context
        self.captures = base.captures

    cdef int malloc(self, uint64_t* address, uint64_t nbytes) noexcept nogil:
        cdef uint64_t started = now_ns()
        return self.counted(CALL_MALLOC, started, _lend(self, address, nbytes))

    cdef int free(self, uint64_t address, uint64_t nbytes) noexcept nogil:
        cdef uint64_t started = now_ns()
        return self.counted(CALL_FREE, started, _take(self, address, nbytes))

    cdef int counted(self, Call call, uint64_t started, int status) noexcept nogil:
        cdef uint64_t elapsed = now_ns() - started
        atomic_add(self.stats[<int> call].calls, 1)
        atomic_add(self.stats[<int> call].nanoseconds, elapsed)
        atomic_add(self.spent, elapsed)
        if status != STATUS_OK:
            atomic_add(self.stats[<int> call].failures, 1)
        return status


cdef int _lend(UpstreamDriver driver, uint64_t* address, uint64_t nbytes) noexcept with gil:
    try:
        found = driver.lend(nbytes)
        if found % GRANULE:
            driver.take(found, nbytes)
            raise ValueError(f"{found:#x} is no multiple of {GRANULE}")
        address[0] = found
        return STATUS_OK
    except MemoryError:
        return STATUS_OUT_OF_MEMORY
    except BaseException as error:
        logger.warning("%d bytes could not be had for a pool: %s", nbytes, error)
        return STATUS_UNKNOWN


cdef int _take(UpstreamDriver driver, uint64_t address, uint64_t nbytes) noexcept with gil:
    try:
        driver.take(address, nbytes)
        return STATUS_OK
    except BaseException as error:
        logger.warning("%d bytes of a pool could not be given back: %s", nbytes, error)
        return STATUS_UNKNOWN

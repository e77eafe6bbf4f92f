"""Memory from an allocator of Python's; everything else from the driver of the device that it is of."""
from libc.stdint cimport uint64_t

from vpool._storage.driver cimport Call, Driver


cdef class UpstreamDriver(Driver):
    cdef readonly Driver base     # kept, since its functions are called
    cdef object lend
    cdef object take

    cdef int counted(self, Call call, uint64_t started, int status) noexcept nogil

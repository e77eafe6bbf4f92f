"""Driver calls that give addresses and no memory."""
from libc.stdint cimport uint64_t

from vpool._base.lock cimport SpinLock
from vpool._storage.simulated_streams cimport StreamedDriver, Streams
from vpool._storage.virtual_memory cimport VirtualMemory

cdef struct SimulatedDevice:
    Streams streams
    SpinLock lock                 # of the fields below; held for a few instructions
    uint64_t capacity
    uint64_t used
    uint64_t busy                 # bytes that somebody else holds
    uint64_t next_address
    VirtualMemory memory


cdef class SimulatedDriver(StreamedDriver):
    cdef SimulatedDevice device


cdef int any_attribute(void* context, int device, int attribute, int* value) noexcept nogil
cdef int virtual_granularity(void* context, int device, uint64_t* nbytes) noexcept nogil

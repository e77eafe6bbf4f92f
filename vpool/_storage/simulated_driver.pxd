"""Driver calls that give addresses and no memory."""
from libc.stdint cimport uint64_t

from vpool._base.lock cimport SpinLock
from vpool._storage.simulated_streams cimport StreamedDriver, Streams

cdef struct SimulatedDevice:
    Streams streams
    SpinLock lock                 # of the fields below; held for a few instructions
    uint64_t capacity
    uint64_t used
    uint64_t busy                 # bytes that somebody else holds
    uint64_t next_address


cdef class SimulatedDriver(StreamedDriver):
    cdef SimulatedDevice device

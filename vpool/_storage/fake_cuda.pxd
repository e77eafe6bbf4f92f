"""A CUDA of several devices over ordinary memory, so that the CUDA source runs without a GPU."""
from libc.stdint cimport uint64_t

from vpool._base.lock cimport SpinLock
from vpool._storage.simulated_streams cimport StreamedDriver, Streams

cdef enum:
    FAKE_DEVICES = 8

cdef struct FakeCuda:
    Streams streams
    SpinLock lock                 # of `used`; held for a few instructions
    int devices
    uint64_t capacity             # bytes of each device
    uint64_t used[FAKE_DEVICES]


cdef class FakeCudaDriver(StreamedDriver):
    cdef FakeCuda machine

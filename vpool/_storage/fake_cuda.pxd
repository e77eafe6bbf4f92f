"""A CUDA of several devices over ordinary memory, so that the CUDA source runs without a GPU."""
from libc.stdint cimport uint64_t

from vpool._base.lock cimport SpinLock
from vpool._storage.driver cimport Driver

cdef enum:
    FAKE_DEVICES = 8

cdef struct FakeCuda:
    SpinLock lock                 # of `used`; held for a few instructions
    int devices
    uint64_t capacity             # bytes of each device
    uint64_t used[FAKE_DEVICES]


cdef class FakeCudaDriver(Driver):
    cdef FakeCuda machine

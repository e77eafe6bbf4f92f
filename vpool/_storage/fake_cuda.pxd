"""A CUDA of several devices over ordinary memory, so that the CUDA source runs without a GPU."""
from libc.stdint cimport uint64_t

from vpool._base.lock cimport SpinLock
from vpool._storage.shared_memory cimport MOST_SHARED, Shared
from vpool._storage.simulated_streams cimport StreamedDriver, Streams
from vpool._storage.virtual_memory cimport VirtualMemory

cdef enum:
    FAKE_DEVICES = 8

cdef struct FakeCuda:
    Streams streams
    SpinLock lock                 # of what follows; held for a few instructions, or to share memory
    int devices
    uint64_t capacity             # bytes of each device
    uint64_t used[FAKE_DEVICES]
    uint64_t pinned               # bytes of the host
    bint pins                     # memory is the host's, and no device's
    Shared exported[<int> MOST_SHARED]
    Shared opened[<int> MOST_SHARED]
    VirtualMemory memory
    int file                      # in memory only: what handles have lies in it, each at a place of its own
    uint64_t file_bytes


cdef class FakeCudaDriver(StreamedDriver):
    cdef FakeCuda machine

"""Driver calls to a real CUDA device."""
from vpool._storage.driver cimport Driver


cdef class CudaDriver(Driver):
    pass

"""Memory of the fake CUDA that other processes can open."""
from libc.stdint cimport uint64_t

cdef enum:
    MOST_SHARED = 64

cdef struct Shared:
    uint64_t address              # 0: a free place
    uint64_t nbytes
    int file                      # of what was exported; -1: opened here
    uint64_t number               # of the file, the same in every process


cdef int shared_export(Shared* table, uint64_t address, uint64_t nbytes, char* handle) noexcept nogil
cdef int shared_open(Shared* table, const char* handle, uint64_t* address) noexcept nogil
cdef int shared_close(Shared* table, uint64_t address, bint exported) noexcept nogil

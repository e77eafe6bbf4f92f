"""Driver calls over ordinary memory."""
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from vpool._storage.simulated_streams cimport StreamedDriver, Streams


cdef class HostDriver(StreamedDriver):
    cdef Streams head


cdef const char* status_name(int status) noexcept nogil
cdef int host_map(uint64_t* address, uint64_t nbytes) noexcept nogil
cdef int host_unmap(uint64_t address, uint64_t nbytes) noexcept nogil
cdef int host_memory_info(void* context, uint64_t* free, uint64_t* total) noexcept nogil
cdef int host_fill(void* context, uint64_t address, uint32_t word, uint64_t words) noexcept nogil
cdef int host_read(void* context, void* host, uint64_t address, uint64_t nbytes) noexcept nogil
cdef int host_write(void* context, uint64_t address, const void* host, uint64_t nbytes) noexcept nogil
cdef int host_fill_on(void* context, uint64_t stream, uint64_t address, uint8_t byte, uint64_t nbytes) noexcept nogil
cdef int host_read_on(void* context, uint64_t stream, void* host, uint64_t address, uint64_t nbytes) noexcept nogil
cdef int host_copy_on(void* context, uint64_t stream, uint64_t to, uint64_t address, uint64_t nbytes) noexcept nogil

# What every machine with one device answers.
cdef int one_device_count(void* context, int* count) noexcept nogil
cdef int one_device_get(void* context, int* device) noexcept nogil
cdef int one_device_set(void* context, int device) noexcept nogil

"""Driver calls over ordinary memory: page-aligned, zeroed on first touch, really writable."""
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap
from posix.unistd cimport _SC_PAGESIZE, sysconf

from vpool._storage.driver cimport (
    STATUS_ALREADY_MAPPED,
    STATUS_CAPTURE_IMPLICIT,
    STATUS_CAPTURE_INVALIDATED,
    STATUS_CAPTURE_UNSUPPORTED,
    STATUS_ILLEGAL_ADDRESS,
    STATUS_INVALID_CONTEXT,
    STATUS_INVALID_DEVICE,
    STATUS_INVALID_HANDLE,
    STATUS_INVALID_VALUE,
    STATUS_NEEDS_NEWER_DRIVER,
    STATUS_NOT_INITIALIZED,
    STATUS_NOT_READY,
    STATUS_NOT_SUPPORTED,
    STATUS_OK,
    STATUS_OUT_OF_MEMORY,
)
from vpool._storage.simulated_streams cimport StreamedDriver

cdef extern from "unistd.h" nogil:
    int _SC_PHYS_PAGES
    int _SC_AVPHYS_PAGES


cdef const char* status_name(int status) noexcept nogil:
    """CUDA's name of the statuses that a driver without CUDA gives, or that tests have it give."""
    if status == STATUS_OK:
        return b"cudaSuccess"
    if status == STATUS_INVALID_VALUE:
        return b"cudaErrorInvalidValue"
    if status == STATUS_OUT_OF_MEMORY:
        return b"cudaErrorMemoryAllocation"
    if status == STATUS_NOT_INITIALIZED:
        return b"cudaErrorInitializationError"
    if status == STATUS_NEEDS_NEWER_DRIVER:
        return b"cudaErrorCallRequiresNewerDriver"
    if status == STATUS_INVALID_DEVICE:
        return b"cudaErrorInvalidDevice"
    if status == STATUS_INVALID_HANDLE:
        return b"cudaErrorInvalidResourceHandle"
    if status == STATUS_NOT_READY:
        return b"cudaErrorNotReady"
    if status == STATUS_ILLEGAL_ADDRESS:
        return b"cudaErrorIllegalAddress"
    if status == STATUS_CAPTURE_UNSUPPORTED:
        return b"cudaErrorStreamCaptureUnsupported"
    if status == STATUS_CAPTURE_INVALIDATED:
        return b"cudaErrorStreamCaptureInvalidated"
    if status == STATUS_CAPTURE_IMPLICIT:
        return b"cudaErrorStreamCaptureImplicit"
    if status == STATUS_INVALID_CONTEXT:
        return b"cudaErrorDeviceUninitialized"
    if status == STATUS_ALREADY_MAPPED:
        return b"cudaErrorAlreadyMapped"
    if status == STATUS_NOT_SUPPORTED:
        return b"cudaErrorNotSupported"
    return b"cudaErrorUnknown"


cdef int host_map(uint64_t* address, uint64_t nbytes) noexcept nogil:
    cdef void* base = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    if base == MAP_FAILED:
        return STATUS_OUT_OF_MEMORY
    address[0] = <uint64_t> base
    return STATUS_OK


cdef int host_unmap(uint64_t address, uint64_t nbytes) noexcept nogil:
    return STATUS_OK if munmap(<void*> address, nbytes) == 0 else STATUS_INVALID_VALUE


cdef int host_fill(void* context, uint64_t address, uint32_t word, uint64_t words) noexcept nogil:
    cdef uint32_t* memory = <uint32_t*> address
    cdef uint64_t i
    for i in range(words):
        memory[i] = word
    return STATUS_OK


cdef int host_read(void* context, void* host, uint64_t address, uint64_t nbytes) noexcept nogil:
    memcpy(host, <const void*> address, nbytes)
    return STATUS_OK


cdef int host_write(void* context, uint64_t address, const void* host, uint64_t nbytes) noexcept nogil:
    memcpy(<void*> address, host, nbytes)
    return STATUS_OK


# Nothing runs on a simulated stream, so its order is that of the calls.

cdef int host_fill_on(void* context, uint64_t stream, uint64_t address, uint8_t byte, uint64_t nbytes) noexcept nogil:
    memset(<void*> address, byte, nbytes)
    return STATUS_OK


cdef int host_read_on(void* context, uint64_t stream, void* host, uint64_t address, uint64_t nbytes) noexcept nogil:
    return host_read(context, host, address, nbytes)


cdef int host_copy_on(void* context, uint64_t stream, uint64_t to, uint64_t address, uint64_t nbytes) noexcept nogil:
    memcpy(<void*> to, <const void*> address, nbytes)
    return STATUS_OK


cdef int _malloc(void* context, uint64_t* address, uint64_t nbytes) noexcept nogil:
    return host_map(address, nbytes)


cdef int _free(void* context, uint64_t address, uint64_t nbytes) noexcept nogil:
    return host_unmap(address, nbytes)


cdef int host_memory_info(void* context, uint64_t* free, uint64_t* total) noexcept nogil:
    cdef uint64_t page = sysconf(_SC_PAGESIZE)
    free[0] = page * <uint64_t> sysconf(_SC_AVPHYS_PAGES)
    total[0] = page * <uint64_t> sysconf(_SC_PHYS_PAGES)
    return STATUS_OK


cdef int one_device_count(void* context, int* count) noexcept nogil:
    count[0] = 1
    return STATUS_OK


cdef int one_device_get(void* context, int* device) noexcept nogil:
    device[0] = 0
    return STATUS_OK


cdef int one_device_set(void* context, int device) noexcept nogil:
    return STATUS_OK if device == 0 else STATUS_INVALID_DEVICE


cdef class HostDriver(StreamedDriver):
    """Anonymous mappings of this process."""

    def __cinit__(self):
        self.context = &self.head
        self.give_streams(&self.head)
        self.table.malloc = _malloc
        self.table.free = _free
        self.table.memory_info = host_memory_info
        self.table.device_count = one_device_count
        self.table.get_device = one_device_get
        self.table.set_device = one_device_set
        self.table.fill = host_fill
        self.table.read = host_read
        self.table.write = host_write
        self.table.fill_on = host_fill_on
        self.table.read_on = host_read_on
        self.table.copy_on = host_copy_on
        self.table.error_name = status_name

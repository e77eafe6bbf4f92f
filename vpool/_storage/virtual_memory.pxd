"""Virtual memory without a device: ranges, handles and mappings, as strict as CUDA is."""
from libc.stdint cimport uint32_t, uint64_t

cdef enum:
    VIRTUAL_GRANULE = 2 << 20     # bytes; every size and address is a multiple of it
    MOST_RANGES = 256

cdef struct VirtualRange:
    uint64_t address              # 0: not in use
    uint64_t nbytes
    uint32_t* granules            # of each: the number of the handle that is mapped there, and flags; 0: none

cdef struct VirtualHandle:
    uint64_t nbytes               # 0: not in use
    uint64_t place                # its owner's word for where the memory is
    int device
    uint32_t mappings
    uint32_t uses                 # of this number, so that an old token is told from a new one
    uint32_t next                 # of those not in use
    bint released

cdef struct VirtualMemory:
    # The owner's lock guards all of it.
    VirtualRange ranges[<int> MOST_RANGES]
    VirtualHandle* handles
    uint32_t fresh
    uint32_t spare
    # What there is now.
    uint64_t range_count
    uint64_t handle_count
    uint64_t mapping_count


cdef void virtual_close(VirtualMemory* memory) noexcept nogil
cdef int virtual_add_range(VirtualMemory* memory, uint64_t address, uint64_t nbytes) noexcept nogil
cdef int virtual_drop_range(VirtualMemory* memory, uint64_t address, uint64_t nbytes) noexcept nogil
cdef VirtualHandle* virtual_create(VirtualMemory* memory, int device, uint64_t nbytes, uint64_t* token) noexcept nogil
cdef VirtualHandle* virtual_handle(VirtualMemory* memory, uint64_t token) noexcept nogil
cdef bint virtual_gone(VirtualMemory* memory, VirtualHandle* handle) noexcept nogil
cdef int virtual_map(VirtualMemory* memory, uint64_t address, uint64_t nbytes, uint64_t token) noexcept nogil
cdef VirtualHandle* virtual_mapped(VirtualMemory* memory, uint64_t address) noexcept nogil
cdef int virtual_may_unmap(VirtualMemory* memory, uint64_t address, uint64_t nbytes) noexcept nogil
cdef VirtualHandle* virtual_unmap(VirtualMemory* memory, uint64_t address) noexcept nogil
cdef int virtual_open(VirtualMemory* memory, uint64_t address, uint64_t nbytes) noexcept nogil

"""Driver calls that give addresses and no memory: for replay, tuning and tests."""
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from vpool._base.lock cimport spin_lock, spin_unlock
from vpool._base.types cimport round_up
from vpool._storage.driver cimport (
    CALL_ACCESS_SET,
    CALL_ADDRESS_FREE,
    CALL_ADDRESS_RESERVE,
    CALL_HANDLE_CREATE,
    CALL_HANDLE_MAP,
    CALL_HANDLE_RELEASE,
    CALL_HANDLE_UNMAP,
    STATUS_CAPTURE_UNSUPPORTED,
    STATUS_INVALID_VALUE,
    STATUS_OK,
    STATUS_OUT_OF_MEMORY,
)
from vpool._storage.host_driver cimport (
    one_device_count,
    one_device_get,
    one_device_set,
    status_name,
)
from vpool._storage.simulated_streams cimport StreamedDriver, forbidden_in_capture
from vpool._storage.virtual_memory cimport (
    VIRTUAL_GRANULE,
    VirtualHandle,
    VirtualMemory,
    virtual_add_range,
    virtual_close,
    virtual_create,
    virtual_drop_range,
    virtual_gone,
    virtual_handle,
    virtual_map,
    virtual_may_unmap,
    virtual_mapped,
    virtual_open,
    virtual_unmap,
)

cdef uint64_t FIRST_ADDRESS = (<uint64_t> 1) << 40


cdef int _malloc(void* context, uint64_t* address, uint64_t nbytes) noexcept nogil:
    cdef SimulatedDevice* device = <SimulatedDevice*> context
    cdef int status = STATUS_OUT_OF_MEMORY
    if forbidden_in_capture(context):
        return STATUS_CAPTURE_UNSUPPORTED
    spin_lock(&device.lock)
    if nbytes <= device.capacity - device.used and device.busy <= device.capacity - device.used - nbytes:
        address[0] = device.next_address
        # Segments lie side by side, the hardest case for a pool that must not merge across them.
        device.next_address += nbytes
        device.used += nbytes
        status = STATUS_OK
    spin_unlock(&device.lock)
    return status


cdef int _free(void* context, uint64_t address, uint64_t nbytes) noexcept nogil:
    cdef SimulatedDevice* device = <SimulatedDevice*> context
    if forbidden_in_capture(context):
        return STATUS_CAPTURE_UNSUPPORTED
    spin_lock(&device.lock)
    device.used -= nbytes
    spin_unlock(&device.lock)
    return STATUS_OK


cdef int _memory_info(void* context, uint64_t* free, uint64_t* total) noexcept nogil:
    cdef SimulatedDevice* device = <SimulatedDevice*> context
    spin_lock(&device.lock)
    total[0] = device.capacity
    free[0] = device.capacity - device.used
    free[0] = free[0] - device.busy if device.busy < free[0] else 0
    spin_unlock(&device.lock)
    return STATUS_OK


cdef int _no_memory_to_fill(void* context, uint64_t address, uint32_t word, uint64_t words) noexcept nogil:
    return STATUS_INVALID_VALUE


cdef int _no_memory_to_read(void* context, void* host, uint64_t address, uint64_t nbytes) noexcept nogil:
    return STATUS_INVALID_VALUE


cdef int _no_memory_to_write(void* context, uint64_t address, const void* host, uint64_t nbytes) noexcept nogil:
    return STATUS_INVALID_VALUE


cdef int _no_memory_to_fill_on(void* context, uint64_t stream, uint64_t address, uint8_t byte,
                               uint64_t nbytes) noexcept nogil:
    return STATUS_INVALID_VALUE


cdef int _no_memory_to_read_on(void* context, uint64_t stream, void* host, uint64_t address,
                               uint64_t nbytes) noexcept nogil:
    return STATUS_INVALID_VALUE


cdef int _no_memory_to_copy_on(void* context, uint64_t stream, uint64_t to, uint64_t address,
                               uint64_t nbytes) noexcept nogil:
    return STATUS_INVALID_VALUE


cdef int any_attribute(void* context, int device, int attribute, int* value) noexcept nogil:
    value[0] = 1
    return STATUS_OK


cdef int virtual_granularity(void* context, int device, uint64_t* nbytes) noexcept nogil:
    nbytes[0] = VIRTUAL_GRANULE
    return STATUS_OK


cdef int _address_reserve(void* context, uint64_t nbytes, uint64_t* address) noexcept nogil:
    cdef SimulatedDevice* device = <SimulatedDevice*> context
    cdef uint64_t begin
    cdef int status = STATUS_OUT_OF_MEMORY
    spin_lock(&device.lock)
    begin = round_up(device.next_address, VIRTUAL_GRANULE)
    # Processors have 57 bits of address space at most.
    if nbytes < (<uint64_t> 1 << 57) - begin:
        status = virtual_add_range(&device.memory, begin, nbytes)
    if status == STATUS_OK:
        address[0] = begin
        device.next_address = begin + nbytes
    spin_unlock(&device.lock)
    return status


cdef int _address_free(void* context, uint64_t address, uint64_t nbytes) noexcept nogil:
    cdef SimulatedDevice* device = <SimulatedDevice*> context
    cdef int status
    spin_lock(&device.lock)
    status = virtual_drop_range(&device.memory, address, nbytes)
    spin_unlock(&device.lock)
    return status


cdef int _handle_create(void* context, int ordinal, uint64_t nbytes, bint exportable, uint64_t* token) noexcept nogil:
    cdef SimulatedDevice* device = <SimulatedDevice*> context
    cdef int status = STATUS_OUT_OF_MEMORY
    if nbytes == 0 or nbytes % VIRTUAL_GRANULE:
        return STATUS_INVALID_VALUE
    spin_lock(&device.lock)
    if nbytes <= device.capacity - device.used and device.busy <= device.capacity - device.used - nbytes and (
            virtual_create(&device.memory, ordinal, nbytes, token) != NULL):
        device.used += nbytes
        status = STATUS_OK
    spin_unlock(&device.lock)
    return status


cdef int _handle_release(void* context, uint64_t token) noexcept nogil:
    cdef SimulatedDevice* device = <SimulatedDevice*> context
    cdef VirtualHandle* handle
    cdef int status = STATUS_INVALID_VALUE
    spin_lock(&device.lock)
    handle = virtual_handle(&device.memory, token)
    if handle != NULL:
        handle.released = True
        _free_if_gone(device, handle)
        status = STATUS_OK
    spin_unlock(&device.lock)
    return status


cdef void _free_if_gone(SimulatedDevice* device, VirtualHandle* handle) noexcept nogil:
    cdef uint64_t nbytes = handle.nbytes
    if virtual_gone(&device.memory, handle):
        device.used -= nbytes


cdef int _handle_map(void* context, uint64_t address, uint64_t nbytes, uint64_t token) noexcept nogil:
    cdef SimulatedDevice* device = <SimulatedDevice*> context
    cdef int status
    spin_lock(&device.lock)
    status = virtual_map(&device.memory, address, nbytes, token)
    spin_unlock(&device.lock)
    return status


cdef int _handle_unmap(void* context, uint64_t address, uint64_t nbytes) noexcept nogil:
    cdef SimulatedDevice* device = <SimulatedDevice*> context
    cdef uint64_t part
    cdef int status
    spin_lock(&device.lock)
    status = virtual_may_unmap(&device.memory, address, nbytes)
    while status == STATUS_OK and nbytes:
        part = virtual_mapped(&device.memory, address).nbytes
        _free_if_gone(device, virtual_unmap(&device.memory, address))
        address += part
        nbytes -= part
    spin_unlock(&device.lock)
    return status


cdef int _access_set(void* context, uint64_t address, uint64_t nbytes, int ordinal) noexcept nogil:
    cdef SimulatedDevice* device = <SimulatedDevice*> context
    cdef int status
    spin_lock(&device.lock)
    status = virtual_open(&device.memory, address, nbytes)
    spin_unlock(&device.lock)
    return status


cdef class SimulatedDriver(StreamedDriver):
    """Addresses only.

    Parameters
    ----------
    capacity : int
        Bytes that the device has.
    base_offset : int
        Bytes by which every address lies past a multiple of 2 MiB, to model a device whose
        addresses are less aligned than one would like.
    """

    def __cinit__(self, uint64_t capacity, uint64_t base_offset=0):
        self.device.capacity = capacity
        self.device.next_address = FIRST_ADDRESS + base_offset
        self.context = &self.device
        self.give_streams(&self.device.streams)
        self.table.malloc = _malloc
        self.table.free = _free
        self.table.memory_info = _memory_info
        self.table.device_count = one_device_count
        self.table.get_device = one_device_get
        self.table.set_device = one_device_set
        self.table.fill = _no_memory_to_fill
        self.table.read = _no_memory_to_read
        self.table.write = _no_memory_to_write
        self.table.fill_on = _no_memory_to_fill_on
        self.table.read_on = _no_memory_to_read_on
        self.table.copy_on = _no_memory_to_copy_on
        self.table.device_attribute = any_attribute
        self.table.handle_granularity = virtual_granularity
        self.table.address_reserve = _address_reserve
        self.table.address_free = _address_free
        self.table.handle_create = _handle_create
        self.table.handle_release = _handle_release
        self.table.handle_map = _handle_map
        self.table.handle_unmap = _handle_unmap
        self.table.access_set = _access_set
        self.table.error_name = status_name
        # As measured on an H200, for handles of up to 64 MiB.
        self.costs[<int> CALL_ADDRESS_RESERVE] = 19_000
        self.costs[<int> CALL_ADDRESS_FREE] = 19_000
        self.costs[<int> CALL_HANDLE_CREATE] = 14_000
        self.costs[<int> CALL_HANDLE_RELEASE] = 14_000
        self.costs[<int> CALL_HANDLE_MAP] = 1_500
        self.costs[<int> CALL_HANDLE_UNMAP] = 21_000
        self.costs[<int> CALL_ACCESS_SET] = 33_000

    def __dealloc__(self):
        virtual_close(&self.device.memory)

    @property
    def used(self):
        """Bytes that are out."""
        return self.device.used

    def virtual(self):
        """How many ranges, handles and mappings there are."""
        cdef VirtualMemory* memory = &self.device.memory
        return memory.range_count, memory.handle_count, memory.mapping_count

    def set_next_address(self, uint64_t address):
        """Let the next segment begin at an address, which is perhaps another's: a source that is broken."""
        self.device.next_address = address

    def set_free(self, uint64_t nbytes):
        """Let somebody else hold so much that `nbytes` are left."""
        cdef uint64_t left = self.device.capacity - self.device.used
        self.device.busy = left - nbytes if nbytes < left else 0

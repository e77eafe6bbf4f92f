"""Driver calls that give addresses and no memory: for replay, tuning and tests."""
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from vpool._base.lock cimport spin_lock, spin_unlock
from vpool._storage.driver cimport STATUS_CAPTURE_UNSUPPORTED, STATUS_INVALID_VALUE, STATUS_OK, STATUS_OUT_OF_MEMORY
from vpool._storage.host_driver cimport (
    one_device_count,
    one_device_get,
    one_device_set,
    status_name,
)
from vpool._storage.simulated_streams cimport StreamedDriver, forbidden_in_capture

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
        self.table.error_name = status_name

    @property
    def used(self):
        """Bytes that are out."""
        return self.device.used

    def set_next_address(self, uint64_t address):
        """Let the next segment begin at an address, which is perhaps another's: a source that is broken."""
        self.device.next_address = address

    def set_free(self, uint64_t nbytes):
        """Let somebody else hold so much that `nbytes` are left."""
        cdef uint64_t left = self.device.capacity - self.device.used
        self.device.busy = left - nbytes if nbytes < left else 0

"""A CUDA of several devices over ordinary memory, so that the CUDA source runs without a GPU.

What it keeps of the real one: a current device for each thread, memory that belongs to the device
that was current when it was taken, ordinals that are checked, a total that can run out, memory that another
process can open.
"""
from libc.stdint cimport uint32_t, uint64_t

from vpool._base.lock cimport spin_lock, spin_unlock
from vpool._storage.driver cimport (
    STATUS_CAPTURE_UNSUPPORTED,
    STATUS_INVALID_DEVICE,
    STATUS_INVALID_VALUE,
    STATUS_OK,
    STATUS_OUT_OF_MEMORY,
)
from vpool._storage.host_driver cimport (
    host_fill,
    host_fill_on,
    host_map,
    host_read,
    host_unmap,
    host_write,
    status_name,
)
from vpool._storage.shared_memory cimport shared_close, shared_export, shared_open
from vpool._storage.simulated_streams cimport StreamedDriver, forbidden_in_capture, stream_captures

cdef extern from *:
    """
    static __thread int vpool_fake_device = 0;
    """
    int current_device "vpool_fake_device"


cdef int _malloc(void* context, uint64_t* address, uint64_t nbytes) noexcept nogil:
    cdef FakeCuda* machine = <FakeCuda*> context
    cdef int device = current_device
    cdef bint fits
    if forbidden_in_capture(context):
        return STATUS_CAPTURE_UNSUPPORTED
    spin_lock(&machine.lock)
    fits = nbytes <= machine.capacity - machine.used[device]
    if fits:
        machine.used[device] += nbytes
    spin_unlock(&machine.lock)
    return host_map(address, nbytes) if fits else STATUS_OUT_OF_MEMORY


cdef int _free(void* context, uint64_t address, uint64_t nbytes) noexcept nogil:
    cdef FakeCuda* machine = <FakeCuda*> context
    cdef bint known
    if forbidden_in_capture(context):
        return STATUS_CAPTURE_UNSUPPORTED
    spin_lock(&machine.lock)
    # Stricter than CUDA, which frees from any device: vpool promises to free on the pool's own.
    known = nbytes <= machine.used[current_device]
    if known:
        machine.used[current_device] -= nbytes
        shared_close(machine.exported, address, True)
    spin_unlock(&machine.lock)
    return host_unmap(address, nbytes) if known else STATUS_INVALID_VALUE


cdef int _memory_info(void* context, uint64_t* free, uint64_t* total) noexcept nogil:
    cdef FakeCuda* machine = <FakeCuda*> context
    total[0] = machine.capacity
    free[0] = machine.capacity - machine.used[current_device]
    return STATUS_OK


cdef int _fill(void* context, uint64_t address, uint32_t word, uint64_t words) noexcept nogil:
    cdef int state
    cdef int status = stream_captures(context, 0, &state)
    return host_fill(context, address, word, words) if status == STATUS_OK else status


cdef int _read(void* context, void* host, uint64_t address, uint64_t nbytes) noexcept nogil:
    cdef int state
    cdef int status = stream_captures(context, 0, &state)
    return host_read(context, host, address, nbytes) if status == STATUS_OK else status


cdef int _read_on(void* context, uint64_t stream, void* host, uint64_t address, uint64_t nbytes) noexcept nogil:
    # It waits for the stream, which no capture allows.
    return STATUS_CAPTURE_UNSUPPORTED if forbidden_in_capture(context) else host_read(context, host, address, nbytes)


cdef int _device_count(void* context, int* count) noexcept nogil:
    count[0] = (<FakeCuda*> context).devices
    return STATUS_OK


cdef int _get_device(void* context, int* device) noexcept nogil:
    device[0] = current_device
    return STATUS_OK


cdef int _set_device(void* context, int device) noexcept nogil:
    global current_device
    if device < 0 or device >= (<FakeCuda*> context).devices:
        return STATUS_INVALID_DEVICE
    current_device = device
    return STATUS_OK


cdef int _ipc_get(void* context, uint64_t address, uint64_t nbytes, char* handle) noexcept nogil:
    cdef FakeCuda* machine = <FakeCuda*> context
    cdef int status
    spin_lock(&machine.lock)
    status = shared_export(machine.exported, address, nbytes, handle)
    spin_unlock(&machine.lock)
    return status


cdef int _ipc_open(void* context, const char* handle, uint64_t* address) noexcept nogil:
    cdef FakeCuda* machine = <FakeCuda*> context
    cdef int status
    spin_lock(&machine.lock)
    status = shared_open(machine.opened, handle, address)
    spin_unlock(&machine.lock)
    return status


cdef int _ipc_close(void* context, uint64_t address) noexcept nogil:
    cdef FakeCuda* machine = <FakeCuda*> context
    cdef int status
    spin_lock(&machine.lock)
    status = shared_close(machine.opened, address, False)
    spin_unlock(&machine.lock)
    return status


cdef class FakeCudaDriver(StreamedDriver):
    """A machine of `devices` devices with `capacity` bytes each."""

    def __cinit__(self, uint64_t capacity, int devices=1):
        if not 1 <= devices <= FAKE_DEVICES:
            raise ValueError(f"a fake machine has 1 to {FAKE_DEVICES} devices, not {devices}")
        self.machine.devices = devices
        self.machine.capacity = capacity
        self.context = &self.machine
        self.give_streams(&self.machine.streams)
        self.table.malloc = _malloc
        self.table.free = _free
        self.table.memory_info = _memory_info
        self.table.device_count = _device_count
        self.table.get_device = _get_device
        self.table.set_device = _set_device
        self.table.fill = _fill
        self.table.read = _read
        self.table.write = host_write
        self.table.ipc_get = _ipc_get
        self.table.ipc_open = _ipc_open
        self.table.ipc_close = _ipc_close
        self.table.fill_on = host_fill_on
        self.table.read_on = _read_on
        self.table.error_name = status_name

    def used(self, int device=0):
        """Bytes that are out on a device."""
        return self.machine.used[device]

    @property
    def current_device(self):
        """The calling thread's current device, as a program without vpool would set it."""
        return current_device

    @current_device.setter
    def current_device(self, int device):
        if _set_device(self.context, device) != STATUS_OK:
            raise ValueError(f"no fake device {device}")

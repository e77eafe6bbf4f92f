"""A CUDA of several devices over ordinary memory, so that the CUDA source runs without a GPU.

What it keeps of the real one: a current device for each thread, memory that belongs to the device
that was current when it was taken, ordinals that are checked, a total that can run out, memory that another
process can open, and virtual memory: handles are parts of a file that exists in memory only, so that they carry
their bytes to wherever they are mapped, and whoever touches an address without memory is killed.
"""
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from posix.fcntl cimport off_t
from posix.mman cimport (
    MAP_ANONYMOUS,
    MAP_FAILED,
    MAP_FIXED,
    MAP_PRIVATE,
    MAP_SHARED,
    PROT_NONE,
    PROT_READ,
    PROT_WRITE,
    mmap,
    mprotect,
    munmap,
)
from posix.unistd cimport close, ftruncate

from vpool._base.lock cimport spin_lock, spin_unlock
from vpool._base.types cimport round_up
from vpool._storage.driver cimport (
    CAPTURE_NONE,
    STATUS_CAPTURE_UNSUPPORTED,
    STATUS_INVALID_DEVICE,
    STATUS_INVALID_VALUE,
    STATUS_OK,
    STATUS_OUT_OF_MEMORY,
)
from vpool._storage.host_driver cimport (
    host_copy_on,
    host_fill,
    host_fill_on,
    host_map,
    host_read,
    host_unmap,
    host_write,
    status_name,
)
from vpool._storage.shared_memory cimport shared_close, shared_export, shared_open
from vpool._storage.simulated_driver cimport any_attribute, virtual_granularity
from vpool._storage.simulated_streams cimport StreamedDriver, forbidden_in_capture, stream_captures
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

cdef extern from "fcntl.h" nogil:
    int fallocate(int file, int mode, off_t offset, off_t nbytes)
    int FALLOC_FL_KEEP_SIZE
    int FALLOC_FL_PUNCH_HOLE

cdef extern from "sys/mman.h" nogil:
    int memfd_create(const char* name, unsigned int flags)
    unsigned int MFD_CLOEXEC
    int MAP_NORESERVE

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
    if machine.pins:
        fits = nbytes <= machine.capacity - machine.pinned
        machine.pinned += nbytes if fits else 0
    else:
        fits = nbytes <= machine.capacity - machine.used[device]
        machine.used[device] += nbytes if fits else 0
    spin_unlock(&machine.lock)
    return host_map(address, nbytes) if fits else STATUS_OUT_OF_MEMORY


cdef int _free(void* context, uint64_t address, uint64_t nbytes) noexcept nogil:
    cdef FakeCuda* machine = <FakeCuda*> context
    cdef bint known
    if forbidden_in_capture(context):
        return STATUS_CAPTURE_UNSUPPORTED
    spin_lock(&machine.lock)
    # Stricter than CUDA, which frees from any device: vpool promises to free on the pool's own.
    known = nbytes <= (machine.pinned if machine.pins else machine.used[current_device])
    if known and machine.pins:
        machine.pinned -= nbytes
    elif known:
        machine.used[current_device] -= nbytes
        shared_close(machine.exported, address, True)
    spin_unlock(&machine.lock)
    return host_unmap(address, nbytes) if known else STATUS_INVALID_VALUE


cdef int _memory_info(void* context, uint64_t* free, uint64_t* total) noexcept nogil:
    cdef FakeCuda* machine = <FakeCuda*> context
    total[0] = machine.capacity
    free[0] = machine.capacity - (machine.pinned if machine.pins else machine.used[current_device])
    return STATUS_OK


cdef int _fill(void* context, uint64_t address, uint32_t word, uint64_t words) noexcept nogil:
    cdef int state
    cdef int status = stream_captures(context, 0, &state)
    return host_fill(context, address, word, words) if status == STATUS_OK else status


cdef int _read(void* context, void* host, uint64_t address, uint64_t nbytes) noexcept nogil:
    cdef int state
    cdef int status = stream_captures(context, 0, &state)
    return host_read(context, host, address, nbytes) if status == STATUS_OK else status


cdef int _fill_on(void* context, uint64_t stream, uint64_t address, uint8_t byte, uint64_t nbytes) noexcept nogil:
    cdef int state
    cdef int status = stream_captures(context, stream, &state)
    if status != STATUS_OK or state != CAPTURE_NONE:
        return status                             # captured, as below
    return host_fill_on(context, stream, address, byte, nbytes)


cdef int _read_on(void* context, uint64_t stream, void* host, uint64_t address, uint64_t nbytes) noexcept nogil:
    cdef int state
    cdef int status = stream_captures(context, stream, &state)
    # It waits for the stream, which no capture allows.
    if forbidden_in_capture(context):
        return STATUS_CAPTURE_UNSUPPORTED
    return host_read(context, host, address, nbytes) if status == STATUS_OK else status


cdef int _copy_on(void* context, uint64_t stream, uint64_t to, uint64_t address, uint64_t nbytes) noexcept nogil:
    cdef int state
    cdef int status = stream_captures(context, stream, &state)
    # What is captured is done when its graph is launched, which none is here.
    if status != STATUS_OK or state != CAPTURE_NONE:
        return status
    return host_copy_on(context, stream, to, address, nbytes)


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


# Virtual memory.

cdef bint _clear(uint64_t address, uint64_t nbytes) noexcept nogil:
    """Make a part of a range address space without memory."""
    return mmap(<void*> address, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
                0) != MAP_FAILED


cdef int _address_reserve(void* context, uint64_t nbytes, uint64_t* address) noexcept nogil:
    cdef FakeCuda* machine = <FakeCuda*> context
    cdef uint64_t base, begin
    cdef void* mapped
    cdef int status
    if nbytes == 0 or nbytes >= <uint64_t> 1 << 46:
        return STATUS_OUT_OF_MEMORY if nbytes else STATUS_INVALID_VALUE
    mapped = mmap(NULL, nbytes + VIRTUAL_GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if mapped == MAP_FAILED:
        return STATUS_OUT_OF_MEMORY
    base = <uint64_t> mapped
    begin = round_up(base, VIRTUAL_GRANULE)
    if begin > base:
        munmap(mapped, begin - base)
    munmap(<void*> (begin + nbytes), VIRTUAL_GRANULE - (begin - base))
    spin_lock(&machine.lock)
    status = virtual_add_range(&machine.memory, begin, nbytes)
    spin_unlock(&machine.lock)
    if status != STATUS_OK:
        munmap(<void*> begin, nbytes)
        return status
    address[0] = begin
    return STATUS_OK


cdef int _address_free(void* context, uint64_t address, uint64_t nbytes) noexcept nogil:
    cdef FakeCuda* machine = <FakeCuda*> context
    cdef int status
    spin_lock(&machine.lock)
    status = virtual_drop_range(&machine.memory, address, nbytes)
    spin_unlock(&machine.lock)
    return host_unmap(address, nbytes) if status == STATUS_OK else status


cdef int _extend(FakeCuda* machine, uint64_t nbytes, uint64_t* place) noexcept nogil:
    """A new place in the file, which is never used again: sparse as it is, it costs nothing when it is empty."""
    if machine.file < 0:
        machine.file = memfd_create(b"vpool", MFD_CLOEXEC)
    if machine.file < 0 or ftruncate(machine.file, machine.file_bytes + nbytes) != 0:
        return STATUS_OUT_OF_MEMORY
    place[0] = machine.file_bytes
    machine.file_bytes += nbytes
    return STATUS_OK


cdef int _handle_create(void* context, int device, uint64_t nbytes, bint exportable, uint64_t* token) noexcept nogil:
    cdef FakeCuda* machine = <FakeCuda*> context
    cdef VirtualHandle* handle = NULL
    cdef uint64_t place = 0
    cdef int status = STATUS_OUT_OF_MEMORY
    if device < 0 or device >= machine.devices:
        return STATUS_INVALID_DEVICE
    if nbytes == 0 or nbytes % VIRTUAL_GRANULE:
        return STATUS_INVALID_VALUE
    spin_lock(&machine.lock)
    if nbytes <= machine.capacity - machine.used[device]:
        status = _extend(machine, nbytes, &place)
    if status == STATUS_OK:
        handle = virtual_create(&machine.memory, device, nbytes, token)
        status = STATUS_OUT_OF_MEMORY
    if handle != NULL:
        handle.place = place
        machine.used[device] += nbytes
        status = STATUS_OK
    spin_unlock(&machine.lock)
    return status


cdef void _free_if_gone(FakeCuda* machine, VirtualHandle* handle) noexcept nogil:
    cdef uint64_t nbytes = handle.nbytes
    if virtual_gone(&machine.memory, handle):
        machine.used[handle.device] -= nbytes
        fallocate(machine.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, handle.place, nbytes)


cdef int _handle_release(void* context, uint64_t token) noexcept nogil:
    cdef FakeCuda* machine = <FakeCuda*> context
    cdef VirtualHandle* handle
    cdef int status = STATUS_INVALID_VALUE
    spin_lock(&machine.lock)
    handle = virtual_handle(&machine.memory, token)
    if handle != NULL:
        handle.released = True
        _free_if_gone(machine, handle)
        status = STATUS_OK
    spin_unlock(&machine.lock)
    return status


cdef int _handle_map(void* context, uint64_t address, uint64_t nbytes, uint64_t token) noexcept nogil:
    cdef FakeCuda* machine = <FakeCuda*> context
    cdef int status
    spin_lock(&machine.lock)
    status = virtual_map(&machine.memory, address, nbytes, token)
    if status == STATUS_OK and mmap(<void*> address, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, machine.file,
                                    virtual_handle(&machine.memory, token).place) == MAP_FAILED:
        virtual_unmap(&machine.memory, address)
        status = STATUS_OUT_OF_MEMORY
    spin_unlock(&machine.lock)
    return status


cdef int _handle_unmap(void* context, uint64_t address, uint64_t nbytes) noexcept nogil:
    cdef FakeCuda* machine = <FakeCuda*> context
    cdef uint64_t part
    cdef int status
    spin_lock(&machine.lock)
    status = virtual_may_unmap(&machine.memory, address, nbytes)
    if status == STATUS_OK and not _clear(address, nbytes):
        status = STATUS_OUT_OF_MEMORY
    while status == STATUS_OK and nbytes:
        part = virtual_mapped(&machine.memory, address).nbytes
        _free_if_gone(machine, virtual_unmap(&machine.memory, address))
        address += part
        nbytes -= part
    spin_unlock(&machine.lock)
    return status


cdef int _access_set(void* context, uint64_t address, uint64_t nbytes, int device) noexcept nogil:
    cdef FakeCuda* machine = <FakeCuda*> context
    cdef int status
    if device < 0 or device >= machine.devices:
        return STATUS_INVALID_DEVICE
    spin_lock(&machine.lock)
    status = virtual_open(&machine.memory, address, nbytes)
    if status == STATUS_OK and mprotect(<void*> address, nbytes, PROT_READ | PROT_WRITE) != 0:
        status = STATUS_OUT_OF_MEMORY
    spin_unlock(&machine.lock)
    return status


cdef class FakeCudaDriver(StreamedDriver):
    """A machine of `devices` devices with `capacity` bytes each, and a host with as many.

    With `pins` it gives the host's memory, as the driver of pinned memory does; managed memory and that of the driver's
    own pool count as the device's.
    """

    def __cinit__(self, uint64_t capacity, int devices=1, *, bint pins=False):
        if not 1 <= devices <= FAKE_DEVICES:
            raise ValueError(f"a fake machine has 1 to {FAKE_DEVICES} devices, not {devices}")
        self.machine.devices = devices
        self.machine.capacity = capacity
        self.machine.file = -1
        self.machine.pins = pins
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
        self.table.fill_on = _fill_on
        self.table.read_on = _read_on
        self.table.copy_on = _copy_on
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

    def __dealloc__(self):
        virtual_close(&self.machine.memory)
        if self.machine.file > 0:                 # 0 where there was no time to say -1
            close(self.machine.file)

    def virtual(self):
        """How many ranges, handles and mappings there are."""
        cdef VirtualMemory* memory = &self.machine.memory
        return memory.range_count, memory.handle_count, memory.mapping_count

    def used(self, int device=0):
        """Bytes that are out on a device."""
        return self.machine.used[device]

    @property
    def pinned(self):
        """Bytes of the host that are out."""
        return self.machine.pinned

    @property
    def current_device(self):
        """The calling thread's current device, as a program without vpool would set it."""
        return current_device

    @current_device.setter
    def current_device(self, int device):
        if _set_device(self.context, device) != STATUS_OK:
            raise ValueError(f"no fake device {device}")

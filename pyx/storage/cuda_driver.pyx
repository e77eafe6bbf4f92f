"""Driver calls to a real CUDA device.  The only module that cimports cuda.bindings, hence C++.

cuda.bindings declares its functions as able to raise: on one status each Cython would take the GIL and
look for an exception.  Here they are called through pointers that cannot, and `_settled` clears
the exception, so that no caller below the interface ever meets Python.
"""
from cpython.exc cimport PyErr_Clear
from cuda.bindings cimport cydriver, cyruntime
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from vpool._storage.driver cimport (
    CAPTURE_RELAXED,
    STATUS_NEEDS_NEWER_DRIVER,
    STATUS_NOT_READY,
    STATUS_OK,
    Driver,
    gone_t,
)
from vpool._storage.host_driver cimport host_memory_info

cdef extern from "cuda.h":
    const int CUDA_VERSION

ctypedef struct IpcBytes:         # as cudaIpcMemHandle_t
    char reserved[64]

ctypedef int (*malloc_t)(void** address, size_t nbytes) noexcept nogil
ctypedef int (*free_t)(void* address) noexcept nogil
ctypedef int (*malloc_with_t)(void** address, size_t nbytes, unsigned int flags) noexcept nogil
ctypedef int (*malloc_on_t)(void** address, size_t nbytes, void* stream) noexcept nogil
ctypedef int (*free_on_t)(void* address, void* stream) noexcept nogil
ctypedef int (*memory_info_t)(size_t* free, size_t* total) noexcept nogil
ctypedef int (*get_int_t)(int* value) noexcept nogil
ctypedef int (*set_int_t)(int value) noexcept nogil
ctypedef int (*copy_t)(void* to, const void* source, size_t nbytes, int kind) noexcept nogil
ctypedef int (*fill_t)(uint64_t address, unsigned int word, size_t words, void* stream) noexcept nogil
ctypedef int (*fill_on_t)(void* address, int byte, size_t nbytes, void* stream) noexcept nogil
ctypedef int (*copy_on_t)(void* to, const void* source, size_t nbytes, int kind, void* stream) noexcept nogil
ctypedef int (*plain_t)() noexcept nogil
ctypedef int (*stream_create_t)(void** stream, unsigned int flags) noexcept nogil
ctypedef int (*stream_id_t)(void* stream, unsigned long long* unique_id) noexcept nogil
ctypedef int (*event_create_t)(void** event, unsigned int flags) noexcept nogil
ctypedef int (*event_t)(void* event) noexcept nogil       # and any call on one handle
ctypedef int (*event_record_t)(void* event, void* stream) noexcept nogil
ctypedef int (*stream_wait_t)(void* stream, void* event, unsigned int flags) noexcept nogil
ctypedef int (*stream_captures_t)(void* stream, int* state) noexcept nogil
ctypedef int (*capture_info_t)(void* stream, int* state, unsigned long long* id, void** graph, void** dependencies,
                               void** edges, size_t* count) noexcept nogil
ctypedef int (*capture_info_12_t)(void* stream, int* state, unsigned long long* id, void** graph, void** dependencies,
                                  size_t* count) noexcept nogil
ctypedef int (*user_object_t)(void** made, void* data, gone_t gone, unsigned int references,
                              unsigned int flags) noexcept nogil
ctypedef int (*release_object_t)(void* object, unsigned int count) noexcept nogil
ctypedef int (*retain_t)(void* graph, void* object, unsigned int count, unsigned int flags) noexcept nogil
ctypedef int (*ipc_get_t)(IpcBytes* handle, void* address) noexcept nogil
ctypedef int (*ipc_open_t)(void** address, IpcBytes handle, unsigned int flags) noexcept nogil
ctypedef int (*attribute_t)(int* value, int attribute, int device) noexcept nogil
ctypedef int (*granularity_t)(size_t* nbytes, const cydriver.CUmemAllocationProp* what, int kind) noexcept nogil
ctypedef int (*reserve_t)(uint64_t* address, size_t nbytes, size_t alignment, uint64_t wanted,
                          unsigned long long flags) noexcept nogil
ctypedef int (*span_t)(uint64_t address, size_t nbytes) noexcept nogil
ctypedef int (*create_t)(uint64_t* token, size_t nbytes, const cydriver.CUmemAllocationProp* what,
                         unsigned long long flags) noexcept nogil
ctypedef int (*release_t)(uint64_t token) noexcept nogil
ctypedef int (*map_t)(uint64_t address, size_t nbytes, size_t offset, uint64_t token,
                      unsigned long long flags) noexcept nogil
ctypedef int (*access_t)(uint64_t address, size_t nbytes, const cydriver.CUmemAccessDesc* who,
                         size_t count) noexcept nogil
ctypedef const char* (*name_t)(int status) noexcept nogil

cdef void* LEGACY_STREAM = <void*> 1


cdef enum:
    STATUS_NOT_FOUND = 500        # what cydriver returns where it raises
    LAST_DEFAULT_STREAM = 2       # 0 and 1 are the legacy default stream, 2 the per-thread one


cdef int _settled(int status) noexcept nogil:
    if status == STATUS_NEEDS_NEWER_DRIVER or status == STATUS_NOT_FOUND:
        with gil:
            PyErr_Clear()
    elif status != STATUS_OK:
        # The error stays with the thread otherwise, and an unrelated kernel launch would report it.
        (<plain_t> cyruntime.cudaGetLastError)()
    return status


cdef int _malloc(void* context, uint64_t* address, uint64_t nbytes) noexcept nogil:
    return _settled((<malloc_t> cyruntime.cudaMalloc)(<void**> address, nbytes))


cdef int _free(void* context, uint64_t address, uint64_t nbytes) noexcept nogil:
    return _settled((<free_t> cyruntime.cudaFree)(<void*> address))


cdef int _memory_info(void* context, uint64_t* free, uint64_t* total) noexcept nogil:
    return _settled((<memory_info_t> cyruntime.cudaMemGetInfo)(<size_t*> free, <size_t*> total))


cdef int _device_count(void* context, int* count) noexcept nogil:
    return _settled((<get_int_t> cyruntime.cudaGetDeviceCount)(count))


cdef int _get_device(void* context, int* device) noexcept nogil:
    return _settled((<get_int_t> cyruntime.cudaGetDevice)(device))


cdef int _set_device(void* context, int device) noexcept nogil:
    return _settled((<set_int_t> cyruntime.cudaSetDevice)(device))


cdef int _legacy_stream_is_free() noexcept nogil:
    """Whether work on the legacy default stream invalidates no capture; STATUS_CAPTURE_IMPLICIT where it would."""
    cdef int state = 0
    return _settled((<stream_captures_t> cyruntime.cudaStreamIsCapturing)(LEGACY_STREAM, &state))


cdef int _fill(void* context, uint64_t address, uint32_t word, uint64_t words) noexcept nogil:
    cdef int status = _legacy_stream_is_free()
    return status if status != STATUS_OK else _settled(
        (<fill_t> cydriver.cuMemsetD32Async)(address, word, words, LEGACY_STREAM))


cdef int _read(void* context, void* host, uint64_t address, uint64_t nbytes) noexcept nogil:
    cdef int mode = CAPTURE_RELAXED
    cdef int restored
    cdef int status = _legacy_stream_is_free()
    if status != STATUS_OK:
        return status
    # It waits, which captures of other streams forbid unless the thread has relaxed its mode.
    status = _capture_mode(context, &mode)
    if status != STATUS_OK:
        return status
    status = _settled((<copy_t> cyruntime.cudaMemcpy)(
        host, <const void*> address, nbytes, cyruntime.cudaMemcpyKind.cudaMemcpyDefault))
    restored = _capture_mode(context, &mode)
    return restored if status == STATUS_OK else status


cdef int _write(void* context, uint64_t address, const void* host, uint64_t nbytes) noexcept nogil:
    return _settled((<copy_t> cyruntime.cudaMemcpy)(
        <void*> address, host, nbytes, cyruntime.cudaMemcpyKind.cudaMemcpyDefault))


cdef int _synchronize(void* context) noexcept nogil:
    return _settled((<plain_t> cyruntime.cudaDeviceSynchronize)())


cdef inline void* _stream(uint64_t stream) noexcept nogil:
    # 0 means another stream in a per-thread build of the runtime, so the legacy stream goes by its name.
    return <void*> stream if stream else LEGACY_STREAM


cdef int _stream_create(void* context, uint64_t* stream) noexcept nogil:
    return _settled((<stream_create_t> cyruntime.cudaStreamCreateWithFlags)(<void**> stream, 0))


cdef int _stream_destroy(void* context, uint64_t stream) noexcept nogil:
    return _settled((<event_t> cyruntime.cudaStreamDestroy)(<void*> stream))


# Of a stream that was made the driver's own calls are asked, which take a third of the runtime's time; the handle
# of a default stream means something to them only where the thread has a context.

cdef int _stream_id(void* context, uint64_t stream, uint64_t* unique_id) noexcept nogil:
    cdef void* asked = <void*> cydriver.cuStreamGetId if stream > LAST_DEFAULT_STREAM else (
        <void*> cyruntime.cudaStreamGetId)
    return _settled((<stream_id_t> asked)(_stream(stream), <unsigned long long*> unique_id))


cdef int _event_create(void* context, uint64_t* event) noexcept nogil:
    return _settled((<event_create_t> cyruntime.cudaEventCreateWithFlags)(
        <void**> event, cyruntime.cudaEventDisableTiming))


cdef int _event_destroy(void* context, uint64_t event) noexcept nogil:
    return _settled((<event_t> cyruntime.cudaEventDestroy)(<void*> event))


cdef int _event_record(void* context, uint64_t event, uint64_t stream) noexcept nogil:
    return _settled((<event_record_t> cyruntime.cudaEventRecord)(<void*> event, _stream(stream)))


cdef int _event_query(void* context, uint64_t event) noexcept nogil:
    cdef int status = (<event_t> cyruntime.cudaEventQuery)(<void*> event)
    return status if status == STATUS_NOT_READY else _settled(status)


cdef int _event_synchronize(void* context, uint64_t event) noexcept nogil:
    return _settled((<event_t> cyruntime.cudaEventSynchronize)(<void*> event))


cdef int _stream_wait_event(void* context, uint64_t stream, uint64_t event) noexcept nogil:
    return _settled((<stream_wait_t> cyruntime.cudaStreamWaitEvent)(_stream(stream), <void*> event, 0))


cdef int _stream_captures(void* context, uint64_t stream, int* state) noexcept nogil:
    cdef void* asked = <void*> cydriver.cuStreamIsCapturing if stream > LAST_DEFAULT_STREAM else (
        <void*> cyruntime.cudaStreamIsCapturing)
    return _settled((<stream_captures_t> asked)(_stream(stream), state))


cdef int _capture_info(void* context, uint64_t stream, int* state, uint64_t* id, uint64_t* graph) noexcept nogil:
    cdef void* asked = <void*> cyruntime.cudaStreamGetCaptureInfo
    if CUDA_VERSION < 13000:      # before CUDA 13 without edges
        return _settled((<capture_info_12_t> asked)(
            _stream(stream), state, <unsigned long long*> id, <void**> graph, NULL, NULL))
    return _settled((<capture_info_t> asked)(
        _stream(stream), state, <unsigned long long*> id, <void**> graph, NULL, NULL, NULL))


cdef int _capture_mode(void* context, int* mode) noexcept nogil:
    return _settled((<get_int_t> cydriver.cuThreadExchangeStreamCaptureMode)(mode))


cdef int _graph_retain(void* context, uint64_t graph, gone_t gone, void* data) noexcept nogil:
    cdef void* made = NULL
    cdef int status = _settled((<user_object_t> cyruntime.cudaUserObjectCreate)(
        &made, data, gone, 1, cyruntime.cudaUserObjectFlags.cudaUserObjectNoDestructorSync))
    if status == STATUS_OK:
        status = _settled((<retain_t> cyruntime.cudaGraphRetainUserObject)(
            <void*> graph, made, 1, cyruntime.cudaUserObjectRetainFlags.cudaGraphUserObjectMove))
        if status != STATUS_OK:
            # Its last reference: `gone` is called, as it would be by the graph.
            (<release_object_t> cyruntime.cudaUserObjectRelease)(made, 1)
    return status


cdef int _ipc_get(void* context, uint64_t address, uint64_t nbytes, char* handle) noexcept nogil:
    return _settled((<ipc_get_t> cyruntime.cudaIpcGetMemHandle)(<IpcBytes*> handle, <void*> address))


cdef int _ipc_open(void* context, const char* handle, uint64_t* address) noexcept nogil:
    return _settled((<ipc_open_t> cyruntime.cudaIpcOpenMemHandle)(
        <void**> address, (<IpcBytes*> handle)[0], cyruntime.cudaIpcMemLazyEnablePeerAccess))


cdef int _ipc_close(void* context, uint64_t address) noexcept nogil:
    return _settled((<event_t> cyruntime.cudaIpcCloseMemHandle)(<void*> address))


cdef int _fill_on(void* context, uint64_t stream, uint64_t address, uint8_t byte, uint64_t nbytes) noexcept nogil:
    return _settled((<fill_on_t> cyruntime.cudaMemsetAsync)(<void*> address, byte, nbytes, _stream(stream)))


cdef int _read_on(void* context, uint64_t stream, void* host, uint64_t address, uint64_t nbytes) noexcept nogil:
    cdef int status = _settled((<copy_on_t> cyruntime.cudaMemcpyAsync)(
        host, <const void*> address, nbytes, cyruntime.cudaMemcpyKind.cudaMemcpyDefault, _stream(stream)))
    # Also after a failure: the copy must not write to the host later.
    cdef int waited = _settled((<event_t> cyruntime.cudaStreamSynchronize)(_stream(stream)))
    return waited if status == STATUS_OK else status


cdef int _copy_on(void* context, uint64_t stream, uint64_t to, uint64_t address, uint64_t nbytes) noexcept nogil:
    return _settled((<copy_on_t> cyruntime.cudaMemcpyAsync)(
        <void*> to, <const void*> address, nbytes, cyruntime.cudaMemcpyKind.cudaMemcpyDefault, _stream(stream)))


cdef int _device_attribute(void* context, int device, int attribute, int* value) noexcept nogil:
    return _settled((<attribute_t> cydriver.cuDeviceGetAttribute)(value, attribute, device))


cdef inline void _describe(cydriver.CUmemAllocationProp* what, int device, bint exportable) noexcept nogil:
    memset(what, 0, sizeof(cydriver.CUmemAllocationProp))
    what.type = cydriver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    what.location.type = cydriver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    what.location.id = device
    if exportable:
        what.requestedHandleTypes = cydriver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


cdef int _handle_granularity(void* context, int device, uint64_t* nbytes) noexcept nogil:
    cdef cydriver.CUmemAllocationProp what
    _describe(&what, device, False)
    return _settled((<granularity_t> cydriver.cuMemGetAllocationGranularity)(
        <size_t*> nbytes, &what, cydriver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM))


cdef int _address_reserve(void* context, uint64_t nbytes, uint64_t* address) noexcept nogil:
    return _settled((<reserve_t> cydriver.cuMemAddressReserve)(address, nbytes, 0, 0, 0))


cdef int _address_free(void* context, uint64_t address, uint64_t nbytes) noexcept nogil:
    return _settled((<span_t> cydriver.cuMemAddressFree)(address, nbytes))


cdef int _handle_create(void* context, int device, uint64_t nbytes, bint exportable, uint64_t* token) noexcept nogil:
    cdef cydriver.CUmemAllocationProp what
    _describe(&what, device, exportable)
    return _settled((<create_t> cydriver.cuMemCreate)(token, nbytes, &what, 0))


cdef int _handle_release(void* context, uint64_t token) noexcept nogil:
    return _settled((<release_t> cydriver.cuMemRelease)(token))


cdef int _handle_map(void* context, uint64_t address, uint64_t nbytes, uint64_t token) noexcept nogil:
    return _settled((<map_t> cydriver.cuMemMap)(address, nbytes, 0, token, 0))


cdef int _handle_unmap(void* context, uint64_t address, uint64_t nbytes) noexcept nogil:
    return _settled((<span_t> cydriver.cuMemUnmap)(address, nbytes))


cdef int _access_set(void* context, uint64_t address, uint64_t nbytes, int device) noexcept nogil:
    cdef cydriver.CUmemAccessDesc who
    memset(&who, 0, sizeof(cydriver.CUmemAccessDesc))
    who.location.type = cydriver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    who.location.id = device
    who.flags = cydriver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return _settled((<access_t> cydriver.cuMemSetAccess)(address, nbytes, &who, 1))


# Memory that is not cudaMalloc's, behind the same two calls of the table.

cdef int _malloc_pinned(void* context, uint64_t* address, uint64_t nbytes) noexcept nogil:
    # Every device sees it, at the address that the host has.
    return _settled((<malloc_with_t> cyruntime.cudaHostAlloc)(
        <void**> address, nbytes, cyruntime.cudaHostAllocPortable | cyruntime.cudaHostAllocMapped))


cdef int _free_pinned(void* context, uint64_t address, uint64_t nbytes) noexcept nogil:
    return _settled((<free_t> cyruntime.cudaFreeHost)(<void*> address))


cdef int _malloc_managed(void* context, uint64_t* address, uint64_t nbytes) noexcept nogil:
    return _settled((<malloc_with_t> cyruntime.cudaMallocManaged)(
        <void**> address, nbytes, cyruntime.cudaMemAttachGlobal))


cdef int _malloc_async(void* context, uint64_t* address, uint64_t nbytes) noexcept nogil:
    cdef void* stream = (<void**> context)[0]
    cdef int status = _settled((<malloc_on_t> cyruntime.cudaMallocAsync)(<void**> address, nbytes, stream))
    if status == STATUS_OK:
        # Behind its stream's work the memory is everybody's.  Nothing else is ever queued there.
        status = _settled((<event_t> cyruntime.cudaStreamSynchronize)(stream))
        if status != STATUS_OK:
            (<free_on_t> cyruntime.cudaFreeAsync)(<void*> address[0], stream)
    return status


cdef int _free_async(void* context, uint64_t address, uint64_t nbytes) noexcept nogil:
    cdef void* stream = (<void**> context)[0]
    cdef int status = _settled((<free_on_t> cyruntime.cudaFreeAsync)(<void*> address, stream))
    if status == STATUS_OK:
        # So that others find it free.  Where this fails the memory is gone all the same.
        _settled((<event_t> cyruntime.cudaStreamSynchronize)(stream))
    return status


cdef const char* _error_name(int status) noexcept nogil:
    return (<name_t> cyruntime.cudaGetErrorName)(status)


cdef class CudaDriver(Driver):
    """The CUDA runtime of this process, through cuda.bindings.

    Raises
    ------
    RuntimeError
        Where the libraries or the driver are missing; the message says which.
    """

    def __cinit__(self):
        cdef int count = 0
        # Outside the table for once: this call may raise, and tells whether the others can work.
        cdef int status = <int> cyruntime.cudaGetDeviceCount(&count)
        if status != STATUS_OK or count == 0:
            raise RuntimeError(f"no CUDA device: {_error_name(status).decode() if status else 'none found'}")
        self.table.malloc = _malloc
        self.table.free = _free
        self.table.memory_info = _memory_info
        self.table.device_count = _device_count
        self.table.get_device = _get_device
        self.table.set_device = _set_device
        self.table.fill = _fill
        self.table.read = _read
        self.table.write = _write
        self.table.synchronize = _synchronize
        self.table.stream_create = _stream_create
        self.table.stream_destroy = _stream_destroy
        self.table.stream_id = _stream_id
        self.table.event_create = _event_create
        self.table.event_destroy = _event_destroy
        self.table.event_record = _event_record
        self.table.event_query = _event_query
        self.table.event_synchronize = _event_synchronize
        self.table.stream_wait_event = _stream_wait_event
        self.table.stream_captures = _stream_captures
        self.table.capture_info = _capture_info
        self.table.capture_mode = _capture_mode
        self.table.graph_retain = _graph_retain
        self.table.ipc_get = _ipc_get
        self.table.ipc_open = _ipc_open
        self.table.ipc_close = _ipc_close
        self.table.fill_on = _fill_on
        self.table.read_on = _read_on
        self.table.copy_on = _copy_on
        self.table.device_attribute = _device_attribute
        self.table.handle_granularity = _handle_granularity
        self.table.address_reserve = _address_reserve
        self.table.address_free = _address_free
        self.table.handle_create = _handle_create
        self.table.handle_release = _handle_release
        self.table.handle_map = _handle_map
        self.table.handle_unmap = _handle_unmap
        self.table.access_set = _access_set
        self.table.error_name = _error_name


cdef class PinnedDriver(CudaDriver):
    """Pages of the host that every device of this process can use: cudaHostAlloc and cudaFreeHost."""

    def __cinit__(self):
        self.table.malloc = _malloc_pinned
        self.table.free = _free_pinned
        self.table.memory_info = host_memory_info


cdef class ManagedDriver(CudaDriver):
    """Memory that moves between the host and the device that uses it: cudaMallocManaged and cudaFree."""

    def __cinit__(self):
        self.table.malloc = _malloc_managed


cdef class AsyncDriver(CudaDriver):
    """Memory of the driver's own default pool of a device: cudaMallocAsync and cudaFreeAsync on a stream for that.

    The stream is never destroyed: a driver may be in use until the process ends.

    Raises
    ------
    RuntimeError
        Where the device has no such pools, or there is no stream for it.
    """

    cdef void* stream

    def __cinit__(self, int device):
        cdef int previous = 0
        cdef int supported = 0
        cdef int status
        self.context = &self.stream
        self.table.malloc = _malloc_async
        self.table.free = _free_async
        status = _settled((<attribute_t> cyruntime.cudaDeviceGetAttribute)(
            &supported, cyruntime.cudaDeviceAttr.cudaDevAttrMemoryPoolsSupported, device))
        if status == STATUS_OK and not supported:
            raise RuntimeError(f"device {device} has no memory pools of the driver")
        if status == STATUS_OK:
            status = _get_device(NULL, &previous)
        if status == STATUS_OK:
            status = _set_device(NULL, device)
        if status == STATUS_OK:
            status = _settled((<stream_create_t> cyruntime.cudaStreamCreateWithFlags)(
                &self.stream, cyruntime.cudaStreamNonBlocking))
            _set_device(NULL, previous)
        if status != STATUS_OK:
            raise RuntimeError(f"no stream on device {device}: {_error_name(status).decode()}")

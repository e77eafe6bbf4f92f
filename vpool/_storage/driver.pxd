"""The table of driver calls: the one way from vpool to a device, counted, timed and replaceable."""
from libc.stdint cimport uint8_t, uint32_t, uint64_t

# Status codes are CUDA's; sources that are no CUDA use the same numbers.
cdef enum:
    STATUS_OK = 0
    STATUS_INVALID_VALUE = 1
    STATUS_OUT_OF_MEMORY = 2
    STATUS_NOT_INITIALIZED = 3
    STATUS_NEEDS_NEWER_DRIVER = 36
    STATUS_INVALID_DEVICE = 101
    STATUS_INVALID_CONTEXT = 201
    STATUS_ALREADY_MAPPED = 208
    STATUS_INVALID_HANDLE = 400
    STATUS_NOT_READY = 600
    STATUS_ILLEGAL_ADDRESS = 700
    STATUS_NOT_SUPPORTED = 801
    STATUS_CAPTURE_UNSUPPORTED = 900
    STATUS_CAPTURE_INVALIDATED = 901
    STATUS_CAPTURE_ISOLATION = 905
    STATUS_CAPTURE_IMPLICIT = 906
    STATUS_CAPTURED_EVENT = 907

# As in cudaStreamCaptureMode and cudaStreamCaptureStatus.
cdef enum:
    CAPTURE_GLOBAL = 0
    CAPTURE_THREAD_LOCAL = 1
    CAPTURE_RELAXED = 2
    CAPTURE_NONE = 0
    CAPTURE_ACTIVE = 1
    CAPTURE_INVALIDATED = 2

cdef enum Call:
    CALL_MALLOC
    CALL_FREE
    CALL_MEMORY_INFO
    CALL_DEVICE_COUNT
    CALL_GET_DEVICE
    CALL_SET_DEVICE
    CALL_FILL
    CALL_READ
    CALL_WRITE
    CALL_SYNCHRONIZE
    CALL_STREAM_CREATE
    CALL_STREAM_DESTROY
    CALL_STREAM_ID
    CALL_EVENT_CREATE
    CALL_EVENT_DESTROY
    CALL_EVENT_RECORD
    CALL_EVENT_QUERY
    CALL_EVENT_SYNCHRONIZE
    CALL_STREAM_WAIT_EVENT
    CALL_STREAM_CAPTURES
    CALL_CAPTURE_INFO
    CALL_CAPTURE_MODE
    CALL_GRAPH_RETAIN
    CALL_IPC_GET
    CALL_IPC_OPEN
    CALL_IPC_CLOSE
    CALL_FILL_ON
    CALL_READ_ON
    CALL_COPY_ON
    CALL_DEVICE_ATTRIBUTE
    CALL_HANDLE_GRANULARITY
    CALL_ADDRESS_RESERVE
    CALL_ADDRESS_FREE
    CALL_HANDLE_CREATE
    CALL_HANDLE_RELEASE
    CALL_HANDLE_MAP
    CALL_HANDLE_UNMAP
    CALL_ACCESS_SET
    CALL_KINDS

# Of CUdevice_attribute: what `device_attribute` is asked.
cdef enum:
    ATTRIBUTE_VIRTUAL_MEMORY = 102
    ATTRIBUTE_FILE_HANDLES = 103  # a handle can go to another process as a file descriptor

ctypedef void (*gone_t)(void* data) noexcept nogil

cdef struct DriverTable:
    # Each returns a status.  `context` is the driver's own state, NULL for the real CUDA.
    int (*malloc)(void* context, uint64_t* address, uint64_t nbytes) noexcept nogil
    int (*free)(void* context, uint64_t address, uint64_t nbytes) noexcept nogil
    int (*memory_info)(void* context, uint64_t* free, uint64_t* total) noexcept nogil
    int (*device_count)(void* context, int* count) noexcept nogil
    int (*get_device)(void* context, int* device) noexcept nogil
    int (*set_device)(void* context, int device) noexcept nogil
    int (*fill)(void* context, uint64_t address, uint32_t word, uint64_t words) noexcept nogil
    int (*read)(void* context, void* host, uint64_t address, uint64_t nbytes) noexcept nogil
    int (*write)(void* context, uint64_t address, const void* host, uint64_t nbytes) noexcept nogil
    int (*synchronize)(void* context) noexcept nogil
    int (*stream_create)(void* context, uint64_t* stream) noexcept nogil
    int (*stream_destroy)(void* context, uint64_t stream) noexcept nogil
    int (*stream_id)(void* context, uint64_t stream, uint64_t* unique_id) noexcept nogil
    int (*event_create)(void* context, uint64_t* event) noexcept nogil
    int (*event_destroy)(void* context, uint64_t event) noexcept nogil
    int (*event_record)(void* context, uint64_t event, uint64_t stream) noexcept nogil
    int (*event_query)(void* context, uint64_t event) noexcept nogil
    int (*event_synchronize)(void* context, uint64_t event) noexcept nogil
    int (*stream_wait_event)(void* context, uint64_t stream, uint64_t event) noexcept nogil
    # Whether a stream captures, as cudaStreamCaptureStatus.
    int (*stream_captures)(void* context, uint64_t stream, int* state) noexcept nogil
    int (*capture_info)(void* context, uint64_t stream, int* state, uint64_t* id, uint64_t* graph) noexcept nogil
    # Sets what the calling thread may do while something captures, and gives what it was.
    int (*capture_mode)(void* context, int* mode) noexcept nogil
    # Has `gone(data)` called once, from any thread, when the graph and all made of it are gone.
    int (*graph_retain)(void* context, uint64_t graph, gone_t gone, void* data) noexcept nogil
    # Of a whole allocation; a handle is 64 bytes.
    int (*ipc_get)(void* context, uint64_t address, uint64_t nbytes, char* handle) noexcept nogil
    int (*ipc_open)(void* context, const char* handle, uint64_t* address) noexcept nogil
    int (*ipc_close)(void* context, uint64_t address) noexcept nogil
    # In stream order; a read returns when the bytes are there.
    int (*fill_on)(void* context, uint64_t stream, uint64_t address, uint8_t byte, uint64_t nbytes) noexcept nogil
    int (*read_on)(void* context, uint64_t stream, void* host, uint64_t address, uint64_t nbytes) noexcept nogil
    int (*copy_on)(void* context, uint64_t stream, uint64_t to, uint64_t address, uint64_t nbytes) noexcept nogil
    # Virtual memory; NULL, all of them, in a driver that has none.  Sizes and addresses are multiples of the
    # granularity.  A handle is mapped whole or not at all, at as many places as one likes.
    int (*device_attribute)(void* context, int device, int attribute, int* value) noexcept nogil
    int (*handle_granularity)(void* context, int device, uint64_t* nbytes) noexcept nogil
    int (*address_reserve)(void* context, uint64_t nbytes, uint64_t* address) noexcept nogil
    int (*address_free)(void* context, uint64_t address, uint64_t nbytes) noexcept nogil
    int (*handle_create)(void* context, int device, uint64_t nbytes, bint exportable, uint64_t* token) noexcept nogil
    # The memory stays until it is mapped nowhere.
    int (*handle_release)(void* context, uint64_t token) noexcept nogil
    int (*handle_map)(void* context, uint64_t address, uint64_t nbytes, uint64_t token) noexcept nogil
    # Of one or more whole mappings, side by side.
    int (*handle_unmap)(void* context, uint64_t address, uint64_t nbytes) noexcept nogil
    # Lets a device read and write there; nobody may before.
    int (*access_set)(void* context, uint64_t address, uint64_t nbytes, int device) noexcept nogil
    const char* (*error_name)(int status) noexcept nogil

cdef struct CallStats:
    unsigned long long calls
    unsigned long long failures
    unsigned long long nanoseconds
    unsigned long long modelled   # nanoseconds that the device would take, of a driver without one

cdef struct Fault:
    unsigned long long first      # the number of the call that fails first, counted from 1; 0: none
    unsigned long long last       # and of the last one
    int status                    # what it returns
    bint sticky                   # and from then on every other call, too

cdef class Driver:
    cdef DriverTable table
    cdef void* context
    cdef uint32_t forks           # that led to the process it was made in
    cdef CallStats stats[<int> CALL_KINDS]
    cdef Fault faults[<int> CALL_KINDS]
    cdef uint64_t costs[<int> CALL_KINDS]         # nanoseconds of each call that succeeds, modelled; 0 on a device
    cdef unsigned long long spent                 # nanoseconds of all calls, modelled ones too
    # Captures that go on; NULL: the driver does not know, and has to be asked stream by stream.
    cdef const int* captures
    cdef int broken               # the status of a sticky fault that was met, else 0

    cdef bint may_capture(self) noexcept nogil
    cdef int must_be_mine(self) except -1
    cdef int malloc(self, uint64_t* address, uint64_t nbytes) noexcept nogil
    cdef int free(self, uint64_t address, uint64_t nbytes) noexcept nogil
    cdef int memory_info(self, uint64_t* free, uint64_t* total) noexcept nogil
    cdef int device_count(self, int* count) noexcept nogil
    cdef int get_device(self, int* device) noexcept nogil
    cdef int set_device(self, int device) noexcept nogil
    cdef int fill(self, uint64_t address, uint32_t word, uint64_t words) noexcept nogil
    cdef int read(self, void* host, uint64_t address, uint64_t nbytes) noexcept nogil
    cdef int write(self, uint64_t address, const void* host, uint64_t nbytes) noexcept nogil
    cdef int synchronize(self) noexcept nogil
    cdef int stream_create(self, uint64_t* stream) noexcept nogil
    cdef int stream_destroy(self, uint64_t stream) noexcept nogil
    cdef int stream_id(self, uint64_t stream, uint64_t* unique_id) noexcept nogil
    cdef int event_create(self, uint64_t* event) noexcept nogil
    cdef int event_destroy(self, uint64_t event) noexcept nogil
    cdef int event_record(self, uint64_t event, uint64_t stream) noexcept nogil
    cdef int event_query(self, uint64_t event) noexcept nogil
    cdef int event_synchronize(self, uint64_t event) noexcept nogil
    cdef int stream_wait_event(self, uint64_t stream, uint64_t event) noexcept nogil
    cdef int stream_captures(self, uint64_t stream, int* state) noexcept nogil
    cdef int capture_info(self, uint64_t stream, int* state, uint64_t* id, uint64_t* graph) noexcept nogil
    cdef int capture_mode(self, int* mode) noexcept nogil
    cdef int graph_retain(self, uint64_t graph, gone_t gone, void* data) noexcept nogil
    cdef int ipc_get(self, uint64_t address, uint64_t nbytes, char* handle) noexcept nogil
    cdef int ipc_open(self, const char* handle, uint64_t* address) noexcept nogil
    cdef int ipc_close(self, uint64_t address) noexcept nogil
    cdef int fill_on(self, uint64_t stream, uint64_t address, uint8_t byte, uint64_t nbytes) noexcept nogil
    cdef int read_on(self, uint64_t stream, void* host, uint64_t address, uint64_t nbytes) noexcept nogil
    cdef int copy_on(self, uint64_t stream, uint64_t to, uint64_t address, uint64_t nbytes) noexcept nogil
    cdef int device_attribute(self, int device, int attribute, int* value) noexcept nogil
    cdef int handle_granularity(self, int device, uint64_t* nbytes) noexcept nogil
    cdef int address_reserve(self, uint64_t nbytes, uint64_t* address) noexcept nogil
    cdef int address_free(self, uint64_t address, uint64_t nbytes) noexcept nogil
    cdef int handle_create(self, int device, uint64_t nbytes, bint exportable, uint64_t* token) noexcept nogil
    cdef int handle_release(self, uint64_t token) noexcept nogil
    cdef int handle_map(self, uint64_t address, uint64_t nbytes, uint64_t token) noexcept nogil
    cdef int handle_unmap(self, uint64_t address, uint64_t nbytes) noexcept nogil
    cdef int access_set(self, uint64_t address, uint64_t nbytes, int device) noexcept nogil

"""The table of driver calls: counted, timed, and open to injected faults."""
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from vpool._base.clock cimport now_ns
from vpool._base.lock cimport atomic_add, atomic_read, atomic_write
from vpool._storage.fork cimport fork_count

from vpool.errors import ForkedProcessError, SourceError

CALL_NAMES = (
    "malloc", "free", "memory_info", "device_count", "get_device", "set_device", "fill", "read", "write",
    "synchronize", "stream_create", "stream_destroy", "stream_id", "event_create", "event_destroy", "event_record",
    "event_query", "event_synchronize", "stream_wait_event", "stream_captures", "capture_info", "capture_mode",
    "graph_retain", "ipc_get", "ipc_open", "ipc_close", "fill_on", "read_on", "copy_on",
    "device_attribute", "handle_granularity", "address_reserve", "address_free", "handle_create", "handle_release",
    "handle_map", "handle_unmap", "access_set",
)


cdef inline int _refused(Driver driver, Call call) noexcept nogil:
    """Count a call about to be made; return the status of the fault set for it, or 0."""
    cdef unsigned long long number = atomic_add(driver.stats[<int> call].calls, 1)
    cdef Fault* fault = &driver.faults[<int> call]
    if fault.first and fault.first <= number <= fault.last:
        if fault.sticky:
            atomic_write(driver.broken, fault.status)
        return fault.status
    return atomic_read(driver.broken)


cdef inline int _finished(Driver driver, Call call, uint64_t started, int status) noexcept nogil:
    cdef uint64_t elapsed = now_ns() - started
    cdef uint64_t modelled = driver.costs[<int> call] if status == STATUS_OK else 0
    atomic_add(driver.stats[<int> call].nanoseconds, elapsed)
    if modelled:
        atomic_add(driver.stats[<int> call].modelled, modelled)
    atomic_add(driver.spent, elapsed + modelled)
    if status != STATUS_OK and status != STATUS_NOT_READY:
        atomic_add(driver.stats[<int> call].failures, 1)
    return status


cdef int _no_ipc_get(void* context, uint64_t address, uint64_t nbytes, char* handle) noexcept nogil:
    return STATUS_NOT_SUPPORTED


cdef int _no_ipc_open(void* context, const char* handle, uint64_t* address) noexcept nogil:
    return STATUS_NOT_SUPPORTED


cdef int _no_ipc_close(void* context, uint64_t address) noexcept nogil:
    return STATUS_NOT_SUPPORTED


cdef class Driver:
    """A table of driver calls.  Subclasses fill it; tests replace it.

    Thread safety: calls may be made from any thread, without the GIL, and under no lock.
    """

    def __cinit__(self):
        self.forks = fork_count()
        self.table.ipc_get = _no_ipc_get
        self.table.ipc_open = _no_ipc_open
        self.table.ipc_close = _no_ipc_close

    @property
    def forked(self):
        """Whether it was made in a parent of this process."""
        return self.forks != fork_count()

    cdef int must_be_mine(self) except -1:
        """ForkedProcessError in a child of the process that it was made in."""
        if self.forked:
            raise ForkedProcessError(
                'what a source uses of its driver does not survive a fork: start processes by "spawn" or "forkserver",'
                " or make a source after the fork"
            )
        return 0

    cdef int malloc(self, uint64_t* address, uint64_t nbytes) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_MALLOC)
        if status == STATUS_OK:
            status = self.table.malloc(self.context, address, nbytes)
        return _finished(self, CALL_MALLOC, started, status)

    cdef int free(self, uint64_t address, uint64_t nbytes) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_FREE)
        if status == STATUS_OK:
            status = self.table.free(self.context, address, nbytes)
        return _finished(self, CALL_FREE, started, status)

    cdef int memory_info(self, uint64_t* free, uint64_t* total) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_MEMORY_INFO)
        if status == STATUS_OK:
            status = self.table.memory_info(self.context, free, total)
        return _finished(self, CALL_MEMORY_INFO, started, status)

    cdef int device_count(self, int* count) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_DEVICE_COUNT)
        if status == STATUS_OK:
            status = self.table.device_count(self.context, count)
        return _finished(self, CALL_DEVICE_COUNT, started, status)

    cdef int get_device(self, int* device) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_GET_DEVICE)
        if status == STATUS_OK:
            status = self.table.get_device(self.context, device)
        return _finished(self, CALL_GET_DEVICE, started, status)

    cdef int set_device(self, int device) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_SET_DEVICE)
        if status == STATUS_OK:
            status = self.table.set_device(self.context, device)
        return _finished(self, CALL_SET_DEVICE, started, status)

    cdef int fill(self, uint64_t address, uint32_t word, uint64_t words) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_FILL)
        if status == STATUS_OK:
            status = self.table.fill(self.context, address, word, words)
        return _finished(self, CALL_FILL, started, status)

    cdef int read(self, void* host, uint64_t address, uint64_t nbytes) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_READ)
        if status == STATUS_OK:
            status = self.table.read(self.context, host, address, nbytes)
        return _finished(self, CALL_READ, started, status)

    cdef int write(self, uint64_t address, const void* host, uint64_t nbytes) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_WRITE)
        if status == STATUS_OK:
            status = self.table.write(self.context, address, host, nbytes)
        return _finished(self, CALL_WRITE, started, status)

    cdef int synchronize(self) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_SYNCHRONIZE)
        if status == STATUS_OK:
            status = self.table.synchronize(self.context)
        return _finished(self, CALL_SYNCHRONIZE, started, status)

    cdef int stream_create(self, uint64_t* stream) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_STREAM_CREATE)
        if status == STATUS_OK:
            status = self.table.stream_create(self.context, stream)
        return _finished(self, CALL_STREAM_CREATE, started, status)

    cdef int stream_destroy(self, uint64_t stream) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_STREAM_DESTROY)
        if status == STATUS_OK:
            status = self.table.stream_destroy(self.context, stream)
        return _finished(self, CALL_STREAM_DESTROY, started, status)

    cdef int stream_id(self, uint64_t stream, uint64_t* unique_id) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_STREAM_ID)
        if status == STATUS_OK:
            status = self.table.stream_id(self.context, stream, unique_id)
        return _finished(self, CALL_STREAM_ID, started, status)

    cdef int event_create(self, uint64_t* event) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_EVENT_CREATE)
        if status == STATUS_OK:
            status = self.table.event_create(self.context, event)
        return _finished(self, CALL_EVENT_CREATE, started, status)

    cdef int event_destroy(self, uint64_t event) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_EVENT_DESTROY)
        if status == STATUS_OK:
            status = self.table.event_destroy(self.context, event)
        return _finished(self, CALL_EVENT_DESTROY, started, status)

    cdef int event_record(self, uint64_t event, uint64_t stream) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_EVENT_RECORD)
        if status == STATUS_OK:
            status = self.table.event_record(self.context, event, stream)
        return _finished(self, CALL_EVENT_RECORD, started, status)

    cdef int event_query(self, uint64_t event) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_EVENT_QUERY)
        if status == STATUS_OK:
            status = self.table.event_query(self.context, event)
        return _finished(self, CALL_EVENT_QUERY, started, status)

    cdef int event_synchronize(self, uint64_t event) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_EVENT_SYNCHRONIZE)
        if status == STATUS_OK:
            status = self.table.event_synchronize(self.context, event)
        return _finished(self, CALL_EVENT_SYNCHRONIZE, started, status)

    cdef int stream_wait_event(self, uint64_t stream, uint64_t event) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_STREAM_WAIT_EVENT)
        if status == STATUS_OK:
            status = self.table.stream_wait_event(self.context, stream, event)
        return _finished(self, CALL_STREAM_WAIT_EVENT, started, status)

    cdef bint may_capture(self) noexcept nogil:
        """Whether any stream may be capturing now: True where the driver cannot tell without a call."""
        return self.captures == NULL or self.captures[0] != 0

    cdef int stream_captures(self, uint64_t stream, int* state) noexcept nogil:
        # Asked on the way of an allocation, so the clock is not read.
        cdef int status = _refused(self, CALL_STREAM_CAPTURES)
        state[0] = 0
        if status == STATUS_OK:
            status = self.table.stream_captures(self.context, stream, state)
        if status != STATUS_OK:
            atomic_add(self.stats[<int> CALL_STREAM_CAPTURES].failures, 1)
        return status

    cdef int capture_info(self, uint64_t stream, int* state, uint64_t* id, uint64_t* graph) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_CAPTURE_INFO)
        if status == STATUS_OK:
            status = self.table.capture_info(self.context, stream, state, id, graph)
        return _finished(self, CALL_CAPTURE_INFO, started, status)

    cdef int capture_mode(self, int* mode) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_CAPTURE_MODE)
        if status == STATUS_OK:
            status = self.table.capture_mode(self.context, mode)
        return _finished(self, CALL_CAPTURE_MODE, started, status)

    cdef int graph_retain(self, uint64_t graph, gone_t gone, void* data) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_GRAPH_RETAIN)
        if status == STATUS_OK:
            status = self.table.graph_retain(self.context, graph, gone, data)
        return _finished(self, CALL_GRAPH_RETAIN, started, status)

    cdef int ipc_get(self, uint64_t address, uint64_t nbytes, char* handle) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_IPC_GET)
        if status == STATUS_OK:
            status = self.table.ipc_get(self.context, address, nbytes, handle)
        return _finished(self, CALL_IPC_GET, started, status)

    cdef int ipc_open(self, const char* handle, uint64_t* address) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_IPC_OPEN)
        if status == STATUS_OK:
            status = self.table.ipc_open(self.context, handle, address)
        return _finished(self, CALL_IPC_OPEN, started, status)

    cdef int ipc_close(self, uint64_t address) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_IPC_CLOSE)
        if status == STATUS_OK:
            status = self.table.ipc_close(self.context, address)
        return _finished(self, CALL_IPC_CLOSE, started, status)

    cdef int fill_on(self, uint64_t stream, uint64_t address, uint8_t byte, uint64_t nbytes) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_FILL_ON)
        if status == STATUS_OK:
            status = self.table.fill_on(self.context, stream, address, byte, nbytes)
        return _finished(self, CALL_FILL_ON, started, status)

    cdef int read_on(self, uint64_t stream, void* host, uint64_t address, uint64_t nbytes) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_READ_ON)
        if status == STATUS_OK:
            status = self.table.read_on(self.context, stream, host, address, nbytes)
        return _finished(self, CALL_READ_ON, started, status)

    cdef int copy_on(self, uint64_t stream, uint64_t to, uint64_t address, uint64_t nbytes) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_COPY_ON)
        if status == STATUS_OK:
            status = self.table.copy_on(self.context, stream, to, address, nbytes)
        return _finished(self, CALL_COPY_ON, started, status)

    # Virtual memory: a driver without it has none of these calls in its table.

    cdef int device_attribute(self, int device, int attribute, int* value) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_DEVICE_ATTRIBUTE)
        if status == STATUS_OK:
            status = STATUS_NOT_SUPPORTED
            if self.table.device_attribute != NULL:
                status = self.table.device_attribute(self.context, device, attribute, value)
        return _finished(self, CALL_DEVICE_ATTRIBUTE, started, status)

    cdef int handle_granularity(self, int device, uint64_t* nbytes) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_HANDLE_GRANULARITY)
        if status == STATUS_OK:
            status = STATUS_NOT_SUPPORTED
            if self.table.handle_granularity != NULL:
                status = self.table.handle_granularity(self.context, device, nbytes)
        return _finished(self, CALL_HANDLE_GRANULARITY, started, status)

    cdef int address_reserve(self, uint64_t nbytes, uint64_t* address) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_ADDRESS_RESERVE)
        if status == STATUS_OK:
            status = STATUS_NOT_SUPPORTED
            if self.table.address_reserve != NULL:
                status = self.table.address_reserve(self.context, nbytes, address)
        return _finished(self, CALL_ADDRESS_RESERVE, started, status)

    cdef int address_free(self, uint64_t address, uint64_t nbytes) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_ADDRESS_FREE)
        if status == STATUS_OK:
            status = STATUS_NOT_SUPPORTED
            if self.table.address_free != NULL:
                status = self.table.address_free(self.context, address, nbytes)
        return _finished(self, CALL_ADDRESS_FREE, started, status)

    cdef int handle_create(self, int device, uint64_t nbytes, bint exportable, uint64_t* token) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_HANDLE_CREATE)
        if status == STATUS_OK:
            status = STATUS_NOT_SUPPORTED
            if self.table.handle_create != NULL:
                status = self.table.handle_create(self.context, device, nbytes, exportable, token)
        return _finished(self, CALL_HANDLE_CREATE, started, status)

    cdef int handle_release(self, uint64_t token) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_HANDLE_RELEASE)
        if status == STATUS_OK:
            status = STATUS_NOT_SUPPORTED
            if self.table.handle_release != NULL:
                status = self.table.handle_release(self.context, token)
        return _finished(self, CALL_HANDLE_RELEASE, started, status)

    cdef int handle_map(self, uint64_t address, uint64_t nbytes, uint64_t token) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_HANDLE_MAP)
        if status == STATUS_OK:
            status = STATUS_NOT_SUPPORTED
            if self.table.handle_map != NULL:
                status = self.table.handle_map(self.context, address, nbytes, token)
        return _finished(self, CALL_HANDLE_MAP, started, status)

    cdef int handle_unmap(self, uint64_t address, uint64_t nbytes) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_HANDLE_UNMAP)
        if status == STATUS_OK:
            status = STATUS_NOT_SUPPORTED
            if self.table.handle_unmap != NULL:
                status = self.table.handle_unmap(self.context, address, nbytes)
        return _finished(self, CALL_HANDLE_UNMAP, started, status)

    cdef int access_set(self, uint64_t address, uint64_t nbytes, int device) noexcept nogil:
        cdef uint64_t started = now_ns()
        cdef int status = _refused(self, CALL_ACCESS_SET)
        if status == STATUS_OK:
            status = STATUS_NOT_SUPPORTED
            if self.table.access_set != NULL:
                status = self.table.access_set(self.context, address, nbytes, device)
        return _finished(self, CALL_ACCESS_SET, started, status)

    def error_name(self, int status):
        """Name of a status code, as CUDA spells it."""
        return self.table.error_name(status).decode()

    def devices(self):
        """The thread's current device and the number of devices.

        Raises
        ------
        SourceError
            Where the driver does not answer.
        ForkedProcessError
            In a child of the process that made the driver table.
        """
        cdef int current = 0
        cdef int count = 0
        cdef int status
        self.must_be_mine()
        with nogil:
            status = self.device_count(&count)
            if status == STATUS_OK:
                status = self.get_device(&current)
        if status != STATUS_OK:
            raise SourceError(f"the driver cannot tell its devices: {self.error_name(status)}", self.error_name(status))
        return current, count

    def current(self):
        """The thread's current device; the default pools ask for it on every call.

        Raises
        ------
        SourceError
            Where the driver does not answer.
        ForkedProcessError
            In a child of the process that made the driver table.
        """
        cdef int device = 0
        cdef int status
        self.must_be_mine()
        status = self.get_device(&device)                 # which waits for nothing, so the GIL stays
        if status != STATUS_OK:
            raise SourceError(f"the driver cannot tell its device: {self.error_name(status)}", self.error_name(status))
        return device

    def create_stream(self):
        """Make a stream on the current device; its handle."""
        cdef uint64_t handle = 0
        cdef int status
        self.must_be_mine()
        with nogil:
            status = self.stream_create(&handle)
        if status != STATUS_OK:
            raise SourceError(f"the driver makes no stream: {self.error_name(status)}", self.error_name(status))
        return handle

    def destroy_stream(self, stream):
        """Destroy a stream.  Its queued work goes on, as CUDA has it."""
        cdef uint64_t handle = stream
        cdef int status
        self.must_be_mine()
        with nogil:
            status = self.stream_destroy(handle)
        if status != STATUS_OK:
            raise SourceError(f"cannot destroy stream {handle:#x}: {self.error_name(status)}", self.error_name(status))

    def calls(self):
        """Figures of each call: a dict of ``(calls, failures, nanoseconds)`` by name."""
        return {
            name: (
                atomic_read(self.stats[kind].calls),
                atomic_read(self.stats[kind].failures),
                atomic_read(self.stats[kind].nanoseconds),
            )
            for kind, name in enumerate(CALL_NAMES)
        }

    def modelled_ns(self):
        """Nanoseconds that a device would have taken for each call: a dict by name.  Nobody waited for them."""
        return {name: atomic_read(self.stats[kind].modelled) for kind, name in enumerate(CALL_NAMES)}

    def fail(self, call, int status=STATUS_OUT_OF_MEMORY, unsigned long long after=0, unsigned long long times=1,
             *, bint sticky=False):
        """Make a later call fail without reaching the device.

        Parameters
        ----------
        call : str
            Name of the call, one of `CALL_NAMES`.
        status : int
            What it returns instead; the default is out of memory.
        after : int
            How many further calls succeed first.
        times : int
            How many calls fail, from then on; 0 takes the fault away.
        sticky : bool
            From the first failure on every call of any kind fails, as after an illegal access on the
            device, until a fault is set or taken away.
        """
        cdef int kind = CALL_NAMES.index(call)
        cdef Fault* fault = &self.faults[kind]
        atomic_write(self.broken, 0)
        fault.status = status
        fault.sticky = sticky
        fault.last = self.stats[kind].calls + after + times
        fault.first = self.stats[kind].calls + after + 1 if times else 0

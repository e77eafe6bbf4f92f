"""Sources, and the kind whose range and handle are one allocation of the driver."""
cimport cython
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from vpool._storage.driver cimport (
    CAPTURE_ACTIVE,
    CAPTURE_NONE,
    CAPTURE_RELAXED,
    STATUS_CAPTURE_IMPLICIT,
    STATUS_OK,
    Driver,
)
from vpool._storage.simulated_streams cimport StreamedDriver

from vpool.errors import SourceError

cdef enum:
    LAST_DEFAULT_STREAM = 2       # 0 and 1 are the legacy default stream, 2 the per-thread one


@cython.no_gc   # refers to its driver alone: no cycle can form, and none may take the driver away
cdef class Source:
    """Memory of one device, in ranges and handles.

    A range is address space, a handle is memory; `map` puts the one into the other.  This class is
    the source of drivers such as cudaMalloc, which give both at once: one range with one handle.
    Calls go to the pool's own device, whatever the caller's current device is, and that one is
    restored.

    Thread safety: every method may be called from any thread, without the GIL, and under no lock.
    """

    def __cinit__(self, Driver driver not None, str name not None, int device=0, *,
                  bint host_accessible=False, bint has_memory=True, checks_handles=None, **options):
        if options and type(self) is Source:
            raise TypeError(f"a source has no option {next(iter(options))!r}")
        self.driver = driver
        self.name = name
        self.device = device
        self.host_accessible = host_accessible
        self.has_memory = has_memory
        self.checks_handles = isinstance(driver, StreamedDriver) if checks_handles is None else checks_handles

    def __repr__(self):
        return f"<vpool source {self.name!r} of device {self.device}>"

    def __reduce__(self):
        raise TypeError("a source cannot be copied or pickled: it belongs to this process; its name can be sent")

    def memory(self):
        """Free and total bytes of the device.

        Raises
        ------
        SourceError
            Where the source does not answer.
        ForkedProcessError
            In a child of the process that made the source.
        """
        cdef uint64_t available = 0
        cdef uint64_t total = 0
        cdef int status
        self.driver.must_be_mine()
        with nogil:
            status = self.memory_info(&available, &total)
        if status != STATUS_OK:
            name = self.driver.error_name(status)
            raise SourceError(f"source {self.name!r} cannot tell its memory: {name}", name)
        return available, total

    cdef int _enter_device(self, int* previous) noexcept nogil:
        """Make this source's device the thread's current one."""
        cdef int status = self.driver.get_device(previous)
        if status == STATUS_OK and previous[0] != self.device:
            status = self.driver.set_device(self.device)
        return status

    cdef int _leave_device(self, int previous, int status) noexcept nogil:
        """Restore the thread's current device; `status` is of the call between, and goes first."""
        cdef int restored = STATUS_OK
        if previous != self.device:
            restored = self.driver.set_device(previous)
        return restored if status == STATUS_OK else status

    cdef int _relax(self, int* mode) noexcept nogil:
        """Let the thread make a call that may wait though something captures.

        Such calls invalidate captures unless the thread says that it knows better, as it does: what it
        asks for has nothing to do with what is captured.
        """
        mode[0] = CAPTURE_RELAXED
        return self.driver.capture_mode(mode) if self.driver.may_capture() else STATUS_OK

    cdef int _restore(self, int mode, int status) noexcept nogil:
        """Undo `_relax`; `status` is of the call between, and goes first."""
        cdef int restored = STATUS_OK
        if mode != CAPTURE_RELAXED:
            restored = self.driver.capture_mode(&mode)
        return restored if status == STATUS_OK else status

    cdef int _enter_relaxed(self, int* previous, int* mode) noexcept nogil:
        cdef int status = self._enter_device(previous)
        if status == STATUS_OK:
            status = self._relax(mode)
            if status != STATUS_OK:
                self._leave_device(previous[0], status)
        return status

    cdef int _leave_relaxed(self, int previous, int mode, int status) noexcept nogil:
        return self._leave_device(previous, self._restore(mode, status))

    cdef int reserve(self, uint64_t nbytes, Range* span) noexcept nogil:
        span.address = 0
        span.nbytes = nbytes
        return STATUS_OK

    cdef int create(self, uint64_t nbytes, Handle* handle) noexcept nogil:
        cdef int previous, mode
        cdef int status = self._enter_relaxed(&previous, &mode)
        if status != STATUS_OK:
            return status
        handle.nbytes = nbytes
        status = self.driver.malloc(&handle.token, nbytes)
        if status != STATUS_OK:
            return self._leave_relaxed(previous, mode, status)
        status = self._leave_relaxed(previous, mode, STATUS_OK)
        if status != STATUS_OK and self.driver.free(handle.token, nbytes) == STATUS_OK:
            handle.token = 0
        return status

    cdef int map(self, Range* span, uint64_t offset, Handle* handle) noexcept nogil:
        span.address = handle.token
        return STATUS_OK

    cdef int unmap(self, Range* span, uint64_t offset, Handle* handle) noexcept nogil:
        span.address = 0
        return STATUS_OK

    cdef int release(self, Handle* handle) noexcept nogil:
        """Give memory back.  The token becomes 0 when it is gone, whatever else then fails."""
        cdef int previous, mode
        cdef int status = self._enter_relaxed(&previous, &mode)
        if status != STATUS_OK:
            return status
        status = self.driver.free(handle.token, handle.nbytes)
        if status == STATUS_OK:
            handle.token = 0
        return self._leave_relaxed(previous, mode, status)

    cdef int unreserve(self, Range* span) noexcept nogil:
        return STATUS_OK

    cdef int acquire(self, uint64_t nbytes, Range* span, Handle* handle) noexcept nogil:
        """A range of `nbytes` with memory under the whole of it.  All or nothing.

        Where it fails and the token is not 0, the driver did not take back what it gave: that is to be
        surrendered later.
        """
        cdef int status = self.reserve(nbytes, span)
        handle.token = 0
        if status != STATUS_OK:
            return status
        status = self.create(nbytes, handle)
        if status == STATUS_OK:
            status = self.map(span, 0, handle)
            if status == STATUS_OK:
                return STATUS_OK
            self.release(handle)
        self.unreserve(span)
        return status

    cdef int surrender(self, Range* span, Handle* handle) noexcept nogil:
        """Give back what `acquire` gave.  Goes on after a failure and returns the first."""
        cdef int first = self.unmap(span, 0, handle)
        cdef int status = self.release(handle)
        if first == STATUS_OK:
            first = status
        status = self.unreserve(span)
        return status if first == STATUS_OK else first

    cdef int memory_info(self, uint64_t* free, uint64_t* total) noexcept nogil:
        cdef int previous
        cdef int status = self._enter_device(&previous)
        if status != STATUS_OK:
            return status
        return self._leave_device(previous, self.driver.memory_info(free, total))

    cdef int create_event(self, uint64_t* event) noexcept nogil:
        """An event of this device: one of another device could not be recorded on its streams."""
        cdef int previous
        cdef int status = self._enter_device(&previous)
        if status != STATUS_OK:
            return status
        return self._leave_device(previous, self.driver.event_create(event))

    cdef int record_event(self, uint64_t event, uint64_t stream) noexcept nogil:
        cdef int previous
        cdef int status
        if stream > LAST_DEFAULT_STREAM:
            return self.driver.event_record(event, stream)
        # The handles of the default streams mean those of the current device.
        status = self._enter_device(&previous)
        if status != STATUS_OK:
            return status
        return self._leave_device(previous, self.driver.event_record(event, stream))

    cdef int wait_for_event(self, uint64_t stream, uint64_t event) noexcept nogil:
        """Make work that is queued on a stream from now on come after an event."""
        cdef int previous
        cdef int status
        if stream > LAST_DEFAULT_STREAM:
            return self.driver.stream_wait_event(stream, event)
        status = self._enter_device(&previous)
        if status != STATUS_OK:
            return status
        return self._leave_device(previous, self.driver.stream_wait_event(stream, event))

    cdef int query_event(self, uint64_t event) noexcept nogil:
        cdef int mode
        cdef int status = self._relax(&mode)
        return status if status != STATUS_OK else self._restore(mode, self.driver.event_query(event))

    cdef int await_event(self, uint64_t event) noexcept nogil:
        """Return when what an event was recorded behind is complete."""
        cdef int mode
        cdef int status = self._relax(&mode)
        return status if status != STATUS_OK else self._restore(mode, self.driver.event_synchronize(event))

    cdef int ask_capture(self, uint64_t stream, int* state) noexcept nogil:
        """Whether a stream captures; the legacy default stream counts so while one captures that waits for it."""
        cdef int previous
        cdef int status
        state[0] = CAPTURE_NONE
        if not self.driver.may_capture():
            return STATUS_OK
        if stream > LAST_DEFAULT_STREAM:
            return self.driver.stream_captures(stream, state)
        # The handles of the default streams mean those of the current device.
        status = self._enter_device(&previous)
        if status != STATUS_OK:
            return status
        status = self.driver.stream_captures(stream, state)
        if status == STATUS_CAPTURE_IMPLICIT:
            state[0] = CAPTURE_ACTIVE
            status = STATUS_OK
        return self._leave_device(previous, status)

    cdef int capture_info(self, uint64_t stream, int* state, uint64_t* id, uint64_t* graph) noexcept nogil:
        """Id and graph of the capture of a stream that captures."""
        cdef int previous
        cdef int status
        if stream > LAST_DEFAULT_STREAM:
            return self.driver.capture_info(stream, state, id, graph)
        status = self._enter_device(&previous)
        if status != STATUS_OK:
            return status
        return self._leave_device(previous, self.driver.capture_info(stream, state, id, graph))

    cdef int synchronize(self) noexcept nogil:
        """Return when all work that was queued on the device is complete."""
        cdef int previous
        cdef int status = self._enter_device(&previous)
        if status != STATUS_OK:
            return status
        return self._leave_device(previous, self.driver.synchronize())

    cdef int share(self, uint64_t address, uint64_t nbytes, char* handle) noexcept nogil:
        """The 64 bytes that another process opens an allocation by."""
        cdef int previous, mode
        cdef int status = self._enter_relaxed(&previous, &mode)
        if status != STATUS_OK:
            return status
        return self._leave_relaxed(previous, mode, self.driver.ipc_get(address, nbytes, handle))

    def open_shared(self, bytes handle not None, list opened=None):
        """Open an allocation of another process; its address here.

        Parameters
        ----------
        handle : bytes
        opened : list, optional
            Gets the address before any Python code can run, so that no signal loses it.

        Raises
        ------
        ValueError
            For a handle that is not 64 bytes.
        SourceError
            Where the driver does not open it.
        """
        cdef uint64_t address = 0
        cdef const char* given = handle
        cdef int previous, mode, status, answer
        cdef int closed = STATUS_OK
        if len(handle) != 64:
            raise ValueError(f"a handle has 64 bytes, not {len(handle)}")
        self.driver.must_be_mine()
        with nogil:
            status = self._enter_relaxed(&previous, &mode)
            if status == STATUS_OK:
                answer = self.driver.ipc_open(given, &address)
                status = self._leave_relaxed(previous, mode, answer)
                if answer == STATUS_OK and status != STATUS_OK:
                    closed = self.driver.ipc_close(address)
        if status != STATUS_OK:
            name = self.driver.error_name(status)
            left = "" if closed == STATUS_OK else f"; it stays open: {self.driver.error_name(closed)}"
            raise SourceError(
                f"memory of another process cannot be opened on device {self.device}: {name}{left}", name
            )
        if opened is not None:
            opened.append(address)
        return address

    def close_shared(self, uint64_t address, list opened=None):
        """Close what `open_shared` opened.

        Parameters
        ----------
        address : int
        opened : list, optional
            Loses all that is in it once that is closed, before any Python code can run.

        Returns
        -------
        SourceError or None
            To be raised although it is closed: the thread's current device could not be restored.

        Raises
        ------
        SourceError
            Where the driver does not close it.
        """
        cdef int previous, mode, status
        cdef int closed
        self.driver.must_be_mine()
        with nogil:
            status = self._enter_relaxed(&previous, &mode)
            if status != STATUS_OK:
                closed = status
            else:
                closed = self.driver.ipc_close(address)
                status = self._leave_relaxed(previous, mode, closed)
        if closed == STATUS_OK and opened is not None:
            opened.clear()
        name = self.driver.error_name(status)
        if closed != STATUS_OK:
            raise SourceError(f"memory of another process at {address:#x} is not closed: {name}", name)
        return None if status == STATUS_OK else SourceError(f"the current device cannot be restored: {name}", name)

    cdef int fill(self, uint64_t address, uint32_t word, uint64_t words) noexcept nogil:
        cdef int previous
        cdef int status = self._enter_device(&previous)
        if status != STATUS_OK:
            return status
        return self._leave_device(previous, self.driver.fill(address, word, words))

    cdef int read(self, void* host, uint64_t address, uint64_t nbytes) noexcept nogil:
        cdef int previous
        cdef int status = self._enter_device(&previous)
        if status != STATUS_OK:
            return status
        return self._leave_device(previous, self.driver.read(host, address, nbytes))

    cdef int write(self, uint64_t address, const void* host, uint64_t nbytes) noexcept nogil:
        """Copy bytes from the host; they are there when this returns."""
        cdef int previous, mode
        cdef int status = self._enter_relaxed(&previous, &mode)
        if status != STATUS_OK:
            return status
        return self._leave_relaxed(previous, mode, self.driver.write(address, host, nbytes))

    cdef int fill_on(self, uint64_t stream, uint64_t address, uint8_t byte, uint64_t nbytes) noexcept nogil:
        """Set bytes in the order of a stream's work."""
        cdef int previous
        cdef int status = self._enter_device(&previous)
        if status != STATUS_OK:
            return status
        return self._leave_device(previous, self.driver.fill_on(stream, address, byte, nbytes))

    cdef int read_on(self, uint64_t stream, void* host, uint64_t address, uint64_t nbytes) noexcept nogil:
        """Copy bytes to the host in the order of a stream's work, and wait for them."""
        cdef int previous, mode
        cdef int status = self._enter_relaxed(&previous, &mode)
        if status != STATUS_OK:
            return status
        return self._leave_relaxed(previous, mode, self.driver.read_on(stream, host, address, nbytes))

    cdef int copy_on(self, uint64_t stream, uint64_t to, uint64_t address, uint64_t nbytes) noexcept nogil:
        """Copy bytes of the device in the order of a stream's work, without waiting for it."""
        cdef int previous
        cdef int status = self._enter_device(&previous)
        if status != STATUS_OK:
            return status
        return self._leave_device(previous, self.driver.copy_on(stream, to, address, nbytes))

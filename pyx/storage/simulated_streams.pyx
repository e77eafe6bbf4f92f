"""Streams, events and captures without a device: work is complete when it is told to be.

The streams know the true order of their work: each has a vector clock that the events it waits for
advance, so `ordered` can tell whether a pool did its duty.

A handle that was never made counts as a stream that always was, so that any number serves as a
stream on the host.  A destroyed one is refused, and a new stream may get its handle, as in CUDA.
"""
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free, malloc

from vpool._base.lock cimport spin_lock, spin_unlock
from vpool._storage.driver cimport (
    STATUS_CAPTURE_UNSUPPORTED,
    STATUS_INVALID_HANDLE,
    STATUS_NOT_READY,
    STATUS_OK,
    STATUS_OUT_OF_MEMORY,
    Driver,
)

cdef enum:
    FIRST_HANDLE = 0x1000


cdef int _find(Streams* streams, uint64_t handle) noexcept nogil:
    """Index of the newest stream with a handle, made where there is none; -1 where it was destroyed."""
    cdef int i
    for i in range(streams.count - 1, -1, -1):
        if streams.streams[i].handle == handle:
            return i if streams.streams[i].alive else -1
    return _make(streams, handle)


cdef int _make(Streams* streams, uint64_t handle) noexcept nogil:
    cdef SimulatedStream* stream
    if streams.count == MOST_STREAMS:
        return -1
    stream = &streams.streams[streams.count]
    streams.count += 1
    streams.next_id += 1
    stream.handle = handle
    stream.unique_id = streams.next_id
    stream.queued = 0
    stream.complete = 0
    stream.alive = True
    stream.capturing = False
    stream.clock = NULL
    return streams.count - 1


cdef bint _advance(uint64_t** clock, const uint64_t* by) noexcept nogil:
    """Raise a clock, made on first use, to another one where that is ahead; False without memory."""
    cdef int i
    if by == NULL:
        return True
    if clock[0] == NULL:
        clock[0] = <uint64_t*> calloc(MOST_STREAMS, sizeof(uint64_t))
    if clock[0] == NULL:
        return False
    for i in range(MOST_STREAMS):
        if by[i] > clock[0][i]:
            clock[0][i] = by[i]
    return True


cdef bint forbidden_in_capture(void* context) noexcept nogil:
    """Whether a capture goes on, which a call like cudaMalloc invalidates."""
    cdef Streams* streams = <Streams*> context
    if streams.captures:
        streams.invalidated = True
    return streams.captures != 0


cdef int _stream_create(void* context, uint64_t* stream) noexcept nogil:
    cdef Streams* streams = <Streams*> context
    cdef int made
    spin_lock(&streams.lock)
    stream[0] = FIRST_HANDLE + 16 * <uint64_t> streams.count
    made = _make(streams, stream[0])
    spin_unlock(&streams.lock)
    return STATUS_OK if made >= 0 else STATUS_OUT_OF_MEMORY


cdef int _stream_destroy(void* context, uint64_t stream) noexcept nogil:
    cdef Streams* streams = <Streams*> context
    cdef int found
    spin_lock(&streams.lock)
    found = _find(streams, stream)
    if found >= 0:
        streams.streams[found].alive = False
    spin_unlock(&streams.lock)
    return STATUS_OK if found >= 0 else STATUS_INVALID_HANDLE


cdef int _stream_id(void* context, uint64_t stream, uint64_t* unique_id) noexcept nogil:
    cdef Streams* streams = <Streams*> context
    cdef int found
    spin_lock(&streams.lock)
    found = _find(streams, stream)
    if found >= 0:
        unique_id[0] = streams.streams[found].unique_id
    spin_unlock(&streams.lock)
    return STATUS_OK if found >= 0 else STATUS_INVALID_HANDLE


cdef int _event_create(void* context, uint64_t* event) noexcept nogil:
    cdef SimulatedEvent* made = <SimulatedEvent*> malloc(sizeof(SimulatedEvent))
    if made == NULL:
        return STATUS_OUT_OF_MEMORY
    made.stream = -1
    made.captured = False
    made.clock = NULL
    event[0] = <uint64_t> made
    return STATUS_OK


cdef int _event_destroy(void* context, uint64_t event) noexcept nogil:
    free((<SimulatedEvent*> event).clock)
    free(<void*> event)
    return STATUS_OK


cdef int _event_record(void* context, uint64_t event, uint64_t stream) noexcept nogil:
    cdef Streams* streams = <Streams*> context
    cdef SimulatedEvent* recorded = <SimulatedEvent*> event
    cdef int found
    spin_lock(&streams.lock)
    found = _find(streams, stream)
    if found >= 0:
        recorded.stream = found
        recorded.position = streams.streams[found].queued
        recorded.captured = streams.streams[found].capturing
        free(recorded.clock)
        recorded.clock = NULL
        if not _advance(&recorded.clock, streams.streams[found].clock):
            found = -1
    else:
        streams.on_dead_streams += 1
    spin_unlock(&streams.lock)
    return STATUS_OK if found >= 0 else STATUS_INVALID_HANDLE


cdef bint _is_complete(Streams* streams, SimulatedEvent* event) noexcept nogil:
    """Whether all that comes before an event is: also what its stream waited for, if it had no work of its own."""
    cdef int i
    if event.stream < 0:
        return True
    for i in range(streams.count if event.clock != NULL else 0):
        if streams.streams[i].complete < event.clock[i]:
            return False
    return streams.streams[event.stream].complete >= event.position


cdef void _complete_before(Streams* streams, const uint64_t* clock) noexcept nogil:
    """Complete what a clock says: work is never complete before that which its stream waited for."""
    cdef int i
    for i in range(streams.count if clock != NULL else 0):
        if streams.streams[i].complete < clock[i]:
            streams.streams[i].complete = clock[i]


cdef int _event_query(void* context, uint64_t event) noexcept nogil:
    cdef Streams* streams = <Streams*> context
    cdef bint complete
    if forbidden_in_capture(context):
        return STATUS_CAPTURE_UNSUPPORTED
    spin_lock(&streams.lock)
    complete = _is_complete(streams, <SimulatedEvent*> event)
    spin_unlock(&streams.lock)
    return STATUS_OK if complete else STATUS_NOT_READY


cdef int _event_synchronize(void* context, uint64_t event) noexcept nogil:
    cdef Streams* streams = <Streams*> context
    cdef SimulatedEvent* awaited = <SimulatedEvent*> event
    if forbidden_in_capture(context):
        return STATUS_CAPTURE_UNSUPPORTED
    spin_lock(&streams.lock)
    # Waiting is what makes simulated work complete.
    if not _is_complete(streams, awaited):
        _complete_before(streams, awaited.clock)
        if streams.streams[awaited.stream].complete < awaited.position:
            streams.streams[awaited.stream].complete = awaited.position
    spin_unlock(&streams.lock)
    return STATUS_OK


cdef int _stream_wait_event(void* context, uint64_t stream, uint64_t event) noexcept nogil:
    cdef Streams* streams = <Streams*> context
    cdef SimulatedEvent* awaited = <SimulatedEvent*> event
    cdef int found
    cdef int status = STATUS_OK
    spin_lock(&streams.lock)
    found = _find(streams, stream)
    if found < 0:
        streams.on_dead_streams += 1
        status = STATUS_INVALID_HANDLE
    elif awaited.captured and not streams.streams[found].capturing:
        streams.invalidated = True
        status = STATUS_CAPTURE_UNSUPPORTED
    elif awaited.stream >= 0:
        if streams.streams[found].clock == NULL:
            streams.streams[found].clock = <uint64_t*> calloc(MOST_STREAMS, sizeof(uint64_t))
        if streams.streams[found].clock == NULL or not _advance(&streams.streams[found].clock, awaited.clock):
            status = STATUS_OUT_OF_MEMORY
        elif streams.streams[found].clock[awaited.stream] < awaited.position:
            streams.streams[found].clock[awaited.stream] = awaited.position
    spin_unlock(&streams.lock)
    return status


cdef void _synchronize_all(Streams* streams) noexcept nogil:
    cdef int i
    spin_lock(&streams.lock)
    for i in range(streams.count):
        streams.streams[i].complete = streams.streams[i].queued
    spin_unlock(&streams.lock)


cdef int _synchronize(void* context) noexcept nogil:
    if forbidden_in_capture(context):
        return STATUS_CAPTURE_UNSUPPORTED
    _synchronize_all(<Streams*> context)
    return STATUS_OK


cdef class StreamedDriver(Driver):
    """A driver with simulated streams.  Subclasses call `give_streams` with the head of their context."""

    cdef int give_streams(self, Streams* streams) except -1:
        self.streams = streams
        streams.streams = <SimulatedStream*> calloc(MOST_STREAMS, sizeof(SimulatedStream))
        if streams.streams == NULL:
            raise MemoryError("no memory for simulated streams")
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
        return 0

    def __dealloc__(self):
        cdef int i
        if self.streams != NULL and self.streams.streams != NULL:
            for i in range(self.streams.count):
                free(self.streams.streams[i].clock)
            free(self.streams.streams)

    cdef int index_of(self, stream) except -1:
        cdef int found
        cdef uint64_t handle = stream
        spin_lock(&self.streams.lock)
        found = _find(self.streams, handle)
        spin_unlock(&self.streams.lock)
        if found < 0:
            raise ValueError(f"stream {handle:#x} was destroyed")
        return found

    def create_stream(self, handle=None):
        """Make a stream.

        Parameters
        ----------
        handle : int, optional
            The handle that it gets, which may be one that was destroyed; a new one if not given.

        Returns
        -------
        int
            The handle.
        """
        cdef uint64_t number = FIRST_HANDLE + 16 * self.streams.count if handle is None else handle
        spin_lock(&self.streams.lock)
        found = _make(self.streams, number)
        spin_unlock(&self.streams.lock)
        if found < 0:
            raise MemoryError(f"at most {MOST_STREAMS} simulated streams")
        return number

    def queue_work(self, stream):
        """Queue a piece of work; the number of pieces queued on the stream so far."""
        found = self.index_of(stream)
        self.streams.streams[found].queued += 1
        return self.streams.streams[found].queued

    def complete(self, stream=None, upto=None):
        """Tell that the work of a stream, or of all, is complete: all of it, or its first `upto` pieces.

        With it whatever the stream waited for so far.
        """
        cdef SimulatedStream* done
        cdef uint64_t position
        if stream is None:
            _synchronize_all(self.streams)
            return
        done = &self.streams.streams[self.index_of(stream)]
        position = done.queued if upto is None else upto
        spin_lock(&self.streams.lock)
        _complete_before(self.streams, done.clock)
        if position > done.complete:              # what is complete stays so
            done.complete = position
        spin_unlock(&self.streams.lock)

    def number_of(self, stream):
        """What a stream is called for good: `finished` and `ordered` know it after it was destroyed, too."""
        return self.index_of(stream)

    def finished(self, int number, uint64_t position):
        """Whether the first `position` pieces of the stream of that number are complete."""
        return self.streams.streams[self._checked(number)].complete >= position

    def wait(self, stream, int number):
        """What a program does by an event: make a stream wait for what is queued so far on another, by its number."""
        cdef SimulatedStream* other = &self.streams.streams[self._checked(number)]
        cdef SimulatedStream* waiting = &self.streams.streams[self.index_of(stream)]
        if waiting.clock == NULL:
            waiting.clock = <uint64_t*> calloc(MOST_STREAMS, sizeof(uint64_t))
        if waiting.clock == NULL or not _advance(&waiting.clock, other.clock):
            raise MemoryError("no memory for a simulated stream's clock")
        waiting.clock[number] = other.queued

    def ordered(self, stream, other, position, *, number=None):
        """Whether work queued now on a stream comes after the first `position` pieces of another's.

        Either they are complete, or the stream has waited, also through third streams, for an event
        that was recorded behind them.  The other is named by its handle, or if that is None by its
        number.
        """
        cdef int mine = self.index_of(stream)
        cdef int theirs = self._checked(number) if other is None else self.index_of(other)
        cdef SimulatedStream* waiting = &self.streams.streams[mine]
        return (
            mine == theirs
            or self.streams.streams[theirs].complete >= position
            or (waiting.clock != NULL and waiting.clock[theirs] >= position)
        )

    def _checked(self, number):
        if not 0 <= number < self.streams.count:
            raise ValueError(f"no stream has number {number}")
        return number

    cdef void queue_at(self, int stream) noexcept nogil:
        self.streams.streams[stream].queued += 1

    cdef void complete_all(self) noexcept nogil:
        _synchronize_all(self.streams)

    def begin_capture(self, stream):
        """Begin a capture.  Until `end_capture`, calls that CUDA forbids meanwhile fail and invalidate it."""
        self.streams.streams[self.index_of(stream)].capturing = True
        self.streams.captures += 1
        self.streams.invalidated = False

    def end_capture(self, stream):
        """End a capture; whether it is still valid."""
        self.streams.streams[self.index_of(stream)].capturing = False
        self.streams.captures -= 1
        return not self.streams.invalidated

    @property
    def calls_on_dead_streams(self):
        """Calls that named a destroyed stream, other than asking for its id."""
        return self.streams.on_dead_streams

"""Streams, events and captures without a device: work is complete when it is told to be.

The streams know the true order of their work: each has a vector clock that the events it waits for
advance, so `ordered` can tell whether a pool did its duty.

A handle that was never made counts as a stream that always was, so that any number serves as a
stream on the host.  A destroyed one is refused, and a new stream may get its handle, as in CUDA.
"""
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free, malloc
from posix.unistd cimport usleep

from vpool._base.lock cimport spin_lock, spin_unlock
from vpool._storage.driver cimport (
    CAPTURE_ACTIVE,
    CAPTURE_INVALIDATED,
    CAPTURE_NONE,
    STATUS_CAPTURE_IMPLICIT,
    STATUS_CAPTURE_INVALIDATED,
    STATUS_CAPTURE_ISOLATION,
    STATUS_CAPTURE_UNSUPPORTED,
    STATUS_CAPTURED_EVENT,
    STATUS_INVALID_HANDLE,
    STATUS_NOT_READY,
    STATUS_OK,
    STATUS_OUT_OF_MEMORY,
    Driver,
    gone_t,
)
from vpool._storage.simulated_captures cimport (
    Retained,
    SimulatedGraph,
    capture_begin,
    capture_end,
    exchange_mode,
    forbidden_here,
    graph_drop,
    graph_find,
    graph_retain,
    graph_tell,
    graphs_delete,
)
from vpool._storage.fork cimport fork_count

cdef enum:
    FIRST_HANDLE = 0x1000
    LEGACY_STREAM = 1             # and 0, the default streams' first name


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
    stream.blocking = True
    stream.graph = NULL
    stream.joined = False
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
    """Whether a capture forbids the calling thread a call like cudaMalloc, which invalidates it."""
    cdef Streams* streams = <Streams*> context
    cdef bint forbidden
    spin_lock(&streams.lock)
    forbidden = streams.captures.open and forbidden_here(&streams.captures)
    spin_unlock(&streams.lock)
    return forbidden


cdef bint _spoil(SimulatedGraph* graph) noexcept nogil:
    """Invalidate a capture, if it is one."""
    if graph != NULL:
        graph.valid = False
    return graph != NULL


cdef bint _spoil_others(Streams* streams, uint64_t handle) noexcept nogil:
    """Whether to use a legacy default stream would make it part of a capture, which invalidates that one."""
    cdef int i
    cdef bint any = False
    for i in range(streams.count if streams.captures.open and handle <= LEGACY_STREAM else 0):
        if streams.streams[i].blocking and _spoil(streams.streams[i].graph):
            any = True
    return any


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
    cdef int status = STATUS_OK
    spin_lock(&streams.lock)
    found = _find(streams, stream)
    if found >= 0:
        unique_id[0] = streams.streams[found].unique_id
        if _spoil(streams.streams[found].graph):  # CUDA does so too
            status = STATUS_CAPTURE_UNSUPPORTED
    spin_unlock(&streams.lock)
    return status if found >= 0 else STATUS_INVALID_HANDLE


cdef int _event_create(void* context, uint64_t* event) noexcept nogil:
    cdef SimulatedEvent* made = <SimulatedEvent*> malloc(sizeof(SimulatedEvent))
    if made == NULL:
        return STATUS_OUT_OF_MEMORY
    made.stream = -1
    made.captured = 0
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
    cdef SimulatedStream* its
    cdef int found
    cdef int status = STATUS_OK
    if streams.record_delay:
        usleep(streams.record_delay)
    spin_lock(&streams.lock)
    found = _find(streams, stream)
    if found < 0:
        streams.on_dead_streams += 1
        status = STATUS_INVALID_HANDLE
    elif _spoil_others(streams, stream):
        status = STATUS_CAPTURE_IMPLICIT
    else:
        its = &streams.streams[found]
        recorded.stream = found
        recorded.position = its.queued
        recorded.captured = its.graph.id if its.graph != NULL else 0
        free(recorded.clock)
        recorded.clock = NULL
        if its.graph != NULL and not its.graph.valid:
            status = STATUS_CAPTURE_INVALIDATED
        elif not _advance(&recorded.clock, its.clock):
            status = STATUS_OUT_OF_MEMORY
    spin_unlock(&streams.lock)
    return status


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


cdef bint _captured(Streams* streams, SimulatedEvent* event) noexcept nogil:
    """Whether an event is part of a graph; to ask for it invalidates the capture."""
    if event.captured:
        _spoil(graph_find(&streams.captures, event.captured))
    return event.captured != 0


cdef int _event_query(void* context, uint64_t event) noexcept nogil:
    cdef Streams* streams = <Streams*> context
    cdef SimulatedEvent* asked = <SimulatedEvent*> event
    cdef int status
    if forbidden_in_capture(context):
        return STATUS_CAPTURE_UNSUPPORTED
    spin_lock(&streams.lock)
    if _captured(streams, asked):
        status = STATUS_CAPTURED_EVENT
    else:
        status = STATUS_OK if _is_complete(streams, asked) else STATUS_NOT_READY
    spin_unlock(&streams.lock)
    return status


cdef int _event_synchronize(void* context, uint64_t event) noexcept nogil:
    cdef Streams* streams = <Streams*> context
    cdef SimulatedEvent* awaited = <SimulatedEvent*> event
    cdef int status = STATUS_OK
    if forbidden_in_capture(context):
        return STATUS_CAPTURE_UNSUPPORTED
    spin_lock(&streams.lock)
    if _captured(streams, awaited):
        status = STATUS_CAPTURED_EVENT
    elif not _is_complete(streams, awaited):
        # Waiting is what makes simulated work complete.
        _complete_before(streams, awaited.clock)
        if streams.streams[awaited.stream].complete < awaited.position:
            streams.streams[awaited.stream].complete = awaited.position
    spin_unlock(&streams.lock)
    return status


cdef int _await(Streams* streams, SimulatedStream* stream, SimulatedEvent* event) noexcept nogil:
    """Make a stream wait for an event.  The lock is held."""
    cdef SimulatedGraph* theirs = graph_find(&streams.captures, event.captured) if event.captured else NULL
    if stream.graph != NULL and theirs != stream.graph:
        _spoil(stream.graph)                      # a graph cannot wait for what is outside
        return STATUS_CAPTURE_ISOLATION
    if event.captured and (theirs == NULL or not theirs.open):
        return STATUS_CAPTURED_EVENT
    if theirs != NULL and stream.graph == NULL:
        stream.graph = theirs                     # the stream becomes part of the capture
        stream.joined = True
    if theirs != NULL and event.stream >= 0:
        streams.streams[event.stream].joined = False
    if event.stream < 0:
        return STATUS_OK
    if stream.clock == NULL:
        stream.clock = <uint64_t*> calloc(MOST_STREAMS, sizeof(uint64_t))
    if stream.clock == NULL or not _advance(&stream.clock, event.clock):
        return STATUS_OUT_OF_MEMORY
    if stream.clock[event.stream] < event.position:
        stream.clock[event.stream] = event.position
    return STATUS_OK


cdef int _stream_wait_event(void* context, uint64_t stream, uint64_t event) noexcept nogil:
    cdef Streams* streams = <Streams*> context
    cdef int found
    cdef int status
    spin_lock(&streams.lock)
    found = _find(streams, stream)
    if found < 0:
        streams.on_dead_streams += 1
        status = STATUS_INVALID_HANDLE
    elif _spoil_others(streams, stream):
        status = STATUS_CAPTURE_IMPLICIT
    else:
        status = _await(streams, &streams.streams[found], <SimulatedEvent*> event)
    spin_unlock(&streams.lock)
    return status


cdef void _synchronize_all(Streams* streams) noexcept nogil:
    cdef int i
    spin_lock(&streams.lock)
    for i in range(streams.count):
        streams.streams[i].complete = streams.streams[i].queued
    spin_unlock(&streams.lock)


cdef int _synchronize(void* context) noexcept nogil:
    cdef Streams* streams = <Streams*> context
    cdef int i
    cdef bint captures = False
    spin_lock(&streams.lock)
    for i in range(streams.count if streams.captures.open else 0):
        captures = _spoil(streams.streams[i].graph) or captures
    spin_unlock(&streams.lock)
    if captures:
        return STATUS_CAPTURE_UNSUPPORTED
    _synchronize_all(streams)
    return STATUS_OK


cdef int _capture_info(void* context, uint64_t stream, int* state, uint64_t* id, uint64_t* graph) noexcept nogil:
    cdef Streams* streams = <Streams*> context
    cdef SimulatedGraph* its = NULL
    cdef int found
    cdef int status = STATUS_OK
    cdef int i
    spin_lock(&streams.lock)
    found = _find(streams, stream)
    if found < 0:
        status = STATUS_INVALID_HANDLE
    elif stream <= LEGACY_STREAM:
        for i in range(streams.count if streams.captures.open else 0):
            if streams.streams[i].blocking and streams.streams[i].graph != NULL:
                status = STATUS_CAPTURE_IMPLICIT
    else:
        its = streams.streams[found].graph
    state[0] = CAPTURE_NONE if its == NULL else CAPTURE_ACTIVE if its.valid else CAPTURE_INVALIDATED
    id[0] = its.id if state[0] == CAPTURE_ACTIVE else 0
    graph[0] = id[0]
    spin_unlock(&streams.lock)
    return status


cdef int stream_captures(void* context, uint64_t stream, int* state) noexcept nogil:
    cdef uint64_t id, graph
    return _capture_info(context, stream, state, &id, &graph)


cdef int _capture_mode(void* context, int* mode) noexcept nogil:
    return exchange_mode(mode)


cdef int _graph_retain(void* context, uint64_t graph, gone_t gone, void* data) noexcept nogil:
    cdef Streams* streams = <Streams*> context
    return graph_retain(&streams.captures, &streams.lock, graph, gone, data)


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
        self.table.stream_captures = stream_captures
        self.table.capture_info = _capture_info
        self.table.capture_mode = _capture_mode
        self.table.graph_retain = _graph_retain
        self.captures = &streams.captures.open
        return 0

    def __dealloc__(self):
        cdef int i
        # In a child it may be half changed, and goes with the child.
        if self.streams == NULL or self.forks != fork_count():
            return
        graphs_delete(&self.streams.captures)
        if self.streams.streams != NULL:
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

    def create_stream(self, handle=None, *, bint blocking=True):
        """Make a stream.

        Parameters
        ----------
        handle : int, optional
            The handle that it gets, which may be one that was destroyed; a new one if not given.
        blocking : bool
            Whether it is ordered with the legacy default stream, as CUDA's streams are unless made otherwise.

        Returns
        -------
        int
            The handle.
        """
        cdef uint64_t number
        if handle is None and blocking:
            return Driver.create_stream(self)
        number = FIRST_HANDLE + 16 * self.streams.count if handle is None else handle
        spin_lock(&self.streams.lock)
        found = _make(self.streams, number)
        if found >= 0:
            self.streams.streams[<int> found].blocking = blocking
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

    cdef uint64_t queued_at(self, int stream) noexcept nogil:
        return self.streams.streams[stream].queued

    cdef void complete_at(self, int stream, uint64_t upto) noexcept nogil:
        """Let the first `upto` pieces of a stream be complete; what they waited for the caller completes before."""
        spin_lock(&self.streams.lock)
        self.streams.streams[stream].complete = max(self.streams.streams[stream].complete, upto)
        spin_unlock(&self.streams.lock)

    cdef void complete_all(self) noexcept nogil:
        _synchronize_all(self.streams)

    def begin_capture(self, stream, mode="global"):
        """Begin a capture; its id.  Until it ends, calls that CUDA forbids meanwhile fail and invalidate it.

        Parameters
        ----------
        stream : int
        mode : {"global", "thread_local", "relaxed"}
        """
        cdef int found = self.index_of(stream)
        cdef int number = ("global", "thread_local", "relaxed").index(mode)
        if self.streams.streams[found].graph != NULL:
            raise ValueError(f"stream {stream:#x} captures already")
        spin_lock(&self.streams.lock)
        self.streams.streams[found].graph = capture_begin(&self.streams.captures, number)
        spin_unlock(&self.streams.lock)
        return self.graph_of(stream).id

    def fork_capture(self, stream, other):
        """What a program does by an event: make another stream part of a stream's capture."""
        cdef SimulatedGraph* graph = self.graph_of(stream)
        cdef int found = self.index_of(other)
        self.streams.streams[found].graph = graph
        self.streams.streams[found].joined = True
        self.wait(other, self.index_of(stream))

    def join_capture(self, stream, other):
        """What a program does by an event: make a stream wait for another one that became part of its capture."""
        self.streams.streams[self.index_of(other)].joined = False
        self.wait(stream, self.index_of(other))

    def end_capture(self, stream):
        """End a capture; whether it gave a graph, which lives until `destroy_graph` with the capture's id."""
        cdef SimulatedGraph* graph = self.graph_of(stream)
        cdef Retained* retained
        cdef bint valid
        cdef int i
        spin_lock(&self.streams.lock)
        for i in range(self.streams.count):
            if self.streams.streams[i].graph == graph:
                graph.valid = graph.valid and not self.streams.streams[i].joined
                self.streams.streams[i].graph = NULL
                self.streams.streams[i].joined = False
        valid = graph.valid
        retained = capture_end(&self.streams.captures, graph)
        spin_unlock(&self.streams.lock)
        graph_tell(retained)
        return valid

    def fail_capture(self, stream):
        """Invalidate a stream's capture, as a program does that makes a call which is forbidden."""
        _spoil(self.graph_of(stream))

    def destroy_graph(self, id):
        """Destroy the graph of a capture, and all that was made of it."""
        cdef uint64_t number = id
        cdef SimulatedGraph* graph
        cdef Retained* retained = NULL
        spin_lock(&self.streams.lock)
        graph = graph_find(&self.streams.captures, number)
        if graph != NULL and not graph.open:
            retained = graph_drop(&self.streams.captures, graph)
        spin_unlock(&self.streams.lock)
        if graph == NULL:
            raise ValueError(f"no graph of capture {id}")
        graph_tell(retained)

    cdef SimulatedGraph* graph_of(self, stream) except NULL:
        cdef SimulatedGraph* graph = self.streams.streams[self.index_of(stream)].graph
        if graph == NULL:
            raise ValueError(f"stream {stream:#x} captures nothing")
        return graph

    def delay_records(self, double seconds):
        """Have each record of an event take that long before it looks at its stream."""
        self.streams.record_delay = <unsigned int> (seconds * 1e6)

    @property
    def calls_on_dead_streams(self):
        """Calls that named a destroyed stream, other than asking for its id."""
        return self.streams.on_dead_streams

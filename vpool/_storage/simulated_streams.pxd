"""Streams, events and captures without a device: work is complete when it is told to be."""
from libc.stdint cimport uint64_t

from vpool._base.lock cimport SpinLock
from vpool._storage.driver cimport Driver
from vpool._storage.simulated_captures cimport Captures, SimulatedGraph

cdef enum:
    MOST_STREAMS = 4096

cdef struct SimulatedStream:
    uint64_t handle
    uint64_t unique_id
    uint64_t queued               # pieces of work queued so far
    uint64_t complete             # of those, how many are complete
    bint alive
    bint blocking                 # towards the legacy default stream, as streams are unless made otherwise
    SimulatedGraph* graph         # that it captures into
    bint joined                   # it did not begin that capture, and has not been waited for since it joined
    uint64_t* clock               # [stream]: queued there up to this comes before what is queued here next

cdef struct SimulatedEvent:
    int stream                    # of the latest record; -1: never recorded, which counts as complete
    uint64_t position             # what was queued there at that moment
    uint64_t captured             # id of the capture it was recorded in
    uint64_t* clock               # the stream's at that moment

cdef struct Streams:
    SpinLock lock                 # of every field; held for O(streams)
    int count
    uint64_t next_id
    Captures captures
    uint64_t on_dead_streams      # calls that named a destroyed stream, other than asking for its id
    unsigned int record_delay     # microseconds
    SimulatedStream* streams


cdef class StreamedDriver(Driver):
    # The driver's context begins with the streams, so that both kinds of calls find theirs in it.
    cdef Streams* streams

    cdef int give_streams(self, Streams* streams) except -1
    cdef int index_of(self, stream) except -1
    cdef void queue_at(self, int stream) noexcept nogil
    cdef uint64_t queued_at(self, int stream) noexcept nogil
    cdef void complete_at(self, int stream, uint64_t upto) noexcept nogil
    cdef void complete_all(self) noexcept nogil
    cdef SimulatedGraph* graph_of(self, stream) except NULL


cdef bint forbidden_in_capture(void* context) noexcept nogil
cdef int stream_captures(void* context, uint64_t stream, int* state) noexcept nogil

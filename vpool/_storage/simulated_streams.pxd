"""Streams, events and captures without a device: work is complete when it is told to be."""
from libc.stdint cimport uint64_t

from vpool._base.lock cimport SpinLock
from vpool._storage.driver cimport Driver

cdef enum:
    MOST_STREAMS = 4096

cdef struct SimulatedStream:
    uint64_t handle
    uint64_t unique_id
    uint64_t queued               # pieces of work queued so far
    uint64_t complete             # of those, how many are complete
    bint alive
    bint capturing
    uint64_t* clock               # [stream]: queued there up to this comes before what is queued here next

cdef struct SimulatedEvent:
    int stream                    # of the latest record; -1: never recorded, which counts as complete
    uint64_t position             # what was queued there at that moment
    bint captured                 # recorded on a capturing stream
    uint64_t* clock               # the stream's at that moment

cdef struct Streams:
    SpinLock lock                 # of every field; held for O(streams)
    int count
    uint64_t next_id
    int captures                  # streams that capture
    bint invalidated              # a forbidden call was made meanwhile
    uint64_t on_dead_streams      # calls that named a destroyed stream, other than asking for its id
    SimulatedStream* streams


cdef class StreamedDriver(Driver):
    # The driver's context begins with the streams, so that both kinds of calls find theirs in it.
    cdef Streams* streams

    cdef int give_streams(self, Streams* streams) except -1
    cdef int index_of(self, stream) except -1
    cdef void queue_at(self, int stream) noexcept nogil
    cdef void complete_all(self) noexcept nogil


cdef bint forbidden_in_capture(void* context) noexcept nogil

"""Streams become slots here, once for each stream object; nothing below knows a handle."""
from libc.stdint cimport uint64_t

from vpool._interface.captures cimport CaptureTable
from vpool._management.areas cimport Areas

# Threads that have a default stream of their own; while it is 0, None means slot 0.
cdef int defaults_in_use


cdef class Held:
    cdef void* areas              # the pool's, whose slots stream objects hold; NULL once it is gone

    cdef int let_go(self, int slot) except -1


cdef class Kept:
    cdef object stream
    cdef object key               # None: not the one that pools share
    cdef dict shared
    cdef object __weakref__


cdef class StreamTable:
    cdef Areas areas
    cdef Held held
    cdef dict references
    cdef dict by_object           # id of a stream object -> (weak reference to it, slot)
    cdef dict kept                # id of a stream object that would tell too late -> its `Kept`
    cdef list going               # what holds nothing any more of these, and is dropped without a lock
    cdef dict by_handle           # handle -> slot of the stream that has it now
    cdef dict by_thread           # thread number -> slot of its per-thread default stream
    cdef dict foreign             # those of `by_thread` that Python did not make -> the system's number of each
    cdef object changing          # threading.RLock of all six
    cdef str name                 # of the pool
    cdef int host                 # slot of the host; 0: none yet
    cdef CaptureTable captures    # None: the program says that it never allocates in a capture
    cdef object __weakref__

    cdef int slot_of(self, stream) except -1
    cdef int hold_object(self, stream, tuple known, Kept kept) except -1
    cdef bint is_over(self)
    cdef int let_go_of_objects(self, bint wait) except -1
    cdef bint is_alone(self, key)
    cdef int drop_object(self, key) except -1
    cdef int look_for_ended_threads(self) except -1
    cdef int drop_slot(self, int slot) except -1
    cdef uint64_t handle_of(self, stream, bint* lasts) except? 0
    cdef int slot_of_handle(self, uint64_t handle) except -1
    cdef bint is_still(self, int slot) noexcept
    cdef int open_slot(self, uint64_t handle, uint64_t unique_id, uint64_t thread) except -1
    cdef int make_slot(self, uint64_t handle, uint64_t unique_id, uint64_t thread, uint64_t capture) except -1
    cdef int captured(self, object stream, uint64_t handle) except -1
    cdef int host_slot(self) except -1
    cdef int settle(self) except -1

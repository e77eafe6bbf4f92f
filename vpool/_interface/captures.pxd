"""Streams that capture: their memory is kept for the graph, and found by the capture's id."""
from libc.stdint cimport uint64_t

from vpool._management.areas cimport Areas


cdef class Capture:
    cdef Areas areas
    cdef dict slots               # (handle, thread) -> slot
    cdef dict ids                 # of the captures that have not been released -> _Watched or None


cdef class CaptureTable:
    cdef Areas areas
    cdef dict by_id               # capture id -> Capture
    cdef dict promised            # the same of captures that shall share one's memory and have not allocated yet
    # (handle, thread) -> (id, what leads to the stream object or None), of streams that captured when last asked.
    cdef dict capturing
    cdef int believed             # how many those are
    cdef object changing          # threading.RLock of these
    cdef object __weakref__

    cdef int slot_of(self, object table, object stream, uint64_t handle, uint64_t thread) except -1
    cdef int meet(self, object table, tuple where, object stream, uint64_t id, uint64_t graph) except -1
    cdef int enter(self, Capture capture, tuple where, uint64_t id, watched, int opened) except -1
    cdef note_over(self, where)
    cdef int is_over(self, tuple where) except -1
    cdef int ask_again(self) except -1
    cdef int release_gone(self) except -1


cdef int settle() except -1

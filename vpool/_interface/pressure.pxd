"""The ladder as Python climbs it: with callbacks and a garbage collection between its rungs."""
from vpool._management.areas cimport Areas
from vpool._management.state cimport Request


cdef class Pressure:
    cdef Areas areas
    cdef list callbacks           # (-priority, number, function), as they were added, by any thread at any moment
    cdef object numbers           # itertools.count
    cdef object quarantine        # gives back what a debugger keeps; None without one
    cdef object pressed           # threading.local: whether this thread is calling them

    cdef int climb(self, Request* request, str name, measures, debugger) except -1
    cdef tell(self, Request* request, str name)
    cdef ask_python(self, Request* request, str name, bint* fits)
    cdef bint retry(self, Request* request, int rung, str name, bint* fits) except -1

# cython: language_level=3, freethreading_compatible=True
"""A decoder that has one block for each frame, without Python between them: an example of a module on top of vpool."""
cimport vpool
from libc.stdint cimport uint64_t
from libc.string cimport memset


cdef class Decoder:
    """Frames of a video, each in a block of a pool."""

    cdef vpool.Pool pool
    cdef vpool.Stream stream
    cdef readonly int status

    def __cinit__(self, vpool.Pool pool not None, stream=None):
        self.pool = pool                          # a stream is good as long as this
        self.stream = vpool.stream_of(pool, stream)

    def decode(self, uint64_t nbytes, int frames, bint fill=False):
        """Have so many frames in turn; how many there was memory for."""
        cdef uint64_t address
        cdef int done = 0
        with nogil:
            while done < frames:
                self.status = vpool.allocate(self.pool, self.stream, nbytes, &address)
                if self.status != vpool.Status.OK:
                    break
                if fill:
                    memset(<void*> address, done & 255, nbytes)
                self.status = vpool.deallocate(self.pool, self.stream, address)
                done += 1
        return done


# What follows is for the tests: each function as it is.

def allocate(vpool.Pool pool not None, stream, nbytes, alignment=None):
    cdef uint64_t address = 77
    cdef uint64_t size = nbytes
    cdef uint64_t multiple = 0 if alignment is None else alignment
    cdef bint aligned = alignment is not None
    cdef vpool.Stream known = vpool.stream_of(pool, stream)
    cdef int status
    with nogil:
        if aligned:
            status = vpool.allocate_aligned(pool, known, size, multiple, &address)
        else:
            status = vpool.allocate(pool, known, size, &address)
    return status, address


def deallocate(vpool.Pool pool not None, stream, uint64_t address, bint on=False):
    cdef vpool.Stream known = vpool.stream_of(pool, stream)
    cdef int status
    with nogil:
        status = vpool.deallocate_on(pool, known, address) if on else vpool.deallocate(pool, known, address)
    return status


def record_stream(vpool.Pool pool not None, stream, uint64_t address):
    cdef vpool.Stream known = vpool.stream_of(pool, stream)
    cdef int status
    with nogil:
        status = vpool.record_stream(pool, known, address)
    return status

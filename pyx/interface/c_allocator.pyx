"""A pool as two C functions that are called with the GIL, as CuPy's `CFunctionAllocator` does.

Compiled as C++, since a failure is told by a C++ exception: what is returned nobody looks at.  The Python exception
that is set at that moment is the one that the caller's program gets.
"""
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uint16_t, uint64_t

from vpool._base.types cimport GRANULE
from vpool._interface.lender cimport Lender
from vpool._interface.tags cimport enter_tag
from vpool._management.arena cimport Arena
from vpool._management.journal cimport journal_set_tag

from vpool._interface.lender import pools_and_closed
from vpool._interface.tags import number_of
from vpool.errors import ForeignPointerError, OutOfMemoryError

cdef extern from *:
    """
    #include <new>
    typedef void* (*vpool_c_lend_t)(void* blocks, size_t nbytes, int device);
    static vpool_c_lend_t vpool_c_lend;
    static void* vpool_c_malloc(void* blocks, size_t nbytes, int device) {
        void* block = vpool_c_lend(blocks, nbytes, device);
        if (block == NULL && PyErr_Occurred()) throw std::bad_alloc();
        return block;
    }
    """
    ctypedef void* (*lend_t "vpool_c_lend_t")(void* blocks, size_t nbytes, int device) except? NULL
    lend_t lend_of "vpool_c_lend"
    void* c_malloc "vpool_c_malloc"(void* blocks, size_t nbytes, int device)


cdef class Blocks:
    """What serves a framework's allocations.

    Parameters
    ----------
    pool_of : callable
        A device's ordinal to the pool that serves it.
    current_stream : callable
        The stream that allocations are for.
    error_of : callable
        An `OutOfMemoryError` to what is raised for it.
    tag : str, optional
        Of the blocks that a thread without a tag asks for.
    """

    cdef object pool_of
    cdef object current_stream
    cdef object error_of
    cdef uint16_t tag

    def __cinit__(self, pool_of, current_stream, error_of, tag=None):
        self.pool_of = pool_of
        self.current_stream = current_stream
        self.error_of = error_of
        self.tag = number_of(tag)

    def functions(self):
        """The addresses of this, of what lends and of what takes back: what `CFunctionAllocator` wants.

        Who has these keeps nothing alive, also at the end of the interpreter, so this lives as long as the process.
        """
        Py_INCREF(self)
        return <size_t> <PyObject*> self, <size_t> &c_malloc, <size_t> &_take


cdef void* _lend(void* blocks, size_t nbytes, int device) except? NULL:
    cdef Blocks mine = <Blocks> blocks
    cdef Lender pool
    cdef Arena* arena
    cdef uint64_t address = 0
    cdef uint16_t before
    if nbytes >> 63:
        raise OverflowError(f"no block has {nbytes} bytes")
    pool = mine.pool_of(device)
    arena = pool.arena_for(mine.current_stream())
    before = enter_tag(mine.tag)
    try:
        pool.lend(&arena, nbytes, GRANULE, &address)
    except OutOfMemoryError as error:
        raise mine.error_of(error) from error.__cause__
    finally:
        journal_set_tag(before)
    return <void*> address


cdef void _take(void* blocks, void* block, int device) noexcept:
    """Take a block back on its own stream."""
    cdef Blocks mine = <Blocks> blocks
    pool = mine.pool_of(device)
    try:
        pool.deallocate(<uint64_t> block)
    except ForeignPointerError:
        # Of the pool that served the device before.
        for other in pools_and_closed():
            if (<Lender> other).holds(<uint64_t> block):
                other.deallocate(<uint64_t> block)
                return
        raise


lend_of = _lend

"""What callers pass becomes C here: the quick case inline, the rest, with its errors, in the module."""
from cpython.exc cimport PyErr_Clear
from cpython.long cimport PyLong_CheckExact
from libc.stdint cimport int64_t, uint64_t

from vpool._base.types cimport likely

cdef extern from "Python.h":
    # Without an exception clause: the quick case looks at the value alone.
    Py_ssize_t int_as_ssize "PyLong_AsSsize_t"(object number) noexcept
    unsigned long long int_as_address "PyLong_AsUnsignedLongLong"(object number) noexcept

cdef int64_t checked_size(nbytes) except -1
cdef uint64_t checked_alignment(alignment) except 0
cdef uint64_t checked_rounding(rounding) except 0
cdef uint64_t checked_remainder(remainder) except 0
cdef uint64_t checked_address(ptr) except? 0


cdef inline int64_t size_of(nbytes) except -1:
    """Bytes of a request: 0 to 2**63 - 1."""
    cdef Py_ssize_t number
    if PyLong_CheckExact(nbytes):
        number = int_as_ssize(nbytes)
        if likely(number >= 0):
            return number
        PyErr_Clear()
    return checked_size(nbytes)


cdef inline uint64_t address_of(ptr) except? 0:
    """An address that a caller wants to free."""
    cdef unsigned long long number
    if PyLong_CheckExact(ptr):
        number = int_as_address(ptr)
        if likely(number != <unsigned long long> -1):
            return number
        PyErr_Clear()
    return checked_address(ptr)

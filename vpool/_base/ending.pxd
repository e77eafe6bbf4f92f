"""The end of the interpreter."""

cdef extern from *:
    """
    #if PY_VERSION_HEX >= 0x030D0000
    #define vpool_is_finalizing Py_IsFinalizing
    #else
    #define vpool_is_finalizing _Py_IsFinalizing
    #endif
    """
    bint is_finalizing "vpool_is_finalizing"() noexcept   # from then on modules may be half gone

"""Forks: what belongs to the parent is told so in the child."""
from libc.stdint cimport uint32_t

cdef extern from *:
    """
    #ifndef VPOOL_STORAGE_FORK
    #define VPOOL_STORAGE_FORK
    #include <stdint.h>
    typedef struct vpool_watched {
        uint32_t* word;
        uint32_t bits;
        struct vpool_watched* before;
        struct vpool_watched* after;
    } vpool_watched;
    #endif
    """
    # A word that every child of this process gets bits set in, for what holds it.
    ctypedef struct Watched "vpool_watched":
        pass

cdef void fork_watch(Watched* watched, uint32_t* word, uint32_t bits) noexcept nogil
# Also of one that was zeroed and never watched.
cdef void fork_forget(Watched* watched) noexcept nogil
# How many forks led to this process since vpool was imported: whoever has another number is of a parent.
cdef uint32_t fork_count() noexcept nogil

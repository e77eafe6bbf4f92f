"""Host memory that costs nothing until it is touched and never moves."""
from libc.stdint cimport uint64_t
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, madvise, mmap, munmap

cdef extern from "sys/mman.h" nogil:
    int MAP_NORESERVE
    int MADV_HUGEPAGE


cdef inline void* lazy_reserve(uint64_t nbytes) noexcept nogil:
    """`nbytes` of zeroed memory, mapped page by page on first touch; NULL where there is no room."""
    cdef void* base = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    return NULL if base == MAP_FAILED else base


cdef inline void lazy_release(void* base, uint64_t nbytes) noexcept nogil:
    munmap(base, nbytes)


cdef inline void lazy_touch(void* base, uint64_t nbytes) noexcept nogil:
    """Have memory mapped before it is needed: a page that is met first in a loop costs it microseconds."""
    cdef uint64_t at
    madvise(base, nbytes, MADV_HUGEPAGE)          # where there are none, pages are small
    for at in range(0, nbytes, 4096):
        (<volatile char*> base)[at] = 0

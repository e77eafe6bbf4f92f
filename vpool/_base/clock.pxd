"""The monotonic clock, in nanoseconds (a read costs about 20)."""
from libc.stdint cimport uint64_t

cdef extern from *:
    """
    #ifndef VPOOL_BASE_CLOCK
    #define VPOOL_BASE_CLOCK
    #include <stdint.h>
    #include <time.h>
    static inline uint64_t vpool_now_ns(void) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    }
    #endif
    """
    uint64_t now_ns "vpool_now_ns"() noexcept nogil

"""A spin lock that gives way: the only lock that an allocation takes."""
from libc.stdint cimport uint32_t

cdef extern from *:
    """
    #ifndef VPOOL_BASE_LOCK
    #define VPOOL_BASE_LOCK
    #include <stdint.h>
    #include <sched.h>
    #if defined(__x86_64__) || defined(__i386__)
    #define VPOOL_PAUSE() __builtin_ia32_pause()
    #elif defined(__aarch64__)
    #define VPOOL_PAUSE() __asm__ __volatile__("yield")
    #else
    #define VPOOL_PAUSE() ((void)0)
    #endif

    /* What happens while a lock of this kind is held must be bounded and short.  Never under it: a
       driver call, a Python object (the collector could run a finaliser that frees into the same
       pool), the GIL, logging, or a page of a file.  With the GIL held it may only be *tried*; who
       fails releases the GIL first, does the whole operation without it, and unlocks before taking
       the GIL back.  Locks are not recursive. */
    typedef struct vpool_spin { uint32_t held; } vpool_spin;

    static inline int vpool_spin_try(vpool_spin* lock) {
        return __atomic_exchange_n(&lock->held, 1, __ATOMIC_ACQUIRE) == 0;
    }
    static inline void vpool_spin_unlock(vpool_spin* lock) {
        __atomic_store_n(&lock->held, 0, __ATOMIC_RELEASE);
    }
    /* Spins on a plain load for about a microsecond, then yields: a holder that lost its core must
       get it back, or the waiter burns a time slice for nothing. */
    static __attribute__((noinline, unused)) void vpool_spin_wait(vpool_spin* lock) {
        int spins = 0;
        do {
            while (__atomic_load_n(&lock->held, __ATOMIC_RELAXED)) {
                if (++spins < 100) VPOOL_PAUSE();
                else sched_yield();
            }
        } while (!vpool_spin_try(lock));
    }
    static inline void vpool_spin_lock(vpool_spin* lock) {
        if (__builtin_expect(!vpool_spin_try(lock), 0)) vpool_spin_wait(lock);
    }

    #define VPOOL_READ(field) __atomic_load_n(&(field), __ATOMIC_RELAXED)
    #define VPOOL_WRITE(field, value) __atomic_store_n(&(field), (value), __ATOMIC_RELAXED)
    /* Fields of the hit path: words that one thread at a time writes, under a lock, and others may look at.
       Loads and stores of aligned words are whole on the machines that CUDA runs on.  Written as relaxed
       atomics they cost a tight pair of calls 15 to 20% (GCC merges and hoists none of them), so they are
       that only where the thread sanitizer looks: it knows then which races are meant. */
    #ifdef __SANITIZE_THREAD__
    #define VPOOL_COUNT(field, by) __atomic_store_n(&(field), (field) + (by), __ATOMIC_RELAXED)
    #define VPOOL_GLANCE(field) VPOOL_READ(field)
    #else
    #define VPOOL_COUNT(field, by) ((void) ((field) += (by)))
    #define VPOOL_GLANCE(field) (field)
    #endif
    #define VPOOL_ADD(field, value) __atomic_add_fetch(&(field), (value), __ATOMIC_RELAXED)
    #define VPOOL_ACQUIRE(field) __atomic_load_n(&(field), __ATOMIC_ACQUIRE)
    #define VPOOL_RELEASE(field, value) __atomic_store_n(&(field), (value), __ATOMIC_RELEASE)
    #define VPOOL_EXCHANGE(field, value) __atomic_exchange_n(&(field), (value), __ATOMIC_SEQ_CST)
    #endif
    """
    ctypedef struct SpinLock "vpool_spin":
        uint32_t held

    bint spin_try "vpool_spin_try"(SpinLock* lock) noexcept nogil
    void spin_lock "vpool_spin_lock"(SpinLock* lock) noexcept nogil
    void spin_unlock "vpool_spin_unlock"(SpinLock* lock) noexcept nogil

    # Plain counters that others read without the lock: relaxed atomics, so no torn value is seen.
    unsigned long long atomic_read "VPOOL_READ"(unsigned long long field) noexcept nogil
    void atomic_write "VPOOL_WRITE"(unsigned long long field, unsigned long long value) noexcept nogil
    # Of the hit path: plain, but known to the thread sanitizer.
    void lone_count "VPOOL_COUNT"(unsigned long long field, long long by) noexcept nogil
    unsigned long long lone_read "VPOOL_GLANCE"(unsigned long long field) noexcept nogil
    # To publish: who acquires the value that was released sees all that was written before.
    unsigned long long atomic_acquire "VPOOL_ACQUIRE"(unsigned long long field) noexcept nogil
    void atomic_release "VPOOL_RELEASE"(unsigned long long field, unsigned long long value) noexcept nogil
    unsigned long long atomic_exchange "VPOOL_EXCHANGE"(
        unsigned long long field, unsigned long long value) noexcept nogil
    unsigned long long atomic_add "VPOOL_ADD"(unsigned long long field, long long value) noexcept nogil

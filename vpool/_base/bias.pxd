"""A lock that its most frequent user takes without an atomic read-modify-write.

Biased locking on an asymmetric Dekker protocol (Dice, Huang and Yang, "Asymmetric Dekker
Synchronization", 2001).  The lock is biased towards one thread, which says that it is inside by a plain
store into a seat of its own and then looks once more whether the bias still stands.  Any other thread
takes the spin lock, ends the bias, makes every thread of the process pass a barrier (membarrier, about a
microsecond), and waits until the seat is empty.  A thread that takes the lock many times in a row is
given the bias, and each time it is ended, the next one has to be earned by twice as many.

Where the processor takes an uncontended spin lock in a few nanoseconds a bias would cost more than it
saves.  That is measured once; the variable ``VPOOL_BIASED_LOCKS`` (0 or 1) decides it instead.
"""
from libc.stdint cimport uint32_t

from vpool._base.lock cimport SpinLock

cdef extern from *:
    """
    #ifndef VPOOL_BASE_BIAS
    #define VPOOL_BASE_BIAS
    #include <stdint.h>
    #include <stdlib.h>
    #include <time.h>
    #include <unistd.h>
    #if defined(__linux__)
    #include <sys/syscall.h>
    #endif

    #define VPOOL_SEATS 8
    #define VPOOL_PATIENCE 16               /* takings in a row that earn the first bias */
    #define VPOOL_MOST_PATIENCE (1u << 16)
    #define VPOOL_BIAS_PAYS 5               /* nanoseconds of a lock and unlock from which on a bias pays */

    /* A seat is one thread's for good, so nobody else ever writes its `busy`: a thread that was about to
       sit down when its bias ended touches only what is its own. */
    typedef struct vpool_seat {
        uintptr_t thread;
        uint32_t busy;
        char apart[52];
    } vpool_seat;

    typedef struct vpool_bias {
        vpool_spin spin;
        uint32_t streak;                    /* takings in a row by `last`; under the spin lock, as what follows */
        vpool_seat* owner;                  /* the seat of the thread that has the bias, or NULL */
        uintptr_t last;
        uint32_t patience;                  /* the streak that earns the bias; 0: none is ever given */
        uint32_t revocations;
        vpool_seat* seats;                  /* VPOOL_SEATS of them, away from what a hit touches */
    } vpool_bias;

    /* A number that no two living threads share: where the thread's control block is. */
    static inline uintptr_t vpool_self(void) {
        uintptr_t self;
    #if defined(__linux__) && defined(__x86_64__)
        __asm__("mov %%fs:0, %0" : "=r"(self));
    #elif defined(__linux__) && defined(__aarch64__)
        __asm__("mrs %0, tpidr_el0" : "=r"(self));
    #else
        self = 1;
    #endif
        return self;
    }

    /* Commands of membarrier(2). */
    #define VPOOL_BARRIER_GLOBAL 1
    #define VPOOL_BARRIER_EXPEDITED 8
    #define VPOOL_BARRIER_REGISTER 16

    static inline int vpool_membarrier(int command) {
    #if defined(SYS_membarrier)
        return (int) syscall(SYS_membarrier, command, 0, 0);
    #else
        return -1;
    #endif
    }

    /* Nanoseconds that 256 locks and unlocks took at the best of some tries. */
    static inline long vpool_spin_cost(void) {
        vpool_spin spin = {0};
        struct timespec begin, end;
        long best = 1000000000, took;
        int i, j;
        for (i = 0; i < 16; i++) {
            clock_gettime(CLOCK_MONOTONIC, &begin);
            for (j = 0; j < 256; j++) {
                vpool_spin_lock(&spin);
                vpool_spin_unlock(&spin);
            }
            clock_gettime(CLOCK_MONOTONIC, &end);
            took = (end.tv_sec - begin.tv_sec) * 1000000000 + (end.tv_nsec - begin.tv_nsec);
            best = took < best ? took : best;
        }
        return best;
    }

    /* Whether a bias can be ended here, and pays.  The thread sanitizer does not know what a barrier that one
       thread makes for another means. */
    static __attribute__((noinline, unused)) int vpool_bias_pays(void) {
    #if defined(__SANITIZE_THREAD__) || !defined(SYS_membarrier) || !(defined(__x86_64__) || defined(__aarch64__))
        return 0;
    #else
        static int known;
        int pays = __atomic_load_n(&known, __ATOMIC_RELAXED);
        const char* wish = getenv("VPOOL_BIASED_LOCKS");
        if (pays == 0) {
            pays = wish != NULL && *wish ? *wish != '0' : vpool_spin_cost() > 256 * VPOOL_BIAS_PAYS;
            pays = pays && vpool_membarrier(VPOOL_BARRIER_REGISTER) == 0 ? 1 : -1;
            __atomic_store_n(&known, pays, __ATOMIC_RELAXED);
        }
        return pays == 1;
    #endif
    }

    static __attribute__((noinline, unused)) void vpool_barrier(void) {
        struct timespec moment = {0, 10000000};
        if (vpool_membarrier(VPOOL_BARRIER_EXPEDITED) == 0) return;
        /* A filter that was put on after registration.  The slow kind needs none, and where that is forbidden
           too, no store buffer stays full for ten milliseconds. */
        if (vpool_membarrier(VPOOL_BARRIER_GLOBAL) != 0) nanosleep(&moment, NULL);
    }

    static inline void vpool_bias_init(vpool_bias* lock, vpool_seat* seats) {
        lock->seats = seats;
        lock->patience = vpool_bias_pays() ? VPOOL_PATIENCE : 0;
    }

    static inline int vpool_mine(vpool_seat* seat) { return seat->thread == vpool_self(); }

    /* End another thread's bias.  The spin lock is held. */
    static __attribute__((noinline, unused)) void vpool_revoke(vpool_bias* lock, vpool_seat* seat) {
        int spins = 0;
        __atomic_store_n(&lock->owner, NULL, __ATOMIC_SEQ_CST);
        vpool_barrier();
        while (__atomic_load_n(&seat->busy, __ATOMIC_ACQUIRE)) {
            if (++spins < 100) VPOOL_PAUSE();
            else sched_yield();
        }
        lock->patience = lock->patience >= VPOOL_MOST_PATIENCE ? VPOOL_MOST_PATIENCE : 2 * lock->patience;
        lock->revocations += 1;
    }

    /* Give this thread the bias, if there is a seat for it.  The spin lock is held. */
    static __attribute__((noinline, unused)) void vpool_grant(vpool_bias* lock) {
        int i;
        lock->streak = 0;
        for (i = 0; i < VPOOL_SEATS; i++) {
            if (lock->seats[i].thread == 0) lock->seats[i].thread = vpool_self();
            if (vpool_mine(&lock->seats[i])) {
                __atomic_store_n(&lock->owner, &lock->seats[i], __ATOMIC_RELEASE);
                return;
            }
        }
    }

    /* What follows the taking of the spin lock: nobody else is inside after this. */
    static inline void vpool_settle(vpool_bias* lock) {
        vpool_seat* seat = lock->owner;
        if (__builtin_expect(seat != NULL, 0)) {
            if (vpool_mine(seat)) return;
            vpool_revoke(lock, seat);
        }
        if (lock->last != vpool_self()) {
            lock->last = vpool_self();
            lock->streak = 0;
        } else if (__builtin_expect(++lock->streak >= lock->patience, 0)) vpool_grant(lock);
    }

    /* For what is rare: takes the lock, whoever has the bias. */
    static inline void vpool_take(vpool_bias* lock) {
        vpool_spin_lock(&lock->spin);
        if (lock->patience) vpool_settle(lock);
    }
    static __attribute__((noinline, unused)) void vpool_take_often(vpool_bias* lock) { vpool_take(lock); }
    static inline void vpool_drop(vpool_bias* lock) { vpool_spin_unlock(&lock->spin); }

    /* This thread's seat, if it has the bias and has just sat down; NULL otherwise. */
    static inline vpool_seat* vpool_sit(vpool_bias* lock) {
        vpool_seat* seat = __atomic_load_n(&lock->owner, __ATOMIC_RELAXED);
        if (seat != NULL && vpool_mine(seat)) {
            __atomic_store_n(&seat->busy, 1, __ATOMIC_RELAXED);
            __atomic_signal_fence(__ATOMIC_SEQ_CST);    /* for the compiler; the revoker's barrier is for both */
            if (__builtin_expect(__atomic_load_n(&lock->owner, __ATOMIC_ACQUIRE) == seat, 1)) return seat;
            __atomic_store_n(&seat->busy, 0, __ATOMIC_RELEASE);
        }
        return NULL;
    }

    /* For the hit path: takes the lock and says how, which `vpool_leave` must be told. */
    static inline vpool_seat* vpool_enter(vpool_bias* lock) {
        vpool_seat* seat = NULL;
        if (lock->patience == 0) vpool_spin_lock(&lock->spin);
        else if ((seat = vpool_sit(lock)) == NULL) vpool_take_often(lock);
        return seat;
    }

    /* The same without waiting, for callers with the GIL: false where another thread has lock or bias. */
    static inline int vpool_try_enter(vpool_bias* lock, vpool_seat** seat) {
        *seat = NULL;
        if (lock->patience == 0) return vpool_spin_try(&lock->spin);
        *seat = vpool_sit(lock);
        if (*seat != NULL) return 1;
        if (!vpool_spin_try(&lock->spin)) return 0;
        if (lock->owner == NULL || vpool_mine(lock->owner)) {
            vpool_settle(lock);
            return 1;
        }
        vpool_spin_unlock(&lock->spin);
        return 0;
    }

    static inline void vpool_leave(vpool_bias* lock, vpool_seat* seat) {
        if (seat != NULL) __atomic_store_n(&seat->busy, 0, __ATOMIC_RELEASE);
        else vpool_spin_unlock(&lock->spin);
    }
    #endif
    """
    ctypedef struct Seat "vpool_seat":
        pass

    ctypedef struct BiasedLock "vpool_bias":
        Seat* owner
        uint32_t patience
        uint32_t revocations

    enum: FIRST_PATIENCE "VPOOL_PATIENCE"
    enum: SEATS "VPOOL_SEATS"

    # The seats are zeroed memory.
    void bias_init "vpool_bias_init"(BiasedLock* lock, Seat* seats) noexcept nogil
    void bias_take "vpool_take"(BiasedLock* lock) noexcept nogil
    void bias_drop "vpool_drop"(BiasedLock* lock) noexcept nogil
    Seat* bias_enter "vpool_enter"(BiasedLock* lock) noexcept nogil
    bint bias_try_enter "vpool_try_enter"(BiasedLock* lock, Seat** seat) noexcept nogil
    void bias_leave "vpool_leave"(BiasedLock* lock, Seat* seat) noexcept nogil

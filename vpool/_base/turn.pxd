"""A turn that one thread has at a time, for work too long for a lock: asking the driver for memory.

Who has the turn holds no lock.  Who waits for it sleeps, and must not hold the GIL or a lock.  A turn is not taken
twice: a source that is written in Python may call the pool that asks it, which then sees that its thread has the turn.
"""

cdef extern from *:
    """
    #ifndef VPOOL_BASE_TURN
    #define VPOOL_BASE_TURN
    #include <pthread.h>
    #include <sys/syscall.h>
    #include <unistd.h>
    typedef struct vpool_turn {
        pthread_mutex_t mutex;    /* of `taken`; held for a few instructions */
        pthread_cond_t given;
        int taken;                /* by the thread of that number; 0: by none */
    } vpool_turn;

    static inline void vpool_turn_init(vpool_turn* turn) {
        pthread_mutex_init(&turn->mutex, 0);
        pthread_cond_init(&turn->given, 0);
        turn->taken = 0;
    }
    static inline void vpool_turn_destroy(vpool_turn* turn) {
        pthread_cond_destroy(&turn->given);
        pthread_mutex_destroy(&turn->mutex);
    }
    /* Returns whether another thread had the turn meanwhile. */
    static inline int vpool_turn_take(vpool_turn* turn) {
        int waited = 0;
        pthread_mutex_lock(&turn->mutex);
        while (turn->taken) {
            waited = 1;
            pthread_cond_wait(&turn->given, &turn->mutex);
        }
        turn->taken = (int) syscall(SYS_gettid);
        pthread_mutex_unlock(&turn->mutex);
        return waited;
    }
    static inline void vpool_turn_give(vpool_turn* turn) {
        pthread_mutex_lock(&turn->mutex);
        turn->taken = 0;
        pthread_cond_signal(&turn->given);
        pthread_mutex_unlock(&turn->mutex);
    }
    /* Where not, whoever takes it later sees all that the caller did before. */
    static inline int vpool_turn_is_taken(vpool_turn* turn) {
        int taken;
        pthread_mutex_lock(&turn->mutex);
        taken = turn->taken;
        pthread_mutex_unlock(&turn->mutex);
        return taken != 0;
    }
    static inline int vpool_turn_is_mine(vpool_turn* turn) {
        int taken;
        pthread_mutex_lock(&turn->mutex);
        taken = turn->taken;
        pthread_mutex_unlock(&turn->mutex);
        return taken != 0 && taken == (int) syscall(SYS_gettid);
    }
    #endif
    """
    ctypedef struct Turn "vpool_turn":
        int taken

    void turn_init "vpool_turn_init"(Turn* turn) noexcept nogil
    void turn_destroy "vpool_turn_destroy"(Turn* turn) noexcept nogil
    bint turn_take "vpool_turn_take"(Turn* turn) noexcept nogil
    void turn_give "vpool_turn_give"(Turn* turn) noexcept nogil
    bint turn_is_taken "vpool_turn_is_taken"(Turn* turn) noexcept nogil
    bint turn_is_mine "vpool_turn_is_mine"(Turn* turn) noexcept nogil

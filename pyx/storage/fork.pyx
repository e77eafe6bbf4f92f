"""Forks: what belongs to the parent is told so in the child.

A child has the memory of its parent and none of its threads: locks may be held by nobody, what they guard
half changed, and CUDA does not work.  So nothing that was made in the parent is used, not even a lock, but
for words that the handler of the fork sets.  It is one of pthread_atfork, which also sees forks that do not
come from Python; what starts a program anew (vfork, posix_spawn, and subprocess by them) needs none.
"""
from libc.stdint cimport uint32_t

from vpool._base.lock cimport SpinLock

cdef extern from *:
    """
    #include <pthread.h>

    static vpool_spin vpool_fork_lock;            /* of the list; held for a few instructions, and over a fork */
    static vpool_watched* vpool_fork_first;
    static uint32_t vpool_forks;

    static void vpool_fork_watch(vpool_watched* watched, uint32_t* word, uint32_t bits) {
        watched->word = word;
        watched->bits = bits;
        watched->before = NULL;
        vpool_spin_lock(&vpool_fork_lock);
        watched->after = vpool_fork_first;
        if (vpool_fork_first != NULL) vpool_fork_first->before = watched;
        vpool_fork_first = watched;
        vpool_spin_unlock(&vpool_fork_lock);
    }

    static void vpool_fork_forget(vpool_watched* watched) {
        if (watched->word == NULL) return;
        vpool_spin_lock(&vpool_fork_lock);
        if (watched->before != NULL) watched->before->after = watched->after;
        else vpool_fork_first = watched->after;
        if (watched->after != NULL) watched->after->before = watched->before;
        vpool_spin_unlock(&vpool_fork_lock);
        watched->word = NULL;
    }

    static void vpool_fork_before(void) { vpool_spin_lock(&vpool_fork_lock); }
    static void vpool_fork_in_parent(void) { vpool_spin_unlock(&vpool_fork_lock); }
    static void vpool_fork_in_child(void) {
        vpool_watched* watched;
        for (watched = vpool_fork_first; watched != NULL; watched = watched->after) {
            __atomic_fetch_or(watched->word, watched->bits, __ATOMIC_RELAXED);
        }
        vpool_forks += 1;
        vpool_spin_unlock(&vpool_fork_lock);
    }
    static int vpool_fork_handle(void) {
        return pthread_atfork(vpool_fork_before, vpool_fork_in_parent, vpool_fork_in_child);
    }
    """
    void _watch "vpool_fork_watch"(Watched* watched, uint32_t* word, uint32_t bits) noexcept nogil
    void _forget "vpool_fork_forget"(Watched* watched) noexcept nogil
    int _handle "vpool_fork_handle"() noexcept nogil
    uint32_t _forks "vpool_forks"
    SpinLock _lock "vpool_fork_lock"


cdef void fork_watch(Watched* watched, uint32_t* word, uint32_t bits) noexcept nogil:
    _watch(watched, word, bits)


cdef void fork_forget(Watched* watched) noexcept nogil:
    _forget(watched)


cdef uint32_t fork_count() noexcept nogil:
    return _forks


def forks():
    """How many forks led to this process since vpool was imported."""
    return _forks


class PerProcess:
    """Something that each process has one of: made on first use, and anew in a child.

    Locks above all: that of the parent may be held by a thread which the child does not have.
    """

    def __init__(self, make):
        self._make = make
        self._made = {}

    @property
    def here(self):
        """This process's own."""
        made = self._made.get(_forks)
        return self._made.setdefault(_forks, self._make()) if made is None else made


if _handle() != 0:
    raise MemoryError("no memory to be told of forks")

"""The compiled loops of `vpool bench`.  Each returns nanoseconds for all its operations together."""
import numpy as np

from libc.stdint cimport uint64_t

from vpool._base.clock cimport now_ns
from vpool._base.lock cimport SpinLock, spin_lock, spin_unlock
from vpool._interface.pool cimport Pool
from vpool._management.arena cimport Arena
from vpool._management.areas cimport Areas, areas_allocate, areas_deallocate


def lock_and_unlock(Py_ssize_t repeats):
    """The machine's own floor: the pool's lock taken and released, with nothing between."""
    cdef SpinLock lock
    cdef Py_ssize_t _i
    cdef uint64_t started
    lock.held = 0
    with nogil:
        started = now_ns()
        for _i in range(repeats):
            spin_lock(&lock)
            spin_unlock(&lock)
        started = now_ns() - started
    return started


def pair(Pool pool not None, uint64_t nbytes, Py_ssize_t repeats):
    """An allocation and its free, `repeats` times."""
    cdef Areas areas = pool.areas
    cdef Arena* arena = pool.default_arena
    cdef Py_ssize_t _i
    cdef uint64_t started
    cdef uint64_t address = 0
    with nogil:
        started = now_ns()
        for _i in range(repeats):
            if areas_allocate(areas, arena, nbytes, &address):
                areas_deallocate(areas, arena, address)
        started = now_ns() - started
    return started


def random_toggles(Pool pool not None, const uint64_t[::1] sizes not None, Py_ssize_t live, Py_ssize_t operations,
                   uint64_t seed):
    """Operations that each free a random one of 2 x `live` slots if it is full, and fill it otherwise.

    Parameters
    ----------
    sizes : numpy.ndarray of uint64
        Sizes to draw from, in bytes; a power of two of them.
    live : int
        Blocks that are live on average; the slots are filled to that before the clock starts.
    """
    cdef Areas areas = pool.areas
    cdef Arena* arena = pool.default_arena
    cdef uint64_t[::1] slots = np.zeros(2 * live, np.uint64)
    cdef uint64_t mask = sizes.shape[0] - 1
    cdef uint64_t state = seed * 2 + 1
    cdef uint64_t started = 0
    cdef uint64_t slot
    cdef Py_ssize_t i
    if sizes.shape[0] == 0 or mask & sizes.shape[0]:
        raise ValueError("the number of sizes must be a power of two")
    with nogil:
        for i in range(live):
            areas_allocate(areas, arena, sizes[i & mask], &slots[2 * i])
        # Half as many operations again come first, unmeasured, to reach the steady state.
        for i in range(operations + operations // 2):
            if i == operations // 2:
                started = now_ns()
            # Knuth's MMIX generator; its upper half picks the slot (Lemire's multiplication) and the size.
            state = state * <uint64_t> 6364136223846793005 + <uint64_t> 1442695040888963407
            slot = ((state >> 32) * <uint64_t> (2 * live)) >> 32
            if slots[slot]:
                areas_deallocate(areas, arena, slots[slot])
                slots[slot] = 0
            else:
                areas_allocate(areas, arena, sizes[(state >> 11) & mask], &slots[slot])
        started = now_ns() - started
        for i in range(2 * live):
            if slots[i]:
                areas_deallocate(areas, arena, slots[i])
    return started

"""Blocks of which nobody says which streams use them: freed once the device was waited for, many at a time.

Interfaces that know no streams, as those of cudaMalloc and cudaFree are, have their blocks through this.  Nothing here
needs the GIL, since some of their callers hold locks for which others wait with it.
"""
import weakref

cimport cython
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from vpool._base.lock cimport atomic_add, atomic_read, spin_lock, spin_unlock
from vpool._interface.arguments cimport address_of, size_of
from vpool._interface.lender cimport Lender
from vpool._interface.tags cimport enter_tag
from vpool._management.areas cimport areas_allocate, areas_deallocate
from vpool._management.journal cimport journal_set_tag
from vpool._management.order cimport order_captures
from vpool._management.state cimport STATE_FORKED
from vpool._storage.driver cimport STATUS_NOT_READY, STATUS_OK

from vpool._interface.tags import number_of
from vpool.streams import HOST


@cython.no_gc_clear   # `__dealloc__` needs its parts
cdef class Deferred:
    """The blocks of one pool that are used on unknown streams.

    Parameters
    ----------
    pool : Pool
    most : int
        Blocks that are freed together at the latest.
    most_bytes : int
        The same as bytes, as `deallocate` is told.
    tag : str, optional
        Of the blocks that a thread without a tag asks for.
    """

    def __cinit__(self, Lender pool not None, uint32_t most=1, uint64_t most_bytes=9223372036854775807, tag=None):
        self.pool = pool
        self.areas = pool.areas
        self.arena = pool.arena_for(HOST)
        self.most = most
        self.most_bytes = most_bytes
        self.tag = number_of(tag)

    def __init__(self, pool, most=1, most_bytes=9223372036854775807, tag=None):
        # A request that finds no memory has what waits here freed first.
        pool.on_pressure(_settling(weakref.ref(self)), 100)

    def __dealloc__(self):
        if self.areas is not None:
            with nogil:
                self.settle_all()
        free(self.parked)

    def allocate(self, nbytes):
        """Lend a block that no queued work touches: its address.  Errors are those of `Pool.allocate`."""
        cdef uint64_t requested = size_of(nbytes)
        cdef uint16_t before = enter_tag(self.tag)
        try:
            return self.pool.allocate(requested, stream=HOST)
        finally:
            journal_set_tag(before)

    def deallocate(self, ptr, uint64_t nbytes=0):
        """Free a block once what is queued on any stream by now is complete.  Never raises for a live block.

        Parameters
        ----------
        ptr : int
            A live block.
        nbytes : int
            Its bytes, which decide with how many others it is freed.
        """
        cdef uint64_t address = address_of(ptr)
        if address == 0 or self.gone:
            return
        with nogil:
            self.park(address, nbytes)
            if atomic_read(self.holds) == 0 and (
                    atomic_read(self.count) >= self.most or atomic_read(self.parked_bytes) >= self.most_bytes):
                self.settle_all()

    def settle(self):
        """Wait for the device and free what was given back; False where that has to stay, since something captures."""
        cdef int status
        with nogil:
            status = self.settle_all()
        return status == STATUS_OK

    def hold(self, int by):
        """Free nothing, unless memory is short, until as many calls with -1 as with 1."""
        with nogil:
            atomic_add(self.holds, by)

    def abandon(self):
        """Free nothing any more, not with the pool either: its memory is about to be gone.

        Who then has an address of it may be somebody else, so the pool is kept as long as the process lives.
        """
        if not self.gone:
            self.gone = True
            Py_INCREF(self.pool)

    @property
    def waiting(self):
        """Blocks that were given back and are not freed yet."""
        return atomic_read(self.count)

    cdef uint64_t lend(self, uint64_t nbytes) noexcept nogil:
        """A block for callers without the GIL; 0 where there is none."""
        cdef uint64_t address = 0
        cdef uint16_t before = enter_tag(self.tag)
        if areas_allocate(self.areas, self.arena, nbytes, &address) == 0 and (
                atomic_read(self.count) == 0 or self.settle_all() != STATUS_OK
                or areas_allocate(self.areas, self.arena, nbytes, &address) == 0):
            address = 0
        journal_set_tag(before)
        return address

    cdef void park(self, uint64_t address, uint64_t nbytes) noexcept nogil:
        cdef uint64_t* larger
        cdef uint64_t* smaller
        cdef uint32_t capacity
        if atomic_read(self.areas.state.word) & STATE_FORKED:
            return                                # the block is the parent process's, as may be who has the lock
        spin_lock(&self.lock)
        while self.count == self.capacity:
            capacity = self.capacity
            spin_unlock(&self.lock)
            larger = <uint64_t*> malloc((2 * capacity + 64) * sizeof(uint64_t))
            if larger == NULL:
                return                            # it stays reserved, which is the one thing that is surely right
            spin_lock(&self.lock)
            smaller = larger
            if capacity == self.capacity:         # else another thread was faster
                smaller = self.parked
                if self.count:
                    memcpy(larger, smaller, self.count * sizeof(uint64_t))
                self.parked = larger
                self.capacity = 2 * capacity + 64
            spin_unlock(&self.lock)
            free(smaller)
            spin_lock(&self.lock)
        self.parked[self.count] = address
        self.count += 1
        self.parked_bytes += nbytes
        spin_unlock(&self.lock)

    cdef int settle_all(self) noexcept nogil:
        """Wait for the device, then free; STATUS_NOT_READY, or the driver's status, where all stays as it is."""
        cdef uint64_t* taken
        cdef uint32_t i, count
        cdef uint64_t nbytes
        cdef int status
        if self.gone or atomic_read(self.areas.state.word) & STATE_FORKED:
            return STATUS_OK                      # the blocks are nobody's, or the parent process's
        spin_lock(&self.lock)
        taken, count, nbytes = self.parked, self.count, self.parked_bytes
        self.parked, self.count, self.capacity, self.parked_bytes = NULL, 0, 0, 0
        spin_unlock(&self.lock)
        if count == 0:
            free(taken)
            return STATUS_OK
        # A wait for the device would invalidate every capture that goes on.
        status = STATUS_NOT_READY if order_captures() and self.areas.core.source.driver.may_capture() else (
            self.areas.core.source.synchronize())
        for i in range(count):
            if status == STATUS_OK:
                areas_deallocate(self.areas, self.arena, taken[i])
            else:
                self.park(taken[i], nbytes if i == 0 else 0)
        free(taken)
        return status


def _settling(reference):
    def settle(nbytes):
        deferred = reference()
        if deferred is not None:
            deferred.settle()

    return settle

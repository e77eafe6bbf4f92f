"""Pairs of C functions like cudaMalloc and cudaFree, each bound to a pool for good.

For frameworks that are given two functions and nothing that would tell them apart.  PyTorch calls these under a lock
for which other threads may wait with the GIL: so nothing here takes it, and no pool does that has debug modes.
"""
import threading

from cpython.ref cimport Py_INCREF
from libc.stdint cimport uint64_t

from vpool._base.lock cimport atomic_read
from vpool._interface.deferred cimport Deferred
from vpool._interface.lender cimport Lender
from vpool._management.order cimport captures_count
from vpool._management.state cimport STATE_DEBUG, STATE_FORKED
from vpool._storage.driver cimport CAPTURE_NONE, STATUS_OK
from vpool._storage.upstream_driver cimport UpstreamDriver

from vpool._storage.fork import PerProcess

cdef extern from *:
    """
    #include <stddef.h>
    #include <stdint.h>
    typedef void* (*vpool_lend_t)(int number, size_t nbytes, int device, void* stream);
    typedef void (*vpool_take_t)(int number, void* block);
    static vpool_lend_t vpool_pair_lend;
    static vpool_take_t vpool_pair_take;
    #define VPOOL_PAIR(n) \\
        static void* vpool_lend_##n(size_t nbytes, int device, void* stream) { \\
            return vpool_pair_lend(n, nbytes, device, stream); \\
        } \\
        static void vpool_take_##n(void* block, size_t nbytes, int device, void* stream) { \\
            vpool_pair_take(n, block); \\
        }
    #define VPOOL_EACH(each) each(0) each(1) each(2) each(3) each(4) each(5) each(6) each(7) \\
        each(8) each(9) each(10) each(11) each(12) each(13) each(14) each(15)
    VPOOL_EACH(VPOOL_PAIR)
    #define VPOOL_ADDRESSES(n) { (uintptr_t) vpool_lend_##n, (uintptr_t) vpool_take_##n },
    static const uintptr_t vpool_pairs[][2] = { VPOOL_EACH(VPOOL_ADDRESSES) };
    """
    ctypedef void* (*lend_t)(int number, size_t nbytes, int device, void* stream) noexcept nogil
    ctypedef void (*take_t)(int number, void* block) noexcept nogil
    lend_t lend_of "vpool_pair_lend"
    take_t take_of "vpool_pair_take"
    const size_t[2]* pairs "vpool_pairs"

cdef enum:
    PAIRS = 16

cdef void* _bound[<int> PAIRS]
_binding = PerProcess(threading.RLock)


cdef void* _lend(int number, size_t nbytes, int device, void* stream) noexcept nogil:
    """As cudaMalloc; NULL also for another device than the pool's, and in a child of its process."""
    cdef uint64_t address = 0
    cdef int state = CAPTURE_NONE
    cdef bint captures
    if nbytes == 0 or nbytes >> 63 or device != (<Deferred> _bound[number]).areas.core.source.device:
        return NULL
    if atomic_read((<Deferred> _bound[number]).areas.state.word) & STATE_FORKED:
        return NULL                               # where the driver is not even asked
    # For the time of this call the pool knows of that capture, if there is one, and waits for nothing.
    captures = (<Deferred> _bound[number]).areas.core.source.driver.may_capture() and (
        (<Deferred> _bound[number]).areas.core.source.ask_capture(<uint64_t> stream, &state) != STATUS_OK
        or state != CAPTURE_NONE)
    if captures:
        captures_count(1)
    address = (<Deferred> _bound[number]).lend(nbytes)
    if captures:
        captures_count(-1)
    return <void*> address


cdef void _take(int number, void* block) noexcept nogil:
    """As cudaFree: after all that is queued on the device."""
    if block != NULL:
        (<Deferred> _bound[number]).park(<uint64_t> block, 0)
        (<Deferred> _bound[number]).settle_all()


lend_of = _lend
take_of = _take


def bind(Lender pool not None, tag=None):
    """The addresses of two functions that lend and take back blocks of a pool, and what they go through.

    ``void* lend(size_t nbytes, int device, cudaStream_t stream)``: a block that no queued work touches, or NULL.
    ``void take(void* block, size_t nbytes, int device, cudaStream_t stream)``: waits for the device.

    The same pair again for a pool that has one.  The pool lives as long as the process: nobody tells when the last
    call has been made.

    Parameters
    ----------
    pool : Pool
    tag : str, optional
        Of the blocks, for threads without a tag; of a pool that has a pair already it stays what it was.

    Raises
    ------
    ValueError
        For a pool with debug modes, or whose source is an allocator of Python's.
    RuntimeError
        Where as many pools have a pair as there are pairs.
    """
    cdef int number
    cdef Deferred blocks
    if pool.core.state.word & STATE_DEBUG:
        raise ValueError(f"pool {pool.name!r} has debug modes, which need the GIL: its callers here may not take it")
    if isinstance(pool.core.source.driver, UpstreamDriver):
        raise ValueError(f"the source of pool {pool.name!r} needs the GIL: its callers here may not take it")
    pool.must_be_open()
    with _binding.here:
        for number in range(PAIRS):
            if _bound[number] != NULL and (<Deferred> _bound[number]).pool is pool:
                return pairs[number][0], pairs[number][1], <Deferred> _bound[number]
        blocks = Deferred(pool, tag=tag)
        for number in range(PAIRS):
            if _bound[number] == NULL:
                Py_INCREF(blocks)
                _bound[number] = <void*> blocks
                return pairs[number][0], pairs[number][1], blocks
    raise RuntimeError(f"{PAIRS} pools are bound to C functions already, and each stays so: use one of them again")

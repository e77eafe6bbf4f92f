"""A pool for callers that name streams by their numbers alone, and may not have the GIL: a framework's allocator.

What is at hand needs neither the GIL nor Python.  The rest does: a stream that is met for the first time or captures,
and a request that the pool finds no memory for without callbacks and a garbage collection.
"""
import threading

from cpython.ref cimport Py_INCREF
from libc.stdint cimport uint16_t, uint32_t, uint64_t

from vpool._base.bias cimport Seat, bias_enter, bias_leave
from vpool._base.lock cimport SpinLock, atomic_acquire, atomic_read, atomic_release, spin_lock, spin_unlock
from vpool._base.types cimport BlockId
from vpool._interface.lender cimport Lender
from vpool._interface.tags cimport enter_tag
from vpool._management.arena cimport Arena
from vpool._management.areas cimport Areas, areas_allocate, areas_deallocate, is_common, request_init
from vpool._management.hit cimport hit_any
from vpool._management.journal cimport journal_set_tag
from vpool._management.state cimport (
    RUNG_SEARCH,
    RUNG_TRIM,
    STATE_DEBUG,
    STATE_FORKED,
    STATE_NOTED,
    STATE_STOPS,
    Request,
    Slot,
)
from vpool._storage.driver cimport CAPTURE_NONE, STATUS_OK

from vpool._interface.tags import number_of
from vpool._storage.fork import PerProcess
from vpool.errors import OutOfMemoryError

cdef extern from *:
    """
    #include <string.h>
    #if PY_VERSION_HEX >= 0x030D0000
    #define vpool_python_lives() (Py_IsInitialized() && !Py_IsFinalizing())
    #else
    #define vpool_python_lives() (Py_IsInitialized() && !_Py_IsFinalizing())
    #endif
    static __thread char vpool_failure[8192];
    static inline void vpool_set_failure(const char* text) {
        strncpy(vpool_failure, text, sizeof(vpool_failure) - 1);
    }
    """
    bint python_lives "vpool_python_lives"() noexcept nogil
    const char* thread_failure "vpool_failure"
    void set_failure "vpool_set_failure"(const char* text) noexcept nogil

cdef enum:
    MOST_DEVICES = 64
    MOST_KNOWN = 256              # streams of a device that are served without Python

    # What a request comes to.
    SERVED = 0
    OUT_OF_MEMORY = 1
    FAILED = 2

cdef struct Known:
    uint64_t handle
    uint64_t unique_id            # of its slot when it was met
    bint lasts                    # its stream is never destroyed, so its number says who it is
    Arena* arena


cdef class Numbered:
    """One pool, for streams by number.

    Parameters
    ----------
    pool : Pool
    stream_of : callable
        A handle to what the pool is given for it: an object that holds the stream for good, or the handle.
    tag : str, optional
        Of the blocks that a thread without a tag asks for.
    """

    cdef readonly Lender pool
    cdef Areas areas
    cdef object stream_of
    cdef uint16_t tag
    cdef SpinLock lock            # of whoever writes what is known
    cdef unsigned long long count
    cdef Known known[<int> MOST_KNOWN]

    def __cinit__(self, Lender pool not None, stream_of, tag=None):
        self.pool = pool
        self.tag = number_of(tag)
        self.areas = pool.areas
        self.stream_of = stream_of

    cdef Arena* find(self, uint64_t handle, bint ask) noexcept nogil:
        """The arena of a stream that is known, and is surely that one; NULL for whoever has to be asked for.

        Without `ask` the driver is not called, and the arena only is where something is looked for first.
        """
        cdef int state = CAPTURE_NONE
        cdef uint64_t unique_id = 0
        cdef uint64_t i
        cdef Known* known
        cdef Slot* slot
        if handle <= 1:                           # the legacy default stream, which never captures
            return self.areas.state.arenas[0]
        i = atomic_acquire(self.count)
        while i:
            i -= 1
            known = &self.known[i]
            slot = &self.areas.state.table[known.arena.slot]
            if known.handle != handle or atomic_read(slot.stream) != handle or (
                    atomic_read(slot.unique_id) != known.unique_id or atomic_read(slot.gone)):
                continue
            if not ask:
                return known.arena
            if self.areas.core.source.driver.may_capture() and (
                    self.areas.core.source.ask_capture(handle, &state) != STATUS_OK or state != CAPTURE_NONE):
                return NULL
            if known.lasts:
                return known.arena
            if self.areas.core.source.driver.stream_id(handle, &unique_id) == STATUS_OK and (
                    unique_id == known.unique_id):
                return known.arena
            return NULL
        return NULL

    cdef uint64_t lend(self, uint64_t handle, uint64_t nbytes) noexcept nogil:
        """A block that can be had without Python; 0 for whatever takes that."""
        cdef uint32_t word = atomic_read(self.areas.state.word)
        cdef uint64_t address = 0
        cdef Request request
        cdef Arena* arena
        cdef Arena* first
        cdef BlockId block_id
        cdef Seat* seat
        if word & (STATE_STOPS & ~<uint32_t> STATE_NOTED):
            return 0
        arena = self.find(handle, True)
        if arena == NULL:
            return 0
        if word & STATE_NOTED:
            return address if areas_allocate(self.areas, arena, nbytes, &address) else 0
        first = arena.fixed if is_common(self.areas, nbytes) else arena
        seat = bias_enter(&first.lock)
        block_id = hit_any(first, nbytes)
        address = first.blocks[block_id].address
        bias_leave(&first.lock, seat)
        if block_id:
            return address
        request_init(self.areas, &request, arena, nbytes, 256)
        if self.areas.climb(&request, RUNG_SEARCH, RUNG_TRIM):        # nothing is waited for
            return request.address
        return 0

    cdef int learn(self, uint64_t handle, stream) except -1:
        """Have a stream served without Python from now on."""
        cdef Arena* arena = self.pool.arena_for(stream)
        cdef Known* known
        if arena.captured or handle <= 2:
            return 0
        spin_lock(&self.lock)
        if self.count < MOST_KNOWN:
            known = &self.known[self.count]
            known.handle = handle
            known.arena = arena
            known.unique_id = atomic_read(self.areas.state.table[arena.slot].unique_id)
            known.lasts = not isinstance(stream, int)
            atomic_release(self.count, self.count + 1)
        spin_unlock(&self.lock)
        return 0

    cdef void take(self, uint64_t address, uint64_t handle) noexcept nogil:
        cdef Arena* hint = self.find(handle, False)
        if hint == NULL:
            hint = self.areas.state.arenas[0]
        if areas_deallocate(self.areas, hint, address):
            return
        if atomic_read(self.areas.state.word) & STATE_DEBUG == 0 and self.areas.take_back(address, -1) and (
                atomic_read(self.areas.state.word)):
            self.areas.after_free()


cdef void* _served[<int> MOST_DEVICES]
_serving = PerProcess(threading.RLock)
_unserved = [None]


def call_unserved(function):
    """Have a function called with a device that no pool serves yet, which is to serve it."""
    _unserved[0] = function


def serve(numbered, device):
    """Serve a device from a pool from now on.  It lives as long as the process: callers may be in it at any time."""
    cdef int number = device
    if not isinstance(numbered, Numbered):
        raise TypeError("only a pool by numbers can be served")
    if not 0 <= number < MOST_DEVICES:
        raise ValueError(f"no device {device}: they are numbered from 0 to {MOST_DEVICES - 1}")
    with _serving.here:
        Py_INCREF(numbered)
        _served[number] = <void*> numbered


def served(device):
    """The pool that serves a device; None for none."""
    cdef int number = device
    if not 0 <= number < MOST_DEVICES or _served[number] == NULL:
        return None
    return (<Numbered> _served[number]).pool


def all_served():
    """The pools that serve a device, in the order of their devices."""
    cdef int number
    return [(<Numbered> _served[number]).pool for number in range(MOST_DEVICES) if _served[number] != NULL]


cdef int _lend_with_python(uint64_t nbytes, int device, uint64_t handle, uint64_t* address) noexcept with gil:
    cdef Numbered numbered
    cdef uint16_t before
    try:
        if _served[device] == NULL:
            if _unserved[0] is None:
                raise RuntimeError(f"no pool serves device {device}")
            _unserved[0](device)
        numbered = <Numbered> _served[device]
        stream = numbered.stream_of(handle)
        before = enter_tag(numbered.tag)
        try:
            address[0] = numbered.pool.allocate(nbytes, stream=stream)
        finally:
            journal_set_tag(before)
        numbered.learn(handle, stream)
        return SERVED
    except BaseException as error:
        set_failure(str(error).encode(errors="replace"))
        return OUT_OF_MEMORY if isinstance(error, OutOfMemoryError) else FAILED


cdef int lend_numbered(uint64_t nbytes, int device, uint64_t handle, uint64_t* address) noexcept nogil:
    """Lend a block; `thread_failure` says why not."""
    cdef uint16_t before
    address[0] = 0
    if nbytes == 0:
        return SERVED
    if nbytes >> 63 or not 0 <= device < MOST_DEVICES:
        set_failure(b"no block has that size, or no device that number")
        return FAILED
    if _served[device] != NULL:
        before = enter_tag((<Numbered> _served[device]).tag)
        address[0] = (<Numbered> _served[device]).lend(handle, nbytes)
        journal_set_tag(before)
        if address[0]:
            return SERVED
    if not python_lives():
        set_failure(b"out of memory at the end of the interpreter")
        return OUT_OF_MEMORY
    return _lend_with_python(nbytes, device, handle, address)


cdef void take_numbered(uint64_t address, int device, uint64_t handle) noexcept nogil:
    """Take a block back on the stream that it was lent for."""
    if address and 0 <= device < MOST_DEVICES and _served[device] != NULL:
        (<Numbered> _served[device]).take(address, handle)


cdef void _record_with_python(uint64_t address, uint64_t handle) noexcept with gil:
    cdef int device
    try:
        for device in range(MOST_DEVICES):
            if _served[device] != NULL and (<Numbered> _served[device]).pool.holds(address):
                numbered = <Numbered> _served[device]
                stream = (<Numbered> numbered).stream_of(handle)
                (<Numbered> numbered).pool.record_stream(address, stream)
                (<Numbered> numbered).learn(handle, stream)
                return
    except Exception as error:
        set_failure(str(error).encode(errors="replace"))


cdef void record_numbered(uint64_t address, uint64_t handle) noexcept nogil:
    """Tell that a stream uses a block too.  Others' addresses are none of ours."""
    cdef int device
    cdef uint32_t word
    cdef Arena* arena
    if address == 0:
        return
    for device in range(MOST_DEVICES):
        word = STATE_DEBUG if _served[device] == NULL else atomic_read((<Numbered> _served[device]).areas.state.word)
        if word & STATE_FORKED:
            return                                # the block is the parent process's
        if word & STATE_DEBUG == 0:
            arena = (<Numbered> _served[device]).find(handle, True)
            if arena != NULL and (<Numbered> _served[device]).areas.use_on(address, arena.slot) > 0:
                return
    if python_lives():
        _record_with_python(address, handle)


cdef const char* failure_of_thread() noexcept nogil:
    """Why the last request of this thread was not served."""
    return thread_failure


def functions():
    """The addresses of `lend_numbered`, `take_numbered`, `record_numbered` and what tells why a request failed."""
    return (
        <size_t> &lend_numbered, <size_t> &take_numbered, <size_t> &record_numbered, <size_t> &failure_of_thread,
    )

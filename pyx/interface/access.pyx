"""Device memory, written, read and copied in stream order: only the debug modes and a resize do that.

A stream is named by its slot.  Where its handle cannot be touched, since the stream may be gone, all
work on the device is waited for instead.
"""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_SetObject, PyErr_WriteUnraisable
from libc.stdint cimport uint8_t, uint64_t

from vpool._base.lock cimport atomic_read
from vpool._base.turn cimport turn_give, turn_take
from vpool._interface.diagnosis cimport source_error
from vpool._management.areas cimport Areas
from vpool._management.order cimport order_drain, order_make, order_reachable
from vpool._management.state cimport CoreState
from vpool._storage.driver cimport CAPTURE_NONE, STATUS_NOT_READY, STATUS_OK
from vpool._storage.heaps cimport Heaps


@cython.no_gc   # refers to the areas alone: no cycle, and none may take them away
cdef class Access:
    """What a pool's debugger may do to the pool and its memory."""

    def __cinit__(self, Areas areas not None):
        self.areas = areas

    @property
    def has_memory(self):
        """Whether there is something at the addresses."""
        return self.areas.core.source.has_memory

    def stream_of(self, int slot):
        """Handle of a slot's stream."""
        return atomic_read(self.areas.state.table[slot].stream)

    def may(self, int slot, bint named):
        """Whether memory may be written and read now behind what a stream has queued.

        Not while that stream captures, nor what a graph may use at any time, nor where all work would have to
        be waited for while something captures.

        Parameters
        ----------
        slot : int
        named : bool
            Whether the caller's caller has just named the stream, so that it exists.
        """
        cdef int status
        with nogil:
            status = self.get_ready(slot, named)
        if status == STATUS_NOT_READY:
            return False
        if status != STATUS_OK:
            raise source_error(self.areas.core, status, "what was allocated cannot be looked at")
        return True

    def fill(self, int slot, bint named, uint64_t address, int byte, uint64_t nbytes):
        """Set bytes behind what a stream has queued; for this and the next two `may` has said yes."""
        cdef int status
        with nogil:
            status = self.fill_on(slot, named, address, byte, nbytes)
        if status != STATUS_OK:
            raise source_error(self.areas.core, status, f"{nbytes} bytes at {address:#x} cannot be filled")

    def read(self, int slot, bint named, uint64_t address, Py_ssize_t nbytes):
        """The bytes there once what a stream has queued is complete."""
        cdef int status
        cdef void* host
        content = PyBytes_FromStringAndSize(NULL, nbytes)
        host = PyBytes_AS_STRING(content)
        with nogil:
            status = self.read_on(slot, named, host, address, nbytes)
        if status != STATUS_OK:
            raise source_error(self.areas.core, status, f"{nbytes} bytes at {address:#x} cannot be read")
        return content

    def follow(self, int slot, int other, bint named):
        """Make what is queued on a stream from now on come after what another has queued; False where it may not."""
        cdef int status
        with nogil:
            status = self.come_after(slot, other, named)
        if status == STATUS_NOT_READY:
            return False
        if status != STATUS_OK:
            raise source_error(self.areas.core, status, "a stream cannot be made to wait for another")
        return True

    def await_device(self):
        """Wait for all work, also of graphs, which any stream may launch; False while something captures."""
        cdef int status
        with nogil:
            status = self.areas.drain_device()
        if status == STATUS_NOT_READY:
            return False
        if status != STATUS_OK:
            raise source_error(self.areas.core, status, "the device cannot be waited for")
        return True

    def tell(self, error, about):
        """Hand an exception that nobody can catch to ``sys.unraisablehook``, as of the object that it is about."""
        PyErr_SetObject(type(error), error)
        PyErr_WriteUnraisable(about)

    def put(self, uint64_t address, slot):
        """Free a block, on the stream of a slot or for None on its own; whether there was one."""
        cdef int freer = -1 if slot is None else slot
        cdef bint found
        with nogil:
            found = self.areas.take_back(address, freer)
        return found

    def withdraw(self, uint64_t address):
        """Take a block back that nobody got, and that was not noted as lent."""
        with nogil:
            self.areas.put(address, 0)

    def tell_of_heaps(self, Heaps heaps not None):
        """Have tools see each segment as a heap, and each block as a region of one, from the first on."""
        self.heaps = heaps
        self.areas.core.tell_of_heaps(heaps)
        if self.areas.fixed is not None:
            self.areas.fixed.tell_of_heaps(heaps)

    cdef int cover(self, block) except -1:
        """Let tools see a block that may be used from now on."""
        cdef bytes label
        if self.heaps is not None:
            label = block.label.encode("utf-8", "replace")
            self.heaps.cover(block.address, block.requested, label)
        return 0

    cdef int uncover(self, block) except -1:
        """And that it may not any more."""
        if self.heaps is not None:
            self.heaps.uncover(block.address)
        return 0

    cdef bint enter(self, int slot, bint named) noexcept nogil:
        """Take the turn in which streams are named; whether this one can be."""
        turn_take(&self.areas.state.crossing_turn)
        self.areas.state.table[slot].asking = named
        return order_reachable(self.areas.core.source, &self.areas.state.table[slot])

    cdef int leave(self, int slot, int status) noexcept nogil:
        self.areas.state.table[slot].asking = False
        turn_give(&self.areas.state.crossing_turn)
        return status

    cdef int get_ready(self, int slot, bint named) noexcept nogil:
        cdef CoreState* state = self.areas.state
        cdef int status
        cdef int capture = CAPTURE_NONE
        cdef bint reachable = self.enter(slot, named)
        if state.arenas[slot].captured:
            status = STATUS_NOT_READY
        elif reachable:
            status = self.areas.core.source.ask_capture(state.table[slot].stream, &capture)
        else:
            status = order_drain(state, self.areas.core.source)
        if status == STATUS_OK and capture != CAPTURE_NONE:
            status = STATUS_NOT_READY
        return self.leave(slot, status)

    cdef int fill_on(self, int slot, bint named, uint64_t address, int byte, uint64_t nbytes) noexcept nogil:
        cdef uint8_t waited_for
        cdef int status
        if self.enter(slot, named):
            status = self.areas.core.source.fill_on(self.areas.state.table[slot].stream, address, byte, nbytes)
        else:
            status = order_drain(self.areas.state, self.areas.core.source)
            if status == STATUS_OK:
                status = self.areas.core.source.fill_on(0, address, byte, nbytes)
            if status == STATUS_OK:
                # No stream that comes later waits for this one.
                status = self.areas.core.source.read_on(0, &waited_for, address, 1)
        return self.leave(slot, status)

    cdef int read_on(self, int slot, bint named, void* host, uint64_t address, uint64_t nbytes) noexcept nogil:
        cdef int status
        if self.enter(slot, named):
            status = self.areas.core.source.read_on(self.areas.state.table[slot].stream, host, address, nbytes)
        else:
            status = order_drain(self.areas.state, self.areas.core.source)
            if status == STATUS_OK:
                status = self.areas.core.source.read_on(0, host, address, nbytes)
        return self.leave(slot, status)

    cdef int copy_on(self, int slot, bint named, uint64_t to, uint64_t address, uint64_t nbytes) noexcept nogil:
        """Copy behind what a stream has queued, in front of what is queued there from now on.

        With the slot of a capture the copy is part of the graph, and the stream must be named: whether another one
        is still there, and captures, nothing tells.  With another slot it is part of none: STATUS_NOT_READY where it
        would be, or would invalidate a capture.
        """
        cdef uint8_t waited_for
        cdef int capture = CAPTURE_NONE
        cdef bint reachable = self.enter(slot, named)
        cdef uint64_t stream = self.areas.state.table[slot].stream
        cdef int status
        if self.areas.state.arenas[slot].captured:
            status = self.areas.core.source.copy_on(stream, to, address, nbytes) if named else STATUS_NOT_READY
            return self.leave(slot, status)
        status = self.areas.core.source.ask_capture(stream if reachable else 0, &capture)
        if status == STATUS_OK and capture != CAPTURE_NONE:
            status = STATUS_NOT_READY
        if status != STATUS_OK:
            return self.leave(slot, status)
        if reachable:
            status = self.areas.core.source.copy_on(stream, to, address, nbytes)
        else:
            status = order_drain(self.areas.state, self.areas.core.source)
            if status == STATUS_OK:
                status = self.areas.core.source.copy_on(0, to, address, nbytes)
            if status == STATUS_OK:
                # No stream that comes later waits for this one.
                status = self.areas.core.source.read_on(0, &waited_for, to, 1)
        return self.leave(slot, status)

    cdef int come_after(self, int slot, int other, bint named) noexcept nogil:
        cdef CoreState* state = self.areas.state
        cdef int status
        self.enter(slot, named)
        # The stamp of the next free covers all that is queued there.
        status = order_make(state, self.areas.core.source, slot, other, atomic_read(state.arenas[other].sequence))
        if status == STATUS_NOT_READY and not state.arenas[other].captured:
            # Of a pool that never waits to serve a request; this is none.
            status = order_drain(state, self.areas.core.source)
        return self.leave(slot, status)

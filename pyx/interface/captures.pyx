"""Streams that capture: their memory is kept for the graph, and found by the capture's id.

A graph has the addresses of its memory built in, and uses them whenever it is launched.  So a stream that
captures stands for a slot of its own, one for each capture: what was freed there serves that capture
alone, until the capture is released or its graph, and all that was made of it, are gone.
"""
import itertools
import threading
import weakref

cimport cython
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free

from vpool._base.lock cimport atomic_add, atomic_read, atomic_write
from vpool._interface.diagnosis cimport source_error
from vpool._management.areas cimport Areas
from vpool._management.order cimport captures_count, order_captures, thread_number
from vpool._storage.driver cimport CAPTURE_ACTIVE, CAPTURE_NONE, STATUS_OK

from vpool._storage.fork import PerProcess

# What graphs that are not gone may use, though the pool be dropped: Capture -> the areas of its pool.
_kept = {}
_keeping = PerProcess(threading.RLock)
# The captures of all pools, by number.
_tables = PerProcess(weakref.WeakValueDictionary)
_numbers = itertools.count()

cdef unsigned long long _graphs_gone = 0
cdef unsigned long long _graphs_seen = 0          # of them, at the last look

cdef struct Watch:
    # Shared with the driver, which tells when a graph is gone, perhaps after the pool is.
    unsigned long long gone
    unsigned long long holders


def captures_go_on():
    """Whether a capture of this process is known that is not over."""
    return order_captures()


cdef void _let_go(Watch* watch) noexcept nogil:
    if atomic_add(watch.holders, -1) == 0:
        free(watch)


cdef void _graph_gone(void* data) noexcept nogil:
    """Called by the driver on a thread of its own, where no driver call may be made."""
    atomic_write((<Watch*> data).gone, 1)
    atomic_add(_graphs_gone, 1)
    _let_go(<Watch*> data)


@cython.no_gc   # of numbers, and what the driver tells
cdef class Capture:
    """The memory of one capture, or of several that share it."""

    def __cinit__(self, Areas areas not None):
        self.areas = areas
        self.slots = {}
        self.ids = {}


cdef class _Watched:
    """What the driver tells of a graph."""

    cdef Watch* watch

    def __dealloc__(self):
        if self.watch != NULL:
            _let_go(self.watch)


cdef _watch(Areas areas, uint64_t graph):
    """Have the driver tell when a graph is gone; None where it cannot, and only `release` ends the capture."""
    cdef _Watched watched = _Watched()
    cdef int status
    watched.watch = <Watch*> calloc(1, sizeof(Watch))
    if watched.watch == NULL:
        return None
    watched.watch.holders = 2
    with nogil:
        status = areas.core.source.driver.graph_retain(graph, _graph_gone, watched.watch)
    if status != STATUS_OK:
        if atomic_read(watched.watch.holders) == 2:
            _let_go(watched.watch)                # the driver never had it
        return None
    return watched


cdef bint _is_gone(watched):
    return watched is not None and atomic_read((<_Watched> watched).watch.gone) != 0


cdef _stream_of(dict capturing, id):
    """A stream that is in a capture, as its key, or None."""
    for where, known in capturing.items():
        if (<tuple> known)[0] == id:
            return where
    return None


cdef _promise_of(dict promised, Capture capture):
    """Id of a capture that shall share the memory of one, or None."""
    for id, its in promised.items():
        if its is capture:
            return id
    return None


@cython.no_gc_clear   # in no cycle, and a buffer in one may need it
cdef class CaptureTable:
    """The captures of one pool."""

    def __cinit__(self, Areas areas not None):
        self.areas = areas
        self.by_id = {}
        self.promised = {}
        self.capturing = {}
        # Taken again by a finaliser that frees or allocates, when a collection runs while it is held.
        self.changing = threading.RLock()
        _tables.here[next(_numbers)] = self

    def __dealloc__(self):
        captures_count(-self.believed)

    cdef int slot_of(self, object table, object stream, uint64_t handle, uint64_t thread) except -1:
        """The slot of a stream that captures now; 0 where it does not.

        `table` makes slots.  One driver call, two more for a stream that captures.
        """
        cdef uint64_t id = 0
        cdef uint64_t graph = 0
        cdef int state
        cdef int status
        with nogil:
            status = self.areas.core.source.ask_capture(handle, &state)
            if status == STATUS_OK and state == CAPTURE_ACTIVE:
                status = self.areas.core.source.capture_info(handle, &state, &id, &graph)
        if status != STATUS_OK:
            raise source_error(self.areas.core, status, f"cannot ask whether stream {handle:#x} captures")
        if state != CAPTURE_ACTIVE:
            if state == CAPTURE_NONE and self.capturing:
                self.is_over((handle, thread))
            return 0
        slot = 0
        while not slot:                           # what was there may have been released meanwhile
            slot = self.meet(table, (handle, thread), stream, id, graph)
        return slot

    cdef int meet(self, object table, tuple where, object stream, uint64_t id, uint64_t graph) except -1:
        """The slot of a stream that captures; 0 where what is known of the capture changed meanwhile.

        What is needed is made before `changing` is held: see `StreamTable`.
        """
        cdef Capture capture = self.by_id.get(id) or self.promised.get(id)
        cdef Capture made = None
        cdef int slot = 0
        cdef int opened = 0
        watched = over = None
        if capture is None:
            made = capture = Capture(self.areas)
        if capture.ids.get(id) is None:
            watched = _watch(self.areas, graph)
        if where not in capture.slots:
            opened = table.open_captured(where[0], id)
        known = (id, None if isinstance(stream, (int, str)) else stream)
        if made is not None:
            with _keeping.here:
                _kept[made] = self.areas
        with self.changing:
            if (self.by_id.get(id) or self.promised.get(id)) is (capture if made is None else None):
                slot = self.enter(capture, where, id, watched, opened)
                if slot and self.capturing.get(where, (0,))[0] != id:
                    over = self.note_over(where)
                    self.capturing[where] = known
                    self.believed += 1
                    captures_count(1)
        if opened and slot != opened:
            self.areas.end_capture(opened)
        if made is not None and not slot:
            with _keeping.here:
                _kept.pop(made, None)
        return slot

    cdef int enter(self, Capture capture, tuple where, uint64_t id, watched, int opened) except -1:
        """Note a capture that has memory of this pool; the slot of its stream.  `changing` is held."""
        cdef int slot = capture.slots.get(where, opened)
        if slot:
            self.promised.pop(id, None)
            self.by_id[id] = capture
            if watched is not None or id not in capture.ids:
                capture.ids[id] = watched
            capture.slots[where] = slot
        return slot

    cdef note_over(self, where):
        """A stream does not capture any more, as far as is known.  `changing` is held.

        What was known of it is the caller's to drop, without the lock: a stream object's own code may run.
        """
        known = self.capturing.pop(where, None)
        if known is not None:
            self.believed -= 1
            captures_count(-1)
        return known

    cdef int is_over(self, tuple where) except -1:
        known = None
        if where in self.capturing:
            with self.changing:
                known = self.note_over(where)
        return 0

    cdef int ask_again(self) except -1:
        """Learn which captures are over.  Only of streams that surely exist: see `order_reachable`.

        Begins none, since another thread may end that capture, and destroy its graph, while this one asks.
        """
        cdef uint64_t handle
        cdef int state, status
        for stream, known in list(self.capturing.items()):
            if known[1] is None or stream[1] not in (0, thread_number()):
                continue
            handle = stream[0]
            with nogil:
                status = self.areas.core.source.ask_capture(handle, &state)
            if status == STATUS_OK and state == CAPTURE_NONE:
                with self.changing:
                    # Unless it was seen to capture again meanwhile.
                    if self.capturing.get(stream) is known:
                        self.note_over(stream)
        return 0

    def release(self, id):
        """Let everybody have the memory of a capture again, unless another capture shares it."""
        cdef Capture capture
        over = []
        with self.changing:
            capture = self.by_id.pop(id, None)
            self.promised.pop(id, None)
            where = _stream_of(self.capturing, id)
            while where is not None:
                over.append(self.note_over(where))
                where = _stream_of(self.capturing, id)
            if capture is None:
                return
            capture.ids.pop(id, None)
            if capture.ids:
                return
            for slot in capture.slots.values():
                self.areas.end_capture(slot)
            capture.slots.clear()
            promised = _promise_of(self.promised, capture)
            while promised is not None:
                self.promised.pop(promised, None)
                promised = _promise_of(self.promised, capture)
        with _keeping.here:
            _kept.pop(capture, None)

    def share(self, id, other):
        """Have a capture use the memory of another one from its first allocation on.

        Not before: nothing would tell that a capture which allocates nothing is over.
        """
        cdef str wrong = None
        with self.changing:
            capture = self.by_id.get(other) or self.promised.get(other)
            if capture is None:
                wrong = "other"
            elif id not in self.by_id:
                self.promised[id] = capture
            elif self.by_id[id] is not capture:
                wrong = "own"
        if wrong == "other":
            raise ValueError(f"this pool has no memory of a capture {other}")
        if wrong == "own":
            raise ValueError(f"capture {id} has memory of its own already: share before it allocates")

    def ids(self):
        """Ids of the captures that have memory of this pool."""
        return tuple(self.by_id)

    cdef int release_gone(self) except -1:
        """Release the captures whose graphs are gone."""
        for id, capture in list(self.by_id.items()):
            if _is_gone((<Capture> capture).ids.get(id)):
                self.release(id)
        return 0


cdef int settle() except -1:
    """Release the captures of all pools whose graphs are gone.  Cheap where none went since the last look.

    Of all, since what one pool believes to capture keeps every other from waiting for the device.
    """
    global _graphs_seen
    cdef unsigned long long gone = atomic_read(_graphs_gone)
    if gone == _graphs_seen:
        return 0
    for reference in _tables.here.valuerefs():
        table = reference()
        if table is not None:
            (<CaptureTable> table).release_gone()
    # Of pools that were dropped: with the last reference to its areas their memory goes back.
    for capture in list(_kept):
        ids = (<Capture> capture).ids
        if ids and all(_is_gone(watched) for watched in list(ids.values())):
            with _keeping.here:
                _kept.pop(capture, None)
    _graphs_seen = gone
    return 0

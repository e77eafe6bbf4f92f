"""Streams become slots here, once for each stream object; nothing below knows a handle."""
import threading
import weakref

cimport cython
from cpython.object cimport PyObject, PyTypeObject
from libc.stdint cimport uint64_t

from vpool._base.lock cimport atomic_add, atomic_read
from vpool._interface.captures cimport CaptureTable
from vpool._interface.captures cimport settle as settle_captures
from vpool._interface.diagnosis cimport forked
from vpool._management.areas cimport Areas
from vpool._management.order cimport system_thread, system_thread_lives, thread_number
from vpool._management.state cimport STATE_CLOSED, STATE_FORKED
from vpool._storage.driver cimport CAPTURE_NONE, STATUS_OK

from vpool.errors import SourceError
from vpool.streams import HOST, read_stream, stream_handle

cdef enum:
    LEGACY_STREAM = 0
    PER_THREAD_STREAM = 2
    ENOUGH_SLOTS = 64             # from here on the slots of streams that are gone are looked for first
    MOST_KEPT = 64                # stream objects that one pool keeps alive
    HOST_THREAD = 0xFFFFFFFFFFFFFFFF      # see `order_is_host`


cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(PyObject* object)


cdef int checked_id(id) except -1:
    if isinstance(id, bool) or not isinstance(id, int):
        raise TypeError(f"a capture's id is an int, not {type(id).__name__}")
    return 0


_defaults = threading.local()
# The references to stream objects of each pool.  The collector tells of an object's death only those references
# that are not garbage themselves, as the pool's own would be in a cycle that has both.
_references = {}
# What pools keep, by the id of the stream object: a weak reference to its `Kept`.
_kept = {}


class stream:
    """Make a stream the calling thread's default within a ``with`` block.

    Parameters
    ----------
    stream
        A handle, or an object that has one; None is the legacy default stream.

    Raises
    ------
    RuntimeError
        At the end of a block that another thread entered, which changes nothing; and of one that is left before
        another that was entered in it.

    Examples
    --------
    >>> import vpool
    >>> pool = vpool.Pool(source="host")
    >>> with vpool.stream(7):
    ...     buffer = pool.empty(100)
    >>> buffer.stream
    7
    """

    def __init__(self, stream):
        stream_handle(stream)                     # refuse what is none here, not at the first use
        self.stream = stream

    def __enter__(self):
        stack = _defaults.__dict__.setdefault("stack", [])
        stack.append(self.stream)
        atomic_add(defaults_in_use, 1)
        return self

    def __exit__(self, *exc_info):
        stack = getattr(_defaults, "stack", ())
        for at in range(len(stack) - 1, -1, -1):
            if stack[at] is self.stream:
                break
        else:
            raise RuntimeError("vpool.stream: this block was entered on another thread, whose default it still sets")
        last = at == len(stack) - 1
        del stack[at]
        atomic_add(defaults_in_use, -1)
        if not last:
            raise RuntimeError("vpool.stream: a block was left before one that was entered in it, as tasks may do that"
                               " take turns on a thread: their allocations had each other's streams")


cdef class Held:
    """What a stream object's end needs of a pool, which may be gone before it."""

    cdef int let_go(self, int slot) except -1:
        cdef Areas areas
        if self.areas != NULL:
            areas = <Areas> self.areas
            areas.hold_slot(slot, -1)
            with nogil:
                areas.finish_crossings()
        return 0


@cython.no_gc_clear   # `__dealloc__` needs its parts
cdef class Kept:
    """A stream object that pools keep: all of them have this, and it alone has the object."""

    def __dealloc__(self):
        if self.key is not None:
            self.shared.pop(self.key, None)


cdef Kept _kept_for(stream):
    cdef Kept mine
    known = _kept.get(id(stream))
    kept = None if known is None else known()
    if kept is None:
        mine = Kept.__new__(Kept)
        mine.stream = stream
        mine.shared = _kept
        reference = weakref.ref(mine)
        key = id(stream)
        # A collection may have met the object meanwhile; from here on none runs.
        known = _kept.get(key)
        kept = None if known is None else known()
        if kept is None:
            mine.key = key
            _kept[key] = reference
            kept = mine
    return kept


@cython.no_gc_clear   # `__dealloc__` needs its parts
cdef class StreamTable:
    """The slots of one pool, by what callers pass as a stream.

    While a slot counts as held, any thread may name its stream to the driver; so who holds it has to tell before
    the stream can go.  Weak references do, where they are cleared first of all.  Other objects the table keeps
    itself, and lets go of them, first by that count, when it sees that nobody else has them: where streams are
    about to be named, and where a new one is met.  It keeps so many at most, since an object that refers to
    itself is never seen to be nobody's.

    Nothing that the collector knows is made while `changing` is held: a collection would run there, and in it a
    finaliser that may wait for a thread which waits for the lock.
    """

    def __cinit__(self, Areas areas not None, bint captures=True, str name=None):
        self.areas = areas
        self.name = name
        self.held = Held.__new__(Held)
        self.held.areas = <void*> areas
        self.captures = CaptureTable(areas) if captures else None
        self.references = _references             # which may be gone before this, at the end of the interpreter
        self.by_object = self.references[id(self.held)] = {}
        self.kept = {}                            # the table's own: the collector sees through it
        self.going = []
        self.by_handle = {}
        self.by_thread = {}
        self.foreign = {}
        # Taken again by a finaliser that meets a stream, when a collection runs while it is held.
        self.changing = threading.RLock()

    def __dealloc__(self):
        if self.held is not None and self.by_object is not None:
            if self.by_object:
                while self.by_object:             # each is taken out once, also where its object dies meanwhile
                    self.areas.hold_slot(self.by_object.popitem()[1][1], -1)
                with nogil:
                    self.areas.finish_crossings()
            self.held.areas = NULL
            self.references.pop(id(self.held), None)

    cdef int slot_of(self, stream) except -1:
        """The slot of a stream, made on first use.

        A stream object is asked for its handle once; the handle of a number, also of one that may change as
        a ctypes pointer's, is checked on each call, since it may have come back as another stream's.  A stream
        that captures has another slot meanwhile; nothing but asking the driver tells.
        """
        cdef int slot
        cdef bint lasts = False
        if stream is None:
            stack = getattr(_defaults, "stack", None)
            stream = stack[len(stack) - 1] if stack else None
            if stream is None:
                return 0
        known = self.by_object.get(id(stream))
        if known is not None and known[0]() is stream:
            slot = known[1]
            return self.captured(stream, atomic_read(self.areas.state.table[slot].stream)) or slot
        if stream is HOST:
            return self.host_slot()
        handle = self.handle_of(stream, &lasts)
        # First: to ask for the id of a stream that captures invalidates the capture.
        slot = self.captured(stream, handle)
        if slot:
            return slot
        slot = self.slot_of_handle(handle)
        if handle == PER_THREAD_STREAM or not lasts or isinstance(stream, int):
            return slot                           # means another stream each time, or may
        if self.is_over():
            return slot
        try:
            known = (weakref.ref(stream, _Forgetting(self.by_object, self.held, id(stream))), slot)
        except TypeError:
            return slot                           # a cycle that has it would never end: asked again each time
        self.hold_object(stream, known, None if _tells_in_time(type(stream)) else _kept_for(stream))
        if self.kept or self.going:
            self.let_go_of_objects(False)
        return slot

    cdef int hold_object(self, stream, tuple known, Kept kept) except -1:
        """Have a stream object hold its stream, once: its own code, or another thread, may have passed it too."""
        key = id(stream)
        with self.changing:
            before = self.by_object.get(key)
            if atomic_read(self.areas.state.table[<int> known[1]].gone):
                return 0                          # forgotten meanwhile
            if before is None or before[0]() is not stream:
                self.by_object[key] = known
                if kept is not None:
                    self.kept[key] = kept
                self.areas.hold_slot(known[1], 1)
        return 0

    cdef bint is_over(self):
        """Whether the pool is closed and has nothing left that a stream could use."""
        return self.areas.state.word & STATE_CLOSED and self.areas.is_empty()

    cdef int let_go_of_objects(self, bint wait) except -1:
        """Let go of the stream objects that nobody else has, and of the eldest where there are too many.

        Their own code runs, without any lock.  Without `wait` they stay while another thread names streams, so
        that the caller does not wait for it, unless there are too many.  O(stream objects).
        """
        cdef list keys = list(self.kept)
        cdef list going = []
        cdef bint over = self.is_over()
        cdef bint finished = False
        with self.changing:
            for key in keys:
                if over or self.is_alone(key):
                    self.drop_object(key)
            for key in keys:
                if len(self.kept) > MOST_KEPT:
                    self.drop_object(key)
            finished = not self.areas.crossing_now()
            if finished or wait or len(self.going) > MOST_KEPT:
                going, self.going = self.going, going
        if going:
            if not finished:
                with nogil:
                    self.areas.finish_crossings()
            going.clear()
            if self.areas.state.word & STATE_FORKED:
                raise forked(self.name)
        return 0

    cdef bint is_alone(self, key):
        """Whether nothing but pools has a stream object."""
        cdef Kept kept = self.kept.get(key)
        return kept is not None and Py_REFCNT(<PyObject*> kept.stream) == 1

    cdef int drop_object(self, key) except -1:
        """Have a stream object hold its stream no more.  `changing` is held.

        It lives until `let_go_of_objects` has seen the end of crossings that may name it.
        """
        known = self.by_object.pop(key, None)
        if known is not None:
            self.areas.hold_slot(known[1], -1)
        kept = self.kept.pop(key, None)
        if kept is not None:
            self.going.append(kept)
        return 0

    cdef uint64_t handle_of(self, stream, bint* lasts) except? 0:
        """The handle of a stream, and whether it is the object's for good, by its own code, which may have forked."""
        cdef uint64_t handle
        handle, lasts[0] = read_stream(stream, self.areas.core.source.device)
        if self.areas.state.word & STATE_FORKED:
            raise forked(self.name)
        return handle

    cdef int captured(self, object stream, uint64_t handle) except -1:
        """The slot of a stream that captures now, made on first use; 0 where it does not."""
        if handle == LEGACY_STREAM or self.captures is None:
            return 0
        if not self.areas.core.source.driver.may_capture() and not self.captures.capturing:
            return 0
        return self.captures.slot_of(self, stream, handle, thread_number() if handle == PER_THREAD_STREAM else 0)

    def open_captured(self, handle, capture):
        """Make a slot for a stream that captures."""
        with self.changing:
            return self.make_slot(handle, capture, 0, capture)

    cdef int host_slot(self) except -1:
        """The slot of the host, made on first use."""
        cdef int slot
        if self.host == 0:
            handle = stream_handle(HOST)
            with self.changing:
                if self.host == 0:
                    slot = self.make_slot(handle, 0, HOST_THREAD, 0)
                    self.areas.give_to_host(slot)
                    self.host = slot
        return self.host

    cdef int settle(self) except -1:
        """Release the captures whose graphs are gone, learn which are over, and let go of streams."""
        if self.kept or self.going:
            self.let_go_of_objects(True)
        settle_captures()
        if self.captures is not None and self.captures.capturing:
            self.captures.ask_again()
        return 0

    cdef int slot_of_handle(self, uint64_t handle) except -1:
        cdef uint64_t unique_id = 0
        cdef int status
        if handle == LEGACY_STREAM:
            return 0
        if handle == PER_THREAD_STREAM:
            thread = thread_number()
            slot = self.by_thread.get(thread)
            return self.open_slot(handle, 0, thread) if slot is None else slot
        with nogil:
            status = self.areas.core.source.driver.stream_id(handle, &unique_id)
        if status != STATUS_OK:
            name = self.areas.core.source.driver.error_name(status)
            raise SourceError(f"{handle:#x} is no stream of device {self.areas.core.source.device}: {name}", name)
        slot = self.by_handle.get(handle)
        if slot is not None and atomic_read(self.areas.state.table[<int> slot].unique_id) == unique_id:
            return slot
        return self.open_slot(handle, unique_id, 0)

    cdef bint is_still(self, int slot) noexcept:
        """Whether a handle that the caller passes, which exists, is still that of a slot's stream."""
        cdef uint64_t handle = atomic_read(self.areas.state.table[slot].stream)
        cdef uint64_t unique_id = 0
        cdef int capture, status
        with nogil:
            status = self.areas.core.source.ask_capture(handle, &capture)
            if status == STATUS_OK and capture == CAPTURE_NONE:      # else to ask for its id would invalidate that
                status = self.areas.core.source.driver.stream_id(handle, &unique_id)
        return status == STATUS_OK and unique_id == atomic_read(self.areas.state.table[slot].unique_id)

    cdef int open_slot(self, uint64_t handle, uint64_t unique_id, uint64_t thread) except -1:
        cdef int slot = -1
        cdef int before
        ends = getattr(_defaults, "ends", None) if thread else None
        if thread and ends is None and not isinstance(threading.current_thread(), threading._DummyThread):
            ends = _defaults.ends = _ThreadEnd()
        with self.changing:
            if thread and thread in self.by_thread:
                return self.by_thread[thread]
            if not thread and handle in self.by_handle:
                before = self.by_handle[handle]
                if atomic_read(self.areas.state.table[before].unique_id) == unique_id:
                    return before
                # The handle came back: the stream that had it is gone.
                self.areas.slot_is_gone(before)
            slot = self.make_slot(handle, unique_id, thread, 0)
            if thread:
                self.by_thread[thread] = slot
                if ends is None:
                    self.foreign[thread] = system_thread()
            else:
                self.by_handle[handle] = slot
        if ends is not None:
            ends.note(self, slot, thread)
        return slot

    cdef int make_slot(self, uint64_t handle, uint64_t unique_id, uint64_t thread, uint64_t capture) except -1:
        """A slot that nothing leads to yet, new or of a stream that is gone.  `changing` is held."""
        cdef int slot = -1
        # A wait for the device would invalidate the capture, and a pool may be one that never waits.
        cdef bint may_drain = capture == 0 and self.areas.core.may_wait
        with nogil:
            if self.areas.state.slots >= ENOUGH_SLOTS:
                slot = self.areas.reopen_slot(handle, unique_id, thread, capture, False)
            if slot < 0:
                slot = self.areas.open_slot(handle, unique_id, thread, capture)
        if slot < 0:
            self.look_for_ended_threads()
            with nogil:
                slot = self.areas.reopen_slot(handle, unique_id, thread, capture, may_drain)
        if slot < 0:
            raise MemoryError(
                f"pool {self.name!r} knows {self.areas.state.slots - 1:,} streams and has no room for {handle:#x}:"
                " forget_stream() lets go of one, best before it is destroyed")
        self.drop_slot(slot)
        return slot

    def thread_ended(self, int slot, thread):
        """A thread is over, and with it its per-thread default stream; nothing can be queued there any more."""
        if self.by_thread.pop(thread, None) == slot:
            self.areas.slot_is_gone(slot)

    cdef int look_for_ended_threads(self) except -1:
        """Learn which threads that Python did not make are over.  `changing` is held.  O(such threads)."""
        thread = _ended(self.foreign)
        while thread is not None:
            self.foreign.pop(thread)
            self.thread_ended(self.by_thread[thread], thread)
            thread = _ended(self.foreign)
        return 0

    cdef int drop_slot(self, int slot) except -1:
        """Forget whatever led to a slot.  `changing` is held."""
        key = _handle_of(self.by_handle, slot)
        while key is not None:
            self.by_handle.pop(key, None)
            key = _handle_of(self.by_handle, slot)
        key = _object_of(self.by_object, slot)
        while key is not None:
            self.drop_object(key)
            key = _object_of(self.by_object, slot)
        return 0

    def release_capture(self, id):
        checked_id(id)
        if self.captures is not None:
            self.captures.release(id)

    def share_capture(self, id, other):
        if self.captures is None:
            raise ValueError("this pool was made for programs that never allocate in a capture")
        checked_id(id)
        checked_id(other)
        self.captures.share(id, other)

    def capture_ids(self):
        self.settle()
        return () if self.captures is None else self.captures.ids()

    def forget(self, stream):
        """Let go of a stream, best before it is destroyed: nothing that comes later inherits its slot."""
        cdef uint64_t handle = 0
        cdef int slot
        cdef bint lasts
        known = self.by_object.get(id(stream))
        if known is None or known[0]() is not stream:
            handle = self.handle_of(stream, &lasts)
        # Held to the end, or another thread could have an object hold the slot, or give it to another stream.
        with self.changing:
            known = self.by_object.get(id(stream))
            slot = known[1] if known is not None and known[0]() is stream else self.by_handle.get(handle, -1)
            if slot > 0:
                self.drop_slot(slot)
                if not self.is_still(slot):
                    self.areas.slot_is_gone(slot)     # and what is marked on its handle proves nothing of it
                with nogil:
                    self.areas.retire_slot(slot)
        if slot > 0:
            self.let_go_of_objects(True)


cdef _handle_of(dict by_handle, int slot):
    """A handle that leads to a slot, or None."""
    for handle, found in by_handle.items():
        if <int> found == slot:
            return handle
    return None


cdef _object_of(dict by_object, int slot):
    """Key of a stream object that leads to a slot, or None."""
    for key, known in by_object.items():
        if <int> (<tuple> known)[1] == slot:
            return key
    return None


cdef _ended(dict foreign):
    """A thread that is over, or None; one whose number another thread has by now counts as one that goes on."""
    for thread, number in foreign.items():
        if not system_thread_lives(number):
            return thread
    return None


cdef bint _tells_in_time(type its):
    """Whether the weak references to objects of a class are cleared before anything of them ends.

    A finaliser comes before that, and what other languages do in theirs is unknown.  The class is not asked: a
    metaclass may answer anything.
    """
    cdef PyTypeObject* cls = <PyTypeObject*> its
    if cls.tp_finalize != NULL or cls.tp_del != NULL:
        return False
    while cls != <PyTypeObject*> object:
        if cls.tp_dealloc != (<PyTypeObject*> _Forgetting).tp_dealloc:
            return False
        cls = cls.tp_base
    return True


class _ThreadEnd:
    """Lives in a thread's local storage, which is dropped when the thread ends.

    Not of a thread that Python did not make: that has one for each call into Python, and goes on after it.  Nothing
    tells of its end, so the system is asked for it once all slots are taken.
    """

    def __init__(self):
        self.slots = {}

    def note(self, table, slot, thread):
        slots = self.slots
        self.slots[weakref.ref(table, lambda reference: slots.pop(reference, None))] = (slot, thread)

    def __del__(self):
        for reference, (slot, thread) in list(self.slots.items()):
            table = reference()
            if table is not None:
                table.thread_ended(slot, thread)


class _Forgetting:
    """Forgets a stream object when it dies, and with it perhaps its stream."""

    def __init__(self, by_object, held, key):
        self.by_object = by_object
        self.held = held
        self.key = key

    def __call__(self, reference):
        known = self.by_object.get(self.key)
        if known is not None and known[0] is reference:
            self.by_object.pop(self.key, None)
            (<Held> self.held).let_go(known[1])

"""Stream order: markers are recorded only where memory crosses streams, waits only where proof is missing.

Every function here is called with the pool's crossing turn and without any lock, since it may call the
driver.
"""
from libc.stdint cimport uint16_t, uint32_t, uint64_t

from vpool._base.bias cimport bias_drop, bias_take
from vpool._base.lock cimport atomic_add, atomic_exchange, atomic_read, atomic_write
from vpool._base.types cimport BlockId
from vpool._management.arena cimport CLASSES_PER_ROW, ROWS, Arena
from vpool._management.state cimport MARKERS, CoreState, Marker, Slot, slot_count
from vpool._storage.driver cimport CAPTURE_NONE, STATUS_INVALID_HANDLE, STATUS_NOT_READY, STATUS_OK
from vpool._storage.source cimport Source


cdef extern from *:
    """
    #include <errno.h>
    #include <stdint.h>
    #include <sys/syscall.h>
    #include <unistd.h>
    static uint64_t vpool_threads = 0;
    static __thread uint64_t vpool_thread = 0;
    static inline uint64_t vpool_thread_number(void) {
        if (vpool_thread == 0) vpool_thread = __atomic_add_fetch(&vpool_threads, 1, __ATOMIC_RELAXED);
        return vpool_thread;
    }
    static inline int vpool_system_thread(void) {
        return (int) syscall(SYS_gettid);
    }
    /* The signal 0 is none: it only asks. */
    static inline int vpool_system_thread_lives(int number) {
        return syscall(SYS_tgkill, getpid(), number, 0) == 0 || errno != ESRCH;
    }
    """
    uint64_t _thread_number "vpool_thread_number"() noexcept nogil
    int _system_thread "vpool_system_thread"() noexcept nogil
    bint _system_thread_lives "vpool_system_thread_lives"(int number) noexcept nogil


cdef uint64_t thread_number() noexcept nogil:
    return _thread_number()


cdef int system_thread() noexcept nogil:
    return _system_thread()


cdef bint system_thread_lives(int number) noexcept nogil:
    return _system_thread_lives(number)


cdef unsigned long long _captures = 0


cdef void captures_count(int by) noexcept nogil:
    atomic_add(_captures, by)


cdef bint order_captures() noexcept nogil:
    return atomic_read(_captures) != 0


cdef bint order_at_rest(Arena* arena, uint64_t done) noexcept nogil:
    """Whether all that the arena holds is free, and freed with a stamp up to `done`.  O(free blocks)."""
    cdef uint32_t number
    cdef BlockId block_id
    cdef bint rest
    bias_take(&arena.lock)
    rest = arena.live_blocks == 0 and arena.pending_blocks == 0 and arena.lent_blocks == 0 and arena.adopted == 0
    for number in range(<uint32_t> (ROWS * CLASSES_PER_ROW)):
        block_id = arena.heads[number]
        while rest and block_id:
            rest = arena.blocks[block_id].stamp <= done
            block_id = arena.blocks[block_id].list_next
    bias_drop(&arena.lock)
    return rest


cdef void order_poll(CoreState* state, Source source, uint16_t freer) noexcept nogil:
    """Ask for the markers of a slot, oldest first, until one is not complete."""
    cdef Slot* slot = &state.table[freer]
    cdef Marker first
    cdef int i
    while slot.marker_count and source.query_event(slot.markers[0].event) == STATUS_OK:
        first = slot.markers[0]
        atomic_write(slot.done, first.number)
        slot.marker_count -= 1
        # The event goes behind the others, to be recorded again.
        for i in range(MARKERS - 1):
            slot.markers[i] = slot.markers[i + 1]
        slot.markers[MARKERS - 1] = first


cdef bint order_reachable(Source source, Slot* slot) noexcept nogil:
    """Whether the slot's stream surely exists, and this thread can name it.

    CUDA does not answer for the handle of a destroyed stream: its driver crashes (seen with 580.159 and
    cudaStreamGetId, cudaEventRecord and cudaStreamQuery).  So a handle is touched only while an object
    holds the stream, or in the call that passes it; a stream known by its number alone is waited for
    with the device.
    """
    cdef int capture
    if not source.checks_handles:
        return not _out_of_reach(source, slot)    # without a call to the driver
    return order_reach(source, slot, &capture) != STATUS_INVALID_HANDLE


cdef bint _out_of_reach(Source source, Slot* slot) noexcept nogil:
    """Whether the slot's stream is known to be gone, or is not known to exist."""
    if slot.thread:
        return slot.thread != thread_number()
    if slot.unique_id == 0:
        return False
    return atomic_read(slot.gone) or not source.checks_handles and atomic_read(slot.held) <= 0 and not slot.asking


cdef int order_reach(Source source, Slot* slot, int* capture) noexcept nogil:
    """Whether the slot's stream captures; STATUS_INVALID_HANDLE where it is out of reach: see `order_reachable`."""
    cdef uint64_t unique_id = 0
    cdef int asked, status
    cdef bint by_id = source.checks_handles and slot.unique_id != 0 and slot.thread == 0
    capture[0] = CAPTURE_NONE
    if _out_of_reach(source, slot):
        return STATUS_INVALID_HANDLE
    asked = source.ask_capture(slot.stream, capture)
    if not by_id or asked == STATUS_OK and capture[0] != CAPTURE_NONE:
        return asked                              # to ask a stream that captures for its id would invalidate that
    # Another stream may have got the handle of one that was destroyed.
    status = source.driver.stream_id(slot.stream, &unique_id)
    if status == STATUS_INVALID_HANDLE or status == STATUS_OK and unique_id != slot.unique_id:
        atomic_write(slot.gone, True)
        return STATUS_INVALID_HANDLE
    return asked if status == STATUS_OK else STATUS_INVALID_HANDLE   # no answer says nothing of the stream


cdef int order_mark(CoreState* state, Source source, uint16_t freer, uint64_t number) noexcept nogil:
    """Record a marker that covers what a slot freed with that stamp, if none does.

    STATUS_INVALID_HANDLE where the stream is out of reach, STATUS_NOT_READY while it captures: the marker would
    be part of the graph.
    """
    cdef Slot* slot = &state.table[freer]
    cdef Marker* marker
    cdef int status, capture
    if number < atomic_read(state.arenas[freer].sequence):
        return STATUS_OK
    status = order_reach(source, slot, &capture)
    if status != STATUS_OK:
        return status
    if capture != CAPTURE_NONE:
        return STATUS_NOT_READY
    if slot.marker_count == MARKERS:
        order_poll(state, source, freer)
    marker = &slot.markers[slot.marker_count if slot.marker_count < MARKERS else MARKERS - 1]
    if marker.event == 0:
        status = source.create_event(&marker.event)
        if status != STATUS_OK:
            return status
    atomic_write(state.arenas[freer].wanted, 0)
    # Raised before the record: see `Arena.sequence`.  An exchange, since a plain store could be seen
    # by other threads only after the record.
    number = atomic_exchange(state.arenas[freer].sequence, atomic_read(state.arenas[freer].sequence) + 1)
    status = source.record_event(marker.event, slot.stream)
    if status != STATUS_OK:
        # The number is spent: nothing was proved for it, so its frees are covered by the next marker.
        atomic_exchange(state.arenas[freer].wanted, 1)
        return status
    marker.number = number
    if slot.marker_count < MARKERS:
        slot.marker_count += 1
    return STATUS_OK


cdef bint _can_wait(CoreState* state, Source source, uint16_t user) noexcept nogil:
    """Whether a slot's stream can be made to wait for an event now."""
    cdef int capture
    return order_reach(source, &state.table[user], &capture) == STATUS_OK and capture == CAPTURE_NONE


cdef int order_queue(CoreState* state, Source source, uint16_t user, uint16_t freer, uint64_t number) noexcept nogil:
    """Make new work of slot `user` come after what slot `freer` freed with that stamp, without the host waiting.

    By proof that it is complete, by a wait that was already made, else by a wait of the user's stream
    for an event.  STATUS_NOT_READY in a capture, and another status where none of these can be.
    """
    cdef Slot* slot = &state.table[freer]
    cdef int status, i
    if order_proved(state, user, freer, number):
        return STATUS_OK
    if state.arenas[freer].captured:
        return STATUS_NOT_READY                   # a graph may use it again at any time
    status = order_mark(state, source, freer, number)
    if status != STATUS_OK:
        return status
    order_poll(state, source, freer)
    if order_proved(state, user, freer, number):
        return STATUS_OK
    for i in range(slot.marker_count if _can_wait(state, source, user) else 0):
        if slot.markers[i].number >= number:
            status = source.wait_for_event(state.table[user].stream, slot.markers[i].event)
            if status == STATUS_OK:
                atomic_write(state.table[user].waited[freer], slot.markers[i].number)
                atomic_add(state.waits, 1)
                atomic_add(state.overwaits, slot.markers[i].number > number)
                return STATUS_OK
            break
    return STATUS_INVALID_HANDLE


cdef int order_make(CoreState* state, Source source, uint16_t user, uint16_t freer, uint64_t number) noexcept nogil:
    """Make new work of slot `user` come after what slot `freer` freed with that stamp.

    As `order_queue` does, or by waiting: for the device where the freer's stream is out of reach.  STATUS_NOT_READY
    where that may not be: in a pool that never waits, or in a capture.
    """
    cdef int status = order_queue(state, source, user, freer, number)
    if status == STATUS_OK or status == STATUS_NOT_READY:
        return status
    if state.never_waits:
        return STATUS_NOT_READY
    status = order_drain(state, source)
    return STATUS_OK if order_proved(state, user, freer, number) else (
        STATUS_NOT_READY if status == STATUS_OK else status)


cdef int _drain_device(CoreState* state, Source source) noexcept nogil:
    """Wait for the device; then whatever was freed before is complete, but for what graphs may use."""
    cdef uint32_t freer
    cdef uint64_t number
    cdef int status
    for freer in range(slot_count(state)):
        atomic_write(state.arenas[freer].wanted, 0)
        # Raised first, so that a free from here on is not taken for complete.
        number = atomic_exchange(state.arenas[freer].sequence, atomic_read(state.arenas[freer].sequence) + 1)
        state.table[freer].draining = 0 if state.arenas[freer].captured else number
        state.table[freer].ending = state.table[freer].draining and atomic_read(state.table[freer].gone)
    atomic_add(state.drains, 1)
    status = source.synchronize()
    if status == STATUS_OK:
        for freer in range(slot_count(state)):
            if state.table[freer].draining > atomic_read(state.table[freer].done):
                atomic_write(state.table[freer].done, state.table[freer].draining)
            state.table[freer].marker_count = 0
            if state.table[freer].ending:
                state.table[freer].quiet = True
    for freer in range(slot_count(state) if status != STATUS_OK else 0):
        atomic_exchange(state.arenas[freer].wanted, 1)
    return status


cdef int order_drain_device(CoreState* state, Source source) noexcept nogil:
    """Wait for the device, and so for what graphs do, which any stream may launch.

    STATUS_NOT_READY while a capture is known, which that would invalidate.
    """
    cdef uint32_t freer
    cdef int capture
    if order_captures() and source.driver.may_capture():
        return STATUS_NOT_READY
    for freer in range(slot_count(state)):
        if state.arenas[freer].captured or order_is_host(&state.table[freer]):
            continue
        if order_reach(source, &state.table[freer], &capture) == STATUS_OK and capture != CAPTURE_NONE:
            return STATUS_NOT_READY
    return _drain_device(state, source)


cdef int _drain_slot(CoreState* state, Source source, uint16_t freer) noexcept nogil:
    """Wait for what a slot's stream has queued; then whatever it freed before is complete."""
    cdef Slot* slot = &state.table[freer]
    cdef int status = order_mark(state, source, freer, atomic_read(state.arenas[freer].sequence))
    if status == STATUS_OK:
        status = source.await_event(slot.markers[slot.marker_count - 1].event)
    if status == STATUS_OK:
        atomic_write(slot.done, slot.markers[slot.marker_count - 1].number)
        slot.marker_count = 0
    return status


cdef int order_await(CoreState* state, Source source, uint16_t freer) noexcept nogil:
    """Wait for what a slot's stream has queued, if that can be: nothing else of the device."""
    if not order_reachable(source, &state.table[freer]):
        return STATUS_NOT_READY
    return _drain_slot(state, source, freer)


cdef bint _has_ended(Arena* arena, Slot* slot) noexcept nogil:
    """Whether all that a slot ever freed is complete, and nothing else of it is waited for."""
    cdef uint64_t done = atomic_read(slot.done)
    return slot.quiet and not atomic_read(arena.wanted) and done + 1 >= atomic_read(arena.sequence) and order_at_rest(
        arena, done)


cdef int order_drain(CoreState* state, Source source) noexcept nogil:
    """Wait for all work of the pool's streams; then whatever was freed before is complete.

    Stream by stream, since waiting for the device would invalidate any capture that goes on; only for streams
    that are out of reach it has to be, and then not while a capture is known.  STATUS_NOT_READY where some
    could not be waited for.
    """
    cdef uint32_t freer
    cdef int capture, status
    cdef bint beyond = False
    cdef bint captures = order_captures() and source.driver.may_capture()
    for freer in range(slot_count(state)):
        if state.arenas[freer].captured or order_is_host(&state.table[freer]):
            continue
        status = order_reach(source, &state.table[freer], &capture)
        if status == STATUS_INVALID_HANDLE:
            beyond = beyond or not _has_ended(state.arenas[freer], &state.table[freer])
        elif status != STATUS_OK:
            return status
        else:
            captures = captures or capture != CAPTURE_NONE
    if beyond and not captures:
        return _drain_device(state, source)
    for freer in range(slot_count(state)):
        if state.arenas[freer].captured or not order_reachable(source, &state.table[freer]):
            continue
        status = _drain_slot(state, source, freer)
        if not order_waited(status):
            # No event to be had, perhaps: the device is waited for without one.
            return status if captures else _drain_device(state, source)
    return STATUS_NOT_READY if captures else STATUS_OK


cdef void order_forget(CoreState* state, Source source) noexcept nogil:
    """Destroy every event."""
    cdef uint32_t freer
    cdef int i
    for freer in range(slot_count(state)):
        state.table[freer].marker_count = 0
        for i in range(MARKERS):
            if state.table[freer].markers[i].event:
                source.driver.event_destroy(state.table[freer].markers[i].event)
                state.table[freer].markers[i].event = 0

"""Stream order: proof that work is complete, or that a stream waits for it."""
from libc.stdint cimport uint16_t, uint64_t

from vpool._base.lock cimport atomic_read
from vpool._management.arena cimport Arena
from vpool._management.state cimport CoreState, Slot
from vpool._storage.driver cimport STATUS_NOT_READY, STATUS_OK
from vpool._storage.source cimport Source


cdef inline uint64_t order_proved_upto(CoreState* state, uint16_t user, uint16_t freer) noexcept nogil:
    """The highest stamp of another slot such that new work of slot `user` is known to come after its frees up to it."""
    return max(atomic_read(state.table[freer].done), atomic_read(state.table[user].waited[freer]))


cdef inline bint order_proved(CoreState* state, uint16_t user, uint16_t freer, uint64_t number) noexcept nogil:
    """Whether new work of slot `user` is known to come after what slot `freer` freed with that stamp.

    No driver call, no lock.
    """
    return user == freer or order_proved_upto(state, user, freer) >= number


cdef inline bint order_waited(int status) noexcept nogil:
    """Whether a drain ended well: all that may be waited for is complete, if not what a capture goes on with."""
    return status == STATUS_OK or status == STATUS_NOT_READY


cdef inline bint order_is_host(Slot* slot) noexcept nogil:
    """Whether a slot stands for the host: what is freed there is complete, what it gets has to be.

    No thread has that number, so the slot's handle, which is none, is never touched.
    """
    return slot.thread == ~<uint64_t> 0


# Number of the calling thread, from 1; never given twice in a process.
cdef uint64_t thread_number() noexcept nogil

# The system's number of the calling thread, which a later one may get, and whether a thread of this process has it.
cdef int system_thread() noexcept nogil
cdef bint system_thread_lives(int number) noexcept nogil

# Captures that pools of this process know to go on: the device cannot be waited for meanwhile.
cdef void captures_count(int by) noexcept nogil
cdef bint order_captures() noexcept nogil

cdef bint order_at_rest(Arena* arena, uint64_t done) noexcept nogil

# With the crossing turn, and no lock.
cdef bint order_reachable(Source source, Slot* slot) noexcept nogil
cdef int order_reach(Source source, Slot* slot, int* capture) noexcept nogil
cdef void order_poll(CoreState* state, Source source, uint16_t freer) noexcept nogil
cdef int order_mark(CoreState* state, Source source, uint16_t freer, uint64_t number) noexcept nogil
cdef int order_queue(CoreState* state, Source source, uint16_t user, uint16_t freer, uint64_t number) noexcept nogil
cdef int order_make(CoreState* state, Source source, uint16_t user, uint16_t freer, uint64_t number) noexcept nogil
cdef int order_await(CoreState* state, Source source, uint16_t freer) noexcept nogil
cdef int order_drain(CoreState* state, Source source) noexcept nogil
cdef int order_drain_device(CoreState* state, Source source) noexcept nogil
cdef void order_forget(CoreState* state, Source source) noexcept nogil

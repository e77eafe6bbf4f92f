"""Suspended blocks: their memory is given up, and their addresses stay theirs."""
from libc.stdint cimport uint16_t, uint64_t

from vpool._base.types cimport BlockId
from vpool._management.arena cimport Arena
from vpool._management.core cimport Core

cdef struct GivenUp:
    uint64_t released             # bytes that went back to the source
    uint64_t shared               # of handles with chosen blocks that others share
    uint64_t in_use               # and that may not be waited for
    uint64_t refused              # that the source did not take back


# The first three take the growth turn.
cdef int suspended_give_up(Core core, bint every, uint16_t tag, bint copies, GivenUp* result) noexcept nogil
cdef void suspended_settle(Core core) noexcept nogil
cdef int suspended_bring_back(Core core, uint64_t* nbytes) noexcept nogil
cdef bint suspended_free(Core core, uint64_t address, int freer) noexcept nogil
cdef bint suspended_free_record(Core core, Arena* arena, BlockId block_id, uint16_t generation,
                                int freer) noexcept nogil

"""Memory that crosses streams: pending blocks made ready, free blocks stolen, loans sent home."""
from libc.stdint cimport uint16_t, uint64_t

from vpool._base.types cimport BlockId
from vpool._management.arena cimport Arena
from vpool._management.state cimport CoreState, Request
from vpool._storage.source cimport Source

# With the crossing turn, and no lock.
cdef bint cross_ready(CoreState* state, Source source, Arena* arena) noexcept nogil
cdef BlockId cross_steal(CoreState* state, Source source, Request* request) noexcept nogil
cdef BlockId cross_merge(CoreState* state, Source source, Request* request) noexcept nogil
cdef void cross_prove(CoreState* state, Source source, uint16_t slot) noexcept nogil
cdef bint cross_recall(CoreState* state, Source source) noexcept nogil

# Without any turn or lock.
cdef BlockId cross_take_own(Request* request) noexcept nogil
cdef bint cross_free(CoreState* state, uint64_t address, uint16_t freer) noexcept nogil
cdef bint cross_free_record(CoreState* state, Arena* arena, BlockId block_id, uint16_t generation,
                            uint16_t freer) noexcept nogil
cdef int cross_use(CoreState* state, uint64_t address, uint16_t user) noexcept nogil
cdef void cross_gather(CoreState* state, Source source) noexcept nogil

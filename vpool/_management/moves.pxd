"""Single moves of a mapped segment's memory."""
from libc.stdint cimport uint32_t, uint64_t

from vpool._base.types cimport BlockId
from vpool._management.core cimport Core
from vpool._management.mapped cimport MappedHandle, Victim
from vpool._management.state cimport Segment

cdef enum:
    STATUS_NO_ROOM = -3           # the limit, or the range, has no room; the source was not asked

cdef Segment* moves_segment(Core core) noexcept nogil
cdef BlockId moves_find(Core core, BlockId hint, uint64_t address, uint64_t nbytes, int wanted) noexcept nogil
cdef bint moves_punch(Core core, BlockId hint, uint64_t address, uint64_t nbytes, uint64_t* stamp) noexcept nogil
cdef bint moves_complete_everywhere(Core core, MappedHandle* handle, uint64_t stamp) noexcept nogil
cdef bint moves_complete(Core core, uint64_t stamp, bint may_wait) noexcept nogil
cdef void moves_count(Core core) noexcept nogil
cdef int moves_put(Core core, uint32_t number, int place, BlockId hint, uint64_t stamp) noexcept nogil
cdef int moves_take(Core core, Victim* victim, BlockId hole_id, uint64_t address) noexcept nogil
cdef int moves_release(Core core, Victim* victim) noexcept nogil
cdef int moves_create(Core core, BlockId hole_id, uint64_t address, uint64_t nbytes, uint64_t* made) noexcept nogil

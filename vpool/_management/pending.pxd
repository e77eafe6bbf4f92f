"""Pending blocks: freed, but a stream they were recorded for may still use them.  The arena's lock is held."""
from libc.stdint cimport uint64_t

from vpool._base.types cimport BlockId
from vpool._management.arena cimport Arena
from vpool._management.state cimport CoreState

cdef bint pending_use(Arena* arena, BlockId block_id, Arena* user) noexcept nogil
cdef void pending_put(Arena* arena, BlockId block_id) noexcept nogil
cdef void pending_on(Arena* arena, BlockId block_id, Arena* freer, uint64_t number) noexcept nogil
cdef bint pending_release(CoreState* state, Arena* arena, BlockId block_id) noexcept nogil
cdef void pending_rotate(Arena* arena) noexcept nogil
cdef void pending_forget(Arena* arena, BlockId block_id) noexcept nogil

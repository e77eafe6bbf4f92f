"""Extents: memory that one arena lends another.  The lock of the arena that is named is held."""
from libc.stdint cimport uint16_t, uint64_t

from vpool._base.types cimport BlockId
from vpool._management.arena cimport Arena

cdef struct Extent:
    # One loan, as it is carried from one arena's lock to the other's.
    Arena* owner
    BlockId lent                  # the owner's block
    uint64_t address
    uint64_t nbytes
    Arena* freer                  # whose work has to come before the next use
    uint64_t stamp                # and up to which of its frees

cdef void lend_out(Arena* owner, BlockId block_id, uint64_t nbytes, uint16_t borrower, Extent* extent) noexcept nogil
cdef void lend_live(Arena* owner, BlockId block_id, uint16_t borrower, Extent* extent) noexcept nogil
cdef void lend_on(Extent* extent, uint16_t borrower) noexcept nogil
cdef BlockId lend_adopt(Arena* borrower, Extent* extent) noexcept nogil
cdef void lend_unadopt(Arena* borrower, BlockId edge_id, Extent* extent) noexcept nogil
cdef int lend_return(Arena* borrower, Extent* extents, int most) noexcept nogil
cdef bint lend_isolate(Arena* borrower, BlockId edge_id, BlockId block_id) noexcept nogil
cdef void lend_home(Extent* extent) noexcept nogil
cdef BlockId lend_edge(Arena* owner, BlockId lent, Arena* borrower) noexcept nogil

"""Walks over all blocks of a pool: a consistent copy, and the proof of every invariant.

They hold the pool's lock and every arena's in turn, for about 10 ns a block.
"""
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from vpool._base.types cimport Block, BlockId
from vpool._management.arena cimport Arena
from vpool._management.core cimport Core
from vpool._management.state cimport CoreState

cdef packed struct BlockCopy:
    uint64_t address
    uint64_t nbytes
    uint64_t requested
    uint64_t serial               # of its record and its frees: the same only for the same block
    uint32_t segment
    uint16_t stream
    uint16_t tag
    uint16_t waits_for            # of a pending block: the slot whose work is not known to be complete
    uint8_t state

cdef packed struct SegmentCopy:
    uint64_t address
    uint64_t nbytes
    uint16_t stream

cdef packed struct PieceCopy:
    uint64_t address              # 0 of memory that is mapped nowhere
    uint64_t nbytes

cdef enum:
    WAITS_FOR_NOTHING = 0xFFFF    # its work is complete, and the next request that looks finds it

cdef struct Totals:
    # What the blocks of a copy add up to, read at the same moment.
    uint64_t reserved_bytes
    uint64_t allocated_bytes
    uint64_t requested_bytes
    uint64_t peak_reserved_bytes
    uint64_t peak_allocated_bytes
    uint64_t peak_requested_bytes
    uint64_t allocations
    uint64_t live_blocks
    uint64_t pending_bytes
    uint64_t served_bytes
    uint64_t noted                # events that were recorded up to then

cdef struct Place:
    # Where a walk is.
    Arena* arena
    BlockId edge_id               # of the segment, or of the loan that it is in
    BlockId before                # the block that was visited last, or that edge

cdef struct Broken:
    const char* what              # the invariant that does not hold, NULL where all do
    uint64_t address
    uint64_t found
    uint64_t expected


cdef uint64_t walk_copy(Core core, BlockCopy* blocks, uint64_t capacity, SegmentCopy* segments,
                        uint32_t segment_capacity, uint32_t* segment_count, Totals* totals) noexcept nogil
cdef bint walk_covers(Core core, uint64_t address) noexcept nogil
cdef uint64_t walk_pieces(Core core, PieceCopy* pieces, uint64_t capacity, uint64_t* span,
                          uint64_t* noted) noexcept nogil
cdef void walk_check(Core core, Broken* broken) noexcept nogil
cdef void walk_totals(Core core, Totals* totals) noexcept nogil
cdef bint walk_find(Core core, uint64_t address, Block* found) noexcept nogil

# With all locks.
cdef void walk_link_loans(CoreState* state) noexcept nogil
cdef BlockId walk_next(CoreState* state, Place* place) noexcept nogil

"""An arena: the blocks of one stream slot, their free lists and address index, under one lock.

The path of an allocation that hits is `hit_take`, of a free `index_remove` and `hit_put`.  All of it is
inline and O(1): a bitmap look-up and at most one cut; an index look-up and at most two merges.
"""
from libc.stdint cimport uint16_t, uint32_t, uint64_t

from vpool._base.bias cimport SEATS, BiasedLock, Seat
from vpool._base.lock cimport SpinLock, atomic_read
from vpool._base.types cimport Block, BlockId

cdef enum:
    CLASS_BITS = 5
    CLASSES_PER_ROW = 1 << CLASS_BITS
    NEVER_CUT = 0xFFFFFFFFFFFFFFFF  # as the minimum remainder of an arena of solid blocks
    ROWS = 52                     # sizes up to 2**63 - 1 in granules of 2**8
    ANY_STAMP = 0xFFFFFFFFFFFFFFFF

cdef struct Arena

cdef struct Dependency:
    # A stream that a block was recorded for.  In a live block's list `number` means nothing yet; the
    # free stamps it.
    Arena* arena                  # of that stream
    uint64_t number               # work up to this stamp has to be complete, or waited for
    uint32_t next

cdef struct Peaks:
    # The highest sums over a pool's arenas.  Each arena may rise to its ceiling without asking: the
    # ceilings of all together never pass the peak, so that a sum above it is never missed, and an
    # arena looks at the others only near a new peak.  With threads at work each sum is one that was
    # there within the moment of adding it up.  Where threads look at once they share one look, and for
    # a while all ceilings together pass the peak by a `LENIENCE`-th of it: or each block of a stream that
    # is near its ceiling would read the counters of all others, which their threads write all the time.
    SpinLock lock                 # of every field, and of all ceilings; taken last, under an arena's lock
    uint64_t allocated_bytes
    uint64_t requested_bytes
    Arena* first
    uint32_t count
    uint64_t lenient              # looks that leave more than there is, since threads met here
    uint64_t looking              # who has the lock passed a ceiling, and will look at the next
    uint64_t again                # an arena passed its ceiling while such a one looked

cdef struct Arena:
    # Guards every field below and every record of this arena's blocks; `_base/lock.pxd` has the rule.
    # Order: a pool's `CoreState.lock` first, then an arena's; several arenas only under that, by rising slot.
    # Biased towards the thread that uses the stream most.
    BiasedLock lock
    uint16_t slot
    # The capture whose graph may use this memory whenever it is launched, by its id; 0: none.  While it is set
    # nobody else has the memory and it never goes back.  Written without the lock, raised before first use.
    uint64_t captured
    uint64_t solid_size           # bytes of its solid blocks that are found by their place; 0: it has none
    Arena* fixed                  # of the same slot in the pool's fixed core; itself where there is none
    # Records: a slab that never moves, mapped as it is touched.
    BlockId fresh                 # the first record that was never used
    BlockId capacity
    BlockId spare                 # records given back, linked by `next`
    Block* blocks
    # Address index of the live blocks: linear hashing, chained through the records.
    uint32_t* buckets
    uint32_t bucket_count
    uint32_t bucket_mask          # the smallest 2**k - 1 that is not below bucket_count - 1
    uint32_t bucket_capacity
    uint32_t live_blocks
    # Solid blocks of one size stand in the slab in the order of their addresses, so that an address is an
    # index: they are not in the hash table.  All 0 in an arena that has none.
    uint64_t solid_address
    uint64_t solid_bytes          # of all of them together
    uint64_t solid_inverse        # 2**64 / granules of one, rounded up
    uint32_t solid_shift          # its logarithm, 0 where it is no power of two
    BlockId solid_first
    uint32_t solid_count
    uint32_t solid_class
    uint64_t minimum_remainder    # bytes; a smaller rest stays with the block and counts as internal waste
    uint64_t rounding             # bytes, a power of two; sizes of requests are rounded up to it
    # Counters.  Written under the lock, read by `stats` without it.
    uint64_t allocated_bytes      # read it by `arena_allocated`
    uint64_t requested_bytes
    uint64_t allocated_ceiling    # see Peaks
    uint64_t requested_ceiling
    Peaks* peaks
    Arena* next_arena             # of the same pool
    uint64_t served_bytes         # of every block ever lent
    uint64_t allocations
    # The stamp of the next free: the number that the next marker on this slot's stream will have.
    # Raised by `order_mark` before it records the marker, so whatever was freed with a lower stamp is
    # covered by it: the work was queued before the free, the free before the raise.
    uint64_t sequence
    # Whether a block became pending on a free that no marker covers yet.  Set after the stamp was read and
    # cleared before `sequence` is raised, so that none is forgotten.
    uint64_t wanted
    # Pending blocks, oldest first, linked like a free list.  Each waits for what its record names, or for its
    # dependencies in `uses`, or for both.
    BlockId pending_first
    BlockId pending_last
    uint32_t pending_blocks
    uint64_t pending_bytes
    uint32_t* uses                # [block]: first of the dependencies of a live or pending block
    Dependency* dependencies
    uint32_t dependency_fresh
    uint32_t dependency_spare
    uint32_t dependency_capacity
    # Blocks that other arenas have (state LENT), and extents that this one has from others.
    uint32_t lent_blocks
    uint64_t lent_bytes
    BlockId adopted               # edges of the extents, linked by `prev` and `list_prev`
    # Segregated free lists: bit c of columns[r] says that heads[32 r + c] is not empty, bit r of rows
    # that columns[r] is not zero.
    uint64_t rows
    uint32_t columns[<int> ROWS]
    BlockId heads[<int> ROWS * <int> CLASSES_PER_ROW]
    Seat seats[<int> SEATS]       # of the lock


cdef inline uint64_t arena_allocated(Arena* arena) noexcept nogil:
    """Bytes of the arena's live blocks.  Where all blocks are equal their number says it, and nobody counts bytes."""
    if arena.solid_size:
        return atomic_read(arena.live_blocks) * arena.solid_size
    return atomic_read(arena.allocated_bytes)


# In the module, for what is rare.
cdef Arena* arena_new(uint16_t slot, uint64_t minimum_remainder, uint64_t rounding) noexcept nogil
cdef void arena_delete(Arena* arena) noexcept nogil
cdef void arena_grow_index(Arena* arena) noexcept nogil
cdef BlockId arena_take_listed(Arena* arena, BlockId block_id, uint64_t requested) noexcept nogil
cdef void arena_put(Arena* arena, BlockId block_id) noexcept nogil
cdef void arena_raise_peaks(Arena* arena) noexcept nogil
cdef void peaks_look(Peaks* peaks) noexcept nogil
cdef void peaks_begin(Peaks* peaks, uint64_t* allocated, uint64_t* requested) noexcept nogil
cdef BlockId arena_add_segment(Arena* arena, uint64_t address, uint64_t nbytes) noexcept nogil
cdef void arena_index_solid(Arena* arena, BlockId edge_id, uint64_t nbytes, uint64_t count) noexcept nogil
cdef bint arena_cut_solid(Arena* arena, BlockId edge_id, uint64_t nbytes, uint64_t count) noexcept nogil
cdef bint arena_remove_solid(Arena* arena, BlockId edge_id, uint64_t done) noexcept nogil
cdef bint arena_remove_segment(Arena* arena, BlockId edge_id, uint64_t nbytes) noexcept nogil
cdef BlockId arena_find_aligned(Arena* arena, uint64_t nbytes, uint64_t alignment, uint64_t upto,
                                uint32_t looks) noexcept nogil
cdef BlockId arena_take_aligned(Arena* arena, uint64_t nbytes, uint64_t requested, uint64_t alignment,
                                uint16_t tag, uint32_t looks) noexcept nogil
cdef BlockId arena_take_behind(Arena* arena, BlockId block_id, uint64_t padding, uint64_t nbytes, uint64_t requested,
                               uint16_t tag) noexcept nogil
cdef uint64_t arena_free_bytes(Arena* arena) noexcept nogil
cdef BlockId arena_containing(Arena* arena, BlockId edge_id, uint64_t address) noexcept nogil

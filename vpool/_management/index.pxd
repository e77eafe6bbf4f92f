"""Address index of the live blocks: linear hashing.  The arena's lock is held.

The table has two buckets for each live block at its fullest and grows by one bucket at a time, so no
operation ever rehashes the whole.  Chains run through `Block.list_next`, which a live block has free.
"""
from libc.stdint cimport uint32_t, uint64_t

from vpool._base.lock cimport lone_count
from vpool._base.types cimport BLOCK_LIVE, GRANULE_BITS, Block, BlockId, likely, unlikely
from vpool._management.arena cimport Arena, arena_grow_index

cdef extern from *:
    """
    static inline uint64_t vpool_upper_half(uint64_t a, uint64_t b) {
        return (uint64_t) (((unsigned __int128) a * b) >> 64);
    }
    """
    uint64_t upper_half "vpool_upper_half"(uint64_t a, uint64_t b) noexcept nogil


cdef inline uint32_t* index_bucket(Arena* arena, uint64_t address) noexcept nogil:
    # Fibonacci hashing (Knuth, TAOCP 3, 6.4): the upper half of a product with 2**64 / phi.
    cdef uint32_t place = <uint32_t> (((address >> GRANULE_BITS) * <uint64_t> 0x9E3779B97F4A7C15) >> 32)
    place &= arena.bucket_mask
    if place >= arena.bucket_count:
        place &= arena.bucket_mask >> 1
    return &arena.buckets[place]


cdef inline void index_insert(Arena* arena, BlockId block_id, Block* block) noexcept nogil:
    cdef uint32_t* bucket
    if unlikely(<uint64_t> arena.live_blocks * 2 >= arena.bucket_count):
        arena_grow_index(arena)
    bucket = index_bucket(arena, block.address)
    block.list_next = bucket[0]
    bucket[0] = block_id
    lone_count(arena.live_blocks, 1)


cdef inline BlockId index_remove(Arena* arena, uint64_t address) noexcept nogil:
    """Take the live block that starts at `address` out of the index; its number, or 0."""
    cdef uint32_t* link = index_bucket(arena, address)
    cdef BlockId block_id = link[0]
    cdef Block* block
    while block_id:
        block = &arena.blocks[block_id]
        if block.address == address:
            link[0] = block.list_next
            lone_count(arena.live_blocks, -1)
            return block_id
        link = &block.list_next
        block_id = link[0]
    return 0


cdef inline BlockId index_find(Arena* arena, uint64_t address) noexcept nogil:
    """Number of the live block that starts at `address`, or 0."""
    cdef BlockId block_id = index_bucket(arena, address)[0]
    while block_id and arena.blocks[block_id].address != address:
        block_id = arena.blocks[block_id].list_next
    return block_id


cdef inline bint is_solid(Arena* arena, uint64_t address) noexcept nogil:
    """Whether an address lies where blocks are found by their place."""
    return address - arena.solid_address < arena.solid_bytes


cdef inline BlockId solid_find(Arena* arena, uint64_t address) noexcept nogil:
    """Number of the live solid block that starts at `address`, which lies among them, or 0."""
    cdef uint64_t offset = address - arena.solid_address
    # A shift where it can be one: the number is what everything behind waits for.
    cdef BlockId block_id = arena.solid_first + <BlockId> (
        offset >> arena.solid_shift if likely(arena.solid_shift != 0)
        else upper_half(offset >> GRANULE_BITS, arena.solid_inverse))
    cdef Block* block = &arena.blocks[block_id]
    return block_id if block.address == address and block.state == BLOCK_LIVE else 0


# Of live blocks of either kind.

cdef inline void live_insert(Arena* arena, BlockId block_id, Block* block) noexcept nogil:
    # By number: memory that was lent and came back as a loan has an address among them, but another record.
    if unlikely(arena.solid_size != 0 and block_id - arena.solid_first < arena.solid_count):
        lone_count(arena.live_blocks, 1)
    else:
        index_insert(arena, block_id, block)


cdef inline BlockId live_find(Arena* arena, uint64_t address) noexcept nogil:
    """Number of the live block that starts at `address`, or 0."""
    cdef BlockId block_id = solid_find(arena, address) if is_solid(arena, address) else 0
    return block_id if block_id else index_find(arena, address)


cdef inline BlockId live_remove(Arena* arena, uint64_t address) noexcept nogil:
    """Take the live block that starts at `address` out of what finds it; its number, or 0."""
    cdef BlockId block_id
    block_id = solid_find(arena, address) if is_solid(arena, address) else 0
    if block_id == 0:
        return index_remove(arena, address)
    lone_count(arena.live_blocks, -1)
    return block_id

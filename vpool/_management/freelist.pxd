"""Segregated free lists with two levels of bitmaps (TLSF).  The arena's lock is held.

Sizes below 64 granules have a class each; above, every doubling is cut into 32 classes.  A class
holds blocks that differ by at most 1/32 in size, so a search that moves to a larger class may pass
over a block of the request's own class that fits: `freelist_find` looks at the head of that class
first, and `arena_find_aligned` at all of it before the pool grows.
"""
from libc.stdint cimport uint32_t, uint64_t

from vpool._base.types cimport (
    GRANULE_BITS,
    Block,
    BlockId,
    count_leading_zeros,
    count_trailing_zeros,
    unlikely,
)
from vpool._management.arena cimport CLASS_BITS, CLASSES_PER_ROW, Arena


cdef inline uint32_t class_of(uint64_t nbytes) noexcept nogil:
    """Number of the class of a size, a multiple of the granule."""
    cdef uint64_t granules = nbytes >> GRANULE_BITS
    cdef int top
    if granules < CLASSES_PER_ROW:
        return <uint32_t> granules
    top = 63 - count_leading_zeros(granules)
    return <uint32_t> (((top - CLASS_BITS + 1) << CLASS_BITS)
                       | ((granules >> (top - CLASS_BITS)) & (CLASSES_PER_ROW - 1)))


cdef inline void freelist_insert(Arena* arena, BlockId block_id, Block* block) noexcept nogil:
    cdef uint32_t number = class_of(block.nbytes)
    cdef BlockId head = arena.heads[number]
    block.list_prev = 0
    block.list_next = head
    arena.blocks[head].list_prev = block_id       # harmless where head is 0, the sentinel
    arena.heads[number] = block_id
    arena.columns[number >> CLASS_BITS] |= <uint32_t> 1 << (number & (CLASSES_PER_ROW - 1))
    arena.rows |= <uint64_t> 1 << (number >> CLASS_BITS)


cdef inline void freelist_remove(Arena* arena, Block* block) noexcept nogil:
    cdef BlockId prev = block.list_prev
    cdef BlockId next = block.list_next
    cdef uint32_t number, row
    arena.blocks[next].list_prev = prev
    if prev:
        arena.blocks[prev].list_next = next
        return
    number = class_of(block.nbytes)
    arena.heads[number] = next
    if next == 0:
        row = number >> CLASS_BITS
        arena.columns[row] &= ~(<uint32_t> 1 << (number & (CLASSES_PER_ROW - 1)))
        if arena.columns[row] == 0:
            arena.rows &= ~(<uint64_t> 1 << row)


cdef inline void freelist_take_out(Arena* arena, BlockId block_id) noexcept nogil:
    """Remove any block of a list.  O(blocks of its class) where lists are linked forwards only."""
    cdef Block* block = &arena.blocks[block_id]
    cdef BlockId before = 0
    cdef BlockId at
    if unlikely(arena.solid_size != 0):
        at = arena.heads[class_of(block.nbytes)]
        while at != block_id:
            before = at
            at = arena.blocks[at].list_next
        block.list_prev = before
    freelist_remove(arena, block)


cdef inline void freelist_resize(Arena* arena, BlockId block_id, Block* block, uint64_t nbytes) noexcept nogil:
    """Change the size of a listed block; it changes lists only where it changes class."""
    if class_of(block.nbytes) == class_of(nbytes):
        block.nbytes = nbytes
        return
    freelist_remove(arena, block)
    block.nbytes = nbytes
    freelist_insert(arena, block_id, block)


cdef inline BlockId freelist_find(Arena* arena, uint64_t nbytes) noexcept nogil:
    """A free block of at least `nbytes`, or 0.  O(1)."""
    cdef uint32_t number = class_of(nbytes)
    cdef uint32_t row = number >> CLASS_BITS
    cdef BlockId block_id = arena.heads[number]
    cdef uint64_t above
    if block_id and arena.blocks[block_id].nbytes >= nbytes:
        return block_id
    above = arena.columns[row] & (<uint64_t> 0xFFFFFFFE << (number & (CLASSES_PER_ROW - 1)))
    if above == 0:
        above = arena.rows & (<uint64_t> 0xFFFFFFFFFFFFFFFE << row)
        if above == 0:
            return 0
        row = count_trailing_zeros(above)
        above = arena.columns[row]
    return arena.heads[(row << CLASS_BITS) | <uint32_t> count_trailing_zeros(above)]

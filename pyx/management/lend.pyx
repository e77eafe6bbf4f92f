"""Extents: memory that one arena lends another, so that free memory of one stream serves the others.

In the owner's arena a loan is one block, state LENT, in no list.  In the borrower's it is an extent: an
edge and the blocks behind it, which are cut, merged and even lent on as those of a segment.  When an
extent is one free block again it can go home and merge there.  One that is lent on whole leaves its borrower
for the next: a loan inside a loan is smaller than that, or memory that goes to and fro would nest without end.

No two arenas are ever locked together for this: between the two locks a loan is with neither, and only
the thread that carries it knows of it.
"""
from libc.stdint cimport int64_t, uint16_t, uint64_t

from vpool._base.bias cimport bias_drop, bias_take
from vpool._base.lock cimport lone_count
from vpool._base.types cimport BLOCK_EDGE, BLOCK_FREE, BLOCK_LENT, FLAG_SOLID, Block, BlockId
from vpool._management.arena cimport Arena, arena_add_segment
from vpool._management.freelist cimport freelist_take_out
from vpool._management.hit cimport hit_cut
from vpool._management.record cimport record_delete, record_new


cdef void _mark_lent(Arena* owner, BlockId block_id, uint16_t borrower, Extent* extent) noexcept nogil:
    cdef Block* block = &owner.blocks[block_id]
    block.state = BLOCK_LENT
    block.slot = borrower
    block.list_next = 0
    owner.lent_blocks += 1
    owner.lent_bytes += block.nbytes
    extent.owner = owner
    extent.lent = block_id
    extent.address = block.address
    extent.nbytes = block.nbytes


cdef inline bint _is_extent(Arena* arena, Block* block) noexcept nogil:
    """Whether a block is all of an extent."""
    cdef Block* edge = &arena.blocks[block.prev]
    return block.next == 0 and edge.state == BLOCK_EDGE and edge.stamp != 0


cdef void _part_with(Arena* borrower, BlockId edge_id, Extent* extent) noexcept nogil:
    """Take an extent out of the arena whose only block is in no list, and what finds it no more."""
    cdef Block* edge = &borrower.blocks[edge_id]
    cdef BlockId next_id = edge.list_prev
    extent.owner = <Arena*> edge.stamp
    extent.lent = edge.list_next
    extent.address = borrower.blocks[edge.next].address
    extent.nbytes = borrower.blocks[edge.next].nbytes
    if edge.prev:
        borrower.blocks[edge.prev].list_prev = next_id
    else:
        borrower.adopted = next_id
    if next_id:
        borrower.blocks[next_id].prev = edge.prev
    record_delete(borrower, edge.next)
    record_delete(borrower, edge_id)


cdef void lend_out(Arena* owner, BlockId block_id, uint64_t nbytes, uint16_t borrower, Extent* extent) noexcept nogil:
    """Take the first `nbytes` of a listed free block out of the arena, or all of it."""
    cdef Block* block = &owner.blocks[block_id]
    cdef BlockId front_id = 0
    extent.freer = owner
    extent.stamp = block.stamp
    if block.nbytes <= nbytes and _is_extent(owner, block):
        lend_unadopt(owner, block.prev, extent)
        return
    if block.nbytes > nbytes:
        front_id = hit_cut(owner, block_id, nbytes)
    if front_id:
        block_id = front_id
    else:
        freelist_take_out(owner, block_id)
    _mark_lent(owner, block_id, borrower, extent)


cdef BlockId lend_adopt(Arena* borrower, Extent* extent) noexcept nogil:
    """Put an extent into the arena as one free block; its edge, or 0 where no record is left."""
    cdef BlockId edge_id = arena_add_segment(borrower, extent.address, extent.nbytes)
    cdef Block* edge = &borrower.blocks[edge_id]
    if edge_id == 0:
        return 0
    borrower.blocks[edge.next].stamp = extent.stamp
    borrower.blocks[edge.next].flags = extent.owner.blocks[extent.lent].flags & FLAG_SOLID
    edge.stamp = <uint64_t> extent.owner
    edge.list_next = extent.lent
    edge.prev = 0
    edge.list_prev = borrower.adopted
    if borrower.adopted:
        borrower.blocks[borrower.adopted].prev = edge_id
    borrower.adopted = edge_id
    return edge_id


cdef void lend_live(Arena* owner, BlockId block_id, uint16_t borrower, Extent* extent) noexcept nogil:
    """Take a live block, just out of the index, out of the arena: it is freed on the borrower's stream."""
    cdef Block* block = &owner.blocks[block_id]
    lone_count(owner.allocated_bytes, -<int64_t> block.nbytes)
    lone_count(owner.requested_bytes, -<int64_t> block.stamp)
    extent.freer = owner
    if _is_extent(owner, block):
        _part_with(owner, block.prev, extent)
        return
    block.generation += 1
    _mark_lent(owner, block_id, borrower, extent)


cdef void lend_on(Extent* extent, uint16_t borrower) noexcept nogil:
    """Have a loan's owner know who gets it, if that was not known when it was lent.  No lock is held."""
    if extent.owner != extent.freer:
        bias_take(&extent.owner.lock)
        extent.owner.blocks[extent.lent].slot = borrower
        # A number that a walk has left is of the last borrower's records: this one may not have as many.
        extent.owner.blocks[extent.lent].list_next = 0
        bias_drop(&extent.owner.lock)


cdef void lend_unadopt(Arena* borrower, BlockId edge_id, Extent* extent) noexcept nogil:
    """Take an extent that is one listed free block out of the arena again."""
    freelist_take_out(borrower, borrower.blocks[edge_id].next)
    _part_with(borrower, edge_id, extent)


cdef int lend_return(Arena* borrower, Extent* extents, int most) noexcept nogil:
    """Take extents that are one free block out of the arena; how many."""
    cdef int count = 0
    cdef BlockId edge_id = borrower.adopted
    cdef BlockId next_id
    cdef Block* edge
    cdef Block* block
    cdef Extent* extent
    while edge_id and count < most:
        edge = &borrower.blocks[edge_id]
        block = &borrower.blocks[edge.next]
        next_id = edge.list_prev
        if block.state == BLOCK_FREE and block.next == 0:
            extent = &extents[count]
            extent.stamp = block.stamp
            extent.freer = borrower
            lend_unadopt(borrower, edge_id, extent)
            count += 1
        edge_id = next_id
    return count


cdef bint _cut_loan(Arena* owner, BlockId loan_id, uint64_t nbytes) noexcept nogil:
    """Cut a lent block behind its first `nbytes`, into two; False where no record is left."""
    cdef BlockId rest_id = record_new(owner)
    cdef Block* loan = &owner.blocks[loan_id]
    cdef Block* rest = &owner.blocks[rest_id]
    if rest_id == 0:
        return False
    rest.address = loan.address + nbytes
    rest.nbytes = loan.nbytes - nbytes
    rest.stamp = 0
    rest.slot = loan.slot
    rest.flags = 0
    rest.state = BLOCK_LENT
    rest.list_next = 0
    rest.prev = loan_id
    rest.next = loan.next
    owner.blocks[loan.next].prev = rest_id
    loan.next = rest_id
    loan.nbytes = nbytes
    owner.lent_blocks += 1
    return True


cdef bint _cut_extent(Arena* borrower, BlockId edge_id, BlockId block_id) noexcept nogil:
    """Cut an extent in front of one of its blocks, into two; False where no record is left.

    The owner's lent block is cut with it, so both locks are held.
    """
    cdef Block* edge = &borrower.blocks[edge_id]
    cdef Block* block = &borrower.blocks[block_id]
    cdef Arena* owner = <Arena*> edge.stamp
    cdef BlockId rest_id
    cdef Block* rest
    if block.prev == edge_id:
        return True
    rest_id = record_new(borrower)
    if rest_id == 0:
        return False
    if not _cut_loan(owner, edge.list_next, block.address - edge.address):
        record_delete(borrower, rest_id)
        return False
    rest = &borrower.blocks[rest_id]
    rest.address = block.address
    rest.nbytes = 0
    rest.flags = 0
    rest.state = BLOCK_EDGE
    rest.stamp = edge.stamp
    rest.list_next = owner.blocks[edge.list_next].next
    rest.next = block_id
    borrower.blocks[block.prev].next = 0
    block.prev = rest_id
    # Into the list behind its first half, where a walk over the extents comes to it next.
    rest.prev = edge_id
    rest.list_prev = edge.list_prev
    if edge.list_prev:
        borrower.blocks[edge.list_prev].prev = rest_id
    edge.list_prev = rest_id
    return True


cdef bint lend_isolate(Arena* borrower, BlockId edge_id, BlockId block_id) noexcept nogil:
    """Make a block of an extent an extent of its own; False where no record is left.  All locks are held."""
    cdef Block* block = &borrower.blocks[block_id]
    if block.next and not _cut_extent(borrower, edge_id, block.next):
        return False
    return _cut_extent(borrower, edge_id, block_id)


cdef void lend_home(Extent* extent) noexcept nogil:
    """Take a loan back into the owner's arena, as an unlisted block that the caller frees or makes pending."""
    cdef Arena* owner = extent.owner
    owner.lent_blocks -= 1
    owner.lent_bytes -= extent.nbytes
    owner.blocks[extent.lent].list_next = 0
    owner.blocks[extent.lent].slot = owner.slot


cdef BlockId lend_edge(Arena* owner, BlockId lent, Arena* borrower) noexcept nogil:
    """The edge of a lent block's extent, or 0 while the loan is on its way.  Both locks are held.

    Walks ask, and set `list_next` of every lent block first; one that is on its way keeps an old value.
    """
    cdef BlockId edge_id = owner.blocks[lent].list_next
    cdef Block* edge = &borrower.blocks[edge_id]
    if edge_id == 0 or edge.state != BLOCK_EDGE or edge.list_next != lent or edge.stamp != <uint64_t> owner:
        return 0
    return edge_id

"""Pending blocks: freed, but a stream they were recorded for may still use them.

The stream that a block was freed on, or that had it last, is remembered in the block's own record, so that
no free can fail; those that it was recorded for before have records of their own in `uses`.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from vpool._base.lock cimport atomic_exchange, atomic_read, lone_count
from vpool._base.types cimport BLOCK_PENDING, FLAG_SOLID, FLAG_USED, Block, BlockId
from vpool._management.arena cimport Arena, Dependency
from vpool._management.merge cimport free_block
from vpool._management.order cimport order_proved
from vpool._management.state cimport CoreState


cdef bint pending_use(Arena* arena, BlockId block_id, Arena* user) noexcept nogil:
    """Record that a live block is used on a stream too; False where no record is left for it."""
    cdef uint32_t number = arena.uses[block_id]
    cdef Dependency* dependency
    while number:
        if arena.dependencies[number].arena == user:
            return True
        number = arena.dependencies[number].next
    number = arena.dependency_spare
    if number:
        arena.dependency_spare = arena.dependencies[number].next
    elif arena.dependency_fresh < arena.dependency_capacity:
        number = arena.dependency_fresh
        arena.dependency_fresh += 1
    else:
        return False
    dependency = &arena.dependencies[number]
    dependency.arena = user
    dependency.number = 0
    dependency.next = arena.uses[block_id]
    arena.uses[block_id] = number
    arena.blocks[block_id].flags |= FLAG_USED
    return True


cdef void _append(Arena* arena, BlockId block_id) noexcept nogil:
    cdef Block* block = &arena.blocks[block_id]
    block.list_prev = arena.pending_last
    block.list_next = 0
    if arena.pending_last:
        arena.blocks[arena.pending_last].list_next = block_id
    else:
        arena.pending_first = block_id
    arena.pending_last = block_id


cdef void _unlink(Arena* arena, BlockId block_id) noexcept nogil:
    cdef Block* block = &arena.blocks[block_id]
    if block.list_prev:
        arena.blocks[block.list_prev].list_next = block.list_next
    else:
        arena.pending_first = block.list_next
    if block.list_next:
        arena.blocks[block.list_next].list_prev = block.list_prev
    else:
        arena.pending_last = block.list_prev


cdef void pending_put(Arena* arena, BlockId block_id) noexcept nogil:
    """Make a block pending that is freed now, after whatever its recorded streams have queued."""
    cdef Block* block = &arena.blocks[block_id]
    cdef uint32_t number = arena.uses[block_id]
    while number:
        arena.dependencies[number].number = atomic_read(arena.dependencies[number].arena.sequence)
        atomic_exchange(arena.dependencies[number].arena.wanted, 1)
        number = arena.dependencies[number].next
    block.state = BLOCK_PENDING
    block.flags &= FLAG_SOLID
    block.stamp = 0
    block.slot = arena.slot
    block.generation += 1
    lone_count(arena.pending_blocks, 1)
    lone_count(arena.pending_bytes, block.nbytes)
    _append(arena, block_id)


cdef void pending_on(Arena* arena, BlockId block_id, Arena* freer, uint64_t number) noexcept nogil:
    """Make a block that was just put wait for what another slot freed with a stamp, too."""
    cdef Block* block = &arena.blocks[block_id]
    if number >= atomic_read(freer.sequence):
        atomic_exchange(freer.wanted, 1)
    block.slot = freer.slot
    block.stamp = number


cdef bint pending_release(CoreState* state, Arena* arena, BlockId block_id) noexcept nogil:
    """Drop what is proved of a pending block's dependencies; free the block if none is left."""
    cdef Block* block = &arena.blocks[block_id]
    cdef uint32_t* link = &arena.uses[block_id]
    cdef uint32_t number
    cdef Dependency* dependency
    if block.stamp and order_proved(state, arena.slot, block.slot, block.stamp):
        block.stamp = 0
    while link[0]:
        number = link[0]
        dependency = &arena.dependencies[number]
        if order_proved(state, arena.slot, dependency.arena.slot, dependency.number):
            link[0] = dependency.next
            dependency.next = arena.dependency_spare
            arena.dependency_spare = number
        else:
            link = &dependency.next
    if block.stamp or arena.uses[block_id]:
        return False
    block.slot = arena.slot
    _unlink(arena, block_id)
    lone_count(arena.pending_blocks, -1)
    lone_count(arena.pending_bytes, -<int64_t> block.nbytes)
    free_block(arena, block_id)
    return True


cdef void pending_rotate(Arena* arena) noexcept nogil:
    """Move the first pending block behind the last, so that it blocks no other."""
    cdef BlockId block_id = arena.pending_first
    _unlink(arena, block_id)
    _append(arena, block_id)


cdef void pending_forget(Arena* arena, BlockId block_id) noexcept nogil:
    """Forget what a live block was recorded for."""
    cdef uint32_t number
    while arena.uses[block_id]:
        number = arena.uses[block_id]
        arena.uses[block_id] = arena.dependencies[number].next
        arena.dependencies[number].next = arena.dependency_spare
        arena.dependency_spare = number
    arena.blocks[block_id].flags &= FLAG_SOLID

"""What an arena does rarely: it is made, its index grows, segments come and go, alignment is found."""
from libc.stdint cimport uint16_t, uint32_t, uint64_t

from vpool._base.bias cimport bias_drop, bias_init, bias_take
from vpool._base.lock cimport atomic_add, atomic_exchange, atomic_read, atomic_write, spin_lock, spin_try, spin_unlock
from vpool._base.memory cimport lazy_release, lazy_reserve
from vpool._base.types cimport (
    BLOCK_EDGE,
    BLOCK_FREE,
    FLAG_SOLID,
    GRANULE,
    Block,
    BlockId,
    count_trailing_zeros,
    round_up,
)
from vpool._management.arena cimport (
    ANY_STAMP,
    CLASS_BITS,
    CLASSES_PER_ROW,
    NEVER_CUT,
    ROWS,
    Arena,
    Dependency,
    Peaks,
    arena_allocated,
)
from vpool._management.freelist cimport class_of, freelist_find, freelist_insert, freelist_remove, freelist_take_out
from vpool._management.hit cimport hit_cut, hit_put, hit_take_from
from vpool._management.index cimport index_bucket
from vpool._management.record cimport record_delete, record_new

cdef enum:
    MOST_RECORDS = 1 << 28        # 12 GiB of address space, touched as it is used
    LEAST_RECORDS = 1 << 12
    FIRST_BUCKETS = 1 << 10
    MOST_DEPENDENCIES = 1 << 24
    LENIENCE = 64                 # see Peaks
    MEMORY = 64                   # looks after which threads that met are forgotten
    MOST_LOOKS = 4                # one after another of one thread
    LITTLE = 1 << 20              # bytes that each thread may be beyond its ceiling without a look, where threads meet


cdef Arena* arena_new(uint16_t slot, uint64_t minimum_remainder, uint64_t rounding) noexcept nogil:
    """An empty arena, or NULL where there is no address space for its records."""
    cdef Arena* arena = <Arena*> lazy_reserve(sizeof(Arena))
    cdef uint64_t records = MOST_RECORDS
    if arena == NULL:
        return NULL
    bias_init(&arena.lock, arena.seats)
    arena.slot = slot
    arena.fixed = arena
    arena.minimum_remainder = minimum_remainder
    arena.rounding = rounding
    # Where address space is limited (ulimit -v, strict overcommit) fewer records have to do.
    while records >= LEAST_RECORDS:
        arena.blocks = <Block*> lazy_reserve(records * sizeof(Block))
        if arena.blocks != NULL:
            arena.buckets = <uint32_t*> lazy_reserve(2 * records * sizeof(uint32_t))
            if arena.buckets != NULL:
                break
            lazy_release(arena.blocks, records * sizeof(Block))
            arena.blocks = NULL
        records >>= 1
    if records >= LEAST_RECORDS:
        arena.uses = <uint32_t*> lazy_reserve(records * sizeof(uint32_t))
        arena.dependencies = <Dependency*> lazy_reserve(MOST_DEPENDENCIES * sizeof(Dependency))
    if arena.uses == NULL or arena.dependencies == NULL:
        arena.capacity = <BlockId> records
        arena_delete(arena)
        return NULL
    arena.sequence = 1            # memory fresh from the source has stamp 0, which is always complete
    arena.dependency_fresh = 1    # 0 ends a list
    arena.dependency_capacity = MOST_DEPENDENCIES
    arena.capacity = <BlockId> records
    arena.fresh = 1               # 0 is the sentinel
    arena.bucket_capacity = <uint32_t> (2 * records)
    arena.bucket_count = FIRST_BUCKETS
    arena.bucket_mask = FIRST_BUCKETS - 1
    return arena


cdef void _release(void* base, uint64_t nbytes) noexcept nogil:
    if base != NULL:
        lazy_release(base, nbytes)


cdef void arena_delete(Arena* arena) noexcept nogil:
    _release(arena.blocks, arena.capacity * sizeof(Block))
    _release(arena.buckets, 2 * <uint64_t> arena.capacity * sizeof(uint32_t))
    _release(arena.uses, arena.capacity * sizeof(uint32_t))
    _release(arena.dependencies, MOST_DEPENDENCIES * sizeof(Dependency))
    lazy_release(arena, sizeof(Arena))


cdef void _share_out(Peaks* peaks) noexcept nogil:
    """Set every arena's ceilings anew, from what the peaks leave above the present sums."""
    cdef Arena* arena = peaks.first
    cdef uint64_t allocated = 0
    cdef uint64_t requested = 0
    while arena != NULL:
        allocated += arena_allocated(arena)
        requested += atomic_read(arena.requested_bytes)
        arena = arena.next_arena
    if allocated > peaks.allocated_bytes:
        atomic_write(peaks.allocated_bytes, allocated)
    if requested > peaks.requested_bytes:
        atomic_write(peaks.requested_bytes, requested)
    allocated = (peaks.allocated_bytes - allocated) // peaks.count
    requested = (peaks.requested_bytes - requested) // peaks.count
    if atomic_read(peaks.lenient) > 1:            # at 1 the ceilings are what they should be again
        allocated += peaks.allocated_bytes // (LENIENCE * peaks.count)
        requested += peaks.requested_bytes // (LENIENCE * peaks.count)
    if atomic_read(peaks.lenient):
        atomic_write(peaks.lenient, atomic_read(peaks.lenient) - 1)
    arena = peaks.first
    while arena != NULL:
        atomic_write(arena.allocated_ceiling, arena_allocated(arena) + allocated)
        atomic_write(arena.requested_ceiling, atomic_read(arena.requested_bytes) + requested)
        arena = arena.next_arena


cdef inline uint64_t _beyond(Arena* arena) noexcept nogil:
    """Bytes by which the arena has passed a ceiling."""
    cdef uint64_t allocated = arena_allocated(arena)
    cdef uint64_t ceiling = atomic_read(arena.allocated_ceiling)
    return allocated - ceiling if allocated > ceiling else 0


cdef void arena_raise_peaks(Arena* arena) noexcept nogil:
    """The arena has passed a ceiling: see whether the pool has passed its peak.

    Where another thread has passed one too and looks just now, it does so once more, and this one goes on: what it has
    beyond the ceiling may be missed, if that is gone by then.  It waits for its turn where that would be much.
    """
    cdef Peaks* peaks = arena.peaks
    cdef int _i
    if not spin_try(&peaks.lock):
        if atomic_read(peaks.looking) == 0 or _beyond(arena) > max(
                atomic_read(peaks.allocated_bytes) // LENIENCE, <uint64_t> LITTLE):
            spin_lock(&peaks.lock)
        else:
            atomic_write(peaks.lenient, MEMORY)
            atomic_exchange(peaks.again, 1)
            if not spin_try(&peaks.lock):
                return
    for _i in range(MOST_LOOKS):
        atomic_write(peaks.looking, 1)
        if atomic_read(peaks.again):
            atomic_exchange(peaks.again, 0)
        _share_out(peaks)
        atomic_write(peaks.looking, 0)
        spin_unlock(&peaks.lock)
        # Added to, not read: a note is seen here, or whoever leaves it finds the lock free.
        if atomic_add(peaks.again, 0) == 0 or not spin_try(&peaks.lock):
            return
    spin_unlock(&peaks.lock)


cdef void peaks_look(Peaks* peaks) noexcept nogil:
    """Look whether the pool has passed its peak, if an arena may have without a look.  Waits for no lock."""
    if (atomic_read(peaks.lenient) or atomic_read(peaks.again)) and spin_try(&peaks.lock):
        atomic_exchange(peaks.again, 0)
        _share_out(peaks)
        spin_unlock(&peaks.lock)


cdef void peaks_begin(Peaks* peaks, uint64_t* allocated, uint64_t* requested) noexcept nogil:
    """Begin anew with what is given, or with what is there now if that is more; gives what was there before."""
    cdef uint64_t allocated_before, requested_before
    spin_lock(&peaks.lock)
    atomic_write(peaks.lenient, 0)
    _share_out(peaks)                             # what was noted, and not looked for yet, was before
    allocated_before = peaks.allocated_bytes
    requested_before = peaks.requested_bytes
    atomic_write(peaks.allocated_bytes, allocated[0])
    atomic_write(peaks.requested_bytes, requested[0])
    _share_out(peaks)
    spin_unlock(&peaks.lock)
    allocated[0] = allocated_before
    requested[0] = requested_before


cdef void _split_bucket(Arena* arena) noexcept nogil:
    """Add one bucket, and move into it what belongs there from the one it splits off."""
    cdef uint32_t added = arena.bucket_count
    cdef uint32_t* link
    cdef BlockId block_id
    cdef Block* block
    if added > arena.bucket_mask:
        arena.bucket_mask = arena.bucket_mask * 2 + 1
    arena.bucket_count += 1
    link = &arena.buckets[added & (arena.bucket_mask >> 1)]
    while link[0]:
        block_id = link[0]
        block = &arena.blocks[block_id]
        if index_bucket(arena, block.address) == &arena.buckets[added]:
            link[0] = block.list_next
            block.list_next = arena.buckets[added]
            arena.buckets[added] = block_id
        else:
            link = &block.list_next


cdef void arena_grow_index(Arena* arena) noexcept nogil:
    """Add the two buckets that one more live block asks for.  Past the capacity chains grow instead."""
    cdef int _i
    for _i in range(2):
        if arena.bucket_count < arena.bucket_capacity:
            _split_bucket(arena)


cdef BlockId arena_add_segment(Arena* arena, uint64_t address, uint64_t nbytes) noexcept nogil:
    """Put new memory into the lists as one free block behind an edge; the edge's number.

    0 where no record is left.  The edge stays while the segment does, whatever is cut and merged
    behind it, and keeps blocks from merging across segments that happen to touch.
    """
    cdef BlockId edge_id = record_new(arena)
    cdef BlockId block_id = record_new(arena) if edge_id else 0
    cdef Block* edge = &arena.blocks[edge_id]
    cdef Block* block = &arena.blocks[block_id]
    if block_id == 0:
        if edge_id:
            record_delete(arena, edge_id)
        return 0
    edge.address = address
    edge.nbytes = 0
    edge.stamp = 0
    edge.list_next = 0
    edge.state = BLOCK_EDGE
    edge.prev = 0
    edge.next = block_id
    block.address = address
    block.nbytes = nbytes
    block.stamp = 0
    block.prev = edge_id
    block.next = 0
    block.slot = arena.slot
    block.flags = 0
    block.state = BLOCK_FREE
    freelist_insert(arena, block_id, block)
    return edge_id


cdef bint arena_cut_solid(Arena* arena, BlockId edge_id, uint64_t nbytes, uint64_t count) noexcept nogil:
    """Cut `count` solid blocks off the front of what is left of a new segment; False where no record is left.

    What is left is the segment's last block, the only one that is not solid.  The numbers of the blocks
    rise with their addresses, and the lists give them out in that order.
    """
    cdef BlockId block_id = arena.blocks[edge_id].prev    # the segment's last block, kept here between two calls
    cdef BlockId next_id
    cdef Block* block
    cdef Block* next
    cdef uint64_t rest
    cdef uint64_t i, _i
    if block_id == 0:
        block_id = arena.blocks[edge_id].next
    block = &arena.blocks[block_id]
    freelist_remove(arena, block)
    rest = block.nbytes - count * nbytes
    block.nbytes = nbytes
    for i in range(1, count + (rest != 0)):
        next_id = record_new(arena)
        if next_id == 0:
            return False
        next = &arena.blocks[next_id]
        next.address = block.address + nbytes
        next.nbytes = nbytes if i < count else rest
        next.stamp = 0
        next.slot = arena.slot
        next.flags = 0
        next.state = BLOCK_FREE
        next.prev = block_id
        next.next = 0
        block.next = next_id
        block = next
        block_id = next_id
    arena.blocks[edge_id].prev = block_id if rest else 0
    if rest:
        freelist_insert(arena, block_id, block)
        block_id = block.prev
    # Listed from behind: a list gives out first what came last.
    for _i in range(count):
        arena.blocks[block_id].flags = FLAG_SOLID
        freelist_insert(arena, block_id, &arena.blocks[block_id])
        block_id = arena.blocks[block_id].prev
    return True


cdef void arena_index_solid(Arena* arena, BlockId edge_id, uint64_t nbytes, uint64_t count) noexcept nogil:
    """Find the solid blocks of a segment by their place from now on; there are none of another size."""
    cdef BlockId first = arena.blocks[edge_id].next
    cdef uint64_t granules = nbytes // GRANULE
    # Exact while the segment's granules times this stay below 2**64 (Granlund and Montgomery, "Division by
    # invariant integers using multiplication", 1994): for one of 1 TiB, blocks of up to 1 TiB.
    if granules > 1 and count * granules < (<uint64_t> 1 << 32):
        arena.solid_inverse = (<uint64_t> 0 - 1) // granules + 1
        arena.solid_address = arena.blocks[first].address
        arena.solid_bytes = count * nbytes
        arena.solid_size = nbytes
        arena.solid_first = first
        arena.solid_shift = count_trailing_zeros(nbytes) if nbytes & (nbytes - 1) == 0 else 0
        arena.solid_count = <uint32_t> count
        arena.solid_class = class_of(nbytes)


cdef bint arena_remove_solid(Arena* arena, BlockId edge_id, uint64_t done) noexcept nogil:
    """Forget a segment of solid blocks if all are free, and freed with a stamp up to `done`.  O(blocks)."""
    cdef BlockId block_id = arena.blocks[edge_id].next
    cdef BlockId next_id
    while block_id:
        if arena.blocks[block_id].state != BLOCK_FREE or arena.blocks[block_id].stamp > done:
            return False
        block_id = arena.blocks[block_id].next
    block_id = arena.blocks[edge_id].next
    if arena.solid_size:
        # They are all that the list has.
        arena.heads[arena.solid_class] = block_id
        arena.blocks[block_id].list_prev = 0
        arena.blocks[block_id].list_next = 0
        freelist_remove(arena, &arena.blocks[block_id])
    while block_id:
        next_id = arena.blocks[block_id].next
        if arena.solid_size == 0:
            freelist_remove(arena, &arena.blocks[block_id])
        record_delete(arena, block_id)
        block_id = next_id
    record_delete(arena, edge_id)
    arena.solid_bytes = 0
    return True


cdef bint arena_remove_segment(Arena* arena, BlockId edge_id, uint64_t nbytes) noexcept nogil:
    """Forget a segment of `nbytes` if it is one free block."""
    cdef BlockId block_id = arena.blocks[edge_id].next
    cdef Block* block = &arena.blocks[block_id]
    if block.state != BLOCK_FREE or block.nbytes != nbytes:
        return False
    freelist_take_out(arena, block_id)
    record_delete(arena, block_id)
    record_delete(arena, edge_id)
    return True


cdef inline bint _fits(Block* block, uint64_t nbytes, uint64_t alignment) noexcept nogil:
    cdef uint64_t padding = round_up(block.address, alignment) - block.address
    return padding + nbytes <= block.nbytes and (padding == 0 or block.flags & FLAG_SOLID == 0)


cdef BlockId arena_find_aligned(Arena* arena, uint64_t nbytes, uint64_t alignment, uint64_t upto,
                                uint32_t looks) noexcept nogil:
    """Look through every class that can hold a fitting block, for what `freelist_find` passes over.

    Only a block that was freed with a stamp up to `upto` will do.  So many blocks are looked at; 0: every one.
    """
    cdef uint32_t number = class_of(nbytes)
    # Beyond these the first block of any class fits; solid ones cannot be cut to an address, so each is looked at.
    cdef uint32_t last = class_of(nbytes + alignment - GRANULE)
    cdef BlockId block_id
    if arena.minimum_remainder == NEVER_CUT or upto != ANY_STAMP:
        last = <uint32_t> (ROWS * CLASSES_PER_ROW) - 1
    while number <= last:
        if arena.columns[number >> CLASS_BITS] == 0:
            number = ((number >> CLASS_BITS) + 1) << CLASS_BITS
            continue
        block_id = arena.heads[number]
        while block_id:
            if arena.blocks[block_id].stamp <= upto and _fits(&arena.blocks[block_id], nbytes, alignment):
                return block_id
            looks -= 1
            if looks == 0:
                return 0
            block_id = arena.blocks[block_id].list_next
        number += 1
    return 0


cdef BlockId arena_take_aligned(Arena* arena, uint64_t nbytes, uint64_t requested, uint64_t alignment,
                                uint16_t tag, uint32_t looks) noexcept nogil:
    """Lend a block at a multiple of `alignment`, looking harder than `hit_take`; its number, or 0.

    The padding in front stays in the free list.
    """
    cdef BlockId block_id = freelist_find(arena, nbytes + alignment - GRANULE)
    cdef BlockId front_id
    cdef uint64_t padding
    if block_id == 0 or alignment > GRANULE:
        # With an alignment the smallest block that fits beats the first that surely does.
        front_id = arena_find_aligned(arena, nbytes, alignment, ANY_STAMP, looks)
        block_id = front_id if front_id else block_id
    if block_id == 0:
        return 0
    padding = round_up(arena.blocks[block_id].address, alignment) - arena.blocks[block_id].address
    if padding and arena.blocks[block_id].flags & FLAG_SOLID:
        return 0
    return arena_take_behind(arena, block_id, padding, nbytes, requested, tag)


cdef BlockId arena_take_behind(Arena* arena, BlockId block_id, uint64_t padding, uint64_t nbytes, uint64_t requested,
                               uint16_t tag) noexcept nogil:
    """Lend `nbytes` of a free block behind some padding, which stays in the free list; its number, or 0."""
    cdef BlockId front_id
    cdef Block* front
    if padding:
        front_id = hit_cut(arena, block_id, padding)
        if front_id == 0:
            return 0
        front = &arena.blocks[front_id]
        front.state = BLOCK_FREE
        freelist_insert(arena, front_id, front)
    block_id = hit_take_from(arena, block_id, nbytes, requested, tag)
    if arena.solid_size:
        arena_raise_peaks(arena)                  # which the number of live blocks decides there
    return block_id


cdef BlockId arena_take_listed(Arena* arena, BlockId block_id, uint64_t requested) noexcept nogil:
    """Lend a whole block of the lists.  `hit_take_from`, out of the way of what is quick."""
    return hit_take_from(arena, block_id, arena.blocks[block_id].nbytes, requested, 0)


cdef void arena_put(Arena* arena, BlockId block_id) noexcept nogil:
    """`hit_put`, out of the way of what is quick."""
    hit_put(arena, block_id)


cdef uint64_t arena_free_bytes(Arena* arena) noexcept nogil:
    """Bytes of all that is in the arena's lists.  Takes the arena's lock.  O(free blocks)."""
    cdef uint32_t number
    cdef BlockId block_id
    cdef uint64_t total = 0
    bias_take(&arena.lock)
    for number in range(<uint32_t> (ROWS * CLASSES_PER_ROW)):
        block_id = arena.heads[number]
        while block_id:
            total += arena.blocks[block_id].nbytes
            block_id = arena.blocks[block_id].list_next
    bias_drop(&arena.lock)
    return total


cdef BlockId arena_containing(Arena* arena, BlockId edge_id, uint64_t address) noexcept nogil:
    """The block of a segment that `address` lies in.  Walks the segment: for error messages only."""
    cdef BlockId block_id = arena.blocks[edge_id].next
    while block_id and address - arena.blocks[block_id].address >= arena.blocks[block_id].nbytes:
        block_id = arena.blocks[block_id].next
    return block_id

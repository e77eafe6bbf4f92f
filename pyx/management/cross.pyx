"""Memory that crosses streams: pending blocks made ready, free blocks stolen, loans sent home."""
from libc.stdint cimport uint16_t, uint32_t, uint64_t

from vpool._base.bias cimport bias_drop, bias_take
from vpool._base.lock cimport atomic_add, atomic_read
from vpool._base.types cimport BLOCK_FREE, BLOCK_LIVE, FLAG_SOLID, FLAG_USED, GRANULE, Block, BlockId, round_up
from vpool._management.arena cimport ANY_STAMP, Arena, Dependency, arena_find_aligned, arena_take_aligned
from vpool._management.freelist cimport freelist_find, freelist_remove
from vpool._management.hit cimport hit_put
from vpool._management.index cimport live_find, live_remove
from vpool._management.lend cimport (
    Extent,
    lend_adopt,
    lend_home,
    lend_isolate,
    lend_live,
    lend_on,
    lend_out,
    lend_return,
)
from vpool._management.merge cimport free_block
from vpool._management.order cimport (
    order_is_host,
    order_make,
    order_mark,
    order_poll,
    order_proved,
    order_proved_upto,
    order_queue,
)
from vpool._management.pending cimport pending_on, pending_put, pending_release, pending_rotate, pending_use
from vpool._management.state cimport CoreState, Request, lock_all, slot_count, unlock_all
from vpool._storage.driver cimport STATUS_NOT_READY, STATUS_OK
from vpool._storage.source cimport Source

cdef enum:
    SLICE = 256                   # pending blocks looked at while the lock is held once
    STOLEN_AT_LEAST = 2 << 20     # bytes: one crossing then serves many small blocks
    RETURNED_AT_ONCE = 64         # extents carried home together
    AT_ONCE = 64                  # streams that are waited for together


cdef bint _sweep(CoreState* state, Arena* arena) noexcept nogil:
    """Free whatever pending blocks are proved, in slices; whether there was one."""
    cdef uint32_t left = atomic_read(arena.pending_blocks)
    cdef uint32_t part
    cdef bint freed = False
    while left:
        part = left if left < SLICE else SLICE
        left -= part
        bias_take(&arena.lock)
        while part and arena.pending_first:
            if pending_release(state, arena, arena.pending_first):
                freed = True
            else:
                pending_rotate(arena)
            part -= 1
        bias_drop(&arena.lock)
    return freed


cdef uint32_t _note(uint16_t slot, uint64_t number, uint16_t* slots, uint64_t* numbers, uint32_t count,
                    uint32_t most) noexcept nogil:
    """Enter a stamp of a slot in a list of the highest ones, if there is room; the list's new length."""
    cdef uint32_t i = 0
    while i < count and slots[i] != slot:
        i += 1
    if i < most:
        if i == count:
            count += 1
            slots[i] = slot
            numbers[i] = 0
        if number > numbers[i]:
            numbers[i] = number
    return count


cdef uint32_t _awaited(Arena* arena, uint64_t least, uint16_t* slots, uint64_t* numbers, uint32_t most) noexcept nogil:
    """The streams that pending blocks of at least `least` bytes wait for, with the highest stamp of each."""
    cdef uint32_t count = 0
    cdef uint32_t number
    cdef uint32_t looks = 16 * SLICE
    cdef BlockId block_id
    cdef Block* block
    cdef Dependency* dependency
    bias_take(&arena.lock)
    block_id = arena.pending_first
    while block_id and looks:
        looks -= 1
        block = &arena.blocks[block_id]
        number = arena.uses[block_id] if block.nbytes >= least else 0
        if block.stamp and block.nbytes >= least:
            count = _note(block.slot, block.stamp, slots, numbers, count, most)
        while number:
            dependency = &arena.dependencies[number]
            count = _note(dependency.arena.slot, dependency.number, slots, numbers, count, most)
            number = dependency.next
        block_id = block.list_next
    bias_drop(&arena.lock)
    return count


cdef void _prove(CoreState* state, Source source) noexcept nogil:
    """Learn what is complete of all that blocks are pending for.

    Asks by slot, not by block: no number of blocks that wait for one stream hides those that wait for another.
    """
    cdef uint32_t slot
    for slot in range(slot_count(state)):
        if atomic_read(state.arenas[slot].wanted):
            # Where no marker can be recorded the block stays pending, until somebody must wait.
            order_mark(state, source, slot, atomic_read(state.arenas[slot].sequence))
        order_poll(state, source, slot)


cdef bint cross_ready(CoreState* state, Source source, Arena* arena) noexcept nogil:
    """Free the arena's pending blocks whose work is complete; whether there was one."""
    if atomic_read(arena.pending_blocks) == 0:
        return False
    _prove(state, source)
    return _sweep(state, arena)


cdef bint _order_pending(CoreState* state, Source source, Arena* arena, uint64_t least) noexcept nogil:
    """Make the arena's stream wait for what keeps blocks of at least `least` bytes pending."""
    cdef uint16_t slots[AT_ONCE]
    cdef uint64_t numbers[AT_ONCE]
    cdef uint32_t count = AT_ONCE
    cdef uint32_t i
    cdef bint made = True
    cdef bint freed = False
    # One block may wait for any number of streams; those that its own comes after are not told again.
    while made and count == AT_ONCE and atomic_read(arena.pending_blocks):
        made = False
        count = _awaited(arena, least, slots, numbers, AT_ONCE)
        for i in range(count):
            if order_make(state, source, arena.slot, slots[i], numbers[i]) == STATUS_OK:
                made = True
        if count and _sweep(state, arena):
            freed = True
    return freed


cdef void _give_home(CoreState* state, Extent* extent) noexcept nogil:
    """Take a loan back into its owner's arena: free if that is proved, else pending."""
    cdef Arena* owner = extent.owner
    cdef bint proved = order_proved(state, owner.slot, extent.freer.slot, extent.stamp)
    bias_take(&owner.lock)
    lend_home(extent)
    if proved:
        free_block(owner, extent.lent)
    else:
        pending_put(owner, extent.lent)
        pending_on(owner, extent.lent, extent.freer, extent.stamp)
    bias_drop(&owner.lock)


cdef bint _recall_from(CoreState* state, Arena* arena) noexcept nogil:
    """Send home what an arena has borrowed and is one free block; whether there was any."""
    cdef Extent extents[<int> RETURNED_AT_ONCE]
    cdef int count = RETURNED_AT_ONCE
    cdef int i
    cdef bint any = False
    if arena.captured:
        return False
    while count == RETURNED_AT_ONCE:
        bias_take(&arena.lock)
        count = lend_return(arena, extents, RETURNED_AT_ONCE)
        bias_drop(&arena.lock)
        for i in range(count):
            _give_home(state, &extents[i])
            any = True
    return any


cdef bint cross_recall(CoreState* state, Source source) noexcept nogil:
    """Free what is pending and ready, and send every extent home that is one free block; whether there was any.

    Each can make more of the other possible, so it goes on until neither does.
    """
    cdef uint32_t slot
    cdef bint any = False
    cdef bint again = True
    while again:
        again = False
        _prove(state, source)
        for slot in range(slot_count(state)):
            if _sweep(state, state.arenas[slot]):
                again = True
            if _recall_from(state, state.arenas[slot]):
                again = True
        any = any or again
    return any


cdef bint _isolate_some(CoreState* state, Arena* arena) noexcept nogil:
    """Make free blocks of an arena's extents extents of their own, some at a time; whether there may be more.

    A loan is cut with its extent, so this is done under all locks, and walks the extents like a report.
    """
    cdef int left = SLICE
    cdef BlockId edge_id, block_id
    cdef Block* block
    lock_all(state)
    edge_id = arena.adopted
    while edge_id and left > 0:
        block_id = arena.blocks[edge_id].next
        while block_id:
            block = &arena.blocks[block_id]
            if block.state == BLOCK_FREE and (block.prev != edge_id or block.next):
                left = left - 1 if lend_isolate(arena, edge_id, block_id) else -1
                break                             # what is behind it is another extent now
            block_id = block.next
        edge_id = arena.blocks[edge_id].list_prev
    unlock_all(state)
    return left == 0


cdef void _recall_parts(CoreState* state, Source source) noexcept nogil:
    """Send home every free block that an arena has of another, also out of extents that are in use."""
    cdef uint32_t slot
    for slot in range(slot_count(state)):
        while not state.arenas[slot].captured and _isolate_some(state, state.arenas[slot]):
            _recall_from(state, state.arenas[slot])
    cross_recall(state, source)


cdef uint64_t _to_steal(Request* request, Block* block) noexcept nogil:
    """How much of a free block to take: what the request needs, and enough for more small ones."""
    cdef uint64_t need = round_up(block.address, request.alignment) - block.address + request.nbytes
    if block.flags & FLAG_SOLID:
        return block.nbytes
    if need < STOLEN_AT_LEAST:
        need = STOLEN_AT_LEAST
    return need if need < block.nbytes else block.nbytes


cdef BlockId _find_loan(Request* request, Arena* owner, uint64_t upto, bint behind) noexcept nogil:
    """A fitting free block of another arena that was freed with a stamp up to `upto`, or 0.  Its lock is held.

    With `behind` the first that fits is enough of a look: one that is not proved can be had behind an event.
    """
    cdef BlockId block_id = freelist_find(owner, request.nbytes + request.alignment - GRANULE)
    cdef Block* block = &owner.blocks[block_id]
    if block_id and not (block.flags & FLAG_SOLID and block.address & (request.alignment - 1)):
        if block.stamp <= upto:
            return block_id
        if behind:
            return 0
    return arena_find_aligned(owner, request.nbytes, request.alignment, upto, request.looks)


cdef bint _take_loan(CoreState* state, Request* request, Arena* owner, bint proved_only, bint behind,
                     Extent* extent) noexcept nogil:
    """Lend the request's arena a fitting free block of another; whether there was one."""
    cdef uint64_t upto = order_proved_upto(state, request.arena.slot, owner.slot) if proved_only else (
        <uint64_t> ANY_STAMP)
    cdef BlockId block_id
    bias_take(&owner.lock)
    block_id = _find_loan(request, owner, upto, behind)
    if block_id:
        lend_out(owner, block_id, _to_steal(request, &owner.blocks[block_id]), request.arena.slot, extent)
    bias_drop(&owner.lock)
    return block_id != 0


cdef void _cancel_loan(CoreState* state, Extent* extent) noexcept nogil:
    """Let whoever had a loan, which nobody used meanwhile, have it again."""
    cdef bint returned = False
    if extent.owner != extent.freer:
        bias_take(&extent.freer.lock)
        returned = lend_adopt(extent.freer, extent) != 0
        bias_drop(&extent.freer.lock)
    if not returned:
        _give_home(state, extent)


cdef bint _receive_loan(CoreState* state, Arena* arena, Extent* extent) noexcept nogil:
    """Put a loan into the lists of an arena whose stream comes after its last use; False where no record is left.

    The arena's lock is held.
    """
    cdef uint64_t stamp = extent.stamp
    if extent.owner == arena:                     # its own, and home
        lend_home(extent)
        free_block(arena, extent.lent)
        return True
    # The borrower's own stamp: a third stream has to come after this one, which came after the owner.
    extent.stamp = 0 if stamp <= atomic_read(state.table[extent.freer.slot].done) else atomic_read(arena.sequence)
    if lend_adopt(arena, extent):
        return True
    extent.stamp = stamp
    return False


cdef BlockId _use_loan(CoreState* state, Source source, Request* request, Extent* extent) noexcept nogil:
    """Order the request's stream after the loan's last use, and serve the request from it."""
    cdef Arena* arena = request.arena
    cdef int status = order_make(state, source, arena.slot, extent.freer.slot, extent.stamp)
    cdef bint received
    if status != STATUS_OK:
        if status != STATUS_NOT_READY:            # another's memory, or the source, may still serve it
            request.status = status
        _cancel_loan(state, extent)
        return 0
    lend_on(extent, arena.slot)
    bias_take(&arena.lock)
    received = _receive_loan(state, arena, extent)
    if received:
        request.block_id = arena_take_aligned(
            arena, request.nbytes, request.requested, request.alignment, request.tag, request.looks)
        request.address = arena.blocks[request.block_id].address
    bias_drop(&arena.lock)
    if not received:
        request.no_record = True
        lend_on(extent, extent.freer.slot)
        _cancel_loan(state, extent)
        return 0
    atomic_add(state.crossings, 1)
    return request.block_id


cdef void cross_prove(CoreState* state, Source source, uint16_t slot) noexcept nogil:
    """Learn what is complete of all that a slot freed so far, without waiting."""
    order_mark(state, source, slot, atomic_read(state.arenas[slot].sequence))
    order_poll(state, source, slot)


cdef bint _fits(Request* request, Arena* owner) noexcept nogil:
    """Whether an arena has a free block for a request."""
    cdef bint found
    bias_take(&owner.lock)
    found = freelist_find(owner, request.nbytes + request.alignment - GRANULE) != 0
    bias_drop(&owner.lock)
    return found


cdef BlockId cross_steal(CoreState* state, Source source, Request* request) noexcept nogil:
    """Serve the request from another stream's free memory: first what is proved complete.

    In a capture nothing else: a graph cannot wait for work outside of it.  Nor for the host, which would have to
    wait itself while the source may have more.
    """
    cdef Extent extent
    cdef uint32_t slot
    cdef int proved_only
    cdef bint never_behind = request.arena.captured or order_is_host(&state.table[request.arena.slot])
    for proved_only in range(1, 0 if never_behind else -1, -1):
        for slot in range(slot_count(state)):
            if state.arenas[slot] == request.arena or state.arenas[slot].captured:
                continue
            if never_behind and _fits(request, state.arenas[slot]):
                cross_prove(state, source, slot)
            if _take_loan(state, request, state.arenas[slot], proved_only, not never_behind and request.looks, &extent):
                if _use_loan(state, source, request, &extent) or request.status or request.no_record:
                    return request.block_id
    return 0


cdef BlockId cross_take_own(Request* request) noexcept nogil:
    """Serve the request from its own arena, looking harder than a hit does."""
    cdef Arena* arena = request.arena
    bias_take(&arena.lock)
    request.block_id = arena_take_aligned(
        arena, request.nbytes, request.requested, request.alignment, request.tag, request.looks)
    if request.block_id:
        request.address = arena.blocks[request.block_id].address
    bias_drop(&arena.lock)
    return request.block_id


cdef void cross_gather(CoreState* state, Source source) noexcept nogil:
    """Bring free memory home, and let the default stream come after whatever of it is not complete.  Never waits."""
    cdef uint16_t slots[AT_ONCE]
    cdef uint64_t numbers[AT_ONCE]
    cdef uint32_t count, i
    cdef Arena* home = state.arenas[0]
    _recall_parts(state, source)
    count = _awaited(home, 0, slots, numbers, AT_ONCE) if atomic_read(home.pending_blocks) else 0
    for i in range(count):
        order_queue(state, source, home.slot, slots[i], numbers[i])
    if count:
        _sweep(state, home)


cdef BlockId cross_merge(CoreState* state, Source source, Request* request) noexcept nogil:
    """Serve the request from what merges once loans are home and pending blocks are waited for."""
    cdef Arena* arena = request.arena
    cdef uint64_t least = request.nbytes
    cdef uint32_t slot
    _recall_parts(state, source)
    while not cross_take_own(request):
        if not _order_pending(state, source, arena, least):
            if least == 0:
                break
            least = 0
    if request.block_id or cross_steal(state, source, request):
        return request.block_id
    # Last, streams wait for others that have nothing to do with this request.
    for slot in range(slot_count(state)):
        while state.arenas[slot] != arena and not state.arenas[slot].captured and _order_pending(
                state, source, state.arenas[slot], 0):
            pass
    return cross_steal(state, source, request)


cdef bint _leave(CoreState* state, Arena* arena, BlockId block_id, uint16_t freer, Extent* extent) noexcept nogil:
    """Take a block, just out of the index, out of use as freed on another stream.  The arena's lock is held.

    Whether an extent has to be adopted there now.
    """
    if arena.blocks[block_id].flags & FLAG_USED:
        # Several streams have to be waited for: it stays, and this one is one of them.
        hit_put(arena, block_id)
        pending_on(arena, block_id, state.arenas[freer], atomic_read(state.arenas[freer].sequence))
        return False
    lend_live(arena, block_id, freer, extent)
    return True


cdef bint _adopt_pending(Arena* arena, Extent* extent, Arena* freer, uint64_t number) noexcept nogil:
    """Put an extent into an arena, as a block that waits for what another slot freed with a stamp.

    False where no record is left.  The arena's lock is held.
    """
    cdef BlockId edge_id = lend_adopt(arena, extent)
    cdef BlockId block_id = arena.blocks[edge_id].next
    if edge_id == 0:
        return False
    freelist_remove(arena, &arena.blocks[block_id])
    pending_put(arena, block_id)
    pending_on(arena, block_id, freer, number)
    return True


cdef bint _settle_in(CoreState* state, Arena* user, Extent* extent) noexcept nogil:
    """Put what `_leave` took into the arena of the stream it was freed on; False where no record is left for it.

    That stream was named by the caller, but nothing says that it comes after the work of the stream that had the
    block: unless that is proved, the block is pending there.  The user's lock is held.
    """
    cdef uint64_t before = atomic_read(extent.freer.sequence)
    cdef bint proved = order_proved(state, user.slot, extent.freer.slot, before)
    if extent.owner != user:
        extent.stamp = atomic_read(user.sequence)
        return lend_adopt(user, extent) != 0 if proved else _adopt_pending(user, extent, extent.freer, before)
    lend_home(extent)                             # its own
    if proved:
        free_block(user, extent.lent)
    else:
        pending_put(user, extent.lent)
        pending_on(user, extent.lent, extent.freer, before)
    return True


cdef bint _send_back(Arena* user, Extent* extent) noexcept nogil:
    """Let the owner of what `_leave` took have it again, once both streams are through; False without a record."""
    cdef Arena* owner = extent.owner
    cdef bint noted
    bias_take(&owner.lock)
    noted = owner == extent.freer or pending_use(owner, extent.lent, extent.freer)
    if noted:
        lend_home(extent)
        pending_put(owner, extent.lent)
        pending_on(owner, extent.lent, user, extent.stamp)
    bias_drop(&owner.lock)
    return noted


cdef void _turn_back(Arena* user, Extent* extent) noexcept nogil:
    """Let who had what `_leave` took have it again, once the stream it was freed on is through.

    The two records of it there are spare since `_leave`.  A block would be nobody's for good only if other threads
    had both of these too by now, when nobody else in the pool has any.
    """
    lend_on(extent, extent.freer.slot)
    bias_take(&extent.freer.lock)
    _adopt_pending(extent.freer, extent, user, extent.stamp)
    bias_drop(&extent.freer.lock)


cdef void _arrive(CoreState* state, Arena* user, Extent* extent) noexcept nogil:
    cdef bint arrived
    lend_on(extent, user.slot)
    bias_take(&user.lock)
    arrived = _settle_in(state, user, extent)
    bias_drop(&user.lock)
    if not arrived and not _send_back(user, extent):
        _turn_back(user, extent)


cdef bint cross_free(CoreState* state, uint64_t address, uint16_t freer) noexcept nogil:
    """Free a block of any stream on another one: that one has it from now on, with no driver call here.

    False where no arena has a live block there.
    """
    cdef Arena* arena
    cdef Extent extent
    cdef BlockId block_id
    cdef bint moves
    cdef uint32_t slot
    for slot in range(slot_count(state)):
        arena = state.arenas[slot]
        moves = False
        bias_take(&arena.lock)
        block_id = live_remove(arena, address)
        if block_id and slot == freer:
            hit_put(arena, block_id)
        elif block_id:
            moves = _leave(state, arena, block_id, freer, &extent)
        bias_drop(&arena.lock)
        if moves:
            _arrive(state, state.arenas[freer], &extent)
        if block_id:
            return True
    return False


cdef bint cross_free_record(CoreState* state, Arena* arena, BlockId block_id, uint16_t generation,
                            uint16_t freer) noexcept nogil:
    """The same of a block by its record, if that is still the block it was."""
    cdef Block* block = &arena.blocks[block_id]
    cdef Extent extent
    cdef bint moves = False
    cdef bint mine
    bias_take(&arena.lock)
    mine = block.state == BLOCK_LIVE and block.generation == generation
    if mine:
        live_remove(arena, block.address)
        if arena.slot == freer:
            hit_put(arena, block_id)
        else:
            moves = _leave(state, arena, block_id, freer, &extent)
    bias_drop(&arena.lock)
    if moves:
        _arrive(state, state.arenas[freer], &extent)
    return mine


cdef int cross_use(CoreState* state, uint64_t address, uint16_t user) noexcept nogil:
    """Record that a live block is used on a stream too: 1, or 0 where there is none, -1 without memory."""
    cdef Arena* arena
    cdef BlockId block_id
    cdef bint kept = True
    cdef uint32_t slot
    for slot in range(slot_count(state)):
        arena = state.arenas[slot]
        bias_take(&arena.lock)
        block_id = live_find(arena, address)
        if block_id and slot != user:
            kept = pending_use(arena, block_id, state.arenas[user])
        bias_drop(&arena.lock)
        if block_id:
            return 1 if kept else -1
    return 0

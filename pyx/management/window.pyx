"""What to do about a request that no free block holds: where its block shall be, and whose memory goes there.

Pure decisions: the pieces of a range, which are its free blocks and its holes in the order of addresses, go in;
a window or a list of victims comes out.  Nothing is locked, called or changed.
"""
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport qsort

from vpool._base.types cimport round_down, round_up
from vpool._management.mapped cimport Mapped, MappedHandle, Piece, Place, Victim, mapped_at, mapped_place_at

cdef enum:
    # Nanoseconds: to map a handle somewhere else and set its access, as measured, and three times to unmap one.
    MOVE_NS = 34_500
    CLEAR_NS = 63_000


cdef void window_link(Piece* pieces, uint32_t count) noexcept nogil:
    """Say of each piece whether it joins the one before, and how many bytes of holes come before it in its run."""
    cdef uint32_t i
    for i in range(count):
        pieces[i].joins = i > 0 and pieces[i - 1].address + pieces[i - 1].nbytes == pieces[i].address
        pieces[i].holes_before = 0
        if pieces[i].joins:
            pieces[i].holes_before = pieces[i - 1].holes_before + (pieces[i - 1].nbytes if pieces[i - 1].hole else 0)


cdef uint64_t _end(Piece* piece) noexcept nogil:
    return piece.address + piece.nbytes


cdef uint64_t _holes_up_to(Piece* piece, uint64_t address, uint64_t granularity) noexcept nogil:
    """Bytes of holes of a run from its begin up to an address in this piece, to whole granules."""
    return piece.holes_before + (round_up(address - piece.address, granularity) if piece.hole else 0)


cdef uint64_t _begin_in(Piece* piece, uint64_t address, uint64_t granularity) noexcept nogil:
    """Where a window begins that shall begin at an address of a piece at the latest: in a hole at a granule."""
    return piece.address + round_down(address - piece.address, granularity) if piece.hole else address


cdef uint64_t _fill_cost(Mapped* mapped, uint64_t begin, uint64_t end) noexcept nogil:
    """Nanoseconds to give memory to a part of a hole, if it all comes from handles that move.

    To unmap what is stale counts more than its time: where a handle is mapped no more it cannot come back for nothing.
    """
    cdef uint64_t mean = max(mapped.nbytes // max(mapped.handle_count, <uint64_t> 1), mapped.granularity)
    cdef uint64_t cost = 0
    cdef uint64_t at = begin
    cdef uint64_t next
    cdef uint32_t number
    cdef MappedHandle* handle
    cdef Place* place
    while at < end:
        number = mapped_at(mapped, at)
        next = at + mapped.granularity
        if number:
            handle = &mapped.handles[number]
            place = &handle.places[mapped_place_at(handle, at)]
            next = place.address + handle.memory.nbytes
            if handle.candidate and place.open and place.address >= begin and next <= end:
                at = next                         # it comes back there
                continue
            cost += CLEAR_NS
        next = min(next, end)
        cost += (next - at) * MOVE_NS // mean
        at = next
    return cost


cdef uint64_t _movable_within(Mapped* mapped, uint64_t begin, uint64_t end) noexcept nogil:
    """Bytes of the victims that a part of a free block has a part of."""
    cdef uint64_t nbytes = 0
    cdef uint64_t at = begin
    cdef MappedHandle* handle
    while at < end:
        handle = &mapped.handles[mapped_at(mapped, at)]
        if handle.candidate:
            nbytes += handle.memory.nbytes
        at = handle.places[handle.active].address + handle.memory.nbytes
    return nbytes


cdef uint64_t _left_over(Mapped* mapped, uint64_t begin, uint64_t end, uint64_t hole_end) noexcept nogil:
    """Bytes of a part of a hole for which no handle may be small enough, if the hole has no room for one more."""
    cdef uint64_t mean = max(mapped.nbytes // max(mapped.handle_count, <uint64_t> 1), mapped.granularity)
    cdef uint64_t left = (end - begin) % mean
    return left if hole_end - end + left < mean else 0


cdef uint64_t _part_cost(Mapped* mapped, Piece* piece, uint64_t begin, uint64_t end, By by) noexcept nogil:
    """What a part of a piece costs as a part of a window.  The victims are listed."""
    if piece.hole:
        end = piece.address + round_up(end - piece.address, mapped.granularity)
        if by == BY_SHORTAGE:
            return end - begin + _left_over(mapped, begin, end, _end(piece))
        return _fill_cost(mapped, begin, end)
    return _movable_within(mapped, begin, end) if by == BY_SHORTAGE else 0


cdef void window_costs(Mapped* mapped, uint32_t count, By by) noexcept nogil:
    """Work out what each piece costs as a part of a window; the victims are listed.  O(mappings)."""
    cdef Piece* pieces = mapped.pieces
    cdef uint64_t before = 0
    cdef uint32_t i
    for i in range(count):
        pieces[i].cost_before = before
        if i + 1 < count:                         # behind the last block nearly everything is a hole
            before += _part_cost(mapped, &pieces[i], pieces[i].address, _end(&pieces[i]), by)


cdef uint64_t _cost_within(Mapped* mapped, uint32_t first, uint32_t last, uint64_t begin, uint64_t end,
                           By by) noexcept nogil:
    """What a window from `begin` in one piece to `end` in another costs."""
    cdef Piece* pieces = mapped.pieces
    cdef uint64_t cost = _part_cost(mapped, &pieces[last], begin if first == last else pieces[last].address, end, by)
    if first == last:
        return cost
    if begin > pieces[first].address:
        cost += _part_cost(mapped, &pieces[first], begin, _end(&pieces[first]), by)
        first += 1
    return cost + pieces[last].cost_before - pieces[first].cost_before


cdef void _offer(Mapped* mapped, uint32_t first, uint32_t last, uint64_t begin, uint64_t end, uint64_t block,
                 By by, Window* window) noexcept nogil:
    """Take a window if it is the best so far: from `begin` in one piece to `end` in another."""
    cdef Piece* pieces = mapped.pieces
    cdef uint64_t holes = _holes_up_to(&pieces[last], end, mapped.granularity) - _holes_up_to(
        &pieces[first], begin, mapped.granularity)
    cdef uint64_t score = holes
    if holes == 0:
        return
    if by != BY_MEMORY:
        score = _cost_within(mapped, first, last, begin, end, by)
    if window.holes and score >= window.score:
        return
    window.first = first
    window.address = begin
    window.nbytes = end - begin
    window.block = block
    window.holes = holes
    window.score = score


cdef bint window_best(Mapped* mapped, uint32_t count, uint64_t nbytes, By by, Window* window) noexcept nogil:
    """The window of `nbytes` that costs the least; False where there is none.

    Looked at are those that begin where a piece begins, or end where one ends; of these one needs the least memory.
    O(pieces), and not by memory O(pieces + mappings in the pieces that windows begin or end in).
    """
    cdef Piece* pieces = mapped.pieces
    cdef uint32_t first, last
    cdef uint64_t at
    window.holes = 0
    last = 0
    for first in range(count):
        if last < first:
            last = first
        # The piece that its end lies in, if the run reaches that far.
        while pieces[first].address + nbytes > _end(&pieces[last]) and last + 1 < count and pieces[last + 1].joins:
            last += 1
        if pieces[first].address + nbytes <= _end(&pieces[last]):
            _offer(mapped, first, last, pieces[first].address, pieces[first].address + nbytes,
                   pieces[first].address, by, window)
    first = 0
    for last in range(count):
        if not pieces[last].joins:
            first = last
        # What is behind the last block has no end that anything is next to.
        if _end(&pieces[last]) - pieces[first].address < nbytes or pieces[last].hole and last + 1 == count:
            continue
        at = _end(&pieces[last]) - nbytes
        while at >= _end(&pieces[first]):
            first += 1
        _offer(mapped, first, last, _begin_in(&pieces[first], at, mapped.granularity), _end(&pieces[last]), at,
               by, window)
    return window.holes != 0


cdef bint window_at(Mapped* mapped, uint32_t count, uint64_t address, uint64_t nbytes, Window* window) noexcept nogil:
    """The window of `nbytes` that begins at an address, where a piece begins; False where there is none."""
    cdef Piece* pieces = mapped.pieces
    cdef uint32_t first = 0
    cdef uint32_t last
    window.holes = 0
    while first < count and pieces[first].address != address:
        first += 1
    if first == count:
        return False
    last = first
    while last + 1 < count and pieces[last + 1].joins and _end(&pieces[last]) < address + nbytes:
        last += 1
    if _end(&pieces[last]) >= address + nbytes:
        _offer(mapped, first, last, address, address + nbytes, address, BY_MEMORY, window)
    return window.holes != 0


cdef int _smaller(const void* one, const void* other) noexcept nogil:
    cdef const Victim* a = <const Victim*> one
    cdef const Victim* b = <const Victim*> other
    if a.extent != b.extent:
        return -1 if a.extent < b.extent else 1
    return -1 if a.address < b.address else 1


cdef uint32_t _victims_in(Mapped* mapped, Piece* piece, uint64_t begin, uint64_t end, uint32_t count,
                          uint64_t* nbytes) noexcept nogil:
    """Append the handles that lie wholly in a part of a free block."""
    cdef uint64_t at = round_up(begin, mapped.granularity)
    cdef uint64_t base
    cdef uint32_t number
    cdef MappedHandle* handle
    cdef Victim* victim
    while at < end:
        number = mapped_at(mapped, at)
        handle = &mapped.handles[number]
        base = handle.places[handle.active].address
        if base == at and base + handle.memory.nbytes <= end:
            victim = &mapped.victims[count]
            victim.address = at
            victim.stamp = piece.stamp
            victim.extent = end - begin
            victim.number = number
            victim.block_id = piece.block_id
            victim.used = False
            count += 1
            nbytes[0] += handle.memory.nbytes
        at = base + handle.memory.nbytes
    return count


cdef uint32_t window_victims(Mapped* mapped, uint32_t count, Window* window, uint64_t* nbytes) noexcept nogil:
    """List the handles that are wholly free and outside a window, the smallest free memory first.

    How many there are, and their bytes; O(pieces + handles log handles).
    """
    cdef Piece* pieces = mapped.pieces
    cdef uint64_t begin, end
    cdef uint32_t found = 0
    cdef uint32_t i
    nbytes[0] = 0
    for i in range(count):
        if pieces[i].hole:
            continue
        begin = pieces[i].address
        end = _end(&pieces[i])
        if end <= window.address or begin >= window.address + window.nbytes:
            found = _victims_in(mapped, &pieces[i], begin, end, found, nbytes)
            continue
        if begin < window.address:
            found = _victims_in(mapped, &pieces[i], begin, window.address, found, nbytes)
        if end > window.address + window.nbytes:
            found = _victims_in(mapped, &pieces[i], window.address + window.nbytes, end, found, nbytes)
    qsort(mapped.victims, found, sizeof(Victim), _smaller)
    for i in range(found):
        mapped.handles[mapped.victims[i].number].candidate = i + 1
    return found


cdef void window_forget(Mapped* mapped, uint32_t count) noexcept nogil:
    """Forget a list of so many victims."""
    cdef uint32_t i
    for i in range(count):
        mapped.handles[mapped.victims[i].number].candidate = 0

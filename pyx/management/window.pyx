"""What to do about a request that no free block holds: where its block shall be, and whose memory goes there.

Pure decisions: the pieces of a range, which are its free blocks and its holes in the order of addresses, go in;
a window or a list of victims comes out.  Nothing is locked, called or changed.
"""
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport qsort

from vpool._base.types cimport round_down, round_up
from vpool._management.mapped cimport Mapped, MappedHandle, Piece, Victim, mapped_at


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


cdef bint _offer(Piece* pieces, uint32_t first, uint32_t last, uint64_t begin, uint64_t end, uint64_t block,
                 uint64_t granularity, Window* window) noexcept nogil:
    """Take a window if it is the best so far: from `begin` in one piece to `end` in another."""
    cdef uint64_t holes = _holes_up_to(&pieces[last], end, granularity) - _holes_up_to(
        &pieces[first], begin, granularity)
    if holes == 0 or window.holes and holes >= window.holes:
        return False
    window.first = first
    window.address = begin
    window.nbytes = end - begin
    window.block = block
    window.holes = holes
    return True


cdef bint window_best(Piece* pieces, uint32_t count, uint64_t nbytes, uint64_t granularity,
                      Window* window) noexcept nogil:
    """The window of `nbytes` that needs the least memory; False where there is none.  O(pieces).

    Looked at are those that begin where a piece begins, or end where one ends; of these one is the best.
    """
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
            _offer(pieces, first, last, pieces[first].address, pieces[first].address + nbytes,
                   pieces[first].address, granularity, window)
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
        _offer(pieces, first, last, _begin_in(&pieces[first], at, granularity), _end(&pieces[last]), at,
               granularity, window)
    return window.holes != 0


cdef bint window_last(Piece* pieces, uint32_t count, uint64_t nbytes, uint64_t granularity,
                      Window* window) noexcept nogil:
    """The window at the end of what is mapped, where no other memory is in the way; False where the range is full."""
    cdef uint32_t first = count - 1
    if count == 0 or not pieces[first].hole:
        return False
    if pieces[first].joins:
        first -= 1
    if _end(&pieces[count - 1]) - pieces[first].address < nbytes or (
            not pieces[first].hole and pieces[first].nbytes >= nbytes):
        return False
    window.holes = 0
    return _offer(pieces, first, count - 1, pieces[first].address, pieces[first].address + nbytes,
                  pieces[first].address, granularity, window)


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


cdef uint32_t window_victims(Mapped* mapped, Piece* pieces, uint32_t count, Window* window,
                             uint64_t* nbytes) noexcept nogil:
    """List the handles that are wholly free and outside a window, the smallest free memory first.

    How many there are, and their bytes; O(pieces + handles log handles).
    """
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

"""The handles of a range and where they are mapped: one step each, with the source's call and the record of it.

Whoever calls has the growth turn and no lock.  Where a step fails, the record says what is so.
"""
from libc.stdint cimport uint32_t, uint64_t

from vpool._base.memory cimport lazy_release, lazy_reserve
from vpool._management.journal cimport OUTSIDE, journal_moved
from vpool._storage.driver cimport STATUS_OK, STATUS_OUT_OF_MEMORY
from vpool._storage.mapped_source cimport MappedSource

cdef enum:
    SPARE = -1


cdef int mapped_open(Mapped* mapped, MappedSource source, uint64_t nbytes) noexcept nogil:
    """Reserve the range and the records of it."""
    cdef int status
    mapped.granularity = source.granularity
    if mapped.handles == NULL:
        mapped.handles = <MappedHandle*> lazy_reserve(MOST_HANDLES * sizeof(MappedHandle))
        mapped.fresh = 1
    if mapped.pieces == NULL:
        mapped.pieces = <Piece*> lazy_reserve(MOST_PIECES * sizeof(Piece))
    if mapped.victims == NULL:
        mapped.victims = <Victim*> lazy_reserve(MOST_HANDLES * sizeof(Victim))
    if mapped.handles == NULL or mapped.pieces == NULL or mapped.victims == NULL:
        return STATUS_OUT_OF_MEMORY
    status = source.reserve(nbytes, &mapped.span)
    if status != STATUS_OK:
        return status
    mapped.at = <uint32_t*> lazy_reserve(nbytes // mapped.granularity * sizeof(uint32_t))
    if mapped.at == NULL:
        source.unreserve(&mapped.span)
        return STATUS_OUT_OF_MEMORY
    return STATUS_OK


cdef void _release(void* base, uint64_t nbytes) noexcept nogil:
    if base != NULL:
        lazy_release(base, nbytes)


cdef int mapped_close(Mapped* mapped, MappedSource source) noexcept nogil:
    """Give everything back, also what blocks may be in.  Goes on after a failure, and returns the first."""
    cdef uint64_t nbytes = mapped.span.nbytes
    cdef int first = STATUS_OK
    cdef int status
    cdef uint32_t number
    if mapped.handles != NULL:
        for number in range(1, mapped.fresh):
            if mapped.handles[number].memory.token:
                status = mapped_release(mapped, source, number)
                first = status if first == STATUS_OK else first
    if mapped.span.address:
        status = source.unreserve(&mapped.span)
        first = status if first == STATUS_OK else first
        _release(mapped.at, nbytes // mapped.granularity * sizeof(uint32_t))
        mapped.at = NULL
    _release(mapped.handles, MOST_HANDLES * sizeof(MappedHandle))
    _release(mapped.pieces, MOST_PIECES * sizeof(Piece))
    _release(mapped.victims, MOST_HANDLES * sizeof(Victim))
    mapped.handles = NULL
    mapped.pieces = NULL
    mapped.victims = NULL
    return first


cdef uint32_t mapped_at(Mapped* mapped, uint64_t address) noexcept nogil:
    """Number of the handle that is mapped at an address of the range, 0 for none."""
    return mapped.at[(address - mapped.span.address) // mapped.granularity]


cdef uint32_t mapped_active_at(Mapped* mapped, uint64_t address) noexcept nogil:
    """Number of the handle whose blocks are at an address of the range; 0 for none, also where one is stale."""
    cdef uint32_t number = mapped_at(mapped, address)
    cdef MappedHandle* handle = &mapped.handles[number]
    if number and handle.active >= 0 and address - handle.places[handle.active].address < handle.memory.nbytes:
        return number
    return 0


cdef int mapped_place_at(MappedHandle* handle, uint64_t address) noexcept nogil:
    """Which of a handle's places an address lies in."""
    cdef int i
    for i in range(handle.place_count):
        if address - handle.places[i].address < handle.memory.nbytes:
            return i
    return SPARE


cdef bint mapped_is_open(MappedHandle* handle, int place) noexcept nogil:
    """Whether blocks may be at a place of a handle; there is none of a number below 0."""
    return place >= 0 and handle.places[place].open


cdef void _mark(Mapped* mapped, uint64_t address, uint64_t nbytes, uint32_t number) noexcept nogil:
    cdef uint64_t first = (address - mapped.span.address) // mapped.granularity
    cdef uint64_t i
    for i in range(first, first + nbytes // mapped.granularity):
        mapped.at[i] = number


cdef int mapped_create(Mapped* mapped, MappedSource source, uint64_t nbytes, uint32_t* number) noexcept nogil:
    """A new handle, which is mapped nowhere."""
    cdef MappedHandle* handle
    cdef int status
    number[0] = mapped.unused if mapped.unused else mapped.fresh
    if number[0] == MOST_HANDLES:
        return STATUS_OUT_OF_MEMORY
    handle = &mapped.handles[number[0]]
    status = source.create(nbytes, &handle.memory)
    if handle.memory.token:
        # Also one that the driver gave with an error, and did not take back.
        if mapped.unused:
            mapped.unused = handle.next
        else:
            mapped.fresh += 1
        handle.place_count = 0
        handle.active = SPARE
        handle.candidate = 0
        mapped.handle_count += 1
        mapped.spare_bytes += nbytes
        journal_moved(mapped.journal, OUTSIDE, 0, nbytes)
    return status


cdef int mapped_map(Mapped* mapped, MappedSource source, uint32_t number, uint64_t address) noexcept nogil:
    """Map a handle at an address where nothing is mapped; its blocks stay where they are."""
    cdef MappedHandle* handle = &mapped.handles[number]
    cdef bint stays = False
    cdef int status = source.map_at(address, &handle.memory, &stays)
    if status == STATUS_OK or stays:
        handle.places[handle.place_count].open = status == STATUS_OK
        handle.places[handle.place_count].address = address
        handle.places[handle.place_count].stamp = 0
        handle.place_count += 1
        mapped.stale += 1
        _mark(mapped, address, handle.memory.nbytes, number)
    return status


cdef int mapped_unmap(Mapped* mapped, MappedSource source, uint32_t number, int place) noexcept nogil:
    """Unmap a handle from a place; if it is the active one, the handle is spare from then on."""
    cdef MappedHandle* handle = &mapped.handles[number]
    cdef uint64_t address = handle.places[place].address
    cdef int status = source.unmap_at(address, handle.memory.nbytes)
    cdef int i
    if status != STATUS_OK:
        return status
    _mark(mapped, address, handle.memory.nbytes, 0)
    handle.place_count -= 1
    for i in range(place, handle.place_count):
        handle.places[i] = handle.places[i + 1]
    if handle.active == place:
        handle.active = SPARE
        mapped.nbytes -= handle.memory.nbytes
        mapped.spare_bytes += handle.memory.nbytes
        journal_moved(mapped.journal, address, 0, handle.memory.nbytes)
    else:
        mapped.stale -= 1
        if handle.active > place:
            handle.active -= 1
    return STATUS_OK


cdef void mapped_activate(Mapped* mapped, uint32_t number, int place, uint64_t stamp) noexcept nogil:
    """Let a handle's blocks be at another of its places; the one before is stale, and was used up to a stamp."""
    cdef MappedHandle* handle = &mapped.handles[number]
    journal_moved(mapped.journal, 0 if handle.active == SPARE else handle.places[handle.active].address,
                  handle.places[place].address, handle.memory.nbytes)
    if handle.active == SPARE:
        mapped.spare_bytes -= handle.memory.nbytes
        mapped.nbytes += handle.memory.nbytes
        mapped.stale -= 1
    else:
        handle.places[handle.active].stamp = stamp
    handle.active = place


cdef void mapped_deactivate(Mapped* mapped, uint32_t number, uint64_t stamp) noexcept nogil:
    """Let a handle be spare and its active place stale, which was used up to a stamp.  No driver call."""
    cdef MappedHandle* handle = &mapped.handles[number]
    journal_moved(mapped.journal, handle.places[handle.active].address, 0, handle.memory.nbytes)
    handle.places[handle.active].stamp = stamp
    handle.active = SPARE
    mapped.nbytes -= handle.memory.nbytes
    mapped.spare_bytes += handle.memory.nbytes
    mapped.stale += 1


cdef int mapped_release(Mapped* mapped, MappedSource source, uint32_t number) noexcept nogil:
    """Unmap a handle everywhere and give its memory back."""
    cdef MappedHandle* handle = &mapped.handles[number]
    cdef int status = STATUS_OK
    while status == STATUS_OK and handle.place_count:
        status = mapped_unmap(mapped, source, number, handle.place_count - 1)
    if status != STATUS_OK:
        return status
    status = source.release(&handle.memory)
    if handle.memory.token == 0:
        mapped.spare_bytes -= handle.memory.nbytes
        journal_moved(mapped.journal, 0, OUTSIDE, handle.memory.nbytes)
        mapped.handle_count -= 1
        handle.next = mapped.unused
        mapped.unused = number
    return status

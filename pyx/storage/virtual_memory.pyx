"""Virtual memory without a device: which handles are mapped where, and what CUDA would refuse.

Only numbers are kept here; a driver whose memory is real adds the effects.  What is kept of CUDA, measured on a
device: a handle is mapped whole, at no offset, at one or more places; unmapping covers whole mappings, of which there
may be several side by side; memory that was released goes when it is mapped nowhere; a range with mappings cannot be
freed; nobody can touch a mapping before its access is set.
"""
from libc.stdint cimport uint32_t, uint64_t

from vpool._base.memory cimport lazy_release, lazy_reserve
from vpool._storage.driver cimport STATUS_INVALID_VALUE, STATUS_OK, STATUS_OUT_OF_MEMORY

cdef enum:
    MOST_HANDLES = 1 << 22
    NUMBER_BITS = 24
    NUMBER = (1 << NUMBER_BITS) - 1
    # Of a granule.
    BEGINS = 1 << 28              # a mapping begins there
    OPEN = 1 << 29                # access was set


cdef bint _whole(uint64_t nbytes) noexcept nogil:
    return nbytes != 0 and nbytes % VIRTUAL_GRANULE == 0


cdef void virtual_close(VirtualMemory* memory) noexcept nogil:
    """Let go of all records.  Effects are the caller's."""
    cdef int i
    for i in range(MOST_RANGES):
        if memory.ranges[i].address:
            _forget_range(memory, &memory.ranges[i])
    if memory.handles != NULL:
        lazy_release(memory.handles, MOST_HANDLES * sizeof(VirtualHandle))
        memory.handles = NULL


cdef void _forget_range(VirtualMemory* memory, VirtualRange* span) noexcept nogil:
    lazy_release(span.granules, span.nbytes // VIRTUAL_GRANULE * sizeof(uint32_t))
    span.address = 0
    memory.range_count -= 1


cdef int virtual_add_range(VirtualMemory* memory, uint64_t address, uint64_t nbytes) noexcept nogil:
    """Know a range from now on."""
    cdef int i
    if not _whole(nbytes) or address % VIRTUAL_GRANULE:
        return STATUS_INVALID_VALUE
    for i in range(MOST_RANGES):
        if memory.ranges[i].address == 0:
            memory.ranges[i].granules = <uint32_t*> lazy_reserve(nbytes // VIRTUAL_GRANULE * sizeof(uint32_t))
            if memory.ranges[i].granules == NULL:
                return STATUS_OUT_OF_MEMORY
            memory.ranges[i].address = address
            memory.ranges[i].nbytes = nbytes
            memory.range_count += 1
            return STATUS_OK
    return STATUS_OUT_OF_MEMORY


cdef int virtual_drop_range(VirtualMemory* memory, uint64_t address, uint64_t nbytes) noexcept nogil:
    """Forget a whole range in which nothing is mapped."""
    cdef VirtualRange* span = _range_of(memory, address, nbytes)
    cdef uint64_t i
    if span == NULL or span.address != address or span.nbytes != nbytes:
        return STATUS_INVALID_VALUE
    for i in range(nbytes // VIRTUAL_GRANULE):
        if span.granules[i]:
            return STATUS_INVALID_VALUE
    _forget_range(memory, span)
    return STATUS_OK


cdef VirtualRange* _range_of(VirtualMemory* memory, uint64_t address, uint64_t nbytes) noexcept nogil:
    """The range that `nbytes` at an address lie in, or NULL."""
    cdef VirtualRange* span
    cdef int i
    for i in range(MOST_RANGES):
        span = &memory.ranges[i]
        if span.address and address - span.address < span.nbytes and (
                nbytes <= span.nbytes - (address - span.address)):
            return span
    return NULL


cdef VirtualHandle* virtual_create(VirtualMemory* memory, int device, uint64_t nbytes, uint64_t* token) noexcept nogil:
    """A new handle, or NULL where there is no room for it."""
    cdef VirtualHandle* handle
    cdef uint32_t number
    if memory.handles == NULL:
        memory.handles = <VirtualHandle*> lazy_reserve(MOST_HANDLES * sizeof(VirtualHandle))
        memory.fresh = 1
        if memory.handles == NULL:
            return NULL
    number = memory.spare
    if number:
        memory.spare = memory.handles[number].next
    elif memory.fresh < MOST_HANDLES:
        number = memory.fresh
        memory.fresh += 1
    else:
        return NULL
    handle = &memory.handles[number]
    handle.nbytes = nbytes
    handle.device = device
    handle.mappings = 0
    handle.released = False
    handle.uses += 1
    memory.handle_count += 1
    token[0] = (<uint64_t> handle.uses << NUMBER_BITS) | number
    return handle


cdef VirtualHandle* virtual_handle(VirtualMemory* memory, uint64_t token) noexcept nogil:
    """The handle of a token that was not released, or NULL."""
    cdef uint32_t number = token & NUMBER
    cdef VirtualHandle* handle
    if number == 0 or number >= memory.fresh:
        return NULL
    handle = &memory.handles[number]
    return handle if handle.nbytes and handle.uses == token >> NUMBER_BITS and not handle.released else NULL


cdef bint virtual_gone(VirtualMemory* memory, VirtualHandle* handle) noexcept nogil:
    """Whether a handle was released and is mapped nowhere; it is forgotten then, its memory the caller's to free."""
    if not handle.released or handle.mappings:
        return False
    handle.nbytes = 0
    handle.next = memory.spare
    memory.spare = <uint32_t> (handle - memory.handles)
    memory.handle_count -= 1
    return True


cdef int virtual_map(VirtualMemory* memory, uint64_t address, uint64_t nbytes, uint64_t token) noexcept nogil:
    """Map a handle, the whole of it, where nothing is mapped."""
    cdef VirtualRange* span = _range_of(memory, address, nbytes)
    cdef VirtualHandle* handle = virtual_handle(memory, token)
    cdef uint64_t first, i
    if span == NULL or handle == NULL or handle.nbytes != nbytes or address % VIRTUAL_GRANULE:
        return STATUS_INVALID_VALUE
    first = (address - span.address) // VIRTUAL_GRANULE
    for i in range(first, first + nbytes // VIRTUAL_GRANULE):
        if span.granules[i]:
            return STATUS_INVALID_VALUE
    for i in range(first, first + nbytes // VIRTUAL_GRANULE):
        span.granules[i] = <uint32_t> (handle - memory.handles)
    span.granules[first] |= <uint32_t> BEGINS
    handle.mappings += 1
    memory.mapping_count += 1
    return STATUS_OK


cdef VirtualHandle* virtual_mapped(VirtualMemory* memory, uint64_t address) noexcept nogil:
    """The handle whose mapping begins at an address, or NULL."""
    cdef VirtualRange* span = _range_of(memory, address, VIRTUAL_GRANULE)
    cdef uint32_t granule = span.granules[(address - span.address) // VIRTUAL_GRANULE] if span != NULL else 0
    return &memory.handles[granule & NUMBER] if granule & <uint32_t> BEGINS else NULL


cdef int virtual_may_unmap(VirtualMemory* memory, uint64_t address, uint64_t nbytes) noexcept nogil:
    """Whether `nbytes` at an address are whole mappings side by side; the status if not."""
    cdef VirtualHandle* handle
    if not _whole(nbytes):
        return STATUS_INVALID_VALUE
    while nbytes:
        handle = virtual_mapped(memory, address)
        if handle == NULL or handle.nbytes > nbytes:
            return STATUS_INVALID_VALUE
        address += handle.nbytes
        nbytes -= handle.nbytes
    return STATUS_OK


cdef VirtualHandle* virtual_unmap(VirtualMemory* memory, uint64_t address) noexcept nogil:
    """Take away the mapping that begins at an address, which is known to be there; its handle."""
    cdef VirtualRange* span = _range_of(memory, address, VIRTUAL_GRANULE)
    cdef VirtualHandle* handle = virtual_mapped(memory, address)
    cdef uint64_t first = (address - span.address) // VIRTUAL_GRANULE
    cdef uint64_t i
    for i in range(first, first + handle.nbytes // VIRTUAL_GRANULE):
        span.granules[i] = 0
    handle.mappings -= 1
    memory.mapping_count -= 1
    return handle


cdef int virtual_open(VirtualMemory* memory, uint64_t address, uint64_t nbytes) noexcept nogil:
    """Let a device into whole mappings side by side."""
    cdef VirtualRange* span = _range_of(memory, address, nbytes)
    cdef uint64_t first, i
    cdef int status = virtual_may_unmap(memory, address, nbytes)
    if status != STATUS_OK:
        return status
    first = (address - span.address) // VIRTUAL_GRANULE
    for i in range(first, first + nbytes // VIRTUAL_GRANULE):
        span.granules[i] |= <uint32_t> OPEN
    return STATUS_OK

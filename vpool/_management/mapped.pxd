"""A range of addresses with memory under parts of it: handles, the places that they are mapped at, and pieces."""
from libc.stdint cimport uint32_t, uint64_t

from vpool._base.types cimport BlockId
from vpool._management.journal cimport Journal
from vpool._storage.mapped_source cimport MappedSource
from vpool._storage.source cimport Handle, Range

cdef enum:
    MOST_PLACES = 4
    MOST_HANDLES = 1 << 20
    MOST_PIECES = 1 << 20

cdef struct Place:
    uint64_t address
    uint64_t stamp                # frees of the range's slot up to it have to be complete before this is unmapped
    bint open                     # the device may access it: False where the driver failed in the middle

cdef struct MappedHandle:
    # A handle is mapped at up to `MOST_PLACES`; at one of these it has blocks, the others lie in holes and are
    # *stale*: to come back there costs no driver call.
    Handle memory                 # token 0: not in use
    Place places[<int> MOST_PLACES]       # the first is where it was mapped first
    int place_count
    int active                    # where blocks are; -1 of a spare handle, which is mapped nowhere
    uint32_t next                 # of those not in use
    uint32_t candidate            # its number among the victims of this plan, from 1

cdef struct Piece:
    # A free block or a hole of the range, as a plan sees it.
    uint64_t address
    uint64_t nbytes
    uint64_t stamp                # of a free block
    uint64_t holes_before         # bytes of holes before it, in this run of pieces without another block between
    uint64_t cost_before          # of all pieces before it, as parts of a window
    BlockId block_id
    bint hole
    bint joins                    # the piece before it

cdef struct Victim:
    # A handle with nothing but free memory, which can be taken.
    uint64_t address
    uint64_t stamp
    uint64_t extent               # bytes of the free memory around it
    uint32_t number
    BlockId block_id
    bint used

cdef struct Mapped:
    # Read and written by whoever has the growth turn, `nbytes` and `segment_bytes` under the pool's lock too.
    Range span                    # address 0: nothing is reserved yet
    BlockId edge
    uint64_t granularity
    uint32_t* at                  # [granule of the range]: number of the handle that is mapped there
    MappedHandle* handles
    uint32_t fresh
    uint32_t unused
    uint64_t handle_count
    uint64_t nbytes               # of handles that are active
    uint64_t spare_bytes          # and of those that are mapped nowhere
    uint64_t peak_live            # the most that was live at a look
    uint64_t stale                # mappings
    uint64_t served               # bytes that the default stream had lent when the others last gave back
    uint64_t home_live            # what was live when handles last went home; more than that may be, for once it rose
    uint64_t short_at             # the limit at which memory was short, 0: at none
    Piece* pieces
    Victim* victims
    Journal* journal              # of the pool
    # Counters.
    unsigned long long moves
    unsigned long long returns    # to a stale mapping, without a driver call


cdef int mapped_open(Mapped* mapped, MappedSource source, uint64_t nbytes) noexcept nogil
cdef int mapped_close(Mapped* mapped, MappedSource source) noexcept nogil
cdef uint32_t mapped_at(Mapped* mapped, uint64_t address) noexcept nogil
cdef int mapped_place_at(MappedHandle* handle, uint64_t address) noexcept nogil
cdef bint mapped_is_open(MappedHandle* handle, int place) noexcept nogil
cdef int mapped_create(Mapped* mapped, MappedSource source, uint64_t nbytes, uint32_t* number) noexcept nogil
cdef int mapped_map(Mapped* mapped, MappedSource source, uint32_t number, uint64_t address) noexcept nogil
cdef int mapped_unmap(Mapped* mapped, MappedSource source, uint32_t number, int place) noexcept nogil
cdef int mapped_release(Mapped* mapped, MappedSource source, uint32_t number) noexcept nogil
cdef void mapped_activate(Mapped* mapped, uint32_t number, int place, uint64_t stamp) noexcept nogil

"""The inline parts of vpool that no Python call reaches alone, with a thin skin for tests."""
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from vpool._base.bias cimport (
    FIRST_PATIENCE,
    SEATS,
    BiasedLock,
    Seat,
    bias_drop,
    bias_enter,
    bias_init,
    bias_leave,
    bias_take,
    bias_try_enter,
)
from vpool._base.clock cimport now_ns
from vpool._base.lock cimport SpinLock, atomic_add, atomic_read, spin_lock, spin_try, spin_unlock
from vpool._base.turn cimport Turn, turn_destroy, turn_give, turn_init, turn_take
from vpool._base.types cimport BLOCK_FREE, BLOCK_UNMAPPED, GRANULE, Block, BlockId, round_down, round_up
from vpool._interface.pool cimport Pool
from vpool._management.arena cimport (
    CLASSES_PER_ROW,
    ROWS,
    Arena,
    Peaks,
    arena_add_segment,
    arena_delete,
    arena_new,
    arena_remove_segment,
)
from vpool._management.areas cimport areas_allocate, areas_deallocate
from vpool._management.core cimport Core
from vpool._management.freelist cimport class_of, freelist_find, freelist_insert, freelist_remove, freelist_resize
from vpool._management.hit cimport hit_put, hit_take
from vpool._management.holes cimport holes_add_segment, holes_fill, holes_punch
from vpool._management.lend cimport Extent, lend_adopt, lend_on, lend_out
from vpool._management.mapped cimport Mapped, MappedHandle, Piece, mapped_at
from vpool._management.moves cimport moves_punch, moves_put
from vpool._management.window cimport BY_MEMORY, BY_TIME, Window, window_best, window_costs, window_link
from vpool._management.index cimport index_find, index_insert, index_remove
from vpool._management.record cimport record_delete, record_new
from vpool._management.state cimport lock_all, slot_count, unlock_all

from vpool._storage.mapped_source cimport MappedSource
from vpool._storage.source cimport Handle, Range

CLASSES = <int> (ROWS * CLASSES_PER_ROW)


def class_numbers(sizes):
    return [class_of(nbytes) for nbytes in sizes]


def rounded(uint64_t nbytes, uint64_t unit):
    return round_down(nbytes, unit), round_up(nbytes, unit)


cdef class Lock:
    """A spin lock and a plain counter under it."""

    cdef SpinLock lock
    cdef readonly unsigned long long counter
    cdef unsigned long long inside
    cdef readonly unsigned long long most_inside

    def hammer(self, Py_ssize_t repeats):
        cdef Py_ssize_t _
        cdef unsigned long long inside
        with nogil:
            for _ in range(repeats):
                spin_lock(&self.lock)
                inside = atomic_add(self.inside, 1)
                if inside > self.most_inside:
                    self.most_inside = inside
                self.counter += 1
                atomic_add(self.inside, -1)
                spin_unlock(&self.lock)

    def try_lock(self):
        return spin_try(&self.lock)

    def unlock(self):
        spin_unlock(&self.lock)


cdef class BiasLock:
    """A biased lock and a plain counter under it."""

    cdef BiasedLock lock
    cdef Seat seats[<int> SEATS]
    cdef readonly unsigned long long counter
    cdef unsigned long long inside
    cdef readonly unsigned long long most_inside
    first_patience = <int> FIRST_PATIENCE

    def __cinit__(self):
        bias_init(&self.lock, self.seats)

    @property
    def patience(self):
        """Takings in a row that earn the bias; set low, it changes hands all the time."""
        return self.lock.patience

    @patience.setter
    def patience(self, value):
        self.lock.patience = value

    @property
    def biased(self):
        return self.lock.owner != NULL

    @property
    def revocations(self):
        return self.lock.revocations

    cdef void count(self) noexcept nogil:
        cdef unsigned long long inside = atomic_add(self.inside, 1)
        if inside > self.most_inside:
            self.most_inside = inside
        self.counter += 1
        atomic_add(self.inside, -1)

    def hammer(self, Py_ssize_t repeats, Py_ssize_t rare=0, uint32_t patience=0):
        """Take the lock so often; every `rare`-th time in the way of slow paths, which lowers `patience` again."""
        cdef Py_ssize_t i
        cdef Seat* seat
        with nogil:
            for i in range(repeats):
                if rare and i % rare == 0:
                    bias_take(&self.lock)
                    if patience:
                        self.lock.patience = patience
                    self.count()
                    bias_drop(&self.lock)
                else:
                    seat = bias_enter(&self.lock)
                    self.count()
                    bias_leave(&self.lock, seat)

    def hammer_trying(self, Py_ssize_t repeats):
        """Try so often; how often it worked."""
        cdef Py_ssize_t _
        cdef Py_ssize_t worked = 0
        cdef Seat* seat
        with nogil:
            for _ in range(repeats):
                if bias_try_enter(&self.lock, &seat):
                    self.count()
                    bias_leave(&self.lock, seat)
                    worked += 1
        return worked


cdef class TurnTaker:
    """A turn and a plain counter that only its holder writes."""

    cdef Turn turn
    cdef readonly unsigned long long counter
    cdef readonly unsigned long long waits

    def __cinit__(self):
        turn_init(&self.turn)

    def __dealloc__(self):
        turn_destroy(&self.turn)

    def hammer(self, Py_ssize_t repeats):
        cdef Py_ssize_t _
        cdef bint waited
        with nogil:
            for _ in range(repeats):
                waited = turn_take(&self.turn)
                self.counter += 1
                self.waits += waited
                turn_give(&self.turn)


cdef class Probe:
    """An arena of its own, without a pool."""

    cdef Arena* arena
    cdef Peaks peaks

    def __cinit__(self, minimum_remainder=GRANULE):
        self.arena = arena_new(0, minimum_remainder, GRANULE)
        if self.arena == NULL:
            raise MemoryError
        self.peaks.first = self.arena
        self.peaks.count = 1
        self.arena.peaks = &self.peaks

    def __dealloc__(self):
        if self.arena != NULL:
            arena_delete(self.arena)

    def size(self, BlockId block_id):
        return self.arena.blocks[block_id].nbytes

    @property
    def figures(self):
        return {
            "live_blocks": self.arena.live_blocks,
            "allocated_bytes": self.arena.allocated_bytes,
            "requested_bytes": self.arena.requested_bytes,
            "buckets": self.arena.bucket_count,
        }

    # The address index.
    def insert(self, uint64_t address):
        cdef BlockId block_id = record_new(self.arena)
        self.arena.blocks[block_id].address = address
        index_insert(self.arena, block_id, &self.arena.blocks[block_id])
        return block_id

    def find(self, uint64_t address):
        return index_find(self.arena, address)

    def remove(self, uint64_t address):
        cdef BlockId block_id = index_remove(self.arena, address)
        if block_id:
            record_delete(self.arena, block_id)
        return block_id

    def longest_chain(self):
        cdef uint32_t i, length
        cdef uint32_t longest = 0
        cdef BlockId block_id
        for i in range(self.arena.bucket_count):
            length = 0
            block_id = self.arena.buckets[i]
            while block_id:
                length += 1
                block_id = self.arena.blocks[block_id].list_next
            longest = max(longest, length)
        return longest

    # The free lists.
    def list_free(self, uint64_t nbytes):
        cdef BlockId block_id = record_new(self.arena)
        cdef Block* block = &self.arena.blocks[block_id]
        block.nbytes = nbytes
        block.state = BLOCK_FREE
        freelist_insert(self.arena, block_id, block)
        return block_id

    def unlist(self, BlockId block_id):
        freelist_remove(self.arena, &self.arena.blocks[block_id])
        record_delete(self.arena, block_id)

    def relist(self, BlockId block_id, uint64_t nbytes):
        freelist_resize(self.arena, block_id, &self.arena.blocks[block_id], nbytes)

    def find_free(self, uint64_t nbytes):
        return freelist_find(self.arena, nbytes)

    def bitmaps_are_empty(self):
        cdef int row
        if self.arena.rows:
            return False
        for row in range(<int> ROWS):
            if self.arena.columns[row]:
                return False
        return True

    # Segments and blocks.
    def add_segment(self, uint64_t address, uint64_t nbytes):
        return arena_add_segment(self.arena, address, nbytes)

    def remove_segment(self, BlockId edge_id, uint64_t nbytes):
        return arena_remove_segment(self.arena, edge_id, nbytes)

    def take(self, uint64_t nbytes):
        return hit_take(self.arena, round_up(nbytes, GRANULE), nbytes, 0)

    def put(self, BlockId block_id):
        index_remove(self.arena, self.arena.blocks[block_id].address)
        hit_put(self.arena, block_id)

    def allow_no_more_records(self):
        self.arena.capacity = self.arena.fresh


cdef class Records:
    """Takes the records that a pool's arenas have no use for away, and gives them back.

    Those that were used before only with `spare`; until they are back the pool's invariants do not hold.
    """

    cdef Pool pool
    cdef dict kept
    cdef dict spare

    def __init__(self, Pool pool not None):
        self.pool = pool
        self.kept = {}
        self.spare = {}

    def take_spare(self):
        cdef uint32_t slot
        cdef Arena* arena
        for slot in range(slot_count(self.pool.areas.state)):
            arena = self.pool.areas.state.arenas[slot]
            self.spare.setdefault(slot, []).append(arena.spare)
            arena.spare = 0

    def give_spare(self):
        cdef uint32_t slot
        cdef Arena* arena
        cdef BlockId first, last
        for slot, chains in self.spare.items():
            arena = self.pool.areas.state.arenas[slot]
            for first in chains:
                last = first
                while last and arena.blocks[last].next:
                    last = arena.blocks[last].next
                if last:
                    arena.blocks[last].next = arena.spare
                    arena.spare = first
        self.spare.clear()

    def take(self, uint32_t left=0):
        cdef uint32_t slot
        cdef Arena* arena
        for slot in range(slot_count(self.pool.areas.state)):
            arena = self.pool.areas.state.arenas[slot]
            self.kept.setdefault(slot, (arena.capacity, arena.dependency_capacity))
            arena.capacity = arena.fresh + left
            arena.dependency_capacity = arena.dependency_fresh
            arena.dependency_spare = 0

    def lost_in_a_move(self, uint64_t address):
        """Move the free handle at an address to where it is, while others take the last records; its status."""
        cdef Core core = self.pool.areas.core
        cdef Mapped* mapped = &core.state.mapped
        cdef Arena* arena = core.state.arenas[0]
        cdef uint32_t capacity = arena.capacity
        cdef uint32_t number
        cdef BlockId spare
        cdef uint64_t stamp = 0
        cdef int status = -1
        turn_take(&core.state.growth_turn)
        number = mapped_at(mapped, address)
        if moves_punch(core, 0, address, mapped.handles[number].memory.nbytes, &stamp):
            spare = arena.spare
            arena.spare = 0
            arena.capacity = arena.fresh
            status = moves_put(core, number, mapped.handles[number].active, 0, stamp)
            arena.spare = spare
            arena.capacity = capacity
        turn_give(&core.state.growth_turn)
        return status

    def give_back(self):
        for slot, (capacity, dependency_capacity) in self.kept.items():
            self.pool.areas.state.arenas[<uint32_t> slot].capacity = capacity
            self.pool.areas.state.arenas[<uint32_t> slot].dependency_capacity = dependency_capacity
        self.kept.clear()


def edge_after_going_on():
    """The edge that an owner has noted of a loan which one borrower had, whom a walk found, and another gets now."""
    cdef Extent extent
    cdef BlockId edge_id
    cdef BlockId found = 0
    cdef Peaks peaks
    cdef int i
    cdef Arena* arenas[3]
    memset(&peaks, 0, sizeof(Peaks))
    for i in range(3):
        arenas[i] = arena_new(0, GRANULE, GRANULE)
        if arenas[i] == NULL:
            raise MemoryError
        arenas[i].slot = i
        arenas[i].peaks = &peaks
    edge_id = arena_add_segment(arenas[0], GRANULE, GRANULE)
    lend_out(arenas[0], arenas[0].blocks[edge_id].next, GRANULE, 1, &extent)
    edge_id = lend_adopt(arenas[1], &extent)
    arenas[0].blocks[extent.lent].list_next = edge_id
    lend_out(arenas[1], arenas[1].blocks[edge_id].next, GRANULE, 2, &extent)
    lend_on(&extent, 2)
    found = arenas[0].blocks[extent.lent].list_next
    for i in range(3):
        arena_delete(arenas[i])
    return found


def compiled_calls(Pool pool not None, uint64_t nbytes, Py_ssize_t repeats):
    """What a compiled caller does: allocate and free without the GIL; the number of calls that were served."""
    cdef uint64_t address = 0
    cdef Py_ssize_t served = 0
    cdef Py_ssize_t _
    with nogil:
        for _ in range(repeats):
            if areas_allocate(pool.areas, pool.default_arena, nbytes, &address):
                served += areas_deallocate(pool.areas, pool.default_arena, address)
    return served


def figures_under_locks(Pool pool not None):
    """The cheap figures of a pool, read while this thread holds every lock that the pool has."""
    lock_all(&pool.core.state)
    try:
        return pool.stats, pool.memory_info(), pool.ladder, pool.core_share
    finally:
        unlock_all(&pool.core.state)


def allocate_while_peaks_are_looked_at(Pool pool not None, uint64_t nbytes, stream=None):
    """Allocate on the calling thread, as if another one were adding up the arenas; whether that is noted."""
    cdef Peaks* peaks = pool.core.state.peaks
    spin_lock(&peaks.lock)
    peaks.looking = 1
    try:
        address = pool.allocate(nbytes, stream)
    finally:
        peaks.looking = 0
        spin_unlock(&peaks.lock)
    return address, peaks.again != 0


def look_at_peaks_for(Pool pool not None, double seconds, bint looking):
    """Keep who would add the arenas up from it for so long, as one who does so or as who begins a measure."""
    cdef Peaks* peaks = pool.core.state.peaks
    cdef unsigned long long end = now_ns() + <unsigned long long> (seconds * 1e9)
    with nogil:
        spin_lock(&peaks.lock)
        peaks.looking = looking
        while now_ns() < end:
            pass
        peaks.looking = 0
        spin_unlock(&peaks.lock)


def peaks_are_looked_at(Pool pool not None):
    return pool.core.state.peaks.lock.held != 0


def read_atomically(unsigned long long value):
    return atomic_read(value)


cdef class Space:
    """A range of a source, and handles by their number."""

    cdef MappedSource source
    cdef Range span
    cdef Handle handles[64]
    cdef readonly int count

    def __cinit__(self, MappedSource source):
        self.source = source

    def reserve(self, uint64_t nbytes):
        return self.source.reserve(nbytes, &self.span)

    @property
    def address(self):
        return self.span.address

    def create(self, uint64_t nbytes):
        cdef int status = self.source.create(nbytes, &self.handles[self.count])
        self.count += status == 0
        return status

    def token(self, int number):
        return self.handles[number].token

    def map(self, uint64_t offset, int number):
        cdef bint stays
        return self.source.map_at(self.span.address + offset, &self.handles[number], &stays)

    def unmap(self, uint64_t offset, uint64_t nbytes):
        return self.source.unmap_at(self.span.address + offset, nbytes)

    def release(self, int number):
        return self.source.release(&self.handles[number])

    def unreserve(self):
        return self.source.unreserve(&self.span)

    def acquire(self, uint64_t nbytes):
        return self.source.acquire(nbytes, &self.span, &self.handles[0])

    def surrender(self):
        return self.source.surrender(&self.span, &self.handles[0])


def best_window(pieces, uint64_t nbytes, uint64_t granularity, stale=None):
    """The window of the least memory; of the least time where there is a list of what is mapped in the holes.

    Its entries are (address, bytes, whether the handle may come back); a handle has a granule in the mean.
    """
    cdef Piece copies[64]
    cdef MappedHandle handles[64]
    cdef uint32_t at[8192]
    cdef Mapped mapped
    cdef Window window
    cdef uint64_t i, granule
    memset(&mapped, 0, sizeof(Mapped))
    memset(handles, 0, sizeof(handles))
    memset(at, 0, sizeof(at))
    mapped.pieces = copies
    mapped.handles = handles
    mapped.at = at
    mapped.granularity = mapped.nbytes = granularity
    mapped.handle_count = 1
    for i, (address, size, hole) in enumerate(pieces):
        copies[i].address = address
        copies[i].nbytes = size
        copies[i].hole = hole
    for i, (address, size, free) in enumerate(stale or ()):
        handles[i + 1].memory.nbytes = size
        handles[i + 1].places[0].address = address
        handles[i + 1].places[0].open = True
        handles[i + 1].place_count = 1
        handles[i + 1].active = -1
        handles[i + 1].candidate = free
        for granule in range(address // granularity, (address + size) // granularity):
            at[granule] = <uint32_t> (i + 1)
    window_link(copies, <uint32_t> len(pieces))
    if stale is not None:
        window_costs(&mapped, <uint32_t> len(pieces), BY_TIME)
    if not window_best(&mapped, <uint32_t> len(pieces), nbytes, BY_MEMORY if stale is None else BY_TIME, &window):
        return None
    return window.address, window.nbytes, window.block, window.holes


cdef class Holes:
    """A segment of so many units, all holes at first."""

    cdef Arena* arena
    cdef Peaks peaks
    cdef BlockId edge
    cdef uint64_t unit

    def __cinit__(self, uint64_t units, uint64_t unit):
        self.arena = arena_new(0, GRANULE, GRANULE)
        self.arena.peaks = &self.peaks
        self.unit = unit
        self.edge = holes_add_segment(self.arena, unit, units * unit)

    def __dealloc__(self):
        arena_delete(self.arena)

    cdef BlockId at(self, uint64_t first):
        cdef BlockId block_id = self.arena.blocks[self.edge].next
        while (1 + first) * self.unit - self.arena.blocks[block_id].address >= self.arena.blocks[block_id].nbytes:
            block_id = self.arena.blocks[block_id].next
        return block_id

    def fill(self, uint64_t first, uint64_t units, uint64_t stamp):
        return holes_fill(self.arena, self.at(first), (1 + first) * self.unit, units * self.unit, stamp)

    def punch(self, uint64_t first, uint64_t units):
        return holes_punch(self.arena, self.at(first), (1 + first) * self.unit, units * self.unit)

    def blocks(self):
        """Units of each block, and whether it has memory; neighbours link both ways."""
        cdef BlockId before = self.edge
        cdef BlockId block_id = self.arena.blocks[self.edge].next
        cdef Block* block
        rows = []
        while block_id:
            block = &self.arena.blocks[block_id]
            assert block.prev == before
            assert block.state in (BLOCK_FREE, BLOCK_UNMAPPED)
            rows.append((block.nbytes // self.unit, block.state == BLOCK_FREE))
            before = block_id
            block_id = block.next
        return rows

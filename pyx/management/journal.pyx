"""What happened in a pool: a ring of events in native memory, and what is live by tag."""
from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from vpool._base.clock cimport now_ns
from vpool._base.lock cimport atomic_read, atomic_write, spin_lock, spin_unlock
from vpool._base.memory cimport lazy_release, lazy_reserve, lazy_touch
from vpool._management.order cimport thread_number

cdef extern from *:
    """
    static __thread uint16_t vpool_tag_here;
    """
    uint16_t tag_here "vpool_tag_here"

cdef enum:
    TOUCHED = 64 << 20            # bytes of a ring that are mapped when it begins; the rest is as it is written

cdef uint64_t OUTSIDE = ~<uint64_t> 0

cdef unsigned int _tags_in_use = 0


cdef uint16_t journal_tag() noexcept nogil:
    """The innermost tag of the calling thread; 0: none."""
    return tag_here


cdef void journal_set_tag(uint16_t tag) noexcept nogil:
    global tag_here
    tag_here = tag


cdef bint journal_tags_in_use() noexcept nogil:
    """Whether this process ever had a tag."""
    return atomic_read(_tags_in_use)


cdef void journal_use_tags() noexcept nogil:
    atomic_write(_tags_in_use, 1)


cdef bint journal_open(Journal* journal, uint64_t capacity) noexcept nogil:
    """Begin to record, into a ring of `capacity` events, a power of two; False where there is no room for it."""
    cdef Event* ring = <Event*> lazy_reserve(capacity * sizeof(Event))
    if ring == NULL:
        return False
    lazy_touch(ring, min(capacity * sizeof(Event), <uint64_t> TOUCHED))
    spin_lock(&journal.lock)
    journal.ring = ring
    journal.capacity = capacity
    journal.count = 0
    journal.recording = True
    spin_unlock(&journal.lock)
    return True


cdef void journal_stop(Journal* journal) noexcept nogil:
    """Note nothing more.  The events stay until `journal_close`."""
    spin_lock(&journal.lock)
    journal.recording = False
    spin_unlock(&journal.lock)


cdef void journal_close(Journal* journal) noexcept nogil:
    """Give the ring back."""
    cdef Event* ring
    spin_lock(&journal.lock)
    journal.recording = False
    ring = journal.ring
    journal.ring = NULL
    spin_unlock(&journal.lock)
    if ring != NULL:
        lazy_release(ring, journal.capacity * sizeof(Event))


cdef bint journal_count_tags(Journal* journal) noexcept nogil:
    """Count by tag from now on; False where there is no room for it."""
    cdef TagCount* tags
    if journal.tags != NULL:
        return True
    tags = <TagCount*> lazy_reserve(MOST_TAGS * sizeof(TagCount))
    if tags == NULL:
        return False
    spin_lock(&journal.lock)
    if journal.tags == NULL:
        journal.tags = tags
        tags = NULL
    spin_unlock(&journal.lock)
    if tags != NULL:                              # another thread was faster
        lazy_release(tags, MOST_TAGS * sizeof(TagCount))
    return True


cdef uint64_t journal_copy(Journal* journal, uint64_t begin, uint64_t most, Event* events) noexcept nogil:
    """Copy up to `most` events from number `begin` on that are still there; how many.

    Holds the lock for about 10 ns an event, so ask for a few thousand.
    """
    cdef uint64_t count = 0
    cdef uint64_t first, part
    spin_lock(&journal.lock)
    if journal.ring != NULL and begin < journal.count and begin + journal.capacity >= journal.count:
        count = min(most, journal.count - begin)
        first = begin & (journal.capacity - 1)
        part = min(count, journal.capacity - first)
        memcpy(events, &journal.ring[first], part * sizeof(Event))
        memcpy(&events[part], journal.ring, (count - part) * sizeof(Event))
    spin_unlock(&journal.lock)
    return count


cdef inline void write(Journal* journal, uint32_t kind, uint64_t address, uint64_t nbytes, uint64_t requested,
                       uint16_t slot, uint16_t tag, uint32_t site) noexcept nogil:
    """Write an event.  The lock is held, so that times rise with the numbers."""
    cdef Event* event = &journal.ring[journal.count & (journal.capacity - 1)]
    event.time_ns = now_ns()
    event.address = address
    event.nbytes = nbytes
    event.requested = requested
    event.thread = <uint32_t> thread_number()
    event.site = site
    event.slot = slot
    event.tag = tag
    event.kind = kind
    journal.count += 1


cdef void journal_note(Journal* journal, uint32_t kind, uint64_t address, uint64_t nbytes, uint64_t requested,
                       uint16_t slot, uint16_t tag, uint32_t site) noexcept nogil:
    """An event that changes nothing of what is live."""
    spin_lock(&journal.lock)
    if journal.recording:
        write(journal, kind, address, nbytes, requested, slot, tag, site)
    spin_unlock(&journal.lock)


cdef void journal_moved(Journal* journal, uint64_t before, uint64_t now, uint64_t nbytes) noexcept nogil:
    """Memory of the mapped range went from one address to another, 0 or `OUTSIDE` included: in one step."""
    if journal == NULL:
        return
    spin_lock(&journal.lock)
    if journal.recording and before != OUTSIDE:
        write(journal, EVENT_UNMAP, before, nbytes, nbytes, 0, 0, 0)
    if journal.recording and now != OUTSIDE:
        write(journal, EVENT_MAP, now, nbytes, nbytes, 0, 0, 0)
    spin_unlock(&journal.lock)


cdef void journal_lent(Journal* journal, uint64_t address, uint64_t nbytes, uint64_t requested, uint16_t slot,
                       uint16_t tag, uint32_t site) noexcept nogil:
    """A block was lent, which was counted as its tag's before; nobody else knows its address yet.  With the lock."""
    cdef TagCount* count
    if journal.recording:
        write(journal, EVENT_ALLOCATE, address, nbytes, requested, slot, tag, site)
    if tag and journal.tags != NULL:
        count = &journal.tags[tag]
        count.allocated_bytes += nbytes
        count.blocks += 1
        if count.allocated_bytes > count.peak_bytes:
            count.peak_bytes = count.allocated_bytes


cdef void journal_freed(Journal* journal, uint64_t address, uint64_t nbytes, uint64_t requested, uint16_t slot,
                        uint16_t tag, uint32_t site) noexcept nogil:
    """A block is about to be free.  With the lock, and its arena's."""
    cdef TagCount* count
    if journal.recording:
        write(journal, EVENT_FREE, address, nbytes, requested, slot, tag, site)
    if tag and journal.tags != NULL:
        count = &journal.tags[tag]
        count.requested_bytes -= requested
        count.allocated_bytes -= nbytes
        count.blocks -= 1


cdef bint journal_charge(Journal* journal, uint16_t tag, uint64_t requested) noexcept nogil:
    """Count a request that is about to be served as its tag's; False, and nothing is counted, beyond its limit.

    With the lock.
    """
    cdef TagCount* count
    if tag == 0 or journal.tags == NULL:
        return True
    count = &journal.tags[tag]
    if count.limited and not (requested <= count.limit and count.requested_bytes <= count.limit - requested):
        return False
    count.requested_bytes += requested
    journal.highest = max(journal.highest, <uint32_t> tag)
    return True


cdef void journal_discharge(Journal* journal, uint16_t tag, uint64_t requested) noexcept nogil:
    """The request failed.  With the lock."""
    if tag and journal.tags != NULL:
        journal.tags[tag].requested_bytes -= requested


cdef bint journal_resized(Journal* journal, uint64_t address, uint64_t before, uint64_t requested_before,
                          uint64_t nbytes, uint64_t requested, uint16_t slot, uint16_t tag) noexcept nogil:
    """A block gets another size where it is: noted as freed and lent; False, and nothing is noted, beyond its limit.

    With the lock, and its arena's.
    """
    if requested > requested_before and not journal_charge(journal, tag, requested - requested_before):
        return False
    if requested > requested_before:
        journal_discharge(journal, tag, requested - requested_before)
    journal_freed(journal, address, before, requested_before, slot, tag, 0)
    if tag and journal.tags != NULL:
        journal.tags[tag].requested_bytes += requested
    journal_lent(journal, address, nbytes, requested, slot, tag, 0)
    return True


cdef bint journal_limit(Journal* journal, uint16_t tag, uint64_t nbytes, bint limited) noexcept nogil:
    """Set or take away the limit of a tag; False, and nothing is changed, where more than that is live."""
    cdef TagCount* count = &journal.tags[tag]
    cdef bint possible
    spin_lock(&journal.lock)
    possible = not limited or count.requested_bytes <= nbytes
    if possible:
        journal.highest = max(journal.highest, <uint32_t> tag)
        count.limit = nbytes
        count.limited = limited
    spin_unlock(&journal.lock)
    return possible


cdef void journal_reset_peaks(Journal* journal) noexcept nogil:
    """The highest values are what is live now.  O(tags)."""
    cdef uint32_t tag
    if journal.tags == NULL:
        return
    for tag in range(journal.highest + 1):
        spin_lock(&journal.lock)
        journal.tags[tag].peak_bytes = journal.tags[tag].allocated_bytes
        spin_unlock(&journal.lock)

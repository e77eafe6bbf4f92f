"""What happened in a pool: a ring of events in native memory, and what is live by tag.

Both are kept only while the state word says so.  An event of a free is written before the block can be lent again,
under the lock of its arena, and that of an allocation before the caller has the address: so the events of an
address stand in the order in which they came to pass.
"""
from libc.stdint cimport uint16_t, uint32_t, uint64_t

from vpool._base.lock cimport SpinLock

cdef enum:
    MOST_TAGS = 1 << 16
    OTHER_TAGS = MOST_TAGS - 1    # stands for all that came when every other number was given

cdef enum EventKind:
    EVENT_ALLOCATE = 0
    EVENT_FREE = 1
    EVENT_FAILURE = 2             # a request that failed
    EVENT_RESERVE = 3             # a segment came from the source
    EVENT_RELEASE = 4             # and went back
    EVENT_MARK = 5                # a step begins
    EVENT_MAP = 6                 # memory of the mapped range came to an address, 0 where it is mapped nowhere
    EVENT_UNMAP = 7               # and left it

cdef uint64_t OUTSIDE               # the address of memory that is the driver's

cdef struct Event:
    # Its layout is known to the recording, which reads it as an array.
    uint64_t time_ns
    uint64_t address
    uint64_t nbytes               # after rounding
    uint64_t requested
    uint32_t thread
    uint32_t site
    uint16_t slot                 # of the stream: that the block is for, or was freed on
    uint16_t tag
    uint32_t kind

cdef struct TagCount:
    uint64_t requested_bytes      # live, or about to be; the limit is of these
    uint64_t allocated_bytes
    uint64_t blocks
    uint64_t peak_bytes           # of the allocated ones
    uint64_t limit
    bint limited

cdef struct Journal:
    SpinLock lock                 # of all below; taken last, under an arena's lock or the pool's
    bint recording
    uint64_t capacity             # events, a power of two
    uint64_t count                # events so far; the last `capacity` of them are there
    Event* ring
    TagCount* tags                # [MOST_TAGS], NULL until there is one
    uint32_t highest              # tag that was ever counted or limited here


# Of the calling thread, and of the process: whether there ever was a tag.
cdef uint16_t journal_tag() noexcept nogil
cdef void journal_set_tag(uint16_t tag) noexcept nogil
cdef bint journal_tags_in_use() noexcept nogil
cdef void journal_use_tags() noexcept nogil

cdef bint journal_open(Journal* journal, uint64_t capacity) noexcept nogil
cdef void journal_stop(Journal* journal) noexcept nogil
cdef void journal_close(Journal* journal) noexcept nogil
cdef bint journal_count_tags(Journal* journal) noexcept nogil
cdef uint64_t journal_copy(Journal* journal, uint64_t begin, uint64_t most, Event* events) noexcept nogil

cdef void journal_note(Journal* journal, uint32_t kind, uint64_t address, uint64_t nbytes, uint64_t requested,
                       uint16_t slot, uint16_t tag, uint32_t site) noexcept nogil

cdef void journal_moved(Journal* journal, uint64_t before, uint64_t now, uint64_t nbytes) noexcept nogil

# With the lock.
cdef void journal_lent(Journal* journal, uint64_t address, uint64_t nbytes, uint64_t requested, uint16_t slot,
                       uint16_t tag, uint32_t site) noexcept nogil
cdef void journal_freed(Journal* journal, uint64_t address, uint64_t nbytes, uint64_t requested, uint16_t slot,
                        uint16_t tag, uint32_t site) noexcept nogil
cdef bint journal_resized(Journal* journal, uint64_t address, uint64_t before, uint64_t requested_before,
                          uint64_t nbytes, uint64_t requested, uint16_t slot, uint16_t tag) noexcept nogil
cdef bint journal_charge(Journal* journal, uint16_t tag, uint64_t requested) noexcept nogil
cdef void journal_discharge(Journal* journal, uint16_t tag, uint64_t requested) noexcept nogil

cdef bint journal_limit(Journal* journal, uint16_t tag, uint64_t nbytes, bint limited) noexcept nogil
cdef void journal_reset_peaks(Journal* journal) noexcept nogil

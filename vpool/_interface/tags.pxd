"""Tags: names for what blocks are for."""
from libc.stdint cimport uint16_t

from vpool._management.journal cimport journal_set_tag, journal_tag


cdef inline uint16_t enter_tag(uint16_t tag) noexcept nogil:
    """Give the calling thread a tag if it has none; what it had, for `journal_set_tag`."""
    cdef uint16_t before = journal_tag()
    if before == 0:
        journal_set_tag(tag)
    return before

"""What a recording does to its pool: events on and off, and what became of them."""
from libc.stdint cimport uint8_t, uint64_t

from vpool._base.clock cimport now_ns
from vpool._interface.events cimport copy_events
from vpool._interface.lender cimport Lender
from vpool._interface.snapshot cimport copy_records
from vpool._management.journal cimport (
    EVENT_MARK,
    journal_close,
    journal_note,
    journal_open,
    journal_stop,
)
from vpool._management.noted cimport noted_switch
from vpool._management.walk cimport PieceCopy, walk_pieces

import numpy as np

from vpool._interface.tags import name_of
from vpool.errors import Error

_PIECE_DTYPE = np.dtype([("address", "u8"), ("nbytes", "u8")])


cdef class Recorder:
    """The ring of one pool, for one recording at a time."""

    def __cinit__(self, Lender pool not None):
        self.pool = pool

    @property
    def name(self):
        """Of the pool."""
        return self.pool.name

    @property
    def running(self):
        """Whether events are recorded now."""
        return self.pool.areas.journal.recording

    def start(self, uint64_t capacity, sites):
        """Record from now on, into a ring of `capacity` events, a power of two.

        `sites` numbers the places that allocate, or is None.  Gives the time in nanoseconds.
        """
        cdef bint opened
        self.pool.must_be_open()
        if self.pool.areas.journal.ring != NULL:
            raise Error(f"pool {self.pool.name!r} is being recorded already: one recording at a time")
        with nogil:
            opened = journal_open(&self.pool.areas.journal, capacity)
        if not opened:
            raise MemoryError(f"no address space for a ring of {capacity} events")
        self.pool.sites = sites
        if not noted_switch(self.pool.areas, True):
            self.close()
            raise MemoryError("no address space to count by tag")
        return now_ns()

    def mark(self):
        """Note that a step begins."""
        self.pool.must_be_mine()
        with nogil:
            journal_note(&self.pool.areas.journal, EVENT_MARK, 0, 0, 0, 0, 0, 0)

    def stop(self):
        """Record nothing more; what is live, as a pool's records say, and all events that are still there.

        Returns
        -------
        tuple
            The records; the number of the first event that is still there, and an array of all from there on; and
            where the mapped range has memory, as `pieces`.
        """
        self.pool.must_be_mine()
        # What waits in quarantine is live as far as events are concerned.
        records = copy_records(self.pool.areas, self.pool.name)
        pieces = self.pieces()
        with nogil:
            journal_stop(&self.pool.areas.journal)
        noted_switch(self.pool.areas, False)
        self.pool.sites = None
        return records, copy_events(self.pool.areas), pieces

    def pieces(self):
        """Where the mapped range of a pool on virtual memory has memory.

        Returns
        -------
        tuple
            Address of the range, 0 where there is none; number of the event up to which this is so; and an array of
            `address`, 0 of what is mapped nowhere, and `nbytes`.
        """
        cdef uint64_t capacity = 0
        cdef uint64_t count = 1
        cdef uint64_t span, noted
        cdef uint8_t[::1] piece_bytes
        while count > capacity:
            # Memory is taken outside the turn: a collection may drop buffers, which may take it.
            capacity = count + count // 8 + 16
            pieces = np.empty(capacity, _PIECE_DTYPE)
            piece_bytes = pieces.view(np.uint8)
            with nogil:
                count = walk_pieces(self.pool.areas.core, <PieceCopy*> &piece_bytes[0], capacity, &span, &noted)
        return span, noted, pieces[:count]

    def close(self):
        """Give the ring back; a child of the pool's process leaves it to its parent."""
        if self.pool.forked:
            return
        with nogil:
            journal_close(&self.pool.areas.journal)
        noted_switch(self.pool.areas, False)
        self.pool.sites = None

    def tag_names(self, numbers):
        """What the numbers of tags mean."""
        return [name_of(number) or "" for number in numbers]

    def fixed_span(self):
        """Address and bytes of the pool's fixed core; no bytes where it has none."""
        return self.pool.areas.fixed_address, self.pool.areas.fixed_bytes

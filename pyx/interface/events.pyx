"""The events of a pool that are in its ring now, and what they tell of its blocks."""
import numpy as np

from libc.stdint cimport uint8_t, uint64_t

from vpool._base.clock cimport now_ns
from vpool._base.lock cimport atomic_read
from vpool._management.areas cimport Areas
from vpool._management.journal cimport Event, Journal, journal_copy

from vpool.recording import EVENT_DTYPE, live_origins

cdef enum:
    SLICE = 4096                  # events copied while the lock is held once


cdef tuple copy_events(Areas areas):
    """The number of the first event that is still there, and an array of all from there on.

    Holds the ring's lock for some microseconds at a time; what is overwritten meanwhile is left out.
    """
    cdef Journal* journal = &areas.journal
    cdef uint64_t count = atomic_read(journal.count)
    cdef uint64_t first = count - journal.capacity if count > journal.capacity else 0
    cdef uint64_t done = 0
    cdef uint64_t begin = first
    cdef uint64_t copied, part
    cdef uint8_t[::1] view
    if journal.ring == NULL:
        return 0, np.zeros(0, EVENT_DTYPE)
    events = np.empty(count - first + 1, EVENT_DTYPE)
    view = events.view(np.uint8)
    while first + done < count:
        with nogil:
            part = min(<uint64_t> SLICE, count - first - done)
            copied = journal_copy(journal, first + done, part, <Event*> &view[done * sizeof(Event)])
        done += copied if copied else part
        if copied == 0:
            begin = first + done
    return begin, events[begin - first:done]


cdef tuple read_origins(Areas areas, sites, debugger, blocks):
    """Sites, and for each block the index of its own and its age in microseconds, as far as they are known."""
    site = np.zeros(len(blocks), np.uint32)
    age = np.full(len(blocks), -1, np.int64)
    texts = [""]
    if areas.journal.recording:
        _, events = copy_events(areas)
        origin = live_origins(events, blocks)
        known = origin >= 0
        site[known] = events["site"][origin[known]]
        age[known] = (now_ns() - events["time_ns"][origin[known]]).astype(np.int64) // 1000
        if sites is not None:
            texts = list(sites.texts)
        site[site >= len(texts)] = 0
    if debugger is not None:
        debugger.fill_origins(blocks["address"], texts, site, age)
    return texts, site, age

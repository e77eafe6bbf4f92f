"""Recordings: what happens in a pool while it is watched, as a trace."""

import itertools
import operator

import numpy as np

from vpool.arrays import among
from vpool.details import Details, Runs, SegmentEvents
from vpool.sites import Sites
from vpool.sizes import plural
from vpool.trace import ALLOCATE, FREE, Trace

__all__ = ["EVENT_DTYPE", "Recording", "checked_capacity", "live_origins"]

# The layout of an event in the ring.
EVENT_DTYPE = np.dtype(
    [
        ("time_ns", np.uint64),
        ("address", np.uint64),
        ("nbytes", np.uint64),
        ("requested", np.uint64),
        ("thread", np.uint32),
        ("site", np.uint32),
        ("slot", np.uint16),
        ("tag", np.uint16),
        ("kind", np.uint32),
    ]
)
FAILURE, RESERVE, RELEASE, MARK, MAP, UNMAP = 2, 3, 4, 5, 6, 7  # kinds of events, beyond those that a trace has

_MOST_EVENTS = 1 << 28


def checked_capacity(events):
    """Events that a ring shall hold, a power of two."""
    number = operator.index(events)
    if isinstance(events, bool) or not 0 < number <= _MOST_EVENTS:
        raise ValueError(f"a recording holds 1 to {_MOST_EVENTS:,} events, not {events!r}")
    return 1 << (number - 1).bit_length()


class Recording(Trace):
    """A trace of what happens to one pool within a ``with`` block.  Made by `Pool.record`.

    It is empty within the block and complete after it.  Blocks that were live before are its first
    allocations, at time 0.  `details` tells more of each event than other traces know.

    Where more happens than the ring holds the oldest events are lost; `notes` says how many.
    """

    def __init__(self, recorder, capacity, sites):
        super().__init__(*[np.zeros(0, np.int64)] * 5)
        self._recorder = recorder
        self._capacity = checked_capacity(capacity)
        self._sites = Sites(*sites) if sites else None
        self._began: int | None = None
        self._running = False

    def __enter__(self):
        if self._began is not None:
            raise RuntimeError("a recording can be entered once: call pool.record() again")
        self._began = self._recorder.start(self._capacity, self._sites)
        self._running = True
        return self

    def __exit__(self, *exc_info):
        if not self._running:  # the pool may have another one by now
            raise RuntimeError("this recording is not going on")
        self._running = False
        try:
            (figures, blocks, held), (first, events), pieces = self._recorder.stop()
            spans = [(self._recorder.fixed_span(), figures.get("fixed_noted", 0)), ((0, 2**64), figures["noted"])]
            began, name = self._began, self._recorder.name
            parts = _arrays(first, events, blocks, figures["slots"], held, pieces, spans, began, name)
            sites = self._sites.texts if self._sites else [""]
            parts["details"] = parts["details"].named(self._recorder.tag_names, sites)
            super().__init__(**parts)
        finally:
            self._recorder.close()

    def mark(self):
        """Note that a step begins here: an entry of `marks_us`."""
        self._recorder.mark()


def _arrays(first, events, blocks, slots, held, pieces, spans, began, name):
    """The parameters of a trace, from events, the first of which has a number, and a pool's blocks at the end.

    `spans` are pairs of an address range and the number of events up to which the blocks in it are known; the first
    range that holds an address counts.
    """
    number = first + np.arange(len(events), dtype=np.int64)
    until = np.full(len(events), spans[-1][1], np.int64)
    (address, nbytes), noted = spans[0]
    until[(events["address"] - np.uint64(address)) < np.uint64(nbytes)] = noted
    span, known, mapped = pieces
    until[events["kind"] >= MAP] = known
    held = held[held["address"] != span]
    late = events[(number >= until) & (events["kind"] == ALLOCATE)]
    events = events[number < until]
    notes = []
    if first:
        lost = f"{plural(first, 'event')} at the beginning {'is' if first == 1 else 'are'} lost"
        notes.append(f"{lost}: the ring holds {len(events):,}")
    kinds = events["kind"]
    of_blocks = np.flatnonzero(kinds <= FREE)
    pairs = events[of_blocks]
    keep, closes, before = _paired(pairs)
    if not keep.all():
        again = int(np.count_nonzero(~keep))
        is_left_out = f"{'is' if again == 1 else 'are'} left out"
        notes.append(f"{plural(again, 'free')} of what another thread had freed already {is_left_out}")
    # What was live before: frees without an allocation, and what is live and was never allocated here.
    old = pairs[before]
    there = among(blocks["state"], ("live", "suspended")) & ~_touches(blocks, pairs, late)
    live = blocks[there]
    initial = np.zeros(len(old) + len(live), EVENT_DTYPE)
    initial[: len(old)] = old
    for field, given in (("address", "address"), ("nbytes", "nbytes"), ("requested", "requested"), ("tag", "tag")):
        initial[field][len(old) :] = live[given]
    initial["slot"][len(old) :] = slots[there]
    initial["kind"], initial["site"], initial["thread"], initial["time_ns"] = ALLOCATE, 0, 0, began
    initial = initial[np.argsort(initial["address"], kind="stable")]
    if len(initial):
        were = "was" if len(initial) == 1 else "were"
        # Of blocks whose allocation may be lost nobody knows whether they are older than the recording.
        whence, begins = ("where what is left of", "begins") if first else ("when", "began")
        notes.append(f"{plural(len(initial), 'block')} {were} live {whence} the recording of pool {name!r} {begins}")
    # One row an event of the trace: the initial blocks, then what was kept, with frees that nobody saw before it.
    body = np.repeat(pairs, 1 + closes)
    extra = np.zeros(len(body), bool)
    extra[(np.cumsum(1 + closes) - 1 - closes)[closes > 0]] = True
    body["kind"][extra] = FREE
    keep = np.repeat(keep, 1 + closes)
    place = np.repeat(of_blocks, 1 + closes)[keep]
    rows = np.concatenate([initial, body[keep]])
    return _trace_of(rows, place, len(initial), events, held, mapped, began, notes)


def _trace_of(rows, place, initial, events, held, mapped, began, notes):
    """The parameters of a trace from its rows; `place` is where each of them, but the initial ones, was in `events`."""
    ids, sizes, allocated = _numbered(rows)
    start = began if initial else int(rows["time_ns"][0]) if len(rows) else began
    time = (rows["time_ns"].astype(np.int64) - start) // 1000

    def since(kind):
        return (events["time_ns"][events["kind"] == kind].astype(np.int64) - start) // 1000

    def before(kinds):
        """The event of the trace before which those of some kinds came."""
        return initial + np.searchsorted(place, np.flatnonzero(among(events["kind"], kinds)))

    def changes(there, came, went):
        moved = events[among(events["kind"], (came, went))]
        signed = np.where(moved["kind"] == came, 1, -1) * moved["requested"].astype(np.int64)  # with what lies beside
        return _changes(there, before((came, went)), moved["address"], signed)

    failed = events[events["kind"] == FAILURE]
    whole, pieces = changes(held, RESERVE, RELEASE), changes(mapped, MAP, UNMAP)
    moved = [np.concatenate(both) for both in zip(whole, _runs(*pieces), strict=True)]
    order = np.argsort(moved[0], kind="stable")
    segments = SegmentEvents(*(column[order] for column in moved))
    details = Details(rows["address"], allocated, rows["tag"], rows["site"], rows["thread"], [""], [""], segments)
    return {
        "op": (rows["kind"] == FREE).astype(np.uint8),
        "id": ids,
        "bytes": sizes,
        "stream": rows["slot"],
        "t_us": time,
        "marks_us": since(MARK),
        "notes": notes,
        "failures": np.column_stack((before(FAILURE), failed["requested"].astype(np.int64))),
        "details": details,
    }


def _changes(held, events, addresses, signed):
    """The changes of segments, those first that were there from the beginning; `held` are those at the end.

    Returns
    -------
    tuple of array
        Event, address, and bytes, which are negative for a segment that went.
    """
    there: dict[int, int] = {}
    now = zip(held["address"].tolist(), held["nbytes"].tolist(), strict=True)
    undone = zip(addresses[::-1].tolist(), (-signed[::-1]).tolist(), strict=True)
    for address, nbytes in (*now, *undone):
        there[address] = there.get(address, 0) + nbytes
        if there[address] == 0:
            del there[address]
    return (
        np.concatenate((np.zeros(len(there), np.int64), events)),
        np.concatenate((np.array(list(there), np.uint64), addresses)),
        np.concatenate((np.array(list(there.values()), np.int64), signed)),
    )


def _runs(*pieces):
    """The changes of segments by those of pieces: pieces side by side are one, since blocks lie across them.

    Of all that comes and goes before one event only what is different after it.
    """
    runs = Runs()
    changes = []
    rows = zip(*(column.tolist() for column in pieces), strict=True)
    for event, moved in itertools.groupby(rows, operator.itemgetter(0)):
        net: dict[tuple, int] = {}
        for _, address, nbytes in moved:
            for begin, size in runs.change(address, nbytes):
                segment = begin, abs(size)
                net[segment] = net.get(segment, 0) + (1 if size > 0 else -1)
        for sign in (-1, 1):
            changes += [(event, begin, sign * size) for (begin, size), change in net.items() if change == sign]
    kinds = (np.int64, np.uint64, np.int64)
    return [np.array([row[column] for row in changes], kind) for column, kind in enumerate(kinds)]


def _paired(pairs):
    """Which events to keep; before which of them a free is missing; and which frees lack an allocation.

    At one address allocations and frees take turns, if nobody frees what another thread is freeing.
    """
    order = np.argsort(pairs["address"], kind="stable")
    address, kind = pairs["address"][order], pairs["kind"][order]
    first = np.ones(len(pairs), bool)
    first[1:] = address[1:] != address[:-1]
    again = np.zeros(len(pairs), bool)
    again[1:] = ~first[1:] & (kind[1:] == kind[:-1])
    keep = np.ones(len(pairs), bool)
    closes = np.zeros(len(pairs), np.int64)
    keep[order] = ~(again & (kind == FREE))
    closes[order] = again & (kind == ALLOCATE)
    before = np.zeros(len(pairs), bool)
    before[order] = first & (kind == FREE)
    return keep, closes, before


def _touches(blocks, pairs, late):
    """Which blocks lie where events were: those are not older than the events.

    A block whose allocation came after the blocks were looked at is in `late`.
    """
    events = np.concatenate([pairs, late])
    if not len(events):
        return np.zeros(len(blocks), bool)
    order = np.argsort(events["address"], kind="stable")
    begins = events["address"][order]
    ends = np.maximum.accumulate(begins + events["nbytes"][order])
    last = np.searchsorted(begins, blocks["address"] + blocks["nbytes"], side="left") - 1
    return (last >= 0) & (ends[np.maximum(last, 0)] > blocks["address"])


def _numbered(rows):
    """Numbers in the order of birth, and requested and allocated bytes of each row; frees have their allocation's."""
    ids = np.zeros(len(rows), np.uint32)
    births = rows["kind"] == ALLOCATE
    ids[births] = np.arange(np.count_nonzero(births), dtype=np.uint32)
    # At one address a free stands right behind its allocation.
    order = np.argsort(rows["address"], kind="stable")
    frees = np.flatnonzero(~births[order])
    sizes, allocated = rows["requested"].copy(), rows["nbytes"].copy()
    for array in (ids, sizes, allocated):
        array[order[frees]] = array[order[frees - 1]]
    return ids, sizes, allocated


def live_origins(events, blocks):
    """For each block the event that allocated it, as an index into `events`, or -1 where there is none."""
    births = np.flatnonzero(events["kind"] == ALLOCATE)
    order = births[np.argsort(events["address"][births], kind="stable")]
    addresses = events["address"][order]
    last = np.searchsorted(addresses, blocks["address"], side="right") - 1
    found = (last >= 0) & among(blocks["state"], ("live", "suspended"))
    found &= addresses[np.maximum(last, 0)] == blocks["address"] if len(order) else False
    return np.where(found, order[np.maximum(last, 0)] if len(order) else -1, -1)

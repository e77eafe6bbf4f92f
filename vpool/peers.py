"""Models of other pools' policies: what PyTorch, RMM and CuPy would reserve for a trace, without a device.

Each model is the peer's published rules over addresses that nobody owns: sizes, splits, merges, the order of
its free lists, and what it does when the device refuses.  Rules and constants are those of PyTorch 2.11
(``c10/cuda/CUDACachingAllocator.cpp``), RMM 26.10 (``pool_memory_resource``) and CuPy 14.2
(``cupy/cuda/memory.pyx``) in their default settings.  Not modelled: where the driver places a segment
(here always above the ones before it, with a gap), time, and frees that other streams delay: as in `replay`,
a free is complete at its event.
"""

from collections import defaultdict
from dataclasses import asdict, dataclass

from vpool.ranges import Ranges, Space
from vpool.sizes import parse_size
from vpool.trace import Trace

__all__ = ["PEERS", "Cupy", "Peer", "PeerResult", "RmmPool", "Torch", "TorchExpandable", "simulate"]

MIB = 1 << 20
# Between segments, so that ranges of two of them are never neighbours.
_GAP = MIB
# Events between two calls of the progress function.
_CHUNK = 1 << 16


@dataclass(frozen=True)
class PeerResult:
    """What a peer's model did with one trace.

    Attributes
    ----------
    peak_live_bytes, peak_reserved_bytes : int
        The most requested bytes that are live at once; the most that the peer held, over all passes.
    reserved_over_live : float
        peak reserved / peak live; 0 where nothing is ever live.
    source_calls : int
        Segments (with expandable segments: pages) asked of the device and given back, refused ones counted,
        over all passes.
    waited : int
        Requests that waited for such calls.
    external_fragmentation, internal_fragmentation, utilization : float
        As in `Report`, at the moment of the first pass when the most bytes are live, or when it ran out of
        memory.
    oom : dict or None
        ``event``, ``requested`` and ``live_bytes`` of the request that failed.
    """

    peak_live_bytes: int
    peak_reserved_bytes: int
    reserved_over_live: float
    source_calls: int
    waited: int
    external_fragmentation: float
    internal_fragmentation: float
    utilization: float
    oom: dict | None

    def to_dict(self):
        """Every attribute, as plain Python types."""
        return asdict(self)


class Peer:
    """A model: blocks in, blocks out, and what is reserved for them.

    Parameters
    ----------
    capacity : int, optional
        Bytes that the device has; without it there is no end to them.

    Attributes
    ----------
    title : str
        Its name in tables.
    reserved, peak : int
        Bytes held now, and the most so far.
    source_calls, waited : int
        As in `PeerResult`.
    """

    title = ""

    def __init__(self, capacity=None):
        self.capacity = capacity
        self.reserved = self.peak = 0
        self.source_calls = self.waited = 0
        self._top = 0
        self._segments = {}
        self._ranges = defaultdict(Ranges)

    def allocate(self, nbytes, stream):
        """A block ``(ranges, address, size)`` for a request, or None where the device has no more memory."""
        raise NotImplementedError

    def free(self, block, stream):
        """Take a block back; it returns to where it was allocated, whichever stream frees it."""
        ranges, address, size = block
        ranges.put(address, size)

    def free_ranges(self):
        """Sizes in bytes of all free ranges."""
        return [size for ranges in self._ranges.values() for size in ranges.sizes.values()]

    def _ask(self, nbytes):
        """Ask the device for memory; False where it has no more."""
        self.source_calls += 1
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            return False
        self.reserved += nbytes
        self.peak = max(self.peak, self.reserved)
        return True

    def _segment(self, nbytes):
        """A new segment as its address and size, or None."""
        if not self._ask(nbytes):
            return None
        address = self._top
        self._top += nbytes + _GAP
        self._segments[address] = nbytes
        return address, nbytes

    def _segment_or_retry(self, nbytes):
        """The same; where the device refuses, once more after every unused segment was given back."""
        self.waited += 1
        return self._segment(nbytes) or (self._release() and self._segment(nbytes)) or None

    def _release(self):
        """Give back the segments of which nothing is in use; False where there is none."""
        before = self.reserved
        for ranges in self._ranges.values():
            for address, size in list(ranges.sizes.items()):
                if self._segments.get(address) == size:
                    ranges.remove(address)
                    del self._segments[address]
                    self.reserved -= size
                    self.source_calls += 1
        return self.reserved < before


class Torch(Peer):
    """PyTorch's caching allocator.

    Sizes are whole 512 bytes.  Requests up to 1 MiB are cut from segments of 2 MiB, others below 10 MiB from
    segments of 20 MiB, and larger ones get segments of whole 2 MiB; each stream has free lists of its own for
    either kind.  A small block is always split, a large one only where more than 1 MiB is left over.  What is
    free stays cached until the device refuses; then unused segments are given back.
    """

    title = "PyTorch"
    granule = 512
    small = MIB
    small_segment, large_segment, exact_from = 2 * MIB, 20 * MIB, 10 * MIB

    def allocate(self, nbytes, stream):
        """See `Peer.allocate`."""
        size = -(-nbytes // self.granule) * self.granule
        small = size <= self.small
        ranges = self._ranges[stream, small]
        found = ranges.take(size) or self._segment_or_retry(self._segment_size(size))
        if found is None:
            return None
        address, whole = found
        rest = whole - size
        if rest > self.small or (small and rest):
            ranges.add(address + size, rest)
            return ranges, address, size
        return ranges, address, whole

    def _segment_size(self, size):
        if size <= self.small:
            return self.small_segment
        return self.large_segment if size < self.exact_from else -(-size // self.small_segment) * self.small_segment


class TorchExpandable(Peer):
    """PyTorch's caching allocator with ``expandable_segments:True``.

    Each stream has one growing segment for requests up to 1 MiB, mapped in pages of 2 MiB, and one for larger
    requests, in pages of 20 MiB.  A request that no free range serves extends the free range before the
    lowest hole with room.  Every block is split to whole 512 bytes.  When the device refuses, every page that
    is free is unmapped.
    """

    title = "PyTorch expandable"
    granule = 512
    small = MIB
    small_page, large_page = 2 * MIB, 20 * MIB

    def allocate(self, nbytes, stream):
        """See `Peer.allocate`."""
        size = -(-nbytes // self.granule) * self.granule
        small = size <= self.small
        space = self._ranges.get((stream, small))
        if space is None:
            space = self._ranges[stream, small] = Space(self.small_page if small else self.large_page)
        found = space.take(size) or self._grow_or_retry(space, size)
        if found is None:
            return None
        address, whole = found
        if whole > size:
            space.add(address + size, whole - size)
        return space, address, size

    def _grow_or_retry(self, space, size):
        self.waited += 1
        found = self._grow(space, size)
        if found is None and self._release():
            found = self._grow(space, size)
        return found

    def _grow(self, space, size):
        address = space.candidate(size)
        while (free := space.sizes.get(address, 0)) < size:
            if not self._map(space, address + free, size - free):
                return None
        return address, space.remove(address)

    def _map(self, space, address, size):
        """Map what is missing of a hole; all of it or nothing."""
        hole = space.holes.sizes[address]
        nbytes = min(-(-size // space.page) * space.page, hole)
        if not self._ask(nbytes):
            return False
        self.source_calls += nbytes // space.page - 1
        space.holes.remove(address)
        if hole > nbytes:
            space.holes.add(address + nbytes, hole - nbytes)
        space.put(address, nbytes)
        return True

    def _release(self):
        before = self.reserved
        for space in self._ranges.values():
            freed = space.unmap()
            self.reserved -= freed
            self.source_calls += freed // space.page
        return self.reserved < before


class RmmPool(Peer):
    """RMM's ``pool_memory_resource`` without a maximum size.

    Sizes are whole 256 bytes, and blocks always split.  What a stream frees is in that stream's list.  A
    request looks there, then takes from other streams' lists, then merges those lists into its own one by
    one.  After that the pool grows by as much as it has, or by the request if that is more; where the device
    refuses, by half of that, down to the request.  Nothing is ever given back.

    Parameters
    ----------
    capacity : int, optional
        As in `Peer`.
    initial : int
        Bytes of the first segment.  RMM's default is half of the device's free memory, which says nothing
        about a workload; 256 MiB lets the pool's growth show what it needs.
    """

    title = "RMM pool"
    granule = 256

    def __init__(self, capacity=None, initial=256 * MIB):
        super().__init__(capacity)
        if capacity is not None:
            initial = min(initial, capacity // self.granule * self.granule)
        if initial:
            # It belongs to the default stream, which is none of the trace's.
            self._ranges[None].add(*self._segment(initial))

    def allocate(self, nbytes, stream):
        """See `Peer.allocate`."""
        size = -(-nbytes // self.granule) * self.granule
        own = self._ranges[stream]
        ranges, found = own, own.take(size)
        if found is None:
            ranges, found = self._from_others(own, size)
        if found is None:
            return None
        address, whole = found
        if whole > size:
            ranges.add(address + size, whole - size)
        return ranges, address, size

    def free(self, block, stream):
        """Take a block back into the list of the stream that frees it."""
        _, address, size = block
        self._ranges[stream].put(address, size)

    def _from_others(self, own, size):
        """Ranges to put the rest into, and what was found."""
        others = [ranges for ranges in self._ranges.values() if ranges is not own]
        for ranges in others:
            found = ranges.take(size)
            if found:
                return ranges, found
        for ranges in others:
            for address, free in ranges.drain():
                own.put(address, free)
            found = own.take(size)
            if found:
                return own, found
        return own, self._grow(size)

    def _grow(self, size):
        self.waited += 1
        nbytes = max(size, self.reserved)
        while not (found := self._segment(nbytes)):
            if nbytes == size:
                return None
            nbytes = max(size, nbytes // 2)
        return found


class Cupy(Peer):
    """CuPy's ``MemoryPool``.

    Sizes are whole 512 bytes, and blocks always split.  Each stream has free lists of its own, by size; a
    request that none serves gets a segment of exactly its size.  When the device refuses, unused segments are
    given back.  Which of several equal ones CuPy takes depends on where Python put its objects; here it is
    that at the lowest address.
    """

    title = "CuPy"
    granule = 512

    def allocate(self, nbytes, stream):
        """See `Peer.allocate`."""
        size = -(-nbytes // self.granule) * self.granule
        ranges = self._ranges[stream]
        found = ranges.take(size) or self._segment_or_retry(size)
        if found is None:
            return None
        address, whole = found
        if whole > size:
            ranges.add(address + size, whole - size)
        return ranges, address, size


PEERS = {"torch": Torch, "torch_expandable": TorchExpandable, "rmm_pool": RmmPool, "cupy": Cupy}


def simulate(trace, peer, capacity=None, passes=1, progress=None):
    """Run a trace through a peer's model.

    What is live at the end of a pass is freed before the next.  Requests of 0 bytes cost nothing: no peer
    gives them a block.

    Parameters
    ----------
    trace : Trace
    peer : str
        A name of `PEERS`.
    capacity : int or str, optional
        Bytes that the device has; without it there is no end to them.
    passes : int
        How often the trace is run through the same pool.
    progress : callable, optional
        Called now and then with the events done and the events in all.

    Returns
    -------
    PeerResult

    Raises
    ------
    ValueError, TypeError, OverflowError
        Where peer or numbers make no sense.

    Notes
    -----
    O(n log m) for n events and m free ranges, about a microsecond an event.
    """
    if not isinstance(trace, Trace):
        raise TypeError(f"trace must be a vpool.Trace, not {type(trace).__name__}")
    if peer not in PEERS:
        raise ValueError(f"no model of {peer!r}; there are {', '.join(PEERS)}")
    if passes < 1:
        raise ValueError(f"passes must be at least 1, got {passes}")
    if capacity is not None:
        capacity = parse_size(capacity, "capacity")
        if capacity == 0:
            raise ValueError("capacity must not be 0 bytes")
    model = PEERS[peer](capacity)
    return _Run(trace, model, passes, progress).result()


class _Run:
    """The passes of one trace through a model."""

    def __init__(self, trace, model, passes, progress):
        self.trace = trace
        self.model = model
        self.passes = passes
        self.progress = progress
        self.events = (trace.op.tolist(), trace.number.tolist(), trace.bytes.tolist(), trace.stream.tolist())
        self.blocks: list = [None] * trace.allocations
        self.worst = (0.0, 0.0, 0.0)
        self.oom = None

    def result(self):
        peak = self.trace.peak_event + 1
        for number in range(self.passes):
            if self._run(number, 0, peak):
                if number == 0:
                    self.worst = self._fragmentation(peak - 1)
                self._run(number, peak, len(self.trace))
            if self.oom is not None:
                break
            self._free_all()
        live, model = self.trace.peak_live_bytes, self.model
        external, internal, utilization = self.worst
        return PeerResult(
            peak_live_bytes=live,
            peak_reserved_bytes=model.peak,
            reserved_over_live=model.peak / live if live else 0.0,
            source_calls=model.source_calls,
            waited=model.waited,
            external_fragmentation=external,
            internal_fragmentation=internal,
            utilization=utilization,
            oom=self.oom,
        )

    def _run(self, number, begin, end):
        """A range of events; False where the device had no memory for one of them."""
        for start in range(begin, end, _CHUNK):
            stop = min(end, start + _CHUNK)
            failed = self._run_chunk(start, stop)
            if failed is not None:
                live = int(self.trace.live_bytes[failed - 1]) if failed else 0
                self.oom = {"event": failed, "requested": int(self.trace.bytes[failed]), "live_bytes": live}
                self.worst = self._fragmentation(failed - 1)
                return False
            if self.progress:
                self.progress(number * len(self.trace) + stop, self.passes * len(self.trace))
        return True

    def _run_chunk(self, start, stop):
        """The event that failed, or None."""
        blocks, allocate, free = self.blocks, self.model.allocate, self.model.free
        chunk = (column[start:stop] for column in self.events)
        for event, (is_free, number, nbytes, stream) in enumerate(zip(*chunk, strict=True), start):
            if is_free:
                if nbytes:
                    free(blocks[number], stream)
                    blocks[number] = None
            elif nbytes:
                block = blocks[number] = allocate(nbytes, stream)
                if block is None:
                    return event
        return None

    def _free_all(self):
        """Free what the trace leaves alive, each block on the stream that it was allocated on."""
        op, numbers, _, streams = self.events
        for is_free, number, stream in zip(op, numbers, streams, strict=True):
            if not is_free and self.blocks[number] is not None:
                self.model.free(self.blocks[number], stream)
                self.blocks[number] = None

    def _fragmentation(self, event):
        """External and internal fragmentation and utilization after an event."""
        free = self.model.free_ranges()
        allocated = sum(block[2] for block in self.blocks if block is not None)
        live = int(self.trace.live_bytes[event]) if event >= 0 else 0
        return (
            1 - max(free) / sum(free) if free else 0.0,
            1 - live / allocated if allocated else 0.0,
            allocated / self.model.reserved if self.model.reserved else 0.0,
        )

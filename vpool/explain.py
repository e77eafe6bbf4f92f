"""What is at an address: `vpool.explain`."""

import operator
from dataclasses import dataclass, field

import numpy as np

from vpool._interface.lender import may_have, pools_and_closed
from vpool.sizes import format_bytes
from vpool.tables import printable

__all__ = ["Explanation", "Neighbour", "explain"]


@dataclass(frozen=True)
class Neighbour:
    """A block beside the one that was asked for."""

    address: int
    nbytes: int
    state: str
    tag: str | None
    site: str | None

    def __str__(self):
        tag = "" if self.tag is None else f", tag {self.tag!r}"
        site = "" if self.site is None else f", from {printable(self.site)}"
        return f"{self.state}, {format_bytes(self.nbytes)} at {self.address:#x}{tag}{site}"


@dataclass(frozen=True)
class Explanation:
    """What is known of an address.  Its text is for people.

    Attributes
    ----------
    ptr : int
        The address that was asked for.
    pool : str or None
        Name of the pool that has it; None where none has, and then nothing below is known.
    state : str
        ``"live"``, ``"free"``, ``"pending"``, ``"unmapped"`` or ``"suspended"``; ``"foreign"`` where no pool has the
        address, and ``"edge"`` where it lies in a segment, outside all blocks.
    address, nbytes, requested : int
        Of the block: where it begins, its bytes, and those that were asked for.
    offset : int
        Bytes from its start to `ptr`.
    stream : int
        Handle of the stream that it was allocated for, or freed on.
    tag, site : str or None
        What it is for, and the line that asked for it; None where nobody knows.
    age_seconds : float or None
        Since it was lent; None where nobody knows.
    segment : tuple of int or None
        Address and bytes of its segment.
    before, after : Neighbour or None
        The blocks beside it in the segment.
    """

    ptr: int
    pool: str | None = None
    state: str = "foreign"
    address: int = 0
    nbytes: int = 0
    requested: int = 0
    offset: int = 0
    stream: int = 0
    tag: str | None = None
    site: str | None = None
    age_seconds: float | None = None
    segment: tuple[int, int] | None = None
    before: Neighbour | None = None
    after: Neighbour | None = None
    searched: tuple[str, ...] = field(default=(), repr=False)

    def __str__(self):
        if self.state == "foreign":
            pools = ", ".join(repr(name) for name in self.searched[:8]) or "none"
            if len(self.searched) > 8:
                pools += f" and {len(self.searched) - 8} more"
            return f"{self.ptr:#x} is foreign: no pool of this process has it (pools: {pools})"
        lines = [f"{self.ptr:#x} is in pool {self.pool!r}: {self._what()}"]
        if self.segment:
            lines.append(f"  segment  {format_bytes(self.segment[1])} at {self.segment[0]:#x}, stream {self.stream:#x}")
        if self.state == "live":
            lines.append(f"  tag      {'none' if self.tag is None else repr(self.tag)}")
            unknown = 'not known; pool.record(sites=True) or debug="sites" tell'
            lines.append(f"  site     {unknown if self.site is None else printable(self.site)}")
            age = unknown if self.age_seconds is None else f"{self.age_seconds:.3f} s"
            lines.append(f"  age      {age}")
        lines.append(f"  before   {'nothing: the segment begins' if self.before is None else self.before}")
        lines.append(f"  after    {'nothing: the segment ends' if self.after is None else self.after}")
        return "\n".join(lines)

    def _what(self):
        if self.state == "edge":
            return "at an end of a segment that no block covers"
        where = "the start of" if self.offset == 0 else f"{self.offset:,} bytes inside"
        asked = f" ({self.requested:,} asked for)" if self.state == "live" else ""
        return f"{where} a {self.state} block of {self.nbytes:,} bytes at {self.address:#x}{asked}"


def explain(ptr):
    """Tell what is at an address: whose it is, what it is for, who asked for it, and what is beside it.

    Parameters
    ----------
    ptr : int-like or Buffer
        Any address; it need not be the start of a block.

    Returns
    -------
    Explanation
        Its text says it; ``state`` is ``"foreign"`` where no pool of this process has the address.

    Raises
    ------
    TypeError, ValueError
        For what is no address.

    Notes
    -----
    O(segments) of all pools and O(blocks) of those that have the address, or whose memory moves, until one uses it.
    Simulated pools may have the same addresses: the one that uses it is meant, else the one that was made first.

    Examples
    --------
    >>> import vpool
    >>> pool = vpool.Pool(source="host", name="mine")
    >>> ptr = pool.allocate(1000)
    >>> found = vpool.explain(ptr + 10)
    >>> found.pool, found.state, found.offset, found.requested
    ('mine', 'live', 10, 1000)
    """
    found = ptr if hasattr(ptr, "__index__") else getattr(ptr, "ptr", ptr)
    if isinstance(found, bool) or not hasattr(found, "__index__"):
        raise TypeError(f"an address must be an integer, not {type(found).__name__}")
    address = operator.index(found)
    if not 0 <= address < 2**64:
        raise ValueError(f"{address} is no address")
    pools = [pool for pool in pools_and_closed() if not pool.forked]
    unused = None
    for pool in pools:
        if not may_have(pool, address):
            continue
        snapshot = pool.snapshot()
        inside = (snapshot.segments["address"] <= np.uint64(address)) & (np.uint64(address) < _ends(snapshot))
        for number in np.flatnonzero(inside)[:1].tolist():
            explained = _explained(pool.name, snapshot, number, address)
            if explained.state not in ("free", "unmapped", "edge"):
                return explained
            unused = unused or explained
    return unused or Explanation(address, searched=tuple(pool.name for pool in pools))


def _explained(name, snapshot, number, address):
    segment = snapshot.segments[number]
    span = (int(segment["address"]), int(segment["nbytes"]))
    mine = np.sort(snapshot.blocks[snapshot.blocks["segment"] == number], order="address")
    index = int(np.searchsorted(mine["address"], np.uint64(address), side="right")) - 1
    if index < 0 or address >= int(mine["address"][index]) + int(mine["nbytes"][index]):
        return Explanation(address, name, "edge", stream=int(segment["stream"]), segment=span)
    block = mine[index]
    age = int(block["age_us"])
    return Explanation(
        ptr=address,
        pool=name,
        state=str(block["state"]),
        address=int(block["address"]),
        nbytes=int(block["nbytes"]),
        requested=int(block["requested"]),
        offset=address - int(block["address"]),
        stream=int(block["stream"]),
        tag=snapshot.tag_name(int(block["tag"])),
        site=snapshot.sites[int(block["site"])] or None,
        age_seconds=None if age < 0 else age / 1e6,
        segment=span,
        before=_neighbour(snapshot, mine[index - 1]) if index > 0 else None,
        after=_neighbour(snapshot, mine[index + 1]) if index + 1 < len(mine) else None,
    )


def _ends(snapshot):
    """Where each segment ends, or the last of its blocks that is somebody's or has memory; some have none."""
    ends = snapshot.segments["address"] + snapshot.segments["nbytes"]
    blocks = snapshot.blocks[snapshot.blocks["state"] != "unmapped"]
    np.maximum.at(ends, blocks["segment"], blocks["address"] + blocks["nbytes"])
    return ends


def _neighbour(snapshot, block):
    return Neighbour(
        int(block["address"]),
        int(block["nbytes"]),
        str(block["state"]),
        snapshot.tag_name(int(block["tag"])),
        snapshot.sites[int(block["site"])] or None,
    )

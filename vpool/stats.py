"""The cheap counters of a pool."""

from dataclasses import dataclass

__all__ = ["PoolStats"]


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counters of a pool at one moment, read without any lock.

    Each figure is right by itself; two of them may be a moment apart while other threads allocate.
    Sizes are in bytes.

    Attributes
    ----------
    allocated_bytes, requested_bytes : int
        Lent now: after rounding, and as asked for.
    reserved_bytes : int
        Held from the source.
    pending_bytes : int
        Freed, but some stream may still use it.
    peak_allocated_bytes, peak_reserved_bytes : int
        The highest values so far.
    allocations, frees : int
        Blocks lent and taken back.
    hits : int
        Allocations that needed no source call.
    source_calls : int
        Segments asked of the source and given back, refused ones counted.
    ooms : int
        Requests that failed.
    """

    allocated_bytes: int
    requested_bytes: int
    reserved_bytes: int
    pending_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    allocations: int
    frees: int
    hits: int
    source_calls: int
    ooms: int

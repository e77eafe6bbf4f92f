"""The cheap counters of a pool."""

from dataclasses import dataclass

__all__ = ["MemoryInfo", "PoolStats"]


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
    suspended_bytes : int
        Lent, but without memory until the pool is resumed: neither reserved nor allocated.
    peak_allocated_bytes, peak_reserved_bytes : int
        The highest values so far.  Where threads allocate at once, allocated bytes may have been higher for a moment
        (:doc:`observe`).
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
    suspended_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    allocations: int
    frees: int
    hits: int
    source_calls: int
    ooms: int


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """What an allocation could still get.  Sizes are in bytes.

    Attributes
    ----------
    device_free_bytes, device_total_bytes : int
        Of the device, as its driver tells.
    reserved_bytes : int
        Held by the pool.
    reusable_bytes : int
        Of these, free: an allocation gets them without a call to the source, though not always in one piece.
    pending_bytes : int
        Freed, and free as soon as some stream's work is complete.
    limit_bytes : int
        The most that the pool reserves.
    grows : bool
        Whether the pool asks its source for more.
    """

    device_free_bytes: int
    device_total_bytes: int
    reserved_bytes: int
    reusable_bytes: int
    pending_bytes: int
    limit_bytes: int
    grows: bool

    @property
    def growth_bytes(self):
        """What the pool may still take from its source, which its limit and the device bound."""
        if not self.grows:
            return 0
        return max(0, min(self.limit_bytes - self.reserved_bytes, self.device_free_bytes))

    @property
    def available_bytes(self):
        """What allocations could get in all, as reusable, pending and by growth."""
        return self.reusable_bytes + self.pending_bytes + self.growth_bytes

    @property
    def others_bytes(self):
        """What other pools, programs and CUDA itself have of the device."""
        return max(0, self.device_total_bytes - self.device_free_bytes - self.reserved_bytes)

"""What a trim gave back, and why the rest stayed; and the marks by which a pool trims itself."""

import numpy as np

from vpool.arrays import among
from vpool.sizes import parse_size

__all__ = ["Suspended", "Trimmed", "checked_budget", "checked_marks", "why_kept", "why_suspended"]

LIVE = "in segments with live blocks"
PENDING = "in segments that queued work may still use"
CORE = "the strategy's fixed core"
ASKED = "to be kept, as asked"
LATE = "idle, but the time was up"
ELSEWHERE = "idle, but for a capture's graph, another process, or work that cannot be asked about"
ENDS = "lost at the ends of segments"
BELOW = "on handles that suspended blocks share with others"
SHARED = "on handles that other live blocks share"
IN_USE = "on handles that queued work may still use"
REFUSED = "not taken back by the source"
OTHERS = "live and not asked for, a capture's, or allocated meanwhile"


class Trimmed(int):
    """Bytes that went back to the source.

    Attributes
    ----------
    kept : tuple of (int, str)
        Bytes that stayed reserved, and why; they add up to what is reserved, of the moment behind the trim.
    """

    kept: tuple[tuple[int, str], ...]

    def __new__(cls, released, kept):
        trimmed = super().__new__(cls, released)
        trimmed.kept = tuple(kept)
        return trimmed


class Suspended(int):
    """Bytes that went back to the source when blocks were suspended.

    Attributes
    ----------
    kept : tuple of (int, str)
        Bytes that stayed reserved, and why; they add up to what is reserved, of the moment behind it.
    """

    kept: tuple[tuple[int, str], ...]

    def __new__(cls, released, kept):
        suspended = super().__new__(cls, released)
        suspended.kept = tuple(kept)
        return suspended


def why_suspended(reserved, core, shared, in_use, refused):
    """Pairs of bytes and the reason that they are still reserved, in a fixed order; the arguments are bytes."""
    found = [(core, CORE), (shared, SHARED), (in_use, IN_USE), (refused, REFUSED)]
    found.append((max(0, reserved - sum(nbytes for nbytes, _ in found)), OTHERS))
    return [(nbytes, reason) for nbytes, reason in found if nbytes]


def why_kept(report, keep, late):
    """Pairs of bytes and the reason that they are still reserved, in a fixed order.

    Parameters
    ----------
    report : Report
        Behind the trim.
    keep : int
        Bytes that were to stay.
    late : bool
        Whether the trim ended because its time was up.

    Notes
    -----
    A segment goes back whole, so each has one reason.  O(blocks).
    """
    number, states = report.blocks["segment"], report.blocks["state"]
    count = len(report.segment_table)

    def sums(part):
        return np.bincount(number[part], report.blocks["nbytes"][part].astype(float), count).astype(np.int64)

    mapped = sums(~among(states, ("unmapped", "suspended")))
    live, pending = sums(states == "live") > 0, sums(states == "pending") > 0
    core = np.zeros(count, bool)
    core[:1] = report.core is not None
    idle = int(mapped[~(core | live | pending)].sum())
    # What else is reserved already counts towards what is kept.
    asked = min(idle, max(0, keep - report.reserved_bytes + idle))
    found = [
        (int(mapped[core].sum()), CORE),
        (int(mapped[live & ~core].sum()), LIVE),
        (int(mapped[pending & ~live & ~core].sum()), PENDING),
        (asked, ASKED),
        (idle - asked, LATE if late else ELSEWHERE),
        (report.reserved_bytes - int(mapped.sum()), BELOW if report.suspended_bytes else ENDS),
    ]
    return [(nbytes, reason) for nbytes, reason in found if nbytes]


def checked_budget(budget):
    """Nanoseconds of a budget in seconds, and None for none; TypeError or ValueError for what is none."""
    if budget is None:
        return None
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(f"budget must be a number of seconds, not {type(budget).__name__}")
    if not 0 <= budget < 2**32:
        raise ValueError(f"budget must be 0 seconds or more, got {budget}")
    return int(budget * 1e9)


def checked_marks(marks):
    """Low and high mark in bytes; TypeError or ValueError for what is none."""
    if isinstance(marks, str) or not hasattr(marks, "__len__") or len(marks) != 2:
        raise TypeError("trim_marks must be a pair of sizes, low and high")
    low, high = (parse_size(mark, "trim_marks") for mark in marks)
    if low > high:
        raise ValueError(f"the low mark, {low:,} bytes, is above the high one, {high:,}")
    return low, high

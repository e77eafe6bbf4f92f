"""What is live, by the place that asked for it."""

from typing import NamedTuple

from vpool.sizes import format_bytes, plural
from vpool.tables import printable

__all__ = ["UNKNOWN_SITE", "LeakGroup", "Leaks"]

UNKNOWN_SITE = "unknown (debug=('sites',) tells)"


class LeakGroup(NamedTuple):
    """The live blocks of one site."""

    site: str
    blocks: int
    requested_bytes: int
    allocated_bytes: int
    oldest_seconds: float | None  # age of the oldest; None where nobody kept the time
    streams: tuple[int, ...]  # handles of the streams they were allocated for


class Leaks:
    """What a pool has lent and not got back, grouped by site; the most bytes first.

    Made by `Pool.leaks`.  It is true where anything is live, and its text is for people.

    Parameters
    ----------
    name : str
        Of the pool.
    blocks : iterable of tuple
        Site, requested bytes, allocated bytes, age in seconds or None, and stream of each live block.

    Attributes
    ----------
    groups : list of LeakGroup
    blocks : int
        How many blocks are live.
    requested_bytes, allocated_bytes : int
        Of all of them.
    """

    def __init__(self, name, blocks):
        self.name = name
        by_site: dict[str, list] = {}
        for site, *figures in blocks:
            by_site.setdefault(site, []).append(figures)
        groups = [_group(site, rows) for site, rows in by_site.items()]
        self.groups = sorted(groups, key=lambda group: (-group.requested_bytes, group.site))
        self.blocks = sum(group.blocks for group in self.groups)
        self.requested_bytes = sum(group.requested_bytes for group in self.groups)
        self.allocated_bytes = sum(group.allocated_bytes for group in self.groups)

    def __bool__(self):
        return self.blocks != 0

    def __repr__(self):
        return f"<vpool leaks of {self.name!r}: {plural(self.blocks, 'block')}, {format_bytes(self.requested_bytes)}>"

    def __str__(self):
        if not self.blocks:
            return f"pool {self.name!r}: nothing is live"
        lines = [f"pool {self.name!r}: {plural(self.blocks, 'block')} live, {format_bytes(self.requested_bytes)}"]
        for group in self.groups:
            age = "" if group.oldest_seconds is None else f", oldest {group.oldest_seconds:.1f} s"
            streams = ", ".join(f"{stream:#x}" for stream in group.streams[:4])
            more = ", ..." if len(group.streams) > 4 else ""
            lines.append(
                f"{format_bytes(group.requested_bytes):>11} in {plural(group.blocks, 'block')}{age}, "
                f"stream {streams}{more}: {printable(group.site)}"
            )
        return "\n".join(lines)

    def to_dict(self):
        """Every figure in plain Python types."""
        return {
            "name": self.name,
            "blocks": self.blocks,
            "requested_bytes": self.requested_bytes,
            "allocated_bytes": self.allocated_bytes,
            "groups": [{**group._asdict(), "streams": list(group.streams)} for group in self.groups],
        }


def _group(site, rows):
    requested, allocated, ages, streams = zip(*rows, strict=True)
    known = [age for age in ages if age is not None]
    return LeakGroup(
        site, len(rows), sum(requested), sum(allocated), max(known, default=None), tuple(sorted(set(streams)))
    )

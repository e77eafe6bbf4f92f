"""Snapshots: every segment and block of a pool at one moment, kept in a file and compared with another."""

import io
import json
import time
from typing import Any

import numpy as np

from vpool.arrays import among
from vpool.details import packed_names, unpacked_names
from vpool.errors import FormatError
from vpool.files import whole_file
from vpool.formats.npz import arrays_of
from vpool.report import BLOCK_DTYPE, SEGMENT_DTYPE, Report
from vpool.sizes import format_bytes, plural
from vpool.tables import shortened, table

__all__ = ["FORMAT_VERSION", "SNAPSHOT_DTYPE", "Snapshot", "SnapshotDiff"]

FORMAT_VERSION = 1
KIND = "vpool snapshot"
SNAPSHOT_DTYPE = np.dtype([*BLOCK_DTYPE.descr, ("site", np.uint32), ("age_us", np.int64), ("serial", np.uint64)])
_FIELDS = SNAPSHOT_DTYPE.names or ()
_BLOCK_FIELDS = BLOCK_DTYPE.names or ()

_STATES = ("live", "free", "pending", "unmapped", "suspended")
# Of a pool's figures, what only this process understands.
_PRIVATE = ("serials", "slots", "noted", "fixed_noted")
_MOST_ROWS = 8
_NAMES_OF_ROWS = 60  # columns


class Snapshot:
    """Every segment and block of a pool at one moment.  Made by `Pool.snapshot` and `Snapshot.load`.

    Attributes
    ----------
    name : str
        Of the pool.
    taken : float
        When, in seconds since 1970.
    blocks : numpy.ndarray
        One row a block, with the fields of `Report.blocks` and ``site``, an index into `sites`; ``age_us``,
        microseconds since it was lent, or -1 where nobody knows; and ``serial``, which together with the address is
        the same only for the same block of the same pool.
    segments : numpy.ndarray
        One row a segment: ``address``, ``nbytes`` and ``stream``.
    sites : list of str
        The places that allocated blocks, as far as a recording or ``debug="sites"`` knows; the first is empty.
    report : Report
    """

    def __init__(self, figures, blocks, segments, sites, taken):
        self.blocks = blocks
        self.segments = segments
        self.sites = list(sites)
        self.taken = taken
        self.name = figures["name"]
        self._figures = figures

    @classmethod
    def of_records(cls, figures, blocks, segments, origins):
        """Of a pool's records now; `origins` has sites, and the index of one and the age of each block."""
        sites, site, age_us = origins
        rows = np.empty(len(blocks), SNAPSHOT_DTYPE)
        for field in _BLOCK_FIELDS:
            rows[field] = blocks[field]
        rows["site"], rows["age_us"], rows["serial"] = site, age_us, figures["serials"]
        kept = {name: value for name, value in figures.items() if name not in _PRIVATE}
        return cls(kept, rows, segments, sites, time.time())

    @property
    def report(self):
        blocks = np.empty(len(self.blocks), BLOCK_DTYPE)
        for field in _BLOCK_FIELDS:
            blocks[field] = self.blocks[field]
        return Report(self._figures, blocks, self.segments)

    def tag_name(self, number):
        """Name of a tag by its number in `blocks`; None for none."""
        return self._figures["tags"].get(number, {"tag": None})["tag"]

    def __repr__(self):
        blocks, segments = plural(len(self.blocks), "block"), plural(len(self.segments), "segment")
        return f"<vpool.Snapshot of {self.name!r}: {blocks} in {segments}>"

    def save(self, path):
        """Write the snapshot, as ``.npz``.

        Raises
        ------
        OSError
            Where the file cannot be written.
        """
        archive = io.BytesIO()
        np.savez_compressed(
            archive,
            kind=KIND,
            format_version=FORMAT_VERSION,
            taken=self.taken,
            figures=json.dumps(self._figures),
            sites=packed_names(self.sites),
            segments=self.segments,
            **{f"block_{field}": self.blocks[field] for field in _FIELDS},
        )
        with whole_file(path) as file:
            file.write(archive.getbuffer())

    @classmethod
    def load(cls, path):
        """Read a snapshot.

        Raises
        ------
        FormatError
            For a file that is damaged, none of a snapshot, or of a newer version; the message says which.
        OSError
            For a file that is not there or not readable.
        """
        with open(path, "rb") as file:
            try:
                return cls._read(file)
            except FormatError as reason:
                raise FormatError(f"{path}: {reason}") from None
            except Exception as reason:
                # Whatever a damaged file makes zip, zlib, numpy and json raise: there is no end to the kinds.
                raise FormatError(f"{path}: no readable snapshot: {type(reason).__name__}: {reason}") from None

    @classmethod
    def _read(cls, file):
        loaded = arrays_of(file)
        if loaded is None or "kind" not in loaded or str(loaded["kind"]) != KIND:
            raise FormatError("no snapshot of a pool")
        version = loaded["format_version"]
        if version.shape or version.dtype.kind not in "iu" or version < 1:
            raise FormatError(f"format version {version} is none")
        if version > FORMAT_VERSION:
            raise FormatError(f"format version {version}; this vpool reads snapshots up to version {FORMAT_VERSION}")
        segments = loaded["segments"]
        columns = {field: loaded[f"block_{field}"] for field in _FIELDS}
        count = len(columns["address"])
        blocks = np.empty(count, SNAPSHOT_DTYPE)
        for field, column in columns.items():
            if column.dtype != SNAPSHOT_DTYPE[field] or column.shape != (count,):
                raise FormatError(f"array block_{field} of {column.dtype} and shape {column.shape} does not fit")
            blocks[field] = column
        if segments.dtype != SEGMENT_DTYPE or segments.ndim != 1:
            raise FormatError("an array of segments that is none")
        sites = unpacked_names(loaded["sites"], "sites")
        if count and (int(blocks["segment"].max()) >= len(segments) or int(blocks["site"].max()) >= len(sites)):
            raise FormatError("a block names a segment or a site that is not there")
        figures = json.loads(str(loaded["figures"]), parse_constant=_refused)
        figures["tags"] = {int(number): row for number, row in figures["tags"].items()}
        names = [figures["name"], *(row["tag"] for row in figures["tags"].values())]
        if not all(isinstance(name, str) for name in names):
            raise FormatError("a pool or a tag has a name that is none")
        if not (among(blocks["state"], _STATES).all() and (blocks["age_us"] >= -1).all()):
            raise FormatError("a block has a state or an age that is none")
        snapshot = cls(figures, blocks, segments, sites, float(loaded["taken"]))
        report = snapshot.report
        report.to_dict(), str(report)  # every figure that it needs is there, and a number where one is shown
        return snapshot

    def diff(self, later):
        """What changed from this snapshot to a later one of the same pool.

        Parameters
        ----------
        later : Snapshot

        Returns
        -------
        SnapshotDiff
        """
        if not isinstance(later, Snapshot):
            raise TypeError(f"a snapshot is compared with a Snapshot, not {type(later).__name__}")
        return SnapshotDiff(self, later)


class SnapshotDiff:
    """What changed between two snapshots of a pool.

    Attributes
    ----------
    came, went : numpy.ndarray
        Rows of the live blocks that are only in the later one, and only in the earlier one.
    stayed : int
        How many live blocks are in both.
    by_tag, by_size, by_site : list of dict
        For each name, or requested bytes, ``blocks`` and ``live_bytes`` by which it grew, and what is live ``now``;
        what grew most first.  Rows that did not change are left out.
    """

    def __init__(self, before, after):
        self.before, self.after = before, after
        old, new = (one.blocks[one.blocks["state"] == "live"] for one in (before, after))
        old_key, new_key = _identity(old), _identity(new)
        self.came = new[~among(new_key, old_key)]
        self.went = old[~among(old_key, new_key)]
        self.stayed = len(new) - len(self.came)
        self.by_tag = _grown(old, new, "tag", before.tag_name, after.tag_name)
        self.by_size = _grown(old, new, "requested", int, int)
        self.by_site = _grown(
            old, new, "site", lambda number: before.sites[number] or None, lambda number: after.sites[number] or None
        )

    def to_dict(self):
        """Every figure, without the blocks, in plain Python types."""
        return {
            "name": self.after.name,
            "seconds": self.after.taken - self.before.taken,
            "reserved_bytes": self.after.report.reserved_bytes - self.before.report.reserved_bytes,
            "came": _totals(self.came),
            "went": _totals(self.went),
            "stayed": self.stayed,
            "by_tag": self.by_tag,
            "by_size": self.by_size,
            "by_site": self.by_site,
        }

    def __repr__(self):
        came = plural(len(self.came), "block")
        return f"<vpool snapshot diff: {came} came, {len(self.went):,} went, {self.stayed:,} stayed>"

    def __str__(self):
        reserved = self.after.report.reserved_bytes - self.before.report.reserved_bytes
        lines = [
            f"pool {self.after.name!r} after {self.after.taken - self.before.taken:.1f} s: "
            f"reserved {_signed(reserved)}",
            f"{plural(len(self.came), 'block')} of {format_bytes(_totals(self.came)['live_bytes'])} came, "
            f"{len(self.went):,} of {format_bytes(_totals(self.went)['live_bytes'])} went, {self.stayed:,} stayed",
        ]
        for title, rows in (("tag", self.by_tag), ("requested", self.by_size), ("site", self.by_site)):
            if all(row[title] is None for row in rows):
                continue
            shown = [
                (
                    _shown(row[title], title),
                    f"{row['blocks']:+,}",
                    _signed(row["live_bytes"]),
                    format_bytes(row["now"]),
                )
                for row in rows[:_MOST_ROWS]
            ]
            lines += ["", table((title, "blocks", "bytes", "now"), shown)]
            if len(rows) > _MOST_ROWS:
                lines.append(f"and {len(rows) - _MOST_ROWS} more")
        return "\n".join(lines)


def _refused(constant):
    raise FormatError(f"a figure is {constant}, which is none")


def _identity(rows):
    """What tells a block from all others."""
    identity = np.empty(len(rows), [("address", np.uint64), ("serial", np.uint64)])
    identity["address"], identity["serial"] = rows["address"], rows["serial"]
    return identity


def _grown(old, new, field, name_before, name_after):
    """By how much each value of a field has more live bytes and blocks."""
    grown: dict[Any, list[int]] = {}
    for rows, name_of, sign in ((old, name_before, -1), (new, name_after, 1)):
        values, index = np.unique(rows[field], return_inverse=True)
        blocks = np.bincount(index, minlength=len(values))
        nbytes = np.bincount(index, rows["nbytes"].astype(float), len(values))
        for value, count, total in zip(values.tolist(), blocks.tolist(), nbytes.tolist(), strict=True):
            row = grown.setdefault(name_of(value), [0, 0, 0])
            row[0] += sign * count
            row[1] += sign * int(total)
            row[2] += int(total) if sign > 0 else 0
    rows = [
        {field: name, "blocks": blocks, "live_bytes": nbytes, "now": now}
        for name, (blocks, nbytes, now) in grown.items()
        if blocks or nbytes
    ]
    return sorted(rows, key=lambda row: -row["live_bytes"])


def _totals(rows):
    return {"blocks": len(rows), "live_bytes": int(rows["nbytes"].sum(dtype=np.uint64))}


def _signed(nbytes):
    return f"{'-' if nbytes < 0 else '+'}{format_bytes(abs(nbytes))}"


def _shown(name, kind):
    if name is None:
        return "none" if kind == "tag" else "not known"
    if kind == "requested":
        return f"{name:,}"
    return shortened(name, _NAMES_OF_ROWS)

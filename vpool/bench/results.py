"""What a run of `vpool bench` gave, and the ratios within it."""

import json
from dataclasses import asdict, dataclass, field, fields

import numpy as np

from vpool.errors import FormatError
from vpool.files import whole_file
from vpool.sizes import format_bytes

__all__ = ["Results", "Row", "device_peers", "place", "ratio"]

_VERSION = 1
_AT_BYTES = ("pair", "pair_among", "latency_pair", "python_pair", "buffer", "miss")


@dataclass(frozen=True)
class Row:
    """One figure of one subject in one case.

    Attributes
    ----------
    group, case, at
        As of `vpool.bench.cases.Case`.
    who : str
        ``"vpool"``, perhaps with what kind of pool or source, a peer, or what is measured as a floor.
    kind : str
        ``"own"``, ``"peer"`` or ``"floor"``.
    figure : str
        ``ns`` an operation, a percentile such as ``p99_ns``, ``per_us`` for operations of all threads together in a
        microsecond, or bytes.
    median, best : float
        Of the samples; the best throughput is the highest.
    floors : float or None
        For nanoseconds: multiples of the lock and unlock of the same rounds.
    samples : list of float
        One a round.
    """

    group: str
    case: str
    at: int | str
    who: str
    kind: str
    figure: str
    median: float
    best: float
    floors: float | None
    samples: list

    @classmethod
    def of(cls, case, who, kind, figure, samples, floors):
        """The row of some samples, and of the floor's samples of the same rounds."""
        timed = figure.endswith("ns")
        best = max(samples) if figure == "per_us" else min(samples)
        in_floors = float(np.median(np.array(samples) / floors)) if timed else None
        return cls(
            case.group, case.name, case.at, who, kind, figure, float(np.median(samples)), best, in_floors, list(samples)
        )


def ratio(row, other):
    """How many times `other` a row is: the median over the rounds, as each round took turns.

    Returns
    -------
    float or None
        None where one of them was not measured.
    """
    if row is None or other is None:
        return None
    if len(row.samples) == len(other.samples):
        return float(np.median(np.array(row.samples) / np.array(other.samples)))
    return row.median / other.median


def device_peers(results, case, figure, at):
    """The rows of peers that allocate on a device; the C library's malloc does not."""
    return [row for row in results.having(case, figure, at, "peer") if row.who != "malloc"]


def place(case, at):
    """What a case was measured at, as people read it."""
    if case in _AT_BYTES:
        return format_bytes(at)
    return f"{at:,}" if isinstance(at, int) else at


@dataclass(kw_only=True)
class Results:
    """A run.

    Attributes
    ----------
    version : int
        Of the format.
    machine, packages : dict
        What it ran on, and the versions of what was measured.
    settings : dict
        ``groups``, ``full``, ``rounds`` and ``source``.
    floor_ns, clock_ns : float
        Median nanoseconds of a lock and unlock, and of a look at the clock.
    notes : list of str
        What could not be measured, and why.
    rows : list of Row
    """

    version: int = _VERSION
    machine: dict
    packages: dict
    settings: dict
    floor_ns: float
    clock_ns: float
    notes: list = field(default_factory=list)
    rows: list = field(default_factory=list)

    def find(self, case, figure="ns", at=None, who="vpool"):
        """The row of one subject, or None; the case's first where `at` is None."""
        for row in self.rows:
            if (row.case, row.figure, row.who) == (case, figure, who) and at in (None, row.at):
                return row
        return None

    def having(self, case, figure="ns", at=None, kind=None):
        """All rows of a case, perhaps of one kind or at one number."""
        return [
            row
            for row in self.rows
            if (row.case, row.figure) == (case, figure) and at in (None, row.at) and kind in (None, row.kind)
        ]

    def places(self, case):
        """What a case was measured at, in order."""
        return list(dict.fromkeys(row.at for row in self.rows if row.case == case))

    def to_dict(self):
        """Everything, as plain Python types."""
        return asdict(self)

    def save(self, path):
        """Write everything as JSON, a row a line."""
        head = {name: value for name, value in self.to_dict().items() if name != "rows"}
        lines = ",\n".join(f"  {json.dumps(_rounded(asdict(row)))}" for row in self.rows)
        text = json.dumps(head, indent=1)[:-2]
        with whole_file(path) as file:
            file.write(f'{text},\n "rows": [\n{lines}\n ]\n}}\n'.encode())

    @classmethod
    def load(cls, path):
        """The results of an earlier run.

        Raises
        ------
        FormatError
            For a file that holds none.
        OSError
            For one that cannot be read.
        """
        try:
            with open(path, encoding="utf-8") as file:
                data = json.load(file)
            if data.pop("version") != _VERSION:
                raise ValueError("of another version")
            names = {one.name for one in fields(cls)} - {"version"}
            rows = [Row(**row) for row in data.pop("rows")]
            found = cls(rows=rows, **{name: data[name] for name in names - {"rows"}})
            for row in rows:
                np.array(row.samples, float)
                _ = row.median + row.best
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FormatError(f"{path} holds no results of vpool bench: {error}") from None
        return found


def _rounded(row):
    """Four digits: more are noise, and make a file long."""
    four = lambda value: float(f"{value:.4g}")  # noqa: E731
    for name in ("median", "best", "floors"):
        row[name] = None if row[name] is None else four(row[name])
    row["samples"] = [four(one) for one in row["samples"]]
    return row

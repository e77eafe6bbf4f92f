"""Placements of a step's blocks, as files and as pools use them."""

import io
import os
from bisect import bisect_left
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np

from vpool.errors import FormatError
from vpool.files import whole_file
from vpool.formats.npz import arrays_of
from vpool.sizes import MAX_SIZE, format_bytes, plural

__all__ = [
    "FORMAT_VERSION",
    "MAX_ROUNDING",
    "UNPLANNED",
    "Plan",
    "checked_plan",
    "rounded",
    "section_loads",
    "sections_of",
    "with_plan",
]

FORMAT_VERSION = 1
MAX_ROUNDING = 2 << 20
UNPLANNED = -1

_KIND = "plan"
_ARRAYS = {"nbytes": "u8", "stream": "u2", "born": "i8", "freed": "i8", "offset": "i8"}
_NUMBERS = ("rounding", "step", "trace_events")


def rounded(nbytes, rounding):
    """Sizes, rounded up, as int64."""
    return -(-np.asarray(nbytes, np.uint64).astype(np.int64) // rounding) * rounding


def sections_of(born, freed):
    """Lifetimes in sections, the coarsest clock that keeps which blocks live together.

    A section begins with a birth that comes after a death, so all blocks of one live at once at its end.

    Parameters
    ----------
    born, freed : array of int64
        Different numbers, which rise with time; `born` is sorted.

    Returns
    -------
    first, end : array of int32
        The sections in which each block lives, from `first` to before `end`.

    Notes
    -----
    O(n log n).
    """
    count = len(born)
    order = np.argsort(np.concatenate((born, freed)), kind="stable")
    births = order < count
    begins = births & ~np.concatenate(([False], births[:-1]))
    section = np.empty(2 * count, np.int32)
    section[order] = np.cumsum(begins) - 1
    return section[:count], section[count:] + np.int32(1)


def section_loads(first, end, size):
    """Bytes that live in each section."""
    change = np.zeros(int(np.max(end, initial=0)) + 1, np.int64)
    np.add.at(change, first, size)
    np.subtract.at(change, end, size)
    return np.cumsum(change)[:-1]


@dataclass(frozen=True, eq=False)
class Plan:
    """Where the blocks of a repeating step lie: what `vpool.plan` makes, and ``Pool(plan=...)`` serves from.

    A row for each request of the step, in order.  Made by `vpool.plan` or `load`.

    Parameters
    ----------
    nbytes : array of uint64
        Bytes that were requested.
    stream : array of uint16
        Index of the stream.
    born, freed : array of int64
        The trace's events that allocated and freed it; `freed` is -1 for one that outlived the step.
    offset : array of int64
        Bytes from the start of the planned memory, -1 for a request that is not planned.
    rounding : int
        Bytes; every size is rounded up to a multiple of it, as the pool does.
    step : int
        The step's number in its trace, from 0; -1 for a trace without steps.
    trace_events : int
        Events of the trace.

    Raises
    ------
    FormatError
        Where the arrays contradict each other, or blocks that live together overlap.
    """

    nbytes: np.ndarray = field(repr=False)
    stream: np.ndarray = field(repr=False)
    born: np.ndarray = field(repr=False)
    freed: np.ndarray = field(repr=False)
    offset: np.ndarray = field(repr=False)
    rounding: int = 256
    step: int = -1
    trace_events: int = 0

    def __post_init__(self):
        for name, kind in _ARRAYS.items():
            object.__setattr__(self, name, _as(getattr(self, name), kind, name))
        _expect(len({len(getattr(self, name)) for name in _ARRAYS}) == 1, "arrays of different lengths")
        rounding = self.rounding
        _expect(
            0 < rounding <= MAX_ROUNDING and not rounding & (rounding - 1),
            f"a rounding of {rounding} bytes: a power of two up to {MAX_ROUNDING} is one",
        )
        _expect(bool((np.diff(self.born) > 0).all()), "births that are not in order")
        _expect_rows(self.nbytes <= MAX_SIZE - MAX_ROUNDING, "a size beyond 63 bits")
        planned = self.offset != UNPLANNED
        _expect_rows(~planned | (self.freed > self.born), "a planned block without a free after its birth")
        _expect_rows(~planned | (self.nbytes > 0), "a planned block of no bytes")
        on_grid = (self.offset >= 0) & (self.offset % rounding == 0)
        _expect_rows(~planned | on_grid, f"an offset that is no multiple of {rounding}")
        most = MAX_SIZE - MAX_ROUNDING - self.nbytes.astype(np.int64)
        _expect_rows(~planned | (self.offset <= most), "an end beyond 63 bits")
        self.below()  # looks at overlaps

    def below(self, rows=None):
        """For each of some planned requests that which lies next below it while both live.

        Parameters
        ----------
        rows : array of int64, optional
            The requests that are looked at, rising; all planned ones if not given.

        Returns
        -------
        array of int64
            For each of the rows the place of another among them, or -1.

        Raises
        ------
        FormatError
            Where blocks overlap that live together.

        Notes
        -----
        O(n log n) comparisons for n rows; moves words of at most what lives at once for each.
        """
        rows = self._planned_rows if rows is None else rows
        count = len(rows)
        begins = self.offset[rows].tolist()
        ends = (self.offset[rows] + rounded(self.nbytes[rows], self.rounding)).tolist()
        below = np.full(count, -1, np.int64)
        live: list[tuple[int, int, int]] = []  # begin, end and place of what lives, by begin
        for event in np.argsort(np.concatenate((self.born[rows], self.freed[rows])), kind="stable").tolist():
            place = event % count
            mine = (begins[place], ends[place], place)
            at = bisect_left(live, mine)
            if event >= count:
                del live[at]
                continue
            if (at and live[at - 1][1] > mine[0]) or (at < len(live) and live[at][0] < mine[1]):
                raise FormatError(f"request {rows[place]}: its place is another block's while it lives")
            below[place] = live[at - 1][2] if at else -1
            live.insert(at, mine)
        return below

    @cached_property
    def _planned_rows(self):
        return np.flatnonzero(self.offset != UNPLANNED)

    @cached_property
    def _sizes(self):
        """Of the planned blocks, rounded."""
        return rounded(self.nbytes[self._planned_rows], self.rounding)

    def _peak_of(self, sizes):
        rows = self._planned_rows
        first, end = sections_of(self.born[rows], self.freed[rows])
        return int(section_loads(first, end, sizes).max(initial=0))

    def __len__(self):
        return len(self.nbytes)

    @property
    def planned(self):
        """How many of the requests are planned, which are those that are born and freed within the step."""
        return len(self._planned_rows)

    @cached_property
    def lower_bound_bytes(self):
        """The most requested bytes of planned blocks that live at once, below which no placement gets."""
        return self._peak_of(self.nbytes[self._planned_rows].astype(np.int64))

    @cached_property
    def peak_bytes(self):
        """Bytes that the placement takes."""
        return int((self.offset[self._planned_rows] + self._sizes).max(initial=0))

    @property
    def ratio(self):
        """peak / lower bound; 1 is perfect, and what a plan without blocks has."""
        return self.peak_bytes / self.lower_bound_bytes if self.lower_bound_bytes else 1.0

    @cached_property
    def is_optimal(self):
        """Whether no placement of the rounded sizes takes less."""
        return self.peak_bytes == self._peak_of(self._sizes)

    def __str__(self):
        step = "" if self.step < 0 else f" of step {self.step}"
        if not self.planned:
            return f"nothing to plan: of {plural(len(self), 'request')}{step} none is freed within it"
        return (
            f"{self.planned:,} of {len(self):,} requests{step} planned in {format_bytes(self.peak_bytes)}, "
            f"{self.ratio:.4f} times the {format_bytes(self.lower_bound_bytes)} that live at once"
            f"{': no placement takes less' if self.is_optimal else ''}"
        )

    def sequence(self):
        """What a pool serves from: the requests of the stream that has the most planned bytes, and their places.

        Returns
        -------
        nbytes : array of uint64
            Of each request of that stream, in order.
        offset : array of int64
            -1 for one that is not planned.
        below : array of int64
            For each planned request the one that lies next below it while both live, or -1.
        """
        planned = self.offset != UNPLANNED
        bytes_of = np.bincount(self.stream[planned], weights=self._sizes) if planned.any() else [0]
        mine = self.stream == int(np.argmax(bytes_of))
        nbytes, offset = self.nbytes[mine], self.offset[mine]
        below = np.full(len(nbytes), -1, np.int64)
        places = np.flatnonzero(offset != UNPLANNED)
        found = self.below(np.flatnonzero(planned & mine))
        below[places] = np.where(found >= 0, places[found], -1)
        return nbytes, offset, below

    def to_dict(self):
        """The figures, as plain Python types."""
        return {
            "requests": len(self),
            "planned": self.planned,
            "lower_bound_bytes": self.lower_bound_bytes,
            "peak_bytes": self.peak_bytes,
            "ratio": self.ratio,
            "is_optimal": self.is_optimal,
            "rounding": self.rounding,
            "step": None if self.step < 0 else self.step,
        }

    def save(self, path):
        """Write the plan as an ``.npz`` file, which `load` reads.

        Raises
        ------
        OSError
            Where the file cannot be written.
        """
        archive = io.BytesIO()
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        np.savez_compressed(archive, **given, kind=_KIND, format_version=FORMAT_VERSION)
        with whole_file(path) as file:
            file.write(archive.getbuffer())

    @classmethod
    def load(cls, path):
        """Read a plan's file.

        Raises
        ------
        FormatError
            For a file that is no plan, is damaged, or of a newer version.
        OSError
            For a file that is not there or not readable.
        """
        with open(path, "rb") as file:
            data = file.read()
        try:
            return cls(**_contents(io.BytesIO(data)))
        except FormatError as reason:
            raise FormatError(f"{os.fspath(path)}: {reason}") from None
        except MemoryError:
            raise
        except Exception as reason:
            # Whatever a damaged file makes zip, zlib and numpy raise: there is no end to the kinds.
            why = f"{type(reason).__name__}: {reason}"
            raise FormatError(f"{os.fspath(path)}: not a readable plan: {why}") from None


def checked_plan(plan, rounding):
    """The plan that a plan or its path means, for a pool that rounds so.

    Raises
    ------
    ValueError
        For sizes that are rounded less than the pool's.
    """
    if isinstance(plan, (str, os.PathLike)):
        plan = Plan.load(plan)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a vpool.Plan or its path, not {type(plan).__name__}")
    if plan.rounding < rounding:
        raise ValueError(
            f"the plan rounds sizes to {plan.rounding} bytes and the pool to {rounding}: plan with rounding={rounding}"
        )
    return plan


def with_plan(numbers, plan):
    """The numbers of a strategy whose pool serves from a plan: a fixed core for it, from which nothing else is served.

    Raises
    ------
    ValueError
        Where the strategy has a fixed core of its own, or its limit is below the plan's peak.
    """
    if plan is None or plan.planned == 0:
        return numbers
    if numbers.core:
        raise ValueError("a plan needs a strategy that has no fixed core of its own: vpool.Dynamic")
    if plan.peak_bytes > numbers.limit:
        raise ValueError(
            f"the plan takes {format_bytes(plan.peak_bytes)}, and the pool may take {format_bytes(numbers.limit)}"
        )
    # Larger than any size, so that no request is a common one.
    nothing = 2**64 - 1
    return numbers._replace(
        core=plan.peak_bytes,
        smallest=nothing,
        largest=nothing,
        planned=True,
        initial=min(numbers.initial, numbers.limit - plan.peak_bytes),
    )


def _contents(file):
    """The parameters of a `Plan`, from a file."""
    loaded = arrays_of(file)
    if loaded is None or "kind" not in loaded or str(loaded["kind"]) != _KIND:
        raise FormatError("not a plan's file")
    version = _integer(loaded, "format_version")
    if version < 1:
        raise FormatError(f"format version {version} is none")
    if version > FORMAT_VERSION:
        raise FormatError(f"format version {version}; this vpool reads up to version {FORMAT_VERSION}")
    missing = [name for name in (*_ARRAYS, *_NUMBERS) if name not in loaded]
    if missing:
        raise FormatError(f"no array named {', '.join(missing)}")
    return {name: loaded[name] for name in _ARRAYS} | {name: _integer(loaded, name) for name in _NUMBERS}


def _integer(loaded, name):
    value = loaded[name]
    if value.shape or value.dtype.kind not in "iu":
        raise FormatError(f"{name} is no number")
    return int(value)


def _as(values, kind, name):
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise FormatError(f"array {name} must be one row of integers, not {array.dtype} of shape {array.shape}")
    bounds = np.iinfo(kind)
    if array.size and (int(array.min()) < bounds.min or int(array.max()) > bounds.max):
        raise FormatError(f"array {name} is out of range")
    array = np.array(array, kind)
    array.flags.writeable = False
    return array


def _expect(holds, otherwise):
    if not holds:
        raise FormatError(otherwise)


def _expect_rows(holds, otherwise):
    if not holds.all():
        raise FormatError(f"request {int(np.argmin(holds))}: {otherwise}")

"""Rounds: in each one every subject of a case takes its turn, so that a slow moment of the machine falls on all."""

from typing import Any

from vpool._interface import bench as loops
from vpool.bench.calls import in_parts
from vpool.bench.results import Row
from vpool.errors import Error

__all__ = ["lock_ns", "rows_of"]

_LOCKS = 100_000
_FEW = 16  # operations of the first try
_MOST = 20_000_000


def lock_ns():
    """The floor, now."""
    return in_parts(loops.lock_and_unlock, _LOCKS)["ns"]


def rows_of(case, subjects, rounds, sample_ns, notes):
    """Measure one case.

    Parameters
    ----------
    case : Case
    subjects : list
        What may take part: with ``who``, ``kind``, ``supports(case)`` and ``measure(case, count)``.
    rounds : int
        At most; a case may want fewer.
    sample_ns : float
        About how long the operations of one sample shall take.
    notes : list of str
        Gets a line for each subject that fails; its other cases are measured.

    Returns
    -------
    list of Row, list of float
        A row a figure, by subject, and the floor's samples.
    """
    counts: dict[Any, int] = {}
    samples: dict[Any, dict[str, list[float]]] = {}

    def failed(subject, error):
        counts.pop(subject, None)
        samples.pop(subject, None)
        notes.append(f"{subject.who}, {case.name} at {case.at}: {' '.join(str(error).split()) or type(error).__name__}")

    for subject in [one for one in subjects if one.supports(case)]:
        try:
            counts[subject] = case.count or _count(case, subject, sample_ns)
        except (Error, MemoryError, OSError, ValueError) as error:
            failed(subject, error)
    floors = []
    for number in range(min(rounds, case.rounds)):
        floors.append(lock_ns())
        turns = list(counts)
        # Nobody always comes after the same one.
        first = number % max(1, len(turns))
        for subject in turns[first:] + turns[:first]:
            try:
                figures = subject.measure(case, counts[subject])
            except (Error, MemoryError, OSError, ValueError) as error:
                failed(subject, error)
                continue
            for figure, value in figures.items():
                if figure != "elapsed":
                    samples.setdefault(subject, {}).setdefault(figure, []).append(float(value))
    rows = [
        Row.of(case, subject.who, subject.kind, figure, values, floors)
        for subject in counts
        for figure, values in samples.get(subject, {}).items()
    ]
    return rows, floors


def _count(case, subject, sample_ns):
    """Operations that take about as long as a sample shall, by trying more and more."""
    count = _FEW
    while True:
        elapsed = max(1.0, subject.measure(case, count)["elapsed"])
        wanted = count * sample_ns / elapsed
        if wanted < 4 * count or count >= _MOST:
            return int(min(_MOST, max(_FEW, wanted)))
        count = int(min(_MOST, wanted, 20 * count))

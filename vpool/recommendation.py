"""Recommendations: the policy that a search chose, with the figures that say why."""

from dataclasses import asdict, dataclass, field

from vpool.files import whole_file
from vpool.plots import figure_class
from vpool.policy import Policy
from vpool.sizes import format_bytes
from vpool.tables import table

__all__ = ["Expected", "Recommendation"]

_WORDS = {
    "reserved": "the least peak reserved",
    "calls": "the fewest source calls",
    "fits": "the fewest source calls within the capacity",
    "mix": "the least of peak reserved and source calls together",
}
_SIZES = ("initial", "core", "cut", "rounding", "remainder")


@dataclass(frozen=True)
class Expected:
    """What a policy does with one trace, beside the default policy.

    Attributes
    ----------
    trace : str
    peak_live_bytes, peak_reserved_bytes : int
    reserved_over_live : float
    source_calls, waited : int
        As in `ReplayResult`.
    completes : bool
        Whether every request was served.
    default_reserved_bytes, default_source_calls : int or None
        Of the default policy; None where it runs out of memory.
    """

    trace: str
    peak_live_bytes: int
    peak_reserved_bytes: int
    reserved_over_live: float
    source_calls: int
    waited: int
    completes: bool
    default_reserved_bytes: int | None
    default_source_calls: int | None


@dataclass(frozen=True)
class Recommendation:
    """The policy that `tune` found, and why.

    Attributes
    ----------
    policy : Policy
    objective : str
        What was to be least.
    capacity : int or None
        Bytes that the pool may take.
    seed, trials : int
        Of the search, and how many policies were tried.
    expected : list of Expected
        For each trace.
    holdout : list of Expected or None
        What a policy that was chosen on the first half of each trace's steps alone does on the second half; None
        where nothing was held out.
    refused : dict
        Kinds of policies that were left out for what they did there, and why.
    sensitivity : list of dict
        For the values of each number of the policy, the others unchanged: ``knob``, ``value``, whether it is
        ``chosen``, ``reserved_over_live`` (geometric mean) and ``source_calls`` (sum over the traces), None
        where it runs out of memory.
    pareto : list of dict
        The policies that no other beats in both ``reserved_over_live`` and ``source_calls``, each with its
        ``family`` and the text of its ``policy`` file; at most 24 of them.
    """

    policy: Policy
    objective: str
    capacity: int | None
    seed: int
    trials: int
    expected: list
    holdout: list | None = None
    refused: dict = field(default_factory=dict)
    sensitivity: list = field(default_factory=list, repr=False)
    pareto: list = field(default_factory=list, repr=False)

    def dumps(self):
        """The text of the policy's file, with the expected figures in comments."""
        lines = [
            f"Found by vpool tune: {_WORDS[self.objective]} of {self.trials:,} policies, seed {self.seed}.",
            f"Expected on simulated memory{self._within()}:",
            *(f"  {line}" for line in _table_of(self.expected).splitlines()),
        ]
        if self.holdout:
            lines.append("Chosen on the first half of the steps, on the second half:")
            lines += [f"  {line}" for line in _table_of(self.holdout).splitlines()]
        return "".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n" + self.policy.dumps()

    def save(self, path):
        """Write the policy's file; OSError where that fails."""
        text = self.dumps()
        with whole_file(path) as file:
            file.write(text.encode())

    def to_dict(self):
        """All of it, as plain Python types; the policy is the text of its file."""
        return {
            "policy": self.policy.dumps(),
            "objective": self.objective,
            "capacity": self.capacity,
            "seed": self.seed,
            "trials": self.trials,
            "expected": [asdict(one) for one in self.expected],
            "holdout": None if self.holdout is None else [asdict(one) for one in self.holdout],
            "refused": self.refused,
            "sensitivity": self.sensitivity,
            "pareto": self.pareto,
        }

    def tables(self):
        """What there is to show: titles, each with a header and rows of text."""
        yield f"Expected{self._within()}", _HEADER, list(map(_cells, self.expected))
        if self.holdout:
            yield "Chosen on the first half of the steps, on the second half", _HEADER, list(map(_cells, self.holdout))
        yield "What each number does, the others unchanged", _KNOBS, self._knob_rows()
        front = [(one["family"], f"{one['reserved_over_live']:.4f}", f"{one['source_calls']:,}") for one in self.pareto]
        yield "What nothing beats in both (Pareto front)", ("", "reserved / live", "source calls"), front

    def sentences(self):
        """What was searched for, what was chosen of it, and what was left out."""
        yield f"{self.trials:,} policies were tried for {_WORDS[self.objective]}, seed {self.seed}."
        yield "Of those within some 0.5 % of the best, that was chosen which is best where it is worst, on halves too."
        for family, why in self.refused.items():
            yield f"{family} was left out: {why}."

    def __str__(self):
        parts = ["\n".join(self.sentences())]
        parts += [f"{title}:\n\n{table(header, rows)}" for title, header, rows in self.tables()]
        return "\n\n".join([*parts, self.policy.dumps().rstrip("\n")])

    def _within(self):
        return "" if self.capacity is None else f" within {format_bytes(self.capacity)}"

    def _knob_rows(self):
        rows = []
        for knob in dict.fromkeys(row["knob"] for row in self.sensitivity):
            own = [row for row in self.sensitivity if row["knob"] == knob]
            ratios = [row["reserved_over_live"] for row in own if row["reserved_over_live"] is not None]
            calls = [row["source_calls"] for row in own if row["source_calls"] is not None]
            chosen = next(row["value"] for row in own if row["chosen"])
            failed = len(own) - len(ratios)
            rows.append(
                (
                    knob,
                    _knob_text(knob, chosen),
                    _span(f"{min(ratios):.4f}", f"{max(ratios):.4f}"),
                    _span(f"{min(calls):,}", f"{max(calls):,}"),
                    f"{failed} of {len(own)}" if failed else "-",
                )
            )
        return rows

    def plot(self):
        """A matplotlib figure: the Pareto front, and what each number does.

        Raises
        ------
        Error
            Where matplotlib is not installed; ``pip install "vpool[plot]"`` has it.
        """
        knobs = list(dict.fromkeys(row["knob"] for row in self.sensitivity))
        figure = figure_class()(layout="constrained", figsize=(10.0, 3.0 + 2.2 * -(-len(knobs) // 3)))
        rows = -(-len(knobs) // 3)
        parts = figure.add_gridspec(2, 1, height_ratios=(1.2, rows))
        self._draw_front(figure.add_subfigure(parts[0]).add_subplot())
        grid = list(figure.add_subfigure(parts[1]).subplots(rows, 3, squeeze=False).flat)
        for knob, axes in zip(knobs, grid, strict=False):
            self._draw_knob(axes, knob)
        for axes in grid[len(knobs) :]:
            axes.set_axis_off()
        return figure

    def _draw_front(self, axes):
        for family in dict.fromkeys(one["family"] for one in self.pareto):
            own = [one for one in self.pareto if one["family"] == family]
            axes.plot(
                [one["source_calls"] for one in own], [one["reserved_over_live"] for one in own], "o", label=family
            )
        calls = sum(one.source_calls for one in self.expected)
        chosen = [row["reserved_over_live"] for row in self.sensitivity if row["chosen"]][:1]
        axes.plot([calls] * len(chosen), chosen, "k*", markersize=12, label="chosen")
        axes.set_xscale("log")
        axes.set_xlabel("source calls")
        axes.set_ylabel("peak reserved / peak live")
        axes.legend(fontsize="small")

    def _draw_knob(self, axes, knob):
        own = [row for row in self.sensitivity if row["knob"] == knob and row["reserved_over_live"] is not None]
        axes.plot(range(len(own)), [row["reserved_over_live"] for row in own], ".-")
        marked = [place for place, row in enumerate(own) if row["chosen"]]
        axes.plot(marked, [own[place]["reserved_over_live"] for place in marked], "k*")
        axes.set_xticks(range(len(own)), [_knob_text(knob, row["value"]) for row in own], rotation=60, fontsize=6)
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.set_title(knob, fontsize="small")


_HEADER = ("", "live", "reserved", "/ live", "source calls", "waited", "default reserves", "calls")
_KNOBS = ("", "chosen", "reserved / live", "source calls", "out of memory")


def _cells(row):
    return (
        row.trace,
        format_bytes(row.peak_live_bytes),
        format_bytes(row.peak_reserved_bytes) if row.completes else "out of memory",
        f"{row.reserved_over_live:.4f}" if row.completes else "-",
        f"{row.source_calls:,}",
        f"{row.waited:,}",
        "out of memory" if row.default_reserved_bytes is None else format_bytes(row.default_reserved_bytes),
        "-" if row.default_source_calls is None else f"{row.default_source_calls:,}",
    )


def _table_of(rows):
    return table(_HEADER, list(map(_cells, rows)))


def _span(least, most):
    return least if least == most else f"{least} to {most}"


def _knob_text(knob, value):
    """A value of a knob as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"x{value:g}" if knob == "growth" else f"{value:g}"
    return format_bytes(value)

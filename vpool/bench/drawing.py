"""A drawing of a run.  It needs matplotlib, which is looked for before anything takes time."""

from vpool.bench.results import place
from vpool.errors import Error

__all__ = ["draw", "empty_figure"]

_PANELS = (
    ("compiled pair, by size", "pair", "ns"),
    ("random sizes, 512 live", "random", "ns"),
    ("pair from Python", "python_pair", "ns"),
    ("buffer from Python", "buffer", "ns"),
    ("threads on own streams, random sizes", "own_random", "ns"),
    ("threads on one stream, random sizes", "one_random", "per_us"),
    ("recorded programs, warm", "trace", "warm_ns"),
    ("recorded programs, cold", "trace", "cold_ns"),
)
_UNITS = {"per_us": "operations a microsecond"}


def empty_figure():
    """A figure with nothing in it.

    Raises
    ------
    Error
        Without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Error('--plot needs matplotlib: pip install "vpool[plot]"') from None
    return Figure(layout="constrained")


def draw(figure, results):
    """A panel for each of the main cases: lines over what varies, bars where nothing does."""
    panels = [panel for panel in _PANELS if results.having(panel[1], panel[2])]
    columns = 2
    lines = max(1, -(-len(panels) // columns))
    figure.set_size_inches(13.0, 1.0 + 3.6 * lines)
    for number, (title, case, figure_name) in enumerate(panels):
        axes = figure.add_subplot(lines, columns, number + 1)
        _panel(axes, results, case, figure_name)
        axes.set_title(title, fontsize="medium")
        axes.set_ylabel(_UNITS.get(figure_name, "ns"))
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small", ncols=2)
    machine = results.machine
    devices = ", ".join(one["name"] for one in machine["devices"]) or "no device"
    figure.suptitle(f"{machine['processor']}, {machine['cores']} cores, {devices}", parse_math=False)


def _panel(axes, results, case, figure):
    places = results.places(case)
    subjects = list(dict.fromkeys(row.who for row in results.having(case, figure)))
    for number, who in enumerate(subjects):
        rows = [results.find(case, figure, at, who) for at in places]
        values = [float("nan") if row is None else row.median for row in rows]
        own = who.startswith("vpool")
        if len(places) == 1:
            axes.bar([number], values, label=who, color="black" if own else None)
        else:
            axes.plot(range(len(places)), values, "o-", label=who, linewidth=2.5 if own else 1.0)
    if len(places) == 1:
        axes.set_xticks([])
    else:
        labels = [place(case, at) for at in places]
        axes.set_xticks(range(len(places)), labels, rotation=20 if len(places) > 5 else 0, fontsize="small")
    if figure != "per_us":
        axes.axhline(results.floor_ns, color="grey", linestyle="--", linewidth=0.8)  # a lock and unlock

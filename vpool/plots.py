"""Drawings of reports.  They need matplotlib, which is looked for when one is made."""

import numpy as np

from vpool.errors import Error
from vpool.sizes import format_bytes, plural
from vpool.tables import shortened

__all__ = ["draw", "figure_class"]

_COLOURS = {"live": "#4c78a8", "pending": "#f58518", "free": "#e0e0e0", "unmapped": "#ffffff"}
_MOST_SEGMENTS = 40
_MOST_POINTS = 4000
_NAMES = 60  # columns


def figure_class():
    """Matplotlib's `Figure`, imported only now; Error where it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Error('plots need matplotlib: pip install "vpool[plot]"') from None
    return Figure


def draw(report, trace=None):
    """A figure of a report: see `Report.plot`."""
    figure = figure_class()(figsize=(9.0, 9.0 if trace is not None else 6.5), layout="constrained")
    axes = figure.subplots(3 if trace is not None else 2, 1)
    _map(axes[0], report)
    _free_sizes(axes[1], report)
    if trace is not None:
        _timeline(axes[2], trace)
    figure.suptitle(
        f"{shortened(report.name, _NAMES)}: {format_bytes(report.allocated_bytes)} live of "
        f"{format_bytes(report.reserved_bytes)} reserved",
        parse_math=False,
    )
    return figure


def _map(axes, report):
    """A bar a segment, the largest ones, with its blocks by state."""
    rows = report.segment_rows
    shown = sorted(range(len(rows)), key=lambda index: -rows[index]["nbytes"])[:_MOST_SEGMENTS]
    for place, index in enumerate(sorted(shown)):
        mine = report.blocks[report.blocks["segment"] == index]
        offsets = (mine["address"] - np.uint64(rows[index]["address"])).astype(float)
        for state, colour in _COLOURS.items():
            part = mine["state"] == state
            if part.any():
                spans = np.column_stack((offsets[part], mine["nbytes"][part].astype(float)))
                axes.broken_barh(spans / 2**20, (place - 0.4, 0.8), facecolors=colour, linewidth=0)
    more = len(rows) - len(shown)
    without = f", without {plural(more, 'smaller segment')}" if more else ""
    axes.set_title(f"memory map{without}", fontsize="medium")
    axes.set_xlabel("MiB from the start of a segment")
    axes.set_ylabel("segment")
    axes.yaxis.get_major_locator().set_params(integer=True)  # segments are counted
    axes.invert_yaxis()
    for state in ("live", "pending", "free"):
        axes.plot([], [], "s", color=_COLOURS[state], label=state)
    axes.legend(fontsize="small", ncols=3, loc="upper right")


def _free_sizes(axes, report):
    """Bytes that are free, by the size of the block that they are in."""
    free = report.blocks["nbytes"][report.blocks["state"] == "free"].astype(float)
    top = int(np.ceil(np.log2(free.max()))) if len(free) else 20
    axes.hist(free, bins=2.0 ** np.arange(8, max(top, 9) + 1), weights=free / 2**20, color=_COLOURS["live"])
    axes.set_xscale("log", base=2)
    axes.set_title(f"free memory by the size of its pieces ({len(free):,})", fontsize="medium")
    axes.set_xlabel("bytes of a free block")
    axes.set_ylabel("MiB free")


def _timeline(axes, trace):
    """Live bytes over a trace, what was reserved where it knows that, and where its steps begin."""
    step = max(1, len(trace) // _MOST_POINTS)
    curves = {"requested": (trace.live_bytes, _COLOURS["live"])}
    if trace.details is not None:
        curves["reserved"] = (trace.details.segments.reserved_bytes(len(trace)), "black")
    for label, (curve, colour) in curves.items():
        # The highest of each stretch, so that no peak is lost.
        highest = np.maximum.reduceat(curve, np.arange(0, len(curve), step)) if len(curve) else curve
        axes.step(trace.t_us[::step] / 1e6, highest / 2**20, where="post", color=colour, linewidth=1, label=label)
    if len(curves) > 1:
        axes.legend(fontsize="small", loc="lower right")
    for mark in trace.marks_us:
        axes.axvline(mark / 1e6, color="black", linewidth=0.4, alpha=0.5)
    axes.set_title(f"live memory over {plural(len(trace), 'event')}", fontsize="medium")
    axes.set_xlabel("seconds")
    axes.set_ylabel("MiB live")

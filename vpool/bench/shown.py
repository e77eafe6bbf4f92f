"""The tables of a run, for a terminal and for the page of results."""

from typing import NamedTuple

from vpool.bench.results import device_peers, place, ratio

__all__ = ["Shown", "number", "tables_of"]


class Shown(NamedTuple):
    """One table: a row a subject, and below them what the figures are to each other."""

    group: str
    title: str
    header: list
    rows: list


class _Column(NamedTuple):
    label: str
    case: str
    at: int | str
    figure: str


def number(value):
    """A figure as people read it: no digits that are noise."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def tables_of(results):
    """Every table that a run has figures for.

    Returns
    -------
    list of Shown
    """
    shown = []
    for group, title, columns in _layout(results):
        columns = [column for column in columns if _rows(results, column)]
        if columns:
            shown.append(_table(results, group, title, columns))
    return shown


def _layout(results):
    def each(case, figure="ns", label="{}"):
        return [_Column(label.format(place(case, at)), case, at, figure) for at in results.places(case)]

    def single(case, label):
        names = {"p50_ns": "p50", "p99_ns": "p99", "p999_ns": "p99.9"}
        return [
            _Column(f"{label}, {name}", case, at, figure)
            for at in results.places(case)
            for figure, name in names.items()
        ]

    yield "pair", "Compiled: an allocation and its free, ns", [
        *each("pair"),
        *each("pair_among", label="{} among 10,000"),
    ]  # fmt: skip
    yield "random", "Compiled: a free and an allocation of a random size, ns", each("random", label="{} live")
    yield "latency", "Compiled, single operations with a look at the clock, ns", [
        *single("latency_pair", "pair"),
        *single("latency_random", "random"),
    ]  # fmt: skip
    yield "python", "From Python: an allocation and its free, ns", each("python_pair")
    yield "buffer", "From Python: a buffer made and dropped, ns", each("buffer")
    for case, title, figure in (
        ("own_same", "Threads on streams of their own, pairs of 64 KiB: ns in a thread", "ns"),
        ("own_random", "Threads on streams of their own, random sizes: ns in a thread", "ns"),
        ("one_same", "Threads on one stream, pairs of 64 KiB: operations a microsecond, all together", "per_us"),
        ("one_random", "Threads on one stream, random sizes: operations a microsecond, all together", "per_us"),
    ):
        yield "threads", title, each(case, figure)
    yield "handoff", "Allocated in one thread and freed in another: ns a block, by couples", each("handoff")
    yield (
        "misses",
        "Requests that the source serves, each a segment of its own, ns",
        [
            _Column(f"{place('miss', at)}, {name}", "miss", at, figure)
            for at in results.places("miss")
            for figure, name in (("miss_ns", "miss"), ("miss_own_ns", "without driver"), ("hit_ns", "hit"))
        ],
    )
    yield "blocks", "Compiled pair among so many live blocks, ns", each("blocks")
    yield "blocks", "Memory of the pool's own, bytes a block", [
        *each("resident", "bytes_whole", "{} live"),
        *each("resident", "bytes_halved", "every second freed"),
    ]  # fmt: skip
    for figure, title in (
        ("cold_ns", "Recorded programs, first pass: ns an event"),
        ("cold_own_ns", "Recorded programs, first pass without driver time: ns an event"),
        ("warm_ns", "Recorded programs, last of three passes: ns an event"),
        ("warm_own_ns", "Recorded programs, last of three passes without driver time: ns an event"),
        ("reserved_bytes", "Recorded programs, most reserved: MiB"),
    ):
        yield "traces", title, each("trace", figure)


def _rows(results, column):
    return results.having(column.case, column.figure, column.at)


def _table(results, group, title, columns):
    found: dict[tuple, dict] = {}
    for column in columns:
        for row in _rows(results, column):
            found.setdefault((row.kind, row.who), {})[column] = row
    rows = [[who, *(_cell(cells.get(column)) for column in columns)] for (_, who), cells in found.items()]
    for (kind, who), cells in found.items():
        if kind == "own" and any(row.floors is not None for row in cells.values()):
            of = [cells.get(column) for column in columns]
            rows.append([f"{who}, in locks", *("" if row is None else number(row.floors) for row in of)])
    for (kind, who), cells in found.items():
        if kind == "own" and any(column.figure.endswith("ns") or column.figure == "per_us" for column in cells):
            against = [_against_peers(results, column, cells.get(column)) for column in columns]
            if any(against):
                rows.append([f"{who}, times faster than the best peer", *against])
    return Shown(group, title, [_HEADER.get(columns[0].case, ""), *(column.label for column in columns)], rows)


_HEADER = {
    "pair": "bytes",
    "python_pair": "bytes",
    "buffer": "bytes",
    "own_same": "threads",
    "own_random": "threads",
    "one_same": "threads",
    "one_random": "threads",
    "handoff": "couples",
    "blocks": "blocks",
    "trace": "trace",
}


def _cell(row):
    """The median, and the best in brackets where that is another number."""
    if row is None:
        return ""
    scale = 1 / 2**20 if row.figure == "reserved_bytes" else 1
    median, best = number(row.median * scale), number(row.best * scale)
    return median if median == best else f"{median} ({best})"


def _against_peers(results, column, row):
    peers = device_peers(results, column.case, column.figure, column.at)
    if row is None or not peers:
        return ""
    if column.figure == "per_us":
        return number(min(ratio(row, peer) for peer in peers))
    return number(min(ratio(peer, row) for peer in peers))

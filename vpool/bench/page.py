"""The page of results in the documentation, made from what a run gave."""

from vpool.bench.goals import goals
from vpool.bench.shown import number, tables_of

__all__ = ["page"]

_HEAD = """\
.. Written by vpool bench --page; what it says is changed there and by another run.

Performance
===========

What an allocation costs, from one run of ``vpool bench`` (:doc:`commands`).  Everything in a table took turns, round by
round, so what its rows are to each other means more than any number alone: a *lock* is the pool's own lock, taken and
released once with nothing between, in that same run.  A cell is the median of the rounds, and the best in brackets.

What is measured
----------------

- A compiled pair is an allocation and its free, without the GIL; random sizes are from 512 B to 16 MiB, their logarithm
  uniform, with 512 blocks live, and an operation is a free and an allocation.
- Threads are compiled too, and begin at once.  Each has a stream of its own, or all share one.
- From Python, *empty calls* are calls with the same arguments and nothing in them but a fresh integer or an empty
  object as the result.
- Peers in C++ are compiled against their own headers and run the same workloads, each in a process of its own, as
  peers in Python do.  Every measurement has a fresh pool, which is warm before the clock starts.
- A recorded program runs three times through one pool of the default strategy.  The first pass is cold and has all
  driver calls in it.  Driver time of ``simulated-vmm`` is what a model says of a device.
"""


def page(results):
    """The page's text, in reStructuredText."""
    parts = [_HEAD, _section("The machine"), _machine(results), _section("Goals"), _goals(results)]
    for group, shown in _by_group(results).items():
        parts.append(_section(_TITLES[group]))
        for table in shown:
            parts.append(f"{table.title}:\n")
            parts.append(_table(table.header, table.rows))
    if results.notes:
        parts += [_section("What was not measured"), "\n".join(f"- {_escaped(note)}" for note in results.notes) + "\n"]
    return "\n".join(parts)


_TITLES = {
    "pair": "Pairs",
    "random": "Random sizes",
    "latency": "Single operations",
    "python": "Calls from Python",
    "buffer": "Buffers",
    "threads": "Threads",
    "handoff": "Producers and consumers",
    "misses": "Hits and misses",
    "blocks": "Many blocks",
    "traces": "Recorded programs",
}


def _by_group(results):
    groups: dict = {}
    for table in tables_of(results):
        groups.setdefault(table.group, []).append(table)
    return groups


def _section(title):
    return f"{title}\n{'-' * len(title)}\n"


def _machine(results):
    machine, settings = results.machine, results.settings
    busy = f", busy: a load of {machine['load']:g}" if machine["load"] > machine["cores"] / 2 else ""
    devices = [f"{one['name']} (driver {one['driver']})" for one in machine["devices"]]
    rows = [
        ["processor", f"{machine['processor']}, {machine['cores']} cores{busy}"],
        ["device", ", ".join(devices) or "none: memory is simulated, and no peer on a device was measured"],
        ["system", machine["system"]],
        ["date", machine["date"]],
        ["versions", ", ".join(f"{name} {version}" for name, version in results.packages.items())],
        ["rounds", f"{settings['rounds']}{', all sizes' if settings['full'] else ', few sizes'}"],
        ["source", settings["source"]],
        ["a lock and unlock", f"{number(results.floor_ns)} ns"],
        ["a look at the clock", f"{number(results.clock_ns)} ns"],
    ]
    return _table(None, rows)


def _goals(results):
    rows = []
    for goal in goals(results):
        bound = f"{'at least' if goal.at_least else 'at most'} {goal.bound:g}"
        figure = number(goal.figure) + (f" ({goal.where})" if goal.where else "")
        rows.append([goal.text, bound, figure or goal.why, {True: "yes", False: "no", None: ""}[goal.holds]])
    return _table(["goal", "bound", "here", "holds"], rows)


def _table(header, rows):
    lines = [".. list-table::", f"   :header-rows: {int(header is not None)}", ""]
    for row in [*([header] if header else []), *rows]:
        cells = [_escaped(str(cell)) for cell in row]
        lines += [f"   {'* -' if place == 0 else '  -'} {cell}".rstrip() for place, cell in enumerate(cells)]
    return "\n".join(lines) + "\n"


def _escaped(text):
    """Text in which nothing is markup."""
    return "".join(f"\\{one}" if one in "\\*`|_" else one for one in text)

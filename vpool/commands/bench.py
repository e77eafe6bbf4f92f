"""``vpool bench``."""

from vpool.bench import GROUPS, Results, bench
from vpool.bench.drawing import draw, empty_figure
from vpool.bench.goals import goals
from vpool.bench.page import page
from vpool.bench.shown import number, tables_of
from vpool.commands.console import expect_output, expect_plot, progress, save_plot, show_tables
from vpool.files import whole_file

HELP = "Measure what an allocation costs on this machine, beside the cost of a lock and every peer that is installed."
JSON = {
    "nargs": "?",
    "const": True,
    "default": False,
    "metavar": "FILE",
    "help": "write the result to a file as JSON, or print it",
}


def prepare(parser):
    parser.add_argument("--only", type=_groups, metavar="GROUPS", help=f"of {','.join(GROUPS)}, with commas between")
    parser.add_argument(
        "--full", action="store_true", help="all sizes and numbers of threads, and more rounds: minutes"
    )
    parser.add_argument("--traces", nargs="+", default=[], metavar="TRACE", help="recorded traces to replay as well")
    parser.add_argument("--source", metavar="NAME", help="of everything but traces: cuda if it works, else simulated")
    parser.add_argument("--no-peers", action="store_true", help="vpool and its floors alone")
    parser.add_argument("--from", dest="earlier", metavar="FILE", help="show an earlier run, and measure nothing")
    parser.add_argument("--check", action="store_true", help="say which goals hold")
    parser.add_argument("--plot", metavar="FILE", help="write a drawing, as .png, .svg or .pdf")
    parser.add_argument("--page", metavar="FILE", help="write the documentation's page of results")


def _groups(text):
    return [name.strip() for name in text.split(",") if name.strip()]


def run(args):
    written = args.json if isinstance(args.json, str) else None
    read = (*args.traces, args.earlier)
    expect_output(written, *read)
    expect_output(args.page, *read, beside=[written])
    expect_plot(args.plot, *read, beside=[written, args.page])
    figure = empty_figure() if args.plot else None
    if args.earlier:
        results = Results.load(args.earlier)
    else:
        with progress("measuring") as show:
            results = bench(args.only, args.full, args.traces, args.source, peers=not args.no_peers, progress=show)
    if written:
        results.save(written)
    if figure:
        draw(figure, results)
        save_plot(figure, args.plot)
    if args.page:
        text = page(results)
        with whole_file(args.page) as file:
            file.write(text.encode())
    checked = goals(results) if args.check else []
    if args.json is not True:
        _show(results, checked)
    result = results.to_dict()
    if args.check:
        result["goals"] = [goal.to_dict() for goal in checked]
    return result


def failure(result):
    missed = sum(goal["holds"] is False for goal in result.get("goals", ()))
    return f"{missed} of {len(result['goals'])} goals do not hold" if missed else None


def _show(results, checked):
    machine = results.machine
    devices = ", ".join(one["name"] for one in machine["devices"]) or "no device"
    print(f"{machine['processor']}, {machine['cores']} cores, load {machine['load']:g}; {devices}")
    print(
        f"A lock and unlock: {number(results.floor_ns)} ns.  Cells are the median of"
        f" {results.settings['rounds']} rounds, and the best in brackets."
    )
    show_tables([(shown.title, shown.header, shown.rows) for shown in tables_of(results)])
    if checked:
        header = ("goal", "bound", "here", "holds")
        show_tables([("Goals", header, [_line(goal) for goal in checked])])
    if results.notes:
        print("\nNot measured:")
        for note in results.notes:
            print(f"  {note}")


def _line(goal):
    holds = {True: "yes", False: "no", None: "?"}[goal.holds]
    figure = (
        f"{number(goal.figure)}{f' at {goal.where}' if goal.where else ''}" if goal.figure is not None else goal.why
    )
    return goal.text, f"{'>=' if goal.at_least else '<='} {goal.bound:g}", figure, holds

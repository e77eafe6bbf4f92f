"""``vpool compare``."""

from vpool.commands.console import expect_plot, progress, save_plot
from vpool.commands.replay import size
from vpool.compare import STRATEGIES, compare

HELP = "Compare every strategy, and models of other pools, on recorded traces, and tell which suits and why."


def prepare(parser):
    parser.add_argument("traces", metavar="TRACE", nargs="+", help="a trace file of any format that vpool reads")
    parser.add_argument("--capacity", type=size, metavar="N", help="bytes that each pool may take, as 20GiB")
    parser.add_argument(
        "--strategy",
        action="append",
        metavar="NAME_OR_FILE",
        help=f"a policy file or one of {', '.join(STRATEGIES)}, instead of all of these; may be repeated",
    )
    parser.add_argument("--no-peers", action="store_true", help="without the models of other pools")
    parser.add_argument("--plot", metavar="FILE", help="write a bar chart of reserved / live, as .png, .svg or .pdf")


def run(args):
    expect_plot(args.plot, *args.traces, *(args.strategy or ()))
    with progress("comparing") as show:
        result = compare(args.traces, args.strategy, args.capacity, peers=not args.no_peers, progress=show)
    if args.plot:
        save_plot(_drawn(result), args.plot)
    if not args.json:
        print(result)
    return result.to_dict()


def _drawn(result):
    """A figure: a group of bars for each trace, a bar for each pool; hollow where it ran out of memory."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    axes = figure.add_subplot()
    pools = {(row.modelled, row.name): row.title for row in result.rows}
    width = 0.8 / len(pools)
    for number, ((modelled, name), title) in enumerate(pools.items()):
        rows = [row for row in result.rows if (row.modelled, row.name) == (modelled, name)]
        bars = axes.bar(
            [place + (number + 0.5) * width - 0.4 for place in range(len(rows))],
            [row.reserved_over_live for row in rows],
            width,
            label=title,
            hatch="//" if modelled else None,
        )
        for bar, row in zip(bars, rows, strict=True):
            bar.set_fill(row.oom is None)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(result.traces)), list(result.traces), rotation=20 if len(result.traces) > 3 else 0)
    axes.set_ylabel("peak reserved / peak live")
    figure.set_size_inches(max(8.0, 1.5 + 0.3 * len(result.rows)), 5.0)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    return figure

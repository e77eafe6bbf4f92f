"""``vpool bench``."""

from vpool.bench import bench
from vpool.commands.console import progress, table

HELP = "Measure what an allocation costs on this machine, beside the cost of a lock."


def prepare(parser):
    parser.add_argument("--quick", action="store_true", help="a tenth of the operations: a look, not a measurement")


def run(args):
    with progress("measuring") as show:
        result = bench(scale=0.1 if args.quick else 1.0, progress=show)
    if not args.json:
        floor = result["rows"][0]["ns"]
        rows = [
            (row["what"], f"{row['ns']:.1f}", f"{row['best_ns']:.1f}", f"{row['ns'] / floor:.2f}")
            for row in result["rows"]
        ]
        print(table(("nanoseconds, each the median of " + str(result["repeats"]), "median", "best", "in floors"), rows))
        print("\nThe floor is the pool's own lock, taken and released once.")
    return result

"""``vpool tune``."""

from vpool.commands.console import expect_output, expect_plot, progress, save_plot, show_tables
from vpool.commands.replay import count, size
from vpool.tuning import OBJECTIVES, TRIALS, tune

HELP = "Search for the policy that suits recorded traces best, and tell what it gains and why."


def prepare(parser):
    parser.add_argument("traces", metavar="TRACE", nargs="+", help="a trace file of any format that vpool reads")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the policy, with expected figures in comments")
    parser.add_argument("--capacity", type=size, metavar="N", help="bytes that the pool may take, as 20GiB")
    parser.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default="reserved",
        help="the least peak reserved (the default), the fewest source calls, the same within --capacity, or a mix",
    )
    parser.add_argument(
        "--call-bytes", type=size, default=1 << 20, metavar="N", help="bytes that one source call is worth in a mix"
    )
    parser.add_argument("--trials", type=count, default=TRIALS, metavar="N", help=f"policies to try; {TRIALS:,}")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the search; 0")
    parser.add_argument("--workers", type=count, metavar="N", help="threads, or processes of a local cluster")
    parser.add_argument("--passes", type=count, default=1, metavar="N", help="replays into the same pool; 1")
    parser.add_argument("--maintain", action="store_true", help="call the pool's maintain() before each event")
    parser.add_argument("--no-holdout", action="store_true", help="do not check on the second half of the steps")
    parser.add_argument("--study", metavar="FILE", help="keep what was measured, and go on from it")
    parser.add_argument("--scheduler", metavar="ADDRESS", help="of a Dask scheduler; local for a cluster of processes")
    parser.add_argument("--plot", metavar="FILE", help="write a picture of why, as .png, .svg or .pdf")


def run(args):
    expect_output(args.study, *args.traces)
    expect_output(args.output, *args.traces, beside=[args.study])
    expect_plot(args.plot, *args.traces, beside=[args.study, args.output])
    with progress("tuning") as show:
        found = tune(
            args.traces,
            args.capacity,
            args.objective,
            call_bytes=args.call_bytes,
            trials=args.trials,
            seed=args.seed,
            workers=args.workers,
            passes=args.passes,
            maintain=args.maintain,
            holdout=not args.no_holdout,
            study=args.study,
            scheduler=args.scheduler,
            progress=show,
        )
    if args.output:
        found.save(args.output)
    if args.plot:
        save_plot(found.plot(), args.plot)
    if not args.json:
        print("\n".join(found.sentences()))
        show_tables(found.tables())
        print(f"\n{args.output}:" if args.output else "", found.policy.dumps(), sep="\n", end="")
    return found.to_dict()

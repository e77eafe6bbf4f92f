"""Rules of thumb about memory pools, each measured: ``python -m vpool.claims NAME``.

A function a claim gives its figures as rows; the page of the claims says what they mean.
"""

import argparse
import bisect
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vpool import sources
from vpool._interface import bench as loops
from vpool._interface.pool import Pool
from vpool._interface.replay import Replayer
from vpool.errors import Error, OutOfMemoryError
from vpool.policy import Policy
from vpool.replay import replay
from vpool.sizes import format_bytes
from vpool.sizing import fixed_for, smallest_slab
from vpool.strategies import GRANULE, Dynamic, Hybrid
from vpool.tables import table
from vpool.trace import Trace

__all__ = [
    "GROWTH_RULES",
    "alignment",
    "fluctuating",
    "growth",
    "main",
    "malloc",
    "merging",
    "pieces",
    "sharing",
    "tree",
    "utilization",
]

MIB = 1 << 20
GIB = 1 << 30
TRACES = (
    "bert_finetune", "llm_generate", "llm_lora", "llm_train", "maskrcnn_train", "moe_train", "resnet_train",
    "two_streams", "fsdp_train",
)  # fmt: skip
MIXED_PRECISION = ("bert_finetune", "llm_train", "moe_train")
GROWTH_RULES = {
    "1.25": Dynamic(growth=1.25),
    "1.5": Dynamic(growth=1.5),
    "2.0": Dynamic(growth=2.0),
    "512 MiB": Dynamic(growth="512MiB"),
    "adaptive": Dynamic(adaptive=True),
}
# Of a checkout: neither is part of an installed package.
_TESTS = Path(__file__).resolve().parents[1] / "tests"
_FOLDER = _TESTS / "traces"
_TREE = _TESTS / "helpers" / "balanced_tree.cpp"
_REPEATS = 5
_FEW = 128  # live blocks that come and go among many free ones
_SEGMENT_ROUNDING = 2 * MIB


def malloc(source=None, scale=1.0):
    """What the source's own calls cost, against an allocation of the pool on that source.

    Parameters
    ----------
    source : str or vpool.sources.Source, optional
        The best that works here if not given.
    scale : float
        Of the number of the pool's operations.

    Returns
    -------
    list of dict
        A row a size: ``source``, ``bytes``, the medians ``take_ns`` and ``give_ns`` of the source's calls, and
        ``pair_ns`` of an allocation of the pool with its free, and ``times``, the ratio.
    """
    source = sources.resolve(source)
    many = max(1000, int(1_000_000 * scale))
    rows = []
    for nbytes in (2 * MIB, 20 * MIB, 64 * MIB, 512 * MIB):
        # Every block is a segment of its own size; the first takes what else a driver does once.
        with Pool(Dynamic(initial=0, growth=4096, limit=0.8), source, debug=()) as pool:
            pool.allocate(nbytes)
            blocks, takes, gives = [], [], []
            for _ in range(20 if nbytes < 512 * MIB else 4):
                begin = _nanoseconds(source, "malloc")
                blocks.append(pool.allocate(nbytes))
                takes.append(_nanoseconds(source, "malloc") - begin)
            for block in blocks:
                pool.deallocate(block)
                begin = _nanoseconds(source, "free")
                pool.trim()
                gives.append(_nanoseconds(source, "free") - begin)
        take, give = float(np.median(takes)), float(np.median(gives))
        with Pool(Dynamic(initial=2 * nbytes, limit=0.8), source, debug=()) as pool:
            pair = float(np.median([loops.pair(pool, nbytes, many) / many for _ in range(_REPEATS)]))
        rows.append(
            {
                "source": source.name,
                "bytes": nbytes,
                "take_ns": take,
                "give_ns": give,
                "pair_ns": pair,
                "times": (take + give) / pair,
            }
        )
    return rows


def _nanoseconds(source, call):
    """Time that calls of a source's driver took so far."""
    return source.driver.calls()[call][2]


def sharing(folder=_FOLDER):
    """How much of what mixed-precision training asks for is memory that it had before.

    Parameters
    ----------
    folder : path
        Of the recorded traces.

    Returns
    -------
    list of dict
        A row a trace: ``sharing`` of the pool's report at the end; and of its steps the ``least``,
        ``median`` and ``most`` of 1 - (the most that was live in the step / (what was live before it +
        what it asked for)).
    """
    rows = []
    for name in MIXED_PRECISION:
        trace = _recorded(folder, name)
        (report,) = _reports(trace, Dynamic(limit=1.0), [len(trace)])
        live = trace.live_bytes
        steps = []
        for begin, end in trace.steps:
            steps.append(1 - int(live[begin:end].max()) / trace.step_bytes(begin))
        rows.append(
            {
                "trace": name,
                "sharing": report.sharing,
                "steps": len(steps),
                "least": min(steps),
                "median": float(np.median(steps)),
                "most": max(steps),
            }
        )
    return rows


def fluctuating(batches):
    """A made training run whose batch size changes: a step a batch, with activations in proportion to it."""
    op, ids, sizes, marks = [], [], [], []
    born: list[int] = []

    def lend(nbytes):
        born.append(nbytes)
        op.append(0)
        ids.append(len(born) - 1)
        sizes.append(nbytes)
        return len(born) - 1

    def take_back(number):
        op.append(1)
        ids.append(number)
        sizes.append(born[number])

    for _ in range(24):
        lend(24 * MIB)
    for batch in batches:
        marks.append(len(op))
        layers = []
        for _ in range(24):
            layers.append([lend(batch * nbytes) for nbytes in (MIB, MIB // 2, MIB // 4)])
            take_back(lend(batch * 2 * MIB))
        for layer in reversed(layers):
            gradients = [lend(batch * MIB), lend(24 * MIB)]
            for number in layer + gradients:
                take_back(number)
    count = len(op)
    return Trace(op, ids, sizes, np.zeros(count, np.uint16), np.arange(count), marks)


def utilization(steps=60, seed=0):
    """Utilization of each strategy where the batch size is 28 to 32, and 64 in one step of ten.

    Returns
    -------
    list of dict
        A row a strategy: ``mean`` and ``least`` utilization at the fullest moments of the steps,
        ``reserved_over_live`` of the peaks, and ``source_calls``.
    """
    rng = np.random.default_rng(seed)
    batches = [64 if rng.random() < 0.1 else int(rng.integers(28, 33)) for _ in range(steps)]
    trace = fluctuating(batches)
    live = trace.live_bytes
    fullest = [begin + int(live[begin:end].argmax()) + 1 for begin, end in trace.steps]
    core = smallest_slab(fluctuating([32]))
    strategies = {
        "fixed": fixed_for(trace),
        "dynamic": Dynamic(limit=1.0),
        "adaptive": Dynamic(limit=1.0, adaptive=True),
        "hybrid": Hybrid(core=core, dynamic=Dynamic(initial=0, limit=1.0)),
        "hybrid, adaptive": Hybrid(core=core, dynamic=Dynamic(initial=0, limit=1.0, adaptive=True)),
    }
    rows = []
    for name, strategy in strategies.items():
        *reports, last = _reports(trace, strategy, [*fullest, len(trace)])
        shares = [report.utilization for report in reports]
        rows.append(
            {
                "strategy": name,
                "mean": float(np.mean(shares)),
                "least": min(shares),
                "reserved_over_live": last.peak_reserved_bytes / trace.peak_live_bytes,
                "source_calls": last.source_calls,
            }
        )
    return rows


def alignment(folder=_FOLDER):
    """What it wastes to make every block whole 2 MiB, against 256 bytes.

    Returns
    -------
    list of dict
        A row a trace: ``internal`` and ``internal_2mib``, the internal fragmentation when the most bytes are
        live, ``requests_2mib``, that of all requests together, and ``reserved_over_live`` and
        ``reserved_over_live_2mib``.
    """
    rows = []
    for name in TRACES:
        trace = _recorded(folder, name)
        requests = trace.bytes[trace.op == 0].astype(np.int64)
        rounded = -(-requests // (2 * MIB)) * (2 * MIB)
        fine, coarse = (replay(trace, Policy(Dynamic(), rounding=unit)) for unit in (GRANULE, 2 * MIB))
        rows.append(
            {
                "trace": name,
                "internal": fine.internal_fragmentation,
                "internal_2mib": coarse.internal_fragmentation,
                "requests_2mib": 1 - int(requests.sum()) / int(rounded.sum()),
                "reserved_over_live": fine.reserved_over_live,
                "reserved_over_live_2mib": coarse.reserved_over_live,
            }
        )
    return rows


def tree(scale=1.0, counts=(1_000, 10_000, 100_000)):
    """An allocator on a balanced tree, against the pool's bitmaps, by the number of free blocks.

    Parameters
    ----------
    scale : float
        Of the number of operations.
    counts : sequence of int
        How many free blocks there are.

    Returns
    -------
    list of dict
        A row a count: ``free_blocks``, and the medians ``pool_ns`` and ``tree_ns`` of an allocation or a
        free, and ``times``, the ratio.

    Notes
    -----
    Compiles the allocator on a tree with the machine's C++ compiler (``CXX``, or else ``c++``).
    """
    toggles = _compiled_tree()
    many = max(1000, int(1_000_000 * scale))
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(np.log(512), np.log(4 * MIB), 1 << 16)).astype(np.uint64)
    rows = []
    for count in counts:
        holes = rng.choice(sizes, count)
        order = rng.permutation(count).astype(np.uint64)
        with _populated(holes, order) as pool:
            samples = [
                (loops.random_toggles(pool, sizes, _FEW, many, 1), toggles(holes, order, sizes, many))
                for _ in range(_REPEATS)
            ]
        pool_ns, tree_ns = np.median(samples, axis=0) / many
        rows.append(
            {
                "free_blocks": count,
                "pool_ns": float(pool_ns),
                "tree_ns": float(tree_ns),
                "times": float(tree_ns / pool_ns),
            }
        )
    return rows


def _populated(holes, order):
    """A pool with these free blocks, kept apart, freed in this order."""
    pool = Pool(Dynamic(initial="1TiB", limit=1.0), "simulated", debug=())
    blocks = []
    for nbytes in holes.tolist():
        blocks.append(pool.allocate(nbytes))
        pool.allocate(GRANULE)
    for number in order.tolist():
        pool.deallocate(blocks[number])
    return pool


def _compiled_tree():
    """The loop of `_TREE` on populated blocks, as a function that returns nanoseconds."""
    compiler = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "tree.so"
        command = [*compiler.split(), "-std=c++17", "-O3", "-shared", "-fPIC", "-o", str(built), str(_TREE)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{compiler} did not compile the tree: {done.stderr.strip()}")
        function = ctypes.CDLL(str(built)).toggles
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    function.argtypes = [pointer, pointer, number, pointer, number, number, number, number]
    function.restype = number

    def toggles(holes, order, sizes, operations):
        addresses = [array.ctypes.data for array in (holes, order, sizes)]
        return function(addresses[0], addresses[1], len(holes), addresses[2], len(sizes) - 1, _FEW, operations, 1)

    return toggles


def merging(folder=_FOLDER, passes=3):
    """What a pool reserves that cuts blocks as vpool does and never merges them.

    Returns
    -------
    list of dict
        A row a trace: ``merged``, reserved / live of vpool's default pool over all passes, and
        ``never_merged``, a list of the same after each pass of the other.
    """
    rows = []
    for name in TRACES:
        trace = _recorded(folder, name)
        merged = replay(trace, passes=passes).reserved_over_live
        reserved = _never_merged(trace, passes)
        rows.append(
            {
                "trace": name,
                "merged": merged,
                "never_merged": [nbytes / trace.peak_live_bytes for nbytes in reserved],
            }
        )
    return rows


def _never_merged(trace, passes):
    """Bytes reserved after each pass: best fit, 256-byte rounding and the default growth.

    Blocks that are never merged need no addresses: their sizes are all there is to know.
    """
    free: list[int] = []
    reserved, after = 0, []
    sizes = (-(-trace.bytes.astype(np.int64) // GRANULE) * GRANULE).tolist()
    ops, numbers = trace.op.tolist(), trace.number.tolist()
    for _ in range(passes):
        live: dict[int, int] = {}
        for op, number, nbytes in zip(ops, numbers, sizes, strict=True):
            if op:
                bisect.insort(free, live.pop(number))
                continue
            place = bisect.bisect_left(free, nbytes)
            if place < len(free):
                block = free.pop(place)
            else:
                step = -(-(reserved // 2 if reserved else 256 * MIB) // _SEGMENT_ROUNDING) * _SEGMENT_ROUNDING
                block = max(nbytes, step)
                reserved += block
            if block > nbytes:
                bisect.insort(free, block - nbytes)
            live[number] = nbytes
        for nbytes in live.values():
            bisect.insort(free, nbytes)
        after.append(reserved)
    return after


def pieces():
    """4 GiB free: in pieces, where 3 GiB are refused, and side by side, where they are served.

    Returns
    -------
    list of dict
        A row a layout: ``freed``, ``free_bytes``, ``largest_bytes``, ``outcome``, and the error's ``message``.
    """
    rows = []
    for freed, chosen in (("every other block", slice(None, None, 2)), ("the first half", slice(0, 8))):
        with Pool(Dynamic(initial="8GiB", limit=1.0), sources.Simulated("8GiB"), name="pieces", debug=()) as pool:
            blocks = [pool.allocate(GIB // 2) for _ in range(16)]
            for block in blocks[chosen]:
                pool.deallocate(block)
            report, message = pool.inspect(), ""
            try:
                pool.allocate(3 * GIB)
            except OutOfMemoryError as error:
                message = str(error)
            rows.append(
                {
                    "freed": freed,
                    "free_bytes": report.free_bytes,
                    "largest_bytes": report.largest_free_bytes,
                    "outcome": "refused" if message else "served",
                    "message": message,
                }
            )
    return rows


def growth(folder=_FOLDER):
    """What each rule of growth reserves, and how often it calls the source, over two passes of each trace.

    Returns
    -------
    list of dict
        A row a trace, and one with the geometric means and sums: ``trace``, and ``rules``, which has
        ``reserved_over_live`` and ``source_calls`` of each of `GROWTH_RULES`.
    """
    found = {}
    for name in TRACES:
        trace = _recorded(folder, name)
        results = {rule: replay(trace, strategy, passes=2) for rule, strategy in GROWTH_RULES.items()}
        found[name] = {rule: (one.reserved_over_live, one.source_calls) for rule, one in results.items()}
    together = {}
    for rule in GROWTH_RULES:
        ratios, calls = np.array([figures[rule] for figures in found.values()]).T
        together[rule] = (float(np.exp(np.log(ratios).mean())), int(calls.sum()))
    rows = []
    for name, figures in [*found.items(), ("all", together)]:
        rules = {rule: {"reserved_over_live": figure[0], "source_calls": figure[1]} for rule, figure in figures.items()}
        rows.append({"trace": name, "rules": rules})
    return rows


def _recorded(folder, name):
    return Trace.load(Path(folder) / f"{name}.npz")


def _reports(trace, strategy, stops):
    """Reports of a pool that replays a trace of one stream, each before the event of a stop."""
    with Pool(strategy, "simulated", debug=()) as pool:
        replayer = Replayer(pool, trace, {0: 0})
        at = 0
        for stop in stops:
            if replayer.run(at, stop) < stop:
                raise OutOfMemoryError(f"the trace does not complete with {strategy}")
            at = stop
            yield pool.inspect()


class _Claim(NamedTuple):
    """A subcommand: what it says, its figures, and its table's columns: each a header and the format of a row."""

    help: str
    measure: Callable
    columns: str


_CLAIMS = {
    "malloc": _Claim(
        "What the source's own calls cost, against an allocation of the pool with its free; nanoseconds.",
        lambda args: malloc(args.source, 0.1 if args.quick else 1.0),
        "source {source} | size {size} | take {take_ns:,.0f} | give back {give_ns:,.0f} | pool, pair {pair_ns:.1f} "
        "| times {times:,.0f}",
    ),
    "sharing": _Claim(
        "Sharing in recorded mixed-precision training: of the whole run, and of its steps.",
        lambda args: sharing(args.traces),
        "trace {trace} | whole run {sharing:.1%} | steps {steps} | least {least:.1%} | median {median:.1%} "
        "| most {most:.1%}",
    ),
    "utilization": _Claim(
        "Utilization at the fullest moment of each step where the batch size changes.",
        lambda args: utilization(),
        "strategy {strategy} | mean {mean:.1%} | least {least:.1%} | reserved / live {reserved_over_live:.3f} "
        "| source calls {source_calls:,}",
    ),
    "alignment": _Claim(
        "What blocks of whole 2 MiB waste: internal fragmentation at the peak and of all requests.",
        lambda args: alignment(args.traces),
        "trace {trace} | at the peak {internal_2mib:.1%} | of requests {requests_2mib:.1%} "
        "| reserved / live {reserved_over_live_2mib:.3f} | with 256 bytes {reserved_over_live:.3f}",
    ),
    "tree": _Claim(
        "An allocator on a balanced tree against the pool, by free blocks; nanoseconds an operation.",
        lambda args: tree(0.1 if args.quick else 1.0),
        "free blocks {free_blocks:,} | pool {pool_ns:.1f} | tree {tree_ns:.1f} | times {times:.1f}",
    ),
    "merging": _Claim(
        "Reserved / live with merging, over three passes, and without, after each.",
        lambda args: merging(args.traces),
        "trace {trace} | merged {merged:.3f} | never: pass 1 {never_merged[0]:.3f} | pass 2 {never_merged[1]:.3f} "
        "| pass 3 {never_merged[2]:.3f}",
    ),
    "pieces": _Claim(
        "4 GiB are free and 3 GiB asked for.",
        lambda args: pieces(),
        "freed {freed} | free {free} | largest {largest} | 3 GiB {outcome}",
    ),
    "growth": _Claim(
        "Reserved / live and source calls of rules of growth over two passes; means and sums in the last row.",
        lambda args: growth(args.traces),
        "trace {trace} | "
        + " | ".join(
            f"{rule} {{rules[{rule}][reserved_over_live]:.3f}} | calls {{rules[{rule}][source_calls]:,}}"
            for rule in GROWTH_RULES
        ),
    ),
}


def _table(columns, rows):
    """A table of rows, whose sizes are also there in words: `size` of `bytes`, `free` of `free_bytes`."""
    headers, forms = zip(*(column.split(" {", 1) for column in columns.split(" | ")), strict=True)
    cells = []
    for row in rows:
        words = {
            name.removesuffix("_bytes").replace("bytes", "size"): format_bytes(value)
            for name, value in row.items()
            if name.endswith("bytes")
        }
        cells.append([f"{{{form}".format(**row, **words) for form in forms])
    return table(headers, cells)


def _parser():
    parser = argparse.ArgumentParser(prog="python -m vpool.claims", description="Rules of thumb, measured.")
    claims = parser.add_subparsers(dest="claim", required=True, metavar="NAME")
    for name, claim in _CLAIMS.items():
        command = claims.add_parser(name, help=claim.help, description=claim.help)
        command.add_argument("--json", action="store_true", help="print the figures as JSON")
        command.add_argument("--quick", action="store_true", help="a tenth of the operations that are timed")
        command.add_argument("--traces", type=Path, default=_FOLDER, help="the folder of the recorded traces")
        if name == "malloc":
            command.add_argument("--source", help="host or cuda; the best one here if not given")
    return parser


def main(argv=None):
    """Measure one claim and print its table, or its rows as JSON.

    Returns
    -------
    int
        0 for done, 1 for a failure that one line on standard error explains.
    """
    args = _parser().parse_args(argv)
    claim = _CLAIMS[args.claim]
    try:
        rows = claim.measure(args)
    except (Error, OSError, ValueError) as error:
        print(f"{args.claim}: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    print(_table(claim.columns, rows))
    for row in rows:
        if row.get("message"):
            print("", *(textwrap.fill(line, 100) for line in row["message"].splitlines()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

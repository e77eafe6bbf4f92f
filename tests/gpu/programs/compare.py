"""Runs the programs beside this file with and without vpool, and prints how they compare.

    python tests/gpu/programs/compare.py [--programs training three] [--processes 3] [--out figures.json]

Each run is a process of its own; the modes alternate, so that what the machine does meanwhile meets all of them.  Of
the runs of a mode the median counts.  Ratios are to the framework's own allocator, peaks also to PyTorch's expandable
segments.  Digests have to be equal.  The share of raw cudaMalloc and cudaFree is that of training with caching off.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
OF_TORCH = ("default", "expandable", "global", "global-vmm", "mempool")
MODES = {
    "training": OF_TORCH,
    "generation": OF_TORCH,
    "detection": OF_TORCH,
    "grouping": ("default", "vpool", "vpool-c"),
    "kernels": ("default", "vpool"),
    "three": ("default", "vpool"),
}
VARIABLES = {
    "expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "uncached": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
}


def run(program, mode, *options):
    """What one process printed, or why it did not."""
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | VARIABLES.get(mode, {})
    command = [sys.executable, HERE / f"{program}.py", "--mode", mode, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["nothing was said"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def compared(program, processes, options):
    """The medians of each mode, from runs that alternate."""
    runs = {mode: [] for mode in MODES[program]}
    for number in range(processes):
        for mode in MODES[program]:
            found = run(program, mode, *options)
            runs[mode].append(found)
            print(f"{program} {mode} {number + 1}/{processes}: {json.dumps(found)}", file=sys.stderr, flush=True)
    rows = {}
    for mode, found in runs.items():
        errors = [one["error"] for one in found if "error" in one]
        if errors:
            rows[mode] = {"error": errors[0]}
            continue
        rows[mode] = {
            name: statistics.median(one[name] for one in found)
            for name in ("median_step_seconds", "mean_step_seconds", "peak_reserved_bytes")
        }
        rows[mode]["digests"] = sorted({one["digest"] for one in found})
    return rows


def with_ratios(rows):
    """The same, each beside the framework's own."""
    own = rows["default"]
    for row in rows.values():
        if "error" in row or "error" in own:
            continue
        row["same_results"] = row["digests"] == own["digests"] and len(own["digests"]) == 1
        row["step_ratio"] = row["median_step_seconds"] / own["median_step_seconds"]
        for name in ("default", "expandable"):
            peak = rows.get(name, {}).get("peak_reserved_bytes")
            row[f"peak_to_{name}"] = row["peak_reserved_bytes"] / peak if peak else None
    return rows


def show(found):
    columns = "step_ratio", "peak_to_default", "peak_to_expandable"
    print(
        f"{'program':12}{'mode':12}{'step ms':>10}{'peak MiB':>10}{'same':>6}"
        + "".join(f"{one:>20}" for one in columns)
    )
    for program, rows in found.items():
        for mode, row in rows.items():
            if "error" in row:
                print(f"{program:12}{mode:12}{row['error']}")
                continue
            figures = f"{row['median_step_seconds'] * 1e3:10.3f}{row['peak_reserved_bytes'] / 2**20:10.0f}"
            ratios = "".join(f"{row[one]:20.4f}" if row.get(one) else f"{'':20}" for one in columns)
            print(f"{program:12}{mode:12}{figures}{row.get('same_results', '')!s:>6}{ratios}")
    for mode in sorted({mode for rows in found.values() for mode in rows} - {"default"}):
        for column in columns:
            ratios = [rows[mode][column] for rows in found.values() if rows.get(mode, {}).get(column)]
            if ratios:
                mean = math.exp(statistics.fmean(map(math.log, ratios)))
                print(f"geometric mean of {column} in {mode} over {len(ratios)}: {mean:.4f}, worst {max(ratios):.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--steps", help="of each run, if not the program's own number")
    parser.add_argument("--small", action="store_true", help="to see that everything works")
    parser.add_argument("--no-share", action="store_true", help="without the runs with caching off")
    parser.add_argument("--out", type=Path, help="a file for all figures as JSON")
    args = parser.parse_args()
    options = [*(["--steps", args.steps] if args.steps else []), *(["--small"] if args.small else [])]
    found = {program: with_ratios(compared(program, args.processes, options)) for program in args.programs}
    show(found)
    share = None
    if "training" in args.programs and not args.no_share:
        share = {mode: run("training", mode, "--profile", *options) for mode in ("uncached", "default", "global")}
        for mode, row in share.items():
            print(f"training, {mode}: {json.dumps(row)}")
    if args.out:
        args.out.write_text(json.dumps({"programs": found, "share": share}, indent=1))


if __name__ == "__main__":
    main()

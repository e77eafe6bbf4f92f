"""What the programs share: how they get their memory, how steps are timed, and what is printed in the end.

Each program prints one line of JSON: a digest of its results, the most bytes that were held of the device, and the
median and mean seconds of a step.  `compare` runs them in every mode and shows the ratios.
"""

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import time

MODES_OF_TORCH = ("default", "expandable", "global", "global-vmm", "mempool", "uncached")


def arguments(modes, steps):
    """What the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=modes, default="default", help="where memory comes from")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--device", default="cuda", help="cpu: to see that the program works")
    parser.add_argument("--small", action="store_true", help="a model that takes seconds on a CPU")
    parser.add_argument("--profile", action="store_true", help="the share of cudaMalloc and cudaFree in the steps")
    return parser.parse_args()


class Steps:
    """Times steps, the first ones apart, and collects what is printed."""

    def __init__(self, wait, held, warm_up=3):
        self.wait = wait
        self.held = held
        self.warm_up = warm_up
        self.seconds = []
        self.peak = 0
        self.digest = hashlib.sha256()

    @contextlib.contextmanager
    def step(self):
        self.wait()
        began = time.perf_counter()
        yield
        self.wait()
        self.seconds.append(time.perf_counter() - began)
        self.peak = max(self.peak, self.held())

    def add(self, array):
        """Make a result, which NumPy can read, part of the digest."""
        self.digest.update(memoryview(array).cast("B"))

    def show(self, args, **more):
        timed = self.seconds[self.warm_up :] or self.seconds
        found = {
            "program": os.path.basename(__import__("__main__").__file__).removesuffix(".py"),
            "mode": args.mode,
            "digest": self.digest.hexdigest()[:16],
            "peak_reserved_bytes": max(self.peak, self.held()),
            "median_step_seconds": statistics.median(timed),
            "mean_step_seconds": statistics.fmean(timed),
            "steps": len(timed),
            **more,
        }
        print(json.dumps(found), flush=True)


class TorchMemory:
    """PyTorch's memory in one of the modes; `with` it around the whole program."""

    def __init__(self, args):
        import torch

        self.torch = torch
        self.on_gpu = args.device != "cpu"
        self.mode = args.mode
        self.pool = self.segments = None
        if not self.on_gpu:
            return
        # What a program adds for vpool is one of these lines.
        if self.mode == "global":
            import vpool.integrations.torch

            vpool.integrations.torch.install()
            self.pool = vpool.default_pool(0)
        elif self.mode == "global-vmm":
            import vpool.integrations.torch

            self.pool = vpool.Pool(vpool.Dynamic(initial=0, limit=0.95), source="cuda-vmm")
            vpool.integrations.torch.install(self.pool)
        elif self.mode == "mempool":
            import vpool.integrations.torch

            self.pool = vpool.Pool(vpool.Dynamic(initial=0, growth="2MiB", limit=0.95), source="cuda")
            self.segments = vpool.integrations.torch.mem_pool(self.pool)

    def __enter__(self):
        self.scope = self.torch.cuda.use_mem_pool(self.segments) if self.segments else contextlib.nullcontext()
        self.scope.__enter__()
        return self

    def __exit__(self, *exc_info):
        return self.scope.__exit__(*exc_info)

    def wait(self):
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def held(self):
        """Bytes that are held of the device, at most, so far."""
        if not self.on_gpu:
            return 0
        if self.mode == "uncached":
            free, total = self.torch.cuda.mem_get_info()
            return total - free
        if self.mode.startswith("global"):
            return self.pool.stats.peak_reserved_bytes
        reserved = self.torch.cuda.max_memory_reserved()
        if self.pool is not None:  # its blocks are PyTorch's segments; what it holds beyond them counts, too
            reserved += self.pool.stats.reserved_bytes - self.pool.stats.allocated_bytes
        return reserved

    def steps(self):
        return Steps(self.wait, self.held)


def deterministic(torch, seed=0):
    """Bit for bit the same results from run to run."""
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def driver_share(torch, run, steps=10):
    """The share of some steps' time on the host that cudaMalloc and cudaFree take, by the profiler, and their calls."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        began = time.perf_counter()
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    rows = [row for row in profiled.key_averages() if row.key in ("cudaMalloc", "cudaFree")]
    return {
        "driver_share": sum(row.self_cpu_time_total for row in rows) / 1e6 / seconds,
        "driver_calls_per_step": sum(row.count for row in rows) / steps,
    }

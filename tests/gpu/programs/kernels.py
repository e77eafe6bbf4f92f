"""A loop of Numba kernels on arrays of changing length."""

import os
import random
import warnings

import common
import numpy as np

warnings.simplefilter("ignore")  # of grids that are small


def main():
    args = common.arguments(("default", "vpool"), 100)
    if args.mode == "vpool":
        os.environ["NUMBA_CUDA_MEMORY_MANAGER"] = "vpool.integrations.numba"
    from numba import cuda

    @cuda.jit
    def relax(before, after):
        at = cuda.grid(1)
        if 0 < at < before.size - 1:
            after[at] = (before[at - 1] + 2 * before[at] + before[at + 1]) // 4

    @cuda.jit
    def mix(left, right, result):
        at = cuda.grid(1)
        if at < result.size:
            result[at] = left[at] * 3 + right[at % right.size]

    began = cuda.current_context().get_memory_info()

    def held():
        if args.mode == "vpool":
            import vpool

            return vpool.default_pool(0).stats.peak_reserved_bytes
        return began.free - cuda.current_context().get_memory_info().free

    steps = common.Steps(cuda.synchronize, held)
    sizes, data = random.Random(4), np.random.default_rng(4)
    table = cuda.to_device(data.integers(0, 100, 1000))
    for _ in range(args.steps):
        size = sizes.randrange(100_000, 300_000 if args.small else 10_000_000)
        host = data.integers(0, 1_000_000, size)
        grid = -(-size // 256)
        with steps.step():
            now = cuda.to_device(host)
            for _ in range(20):
                after = cuda.device_array(size, np.int64)
                relax[grid, 256](now, after)
                result = cuda.device_array(size, np.int64)
                mix[grid, 256](after, table, result)
                now = result
        # The ends of `after` are not written, and each mix carries them to the same places of its result.
        steps.add(now[21 : size - 21].copy_to_host())
    steps.show(args)


main()

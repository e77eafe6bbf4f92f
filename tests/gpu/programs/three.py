"""PyTorch, CuPy and Numba work on the same data in turn, under vpool with one pool."""

import random
import warnings

import common
import numpy as np

warnings.simplefilter("ignore")  # of grids that are small


def main():
    args = common.arguments(("default", "vpool"), 60)
    pool = None
    if args.mode == "vpool":
        import vpool.integrations.cupy
        import vpool.integrations.numba
        import vpool.integrations.torch

        pool = vpool.Pool(vpool.Dynamic(initial=0, limit=0.95), source="cuda")
        for plugin in (vpool.integrations.torch, vpool.integrations.cupy, vpool.integrations.numba):
            plugin.install(pool)
    import cupy
    import torch
    from numba import cuda

    @cuda.jit
    def triple(values, result):
        at = cuda.grid(1)
        if at < result.size:
            result[at] = 3 * values[at] + 1

    common.deterministic(torch)
    torch.zeros(1, device="cuda")
    free_at_first = torch.cuda.mem_get_info()[0]

    def held():
        if pool is not None:
            return pool.stats.peak_reserved_bytes
        return free_at_first - torch.cuda.mem_get_info()[0]

    steps = common.Steps(torch.cuda.synchronize, held)
    sizes = random.Random(5)
    for _ in range(args.steps):
        rows = sizes.randrange(1000, 5000 if args.small else 3_000_000)
        tensor = torch.randint(1000, (rows, 4))
        with steps.step():
            tensor = tensor.cuda()
            sums = tensor.sum(1) * 2 - tensor[:, 0]
            torch.cuda.synchronize()
            ordered = cupy.sort(cupy.from_dlpack(sums)) + 7
            cupy.cuda.get_current_stream().synchronize()
            result = cuda.device_array(rows, np.int64)
            triple[-(-rows // 256), 256](cuda.as_cuda_array(ordered), result)
            cuda.synchronize()
            again = torch.as_tensor(result, device="cuda").cumsum(0)
        steps.add(again.cpu().numpy())
        del tensor, sums, ordered, result, again
    more = {}
    if pool is not None:
        more = {"tags": {row["tag"]: row["peak_bytes"] for row in pool.inspect().tags}}
    steps.show(args, **more)


main()

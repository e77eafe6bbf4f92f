"""CuPy sorts and groups tables of changing length."""

import random

import common
import cupy
import numpy as np


def main():
    args = common.arguments(("default", "vpool", "vpool-c"), 60)
    pool = None
    if args.mode != "default":
        import vpool.integrations.cupy

        pool = vpool.Pool(vpool.Dynamic(initial=0, limit=0.95), source="cuda")
        if args.mode == "vpool":
            vpool.integrations.cupy.install(pool)
        else:
            cupy.cuda.set_allocator(vpool.integrations.cupy.c_allocator(pool))

    def held():
        return cupy.get_default_memory_pool().total_bytes() if pool is None else pool.stats.peak_reserved_bytes

    steps = common.Steps(cupy.cuda.Device().synchronize, held)
    sizes, data = random.Random(3), np.random.default_rng(3)
    for _ in range(args.steps):
        rows = sizes.randrange(10_000, 100_000 if args.small else 20_000_000)
        keys, values = data.integers(0, rows // 100, rows, dtype=np.int64), data.integers(0, 1000, rows, dtype=np.int64)
        with steps.step():
            keys, values = cupy.asarray(keys), cupy.asarray(values)
            order = cupy.argsort(keys, kind="stable")
            keys, values = keys[order], values[order]
            begins = cupy.flatnonzero(cupy.concatenate([cupy.ones(1, bool), keys[1:] != keys[:-1]]))
            sums = cupy.cumsum(values)
            ends = cupy.concatenate([begins[1:], cupy.asarray([rows])]) - 1
            totals = sums[ends] - sums[begins] + values[begins]
            counts = ends - begins + 1
            largest = cupy.sort(totals * 1000 // counts)[-1000:]
            mask = totals > totals.mean()
            chosen = cupy.unique(keys[begins][mask])
        steps.add(cupy.asnumpy(largest))
        steps.add(cupy.asnumpy(chosen))
        del keys, values, order, begins, sums, ends, totals, counts, largest, mask, chosen
    steps.show(args)


main()

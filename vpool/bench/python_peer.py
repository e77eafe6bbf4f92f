"""One peer as Python sees it: ``python -m vpool.bench.python_peer NAME``, told what to measure as peer.cpp is."""

import contextlib
import functools
import importlib
import json
import sys
import time
from itertools import repeat

from vpool.bench.calls import dropped, in_parts, pairs

__all__ = ["main"]

_RMM_INITIAL = 256 << 20


def _cupy(pool):
    cupy = importlib.import_module("cupy")
    malloc = getattr(cupy.cuda, pool)().malloc
    cupy.cuda.set_allocator(malloc)
    return {
        "python_pair": lambda nbytes, count: dropped(malloc, nbytes, count),
        "buffer": lambda nbytes, count: dropped(cupy.cuda.alloc, nbytes, count),
    }, cupy.__version__


def _rmm(kind):
    rmm = importlib.import_module("rmm")
    mr = rmm.mr
    resource = {
        "pool": lambda: mr.PoolMemoryResource(mr.CudaMemoryResource(), initial_pool_size=_RMM_INITIAL),
        "arena": lambda: mr.ArenaMemoryResource(mr.CudaMemoryResource()),
        "async": lambda: mr.CudaAsyncMemoryResource(),
    }[kind]()
    mr.set_current_device_resource(resource)

    def python_pair(nbytes, count):
        allocate, deallocate = resource.allocate, resource.deallocate
        begin = time.perf_counter_ns()
        for _ in repeat(None, count):
            deallocate(allocate(nbytes), nbytes)
        return time.perf_counter_ns() - begin

    def buffer(nbytes, count):
        make = rmm.DeviceBuffer
        begin = time.perf_counter_ns()
        for _ in repeat(None, count):
            make(size=nbytes)
        return time.perf_counter_ns() - begin

    return {"python_pair": python_pair, "buffer": buffer}, rmm.__version__


def _torch():
    torch = importlib.import_module("torch")
    torch.cuda.init()
    torch.empty(1, device="cuda")
    raw = "_cuda_cudaCachingAllocator_raw_"
    if hasattr(torch._C, f"{raw}alloc"):
        allocate, deallocate = getattr(torch._C, f"{raw}alloc"), getattr(torch._C, f"{raw}delete")
        stream = [torch.cuda.current_stream().cuda_stream]
    else:
        allocate, deallocate = torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete
        stream = []

    def python_pair(nbytes, count):
        begin = time.perf_counter_ns()
        for _ in repeat(None, count):
            deallocate(allocate(nbytes, *stream))
        return time.perf_counter_ns() - begin

    def buffer(nbytes, count):
        make, dtype, device = torch.empty, torch.uint8, torch.device("cuda")
        begin = time.perf_counter_ns()
        for _ in repeat(None, count):
            make(nbytes, dtype=dtype, device=device)
        return time.perf_counter_ns() - begin

    return {"python_pair": python_pair, "buffer": buffer}, torch.__version__


def _cuda_core():
    core = importlib.import_module("cuda.core")
    device = core.Device()
    device.set_current()
    stream = device.create_stream()

    def buffer(nbytes, count):
        allocate = device.allocate
        begin = time.perf_counter_ns()
        for _ in repeat(None, count):
            allocate(nbytes, stream=stream).close(stream)
        return time.perf_counter_ns() - begin

    return {"buffer": buffer}, core.__version__


def _runtime(asynchronous):
    bindings = importlib.import_module("cuda.bindings")
    runtime = importlib.import_module("cuda.bindings.runtime")
    (status,) = runtime.cudaFree(0)
    if int(status):
        raise RuntimeError(f"cudaFree: {status.name}")
    if not asynchronous:

        def allocate(nbytes):
            return runtime.cudaMalloc(nbytes)[1]

        return {"python_pair": lambda nbytes, count: pairs(allocate, runtime.cudaFree, nbytes, count)}, (
            bindings.__version__
        )
    _, pool = runtime.cudaDeviceGetDefaultMemPool(0)
    threshold = runtime.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold
    runtime.cudaMemPoolSetAttribute(pool, threshold, importlib.import_module("cuda.bindings.driver").cuuint64_t(2**63))
    stream = runtime.cudaStreamCreate()[1]

    def python_pair(nbytes, count):
        malloc, free = runtime.cudaMallocAsync, runtime.cudaFreeAsync
        begin = time.perf_counter_ns()
        for _ in repeat(None, count):
            free(malloc(nbytes, stream)[1], stream)
        return time.perf_counter_ns() - begin

    return {"python_pair": python_pair}, bindings.__version__


_PEERS = {
    "cupy": lambda: _cupy("MemoryPool"),
    "cupy_async": lambda: _cupy("MemoryAsyncPool"),
    "rmm_pool": lambda: _rmm("pool"),
    "rmm_arena": lambda: _rmm("arena"),
    "rmm_async": lambda: _rmm("async"),
    "torch": _torch,
    "cuda_core": _cuda_core,
    "cudaMalloc": lambda: _runtime(False),
    "cudaMallocAsync": lambda: _runtime(True),
}


def main(name):
    """Answer each line of standard input with one of JSON."""
    answers = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what a framework says is no answer
            workloads, version = _PEERS[name]()
    except Exception as error:
        print(json.dumps({"error": _one_line(error)}), file=answers, flush=True)
        return 1
    print(json.dumps({"ready": version}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                workload, nbytes, count = line.split()
                measure = functools.partial(workloads[workload], int(nbytes))
                measure(10)
                answer = in_parts(measure, int(count))
        except Exception as error:
            answer = {"error": _one_line(error)}
        print(json.dumps(answer), file=answers, flush=True)
    return 0


def _one_line(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

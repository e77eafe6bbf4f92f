"""Forks, shared blocks and the end of processes on a real device: fifty times each, several processes at once."""

import concurrent.futures
import importlib.util
import subprocess
import sys

import pytest

import vpool
from tests.helpers.pools import run_python
from tests.helpers.processes import FORKING
from vpool.errors import SourceError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

try:
    vpool.sources.Cuda()
except SourceError as error:
    pytest.skip(str(error), allow_module_level=True)

pytest.importorskip("cuda.bindings.runtime")
TIMES = 50
AT_ONCE = 6
FRAMEWORKS = [
    pytest.param(name, marks=pytest.mark.torch if name == "torch" else ())
    for name in ("torch", "cupy")
    if importlib.util.find_spec(name)
]


def run_at_once(program, arguments=(), times=TIMES, status=0, said="", logged=0):
    """Run a program so many times, several at once; each must end with the status and write just that.

    At most `logged` lines tell that a closed pool cannot give memory back.
    """
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as workers:
        runs = [workers.submit(run_python, program, *arguments, timeout=300) for _ in range(times)]
    for run in runs:
        done = run.result()
        assert (done.returncode, done.stdout) == (status, said), done.stderr
        if status == 0:
            lines = done.stderr.splitlines()
            assert len(lines) <= logged, done.stderr
            assert all("closed: the source did not take memory back: cudaError" in line for line in lines)


# Forks.


CUDA = """
import ctypes
from cuda.bindings import runtime

def checked(answer):
    status, *values = answer
    assert status == runtime.cudaError_t.cudaSuccess, status
    return values[0] if values else None

def make_cuda():
    return vpool.Pool(vpool.Dynamic(initial='4MiB'), source='cuda', device=0)

def write(address, number):
    checked(runtime.cudaMemcpy(address, ctypes.addressof(ctypes.c_uint64(number)), 8, runtime.cudaMemcpyKind(1)))

def read(address):
    found = ctypes.c_uint64()
    checked(runtime.cudaMemcpy(ctypes.addressof(found), address, 8, runtime.cudaMemcpyKind(2)))
    return found.value
"""

USED = """
pool = make_cuda()
stream = checked(runtime.cudaStreamCreate())
buffer, other = pool.empty(1 << 20), pool.empty(1000, stream=int(stream))
ptr = pool.allocate(50 << 20)
write(buffer.ptr, 77)

def child():
    global pool, buffer, other
    for call in (vpool.Pool, make_cuda, vpool.default_pool, vpool.sources.Cuda, lambda: vpool.allocate(1),
                 lambda: pool.allocate(100), pool.inspect, pool.trim, lambda: pool.ipc_handle(ptr), lambda: buffer.ptr):
        refused(call)
    pool.deallocate(ptr), vpool.deallocate(ptr), buffer.close(), pool.close()
    works(make())
    del pool, other
    gc.collect()

for _ in range(TIMES):
    ended(fork(child))
assert read(buffer.ptr) == 77
pool.check()
works(pool, None)
"""
IMPORTED = """
def child():
    pool = make_cuda()
    buffer = pool.empty(1 << 20)
    write(buffer.ptr, 99)
    assert read(buffer.ptr) == 99
    global kept
    kept = [vpool.empty(1000), buffer]

for _ in range(TIMES // 2):
    ended(fork(child), fork(child))
"""
USED_BY_ANOTHER = """
checked(runtime.cudaFree(0))

def child():
    refused(vpool.Pool)
    refused(make_cuda)
    works(make())

for _ in range(TIMES):
    ended(fork(child))
works(make_cuda(), None)
"""


@pytest.mark.parametrize("program", [USED, IMPORTED, USED_BY_ANOTHER], ids=["used", "imported only", "another library"])
def test_forks(program):
    run_at_once(f"{FORKING}\n{CUDA}\n{program}", arguments=[TIMES], times=4)


STARTED = """
import multiprocessing, sys
import vpool

def work(number):
    with vpool.Pool(vpool.Dynamic(initial="4MiB"), source="cuda") as pool, pool.empty(1000 + number):
        return pool.stats.requested_bytes

if __name__ == "__main__":
    pool = vpool.Pool(source="cuda")
    buffer = pool.empty(1000)
    context = multiprocessing.get_context(sys.argv[1])
    with context.Pool(6, maxtasksperchild=1) as workers:
        done = workers.map(work, range(50), chunksize=1)
        workers.close()
        workers.join()
    assert done == [1000 + n for n in range(50)], done
    print("done")
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_started_by_multiprocessing(method, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(STARTED)
    done = subprocess.run([sys.executable, script, method], capture_output=True, text=True, timeout=500, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# Shared blocks.


SHARED = (
    """
import multiprocessing, sys
import vpool
"""
    + CUDA
    + """
def consume(handles, number, several):
    for _ in range(several):
        first, second = handles[0].open(), handles[1].open()
        assert read(first.ptr) == 11 and read(second.ptr) == 22 and read(second.ptr + 8 * number) == 100 + number
        write(first.ptr + 8 * (1 + number), 1000 + number)
        first.close()
        with handles[2].open() as alone:
            assert read(second.ptr) == 22 and read(alone.ptr) == 33
        second.close()
    return number

if __name__ == "__main__":
    pool = make_cuda()
    filler, first, second = pool.empty(300), pool.empty(1000), pool.empty(5000)
    alone = pool.empty(100 << 20)
    write(first.ptr, 11), write(second.ptr, 22), write(alone.ptr, 33)
    for number in range(1, 11):
        write(second.ptr + 8 * number, 100 + number)
    handles = [pool.ipc_handle(block) for block in (first, second, alone)]
    assert handles[0].handle == handles[1].handle != handles[2].handle
    try:
        handles[0].open()
        raise AssertionError('opened in the process that has it')
    except ValueError:
        pass
    context = multiprocessing.get_context('spawn')
    with context.Pool(5, maxtasksperchild=1) as workers:
        done = workers.starmap(consume, [(handles, number, 5) for number in range(1, 11)], chunksize=1)
        workers.close()
        workers.join()
    assert done == list(range(1, 11))
    assert [read(first.ptr + 8 * (1 + number)) for number in range(1, 11)] == [1000 + n for n in range(1, 11)]
    for block in (filler, first, second, alone):
        block.close()
    assert pool.trim() == 0 and pool.stats.reserved_bytes >= 104 << 20
    pool.check()
    pool.close()
    assert pool.stats.reserved_bytes == 0
    print('done')
"""
)


def test_blocks_in_other_processes(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(SHARED)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=500, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# The end of a process.


MADE = f"""
import sys, threading, time
import vpool
{CUDA}
pool = make_cuda()
streams = [checked(runtime.cudaStreamCreate()) for _ in range(3)]
buffers = [pool.empty(700_000, stream=int(stream)) for stream in streams]
buffers.pop().close(stream=int(streams[0]))
buffers[0].record_stream(int(streams[1]))
crossed = pool.empty(3 << 20, stream=int(streams[2]))
pool.coalesce()
ptr = pool.allocate(1000)
by_default = vpool.empty(1000)
"""
ENDINGS = {
    "live buffers": ("", 0),
    "cycles": ("cycle = [pool, buffers]; cycle.append(cycle); import gc; gc.disable()", 0),
    "a closed pool": ("pool.close()", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "an exception": ("pool.deallocate(12345)", 1),
    "daemon threads": (
        """
def work(number):
    while True:
        with pool.empty(100 * number), pool.empty(70_000 * number, stream=int(streams[number % 3])):
            pool.stats, pool.inspect(), pool.trim()
for number in range(1, 5):
    threading.Thread(target=work, args=(number,), daemon=True).start()
time.sleep(0.05)
""",
        0,
    ),
    "cudaDeviceReset": ("checked(runtime.cudaDeviceReset())", 0),
    "cudaDeviceReset and frees": (
        "checked(runtime.cudaDeviceReset()); pool.deallocate(ptr); by_default.close(); buffers.clear()",
        0,
    ),
    "cudaDeviceReset and close": (
        """
checked(runtime.cudaDeviceReset())
try:
    pool.close()
except vpool.SourceError as error:
    assert 'cudaError' in str(error)
""",
        0,
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_ends(ending):
    program, status = ENDINGS[ending]
    # Nothing raises what a free meets after a reset, so it is logged, once.
    run_at_once(f"{MADE}\n{program}", status=status, logged=1 if ending == "cudaDeviceReset and close" else 0)


ILLEGAL = """
import numpy, cupy
kernel = cupy.RawKernel('extern "C" __global__ void bad(int* at) { *at = 1; }', 'bad')
kernel((1,), (1,), (numpy.uint64(64),))
# CuPy writes that it cannot unload a module after such an error, so it keeps this one.
import ctypes
ctypes.pythonapi.Py_IncRef(ctypes.py_object(kernel))
ctypes.pythonapi.Py_IncRef(ctypes.py_object(kernel.kernel))
status, = runtime.cudaDeviceSynchronize()
assert status == runtime.cudaError_t.cudaErrorIllegalAddress, status
def fails(call, *arguments):
    try:
        call(*arguments)
    except vpool.SourceError as error:
        assert error.name == 'cudaErrorIllegalAddress', error.name
    else:
        raise AssertionError(call)
"""


@pytest.mark.parametrize(
    "then", ["", "pool.deallocate(ptr); fails(pool.allocate, 500 << 20); fails(pool.trim); fails(pool.close)"]
)
def test_after_an_illegal_address(then):
    pytest.importorskip("cupy")
    run_at_once(f"{MADE}\n{ILLEGAL}\n{then}")


USES = {
    "torch": "import torch; tensor = torch.zeros(1000, device='cuda'); kept = [tensor]; kept.append(kept)",
    "cupy": "import cupy; array = cupy.zeros(1000); kept = [array]; kept.append(kept)",
}


@pytest.mark.parametrize("order", ["first", "last", "used first, imported last"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_with_a_framework(framework, order):
    use = USES[framework]
    program = {
        "first": f"{use}\n{MADE}",
        "last": f"{MADE}\n{use}",
        "used first, imported last": f"import {framework}\n{MADE}\n{use}\nsys.modules['{framework}'].kept = pool",
    }[order]
    # Their own warnings are not ours.
    run_at_once(f"import warnings; warnings.simplefilter('ignore')\n{program}", times=TIMES // 2)

"""compute-sanitizer sees blocks: an access beside one is an error, and one to the block is none."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vpool
from vpool import annotation
from vpool.errors import SourceError

pytestmark = pytest.mark.gpu

try:
    vpool.sources.Cuda()
except SourceError as error:
    pytest.skip(str(error), allow_module_level=True)

if annotation._library() is None:
    pytest.skip("nvidia-nvtx is not installed", allow_module_level=True)

FOUND = 9
# Stores one byte.
KERNEL = """
.version 7.0
.target sm_75
.address_size 64
.visible .entry store(.param .u64 where)
{
    .reg .u64 %address;
    .reg .u16 %value;
    ld.param.u64 %address, [where];
    cvta.to.global.u64 %address, %address;
    mov.u16 %value, 7;
    st.global.u8 [%address], %value;
    ret;
}
"""
PROGRAM = f"""
import ctypes, sys
import vpool
from cuda.bindings import driver, runtime

def ok(result):
    status, *values = result
    assert int(status) == 0, status
    return values[0] if values else None

what = sys.argv[1]
ok(runtime.cudaFree(0))
module = ok(driver.cuModuleLoadData({KERNEL!r}.encode() + bytes(1)))
function = ok(driver.cuModuleGetFunction(module, b"store"))
pool = vpool.Pool(vpool.Dynamic(initial="8MiB", limit="64MiB"), "cuda", debug="nvtx-memory")
kept, ptr = pool.allocate(4000), pool.allocate(1000)
address = ptr + {{"first": 0, "last": 999, "before": -1, "behind": 1000, "freed": 0, "again": 0}}[what]
if what in ("freed", "again"):
    pool.deallocate(ptr)
if what == "again":
    assert pool.allocate(1000) == ptr
values = ((address,), (ctypes.c_void_p,))
ok(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, values, 0))
runtime.cudaDeviceSynchronize()               # fails where the sanitizer has stopped the kernel
"""


def sanitizer():
    """The program, of a toolkit or of the package nvidia-cuda-sanitizer-api."""
    found = shutil.which("compute-sanitizer")
    for root in importlib.util.find_spec("nvidia").submodule_search_locations:
        for path in Path(root).glob("*/compute-sanitizer/compute-sanitizer"):
            found = found or str(path)
    return found or pytest.skip("compute-sanitizer is not installed")


@pytest.mark.parametrize(
    ("what", "wrong"),
    [("first", 0), ("last", 0), ("again", 0), ("before", 1), ("behind", 1), ("freed", 1)],
)
def test_only_blocks_may_be_used(what, wrong):
    # The bindings ask for functions that no driver has: errors of calls are not what is looked for.
    options = ["--report-api-errors", "no", "--error-exitcode", str(FOUND)]
    command = [sanitizer(), *options, sys.executable, "-c", PROGRAM, what]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=120)
    said = done.stdout + done.stderr
    assert done.returncode == (FOUND if wrong else 0), said
    assert ("Invalid __global__ write" in said) == bool(wrong), said
    assert "nvtxMem" not in said, said  # nothing that the tool was told is refused

"""Forks: a child can use nothing of its parent's pools, and hurts neither them nor itself.

The default run forks 20 times in each test; `pytest -m repeat` does 200 times, here and in `test_exit.py`.
"""

import re
import subprocess
import sys

import pytest

import vpool
from tests.helpers.pools import run_cleanly
from tests.helpers.processes import FORKING, run_forking


@pytest.fixture(params=[20, pytest.param(200, marks=pytest.mark.repeat)])
def times(request):
    """How often each test forks."""
    return request.param


FIRST_USE = """
pool = make()
buffer = pool.empty(1 << 20)
other = pool.empty(300, stream=5)
ptr = pool.allocate(1000)
figures = pool.stats
recording = pool.record().__enter__()
phase = pool.measure().__enter__()

def child():
    calls = {
        'allocate': lambda: pool.allocate(100), 'on a stream': lambda: pool.allocate(100, stream=5),
        'empty': lambda: pool.empty(100), 'empty on a stream': lambda: pool.empty(100, stream=object()),
        'record a stream': lambda: pool.record_stream(ptr, 5), 'record a buffer': lambda: buffer.record_stream(5),
        'forget': lambda: pool.forget_stream(5), 'on_pressure': lambda: pool.on_pressure(print),
        'ladder': lambda: pool.ladder, 'planned': lambda: pool.planned, 'crossings': lambda: pool.crossings,
        'stats': lambda: pool.stats,
        'core_share': lambda: pool.core_share, 'inspect': pool.inspect, 'apply': lambda: pool.apply(vpool.Dynamic()),
        'set_limit': lambda: pool.set_limit('32MiB'), 'maintain': pool.maintain, 'coalesce': pool.coalesce,
        'reserve': lambda: pool.reserve(100),
        'leaks': pool.leaks, 'snapshot': pool.snapshot, 'memory_info': pool.memory_info,
        'measure': pool.measure, 'limit': lambda: pool.limit('some', 100), 'record': lambda: pool.record(),
        'an end of a recording': lambda: recording.__exit__(None, None, None), 'mark': recording.mark,
        'an end of a measure': lambda: phase.__exit__(None, None, None), 'what a measure says': lambda: repr(phase),
        'trim': pool.trim, 'reset_peaks': pool.reset_peaks, 'check': pool.check,
        'release': lambda: pool.release_capture(1), 'share': lambda: pool.share_capture(1, 2),
        'captures': lambda: pool.captures, 'ipc': lambda: pool.ipc_handle(ptr), 'int': lambda: int(buffer),
        'ptr': lambda: buffer.ptr, 'nbytes': lambda: buffer.nbytes, 'requested': lambda: buffer.requested,
        'stream': lambda: buffer.stream, 'set_default_pool': lambda: vpool.set_default_pool(pool),
        'resize': lambda: pool.resize(buffer, 10), 'suspend': pool.suspend, 'resume': pool.resume,
        'movable': lambda: pool.movable(ptr, print),
        'memory': pool.source.memory, 'a source': lambda: make_on(pool.source),
    }
    for call in calls.values():
        refused(call)
    assert pool.forked and 'parent' in repr(pool) and 'parent' in repr(buffer)
    # Frees of all kinds say nothing, and so does the end of what the child has.
    global other
    pool.deallocate(ptr)
    pool.deallocate(ptr, stream=5)
    pool.deallocate(ptr)
    pool.deallocate(buffer)
    assert buffer.closed
    buffer.close()
    del other
    with pool:
        pass
    pool.close()
    assert vpool.pools() == []
    works(make())
    works(vpool.Pool(source='simulated'))
    works(vpool.Pool(vpool.Hybrid(core='1MiB', block='4KiB'), source='host'))

def make_on(source):
    return vpool.Pool(source=source)

for _ in range(TIMES):
    ended(fork(child))
    assert pool.stats == figures and not buffer.closed and not pool.forked
buffer.close(), other.close(), pool.deallocate(ptr)
works(pool)
"""


def test_fork_after_first_use(times):
    run_forking(FIRST_USE, times)


def test_every_public_name_is_tried_in_a_child():
    """A method that is added has to say what it does there."""
    silent = {"close", "deallocate"}
    of_any_process = {"closed", "debug", "device", "forked", "name", "source", "strategy", "plan", "from_policy"}
    names = {name for name in dir(vpool.Pool) if not name.startswith("_")} - silent - of_any_process
    tried = {name for name in names if re.search(rf"\bpool\.{name}\b", FIRST_USE)}
    assert names - tried == set()


THREADS = """
from vpool._storage.fake_cuda import FakeCudaDriver
pool = make(maintain_every=0.001)
watched = make(debug='leaks')
leak = watched.empty(100)
driver = FakeCudaDriver(1 << 20)
captured = vpool.Pool(vpool.Dynamic(initial=0), vpool.sources.Source(driver, 'cuda', 0))
stream = driver.create_stream()
graph = driver.begin_capture(stream)
captured.deallocate(captured.allocate(100, stream=stream))
driver.end_capture(stream)
driver.destroy_graph(graph)    # the next request of any pool looks for what that gives back
ended_all = False

held = threading.Event()
phase = watched.measure().__enter__()

def hold():
    # What a child could wait for forever: locks that a thread holds which it does not have.
    from vpool._interface import captures
    with vpool.defaults._making.here, captures._keeping.here, phase._measures._changing.here:
        held.set()
        while not ended_all:
            time.sleep(0.001)

def work(stream):
    while not ended_all:
        mine = [pool.empty(256 * (1 + n % 40), stream=stream) for n in range(20)]
        pool.inspect()
        mine[0].close(stream=stream + 1)
        pool.deallocate(pool.allocate(100_000, stream=stream + 1), stream)
        pool.trim()

buffer = pool.empty(100)
ptr = pool.allocate(100)

def child():
    refused(pool.allocate, 100)
    refused(pool.inspect)
    refused(pool.trim)
    refused(phase.__exit__, None, None, None)
    refused(repr, phase)
    pool.deallocate(ptr)
    buffer.close()
    works(make(maintain_every=0.001))
    assert vpool.default_pool().name == 'default-0'
    vpool.deallocate(vpool.allocate(100))

sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=work, args=(n,)) for n in (1, 3)] + [threading.Thread(target=hold)]
for thread in threads:
    thread.start()
held.wait()
for _ in range(TIMES):
    ended(fork(child))
ended_all = True
for thread in threads:
    thread.join()
buffer.close(), pool.deallocate(ptr), leak.close()
pool.check()
assert pool.stats.allocated_bytes == 0
works(make())
"""


def test_a_fork_while_threads_are_inside(times):
    run_forking(THREADS, times)


C_CALLERS = """
import ctypes
from vpool._interface.segments import bind
run_steps = ctypes.CDLL(sys.argv[2]).run_steps
run_steps.argtypes = ctypes.c_void_p, ctypes.c_long
pool = make()
lend, take, blocks = bind(pool)
ptr = blocks.allocate(100)
lends = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(lend)
takes = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(take)
# Each free is of an address that is no block's; none of them takes the GIL.
for _ in range(3):
    threading.Thread(target=run_steps, args=(take, 1 << 40), daemon=True).start()

def child():
    assert lends(100, 0, None) is None
    takes(ptr, 100, 0, None)
    blocks.deallocate(ptr)
    refused(blocks.allocate, 100)
    assert blocks.settle()
    os._exit(0)

for _ in range(TIMES):
    ended(fork(child))
print('done', flush=True)
os._exit(0)
"""


def test_a_fork_while_threads_are_inside_without_the_gil(times, foreign_thread):
    code = f"{FORKING}\n{C_CALLERS}"
    assert run_cleanly(code, times, foreign_thread, timeout=200 + 3 * times) == "done\n"


LEAKS_AT_EXIT = """
pool = vpool.Pool(vpool.Dynamic(initial='64KiB'), source='host', debug='leaks,sites')
buffer = pool.empty(100)
for _ in range(TIMES):
    ended(fork(lambda: refused(pool.leaks)))
buffer.close()
"""


def test_a_child_reports_no_leaks_of_its_parent(times):
    run_forking(LEAKS_AT_EXIT, times)


FROM_C = """
import ctypes
# With the GIL held, as a library would; Python does not notice.
c_fork = ctypes.PyDLL(None).fork
from vpool._storage.fork import forks
pool = make()
buffer = pool.empty(100)
release, held = threading.Event(), threading.Event()

def hold():
    with vpool.defaults._making.here:
        held.set()
        release.wait()

def child():
    assert forks() == 1
    refused(pool.allocate, 100)
    buffer.close()
    works(make())
    vpool.deallocate(vpool.allocate(100))
    os._exit(0)

thread = threading.Thread(target=hold)
thread.start()
held.wait()
for _ in range(TIMES):
    ended(fork(child, fork=c_fork))
release.set()
thread.join()
assert forks() == 0
buffer.close()
works(pool)
"""


def test_a_fork_that_python_does_not_see(times):
    run_forking(FROM_C, times)


GRANDCHILDREN = """
pool = make()
buffer = pool.empty(100)

def child():
    mine = make()
    kept = mine.empty(100)

    def grandchild():
        refused(pool.allocate, 1)
        refused(mine.allocate, 1)
        works(make())

    ended(fork(grandchild))
    refused(pool.allocate, 1)
    kept.close()
    mine.deallocate(mine.allocate(5))
    mine.check()

for _ in range(TIMES):
    ended(*[fork(child) for _ in range(2)])
works_still = pool.allocate(1)
"""


def test_children_of_children(times):
    run_forking(GRANDCHILDREN, times // 2)


PROGRAMS = """
import subprocess
pool = make()
buffer = pool.empty(100)
for number in range(TIMES):
    subprocess.run(['true'], check=True)
    os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)
    if number % 4 == 0:
        subprocess.run(['true'], check=True, preexec_fn=lambda: refused(pool.allocate, 1))
    assert not pool.forked
    pool.deallocate(pool.allocate(100))
buffer.close()
works(make())
"""


def test_starting_other_programs(times):
    run_forking(PROGRAMS, times)


FAKE_CUDA = """
import types
from vpool._storage.fake_cuda import FakeCudaDriver

class Counting(FakeCudaDriver):
    made = 0
    def __init__(self, *args):
        Counting.made += 1
    def __new__(cls):
        return super().__new__(cls, 1 << 30)

sys.modules['vpool._storage.cuda_driver'] = types.SimpleNamespace(CudaDriver=Counting)
"""

IMPORTED_ONLY = (
    FAKE_CUDA
    + """
assert not any(name.startswith('cuda') for name in sys.modules)

def child():
    works(vpool.Pool(vpool.Dynamic(initial='1MiB'), source='cuda'))
    vpool.deallocate(vpool.allocate(100))
    assert vpool.default_pool().source.name == 'cuda' and Counting.made == 1

for _ in range(TIMES):
    ended(fork(child))
assert Counting.made == 0
"""
)


def test_a_parent_that_only_imported_vpool_forks_freely(times):
    run_forking(IMPORTED_ONLY, times)


CUDA_USED = (
    FAKE_CUDA
    + """
pool = vpool.Pool(vpool.Dynamic(initial='1MiB'), source='cuda')
buffer = pool.empty(5 << 20)
ptr = pool.allocate(100, stream=3)
pool.deallocate(pool.allocate(100, stream=4), stream=3)
driver = pool.source.driver

def child():
    global pool, buffer
    before = driver.calls()
    for call in (vpool.Pool, vpool.sources.Cuda, vpool.default_pool, lambda: vpool.Pool(source='cuda'),
                 lambda: vpool.Pool(source=pool.source), driver.devices,
                 lambda: vpool.allocate(1), lambda: vpool.empty(1), vpool.inspect):
        refused(call)
    vpool.deallocate(ptr)
    pool.deallocate(ptr)
    pool.close()
    del pool, buffer
    gc.collect()
    assert driver.calls() == before and Counting.made == 1
    host = make()
    vpool.set_default_pool(host)
    vpool.deallocate(vpool.allocate(1000))
    works(host)

for _ in range(TIMES):
    ended(fork(child))
pool.deallocate(ptr)
works(vpool.Pool(source='cuda'))
"""
)


def test_a_child_of_a_process_that_used_cuda(times):
    run_forking(CUDA_USED, times)


CUDA_USED_BY_ANOTHER = """
import types

class Poisoned:
    def __init__(self):
        raise RuntimeError('no CUDA device: cudaErrorInitializationError')

sys.modules['vpool._storage.cuda_driver'] = types.SimpleNamespace(CudaDriver=Poisoned)

def child():
    for _ in range(2):
        # Not memory of the host instead, unasked.
        refused(vpool.Pool)
        refused(vpool.sources.Cuda)
    works(make())

for _ in range(TIMES):
    ended(fork(child))
assert vpool.Pool().source.name == 'host'
"""


def test_a_child_of_a_process_where_another_library_used_cuda(times):
    run_forking(CUDA_USED_BY_ANOTHER, times)


DEFAULT_POOL = """
sys.modules['vpool._storage.cuda_driver'] = None
ptr = vpool.allocate(1000)
buffer = vpool.empty(1000)

def child():
    for call in (lambda: vpool.allocate(1), lambda: vpool.empty(1), vpool.inspect, lambda: vpool.inspect('all')):
        refused(call)
    vpool.deallocate(ptr)
    buffer.close()
    mine = make()
    vpool.set_default_pool(mine)
    vpool.deallocate(vpool.allocate(100))
    vpool.deallocate(ptr)
    vpool.set_default_pool(make())
    mine.close()
    assert vpool.inspect().live_blocks == 0
    try:
        vpool.deallocate(12345)
    except vpool.ForeignPointerError:
        pass

for _ in range(TIMES):
    ended(fork(child))
vpool.deallocate(ptr)
buffer.close()
assert vpool.inspect().live_blocks == 0
"""


def test_the_default_pool(times):
    run_forking(DEFAULT_POOL, times)


LOADING = """
# A thread that has begun to load what says which CUDA there is, as the first use of a default pool does.
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == 'importlib.metadata':
            begun.set()
            time.sleep(0.5)

def load():
    try:
        vpool.sources.cuda_missing()
    except vpool.ForkedProcessError:
        pass                       # where there is a device, the parent has used it

begun = threading.Event()
sys.modules.pop('importlib.metadata', None)
sys.meta_path.insert(0, Slow())
thread = threading.Thread(target=load)
thread.start()
assert begun.wait(60)
ended(fork(load))
thread.join()
"""


def test_a_fork_while_another_thread_looks_for_cuda():
    run_forking(LOADING, 1)


MULTIPROCESSING = """
import multiprocessing, os, sys
import vpool

pool = None

def work(number):
    if pool is not None:
        try:
            pool.allocate(100)
            return "the pool of the parent works"
        except vpool.ForkedProcessError:
            pool.deallocate(ptr)
    with vpool.Pool(vpool.Dynamic(initial="64KiB"), source="host") as mine:
        buffer = mine.empty(1000 + number)
        return mine.stats.requested_bytes

if __name__ == "__main__":
    pool = vpool.Pool(vpool.Dynamic(initial="64KiB"), source="host")
    ptr = pool.allocate(100)
    method, times = sys.argv[1], int(sys.argv[2])
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["vpool"])
    with context.Pool(2, maxtasksperchild=1) as workers:
        done = workers.map(work, range(times), chunksize=1)
        workers.close()
        workers.join()
    assert done == [1000 + n for n in range(times)], done
    pool.deallocate(ptr)
    assert pool.stats.allocated_bytes == 0
    print("done")
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_multiprocessing(method, times, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(MULTIPROCESSING)
    command = [sys.executable, "-W", "error", script, method, str(times)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10 * times, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")

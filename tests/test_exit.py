"""The end of a process: the right status and no word of complaint, whatever is alive then.

Each program ends 20 times in the default run, and 200 times by `pytest -m repeat`.
"""

import gc
import pkgutil

import pytest

import vpool
from tests.helpers.pools import run_cleanly
from tests.helpers.processes import run_often
from vpool._storage.fake_cuda import FakeCudaDriver
from vpool._storage.source import Source


@pytest.fixture(params=[20, pytest.param(200, marks=pytest.mark.repeat)])
def times(request):
    """How often each program ends."""
    return request.param


MAKE = """
import vpool
def make(source='host', **options):
    return vpool.Pool(vpool.Dynamic(initial='64KiB', limit='64MiB'), source=source, **options)
"""

ENDINGS = {
    "live buffers": """
import sys; sys.modules['vpool._storage.cuda_driver'] = None
pool = make(); buffer = pool.empty(1000); other = pool.empty(1000, stream=3); ptr = pool.allocate(1000)
simulated = make('simulated'); far = simulated.empty(5000)
hybrid = vpool.Pool(vpool.Hybrid(core='1MiB', block='4KiB'), source='host'); small = hybrid.empty(4096)
closed = make(); kept = closed.empty(1000); address = closed.allocate(10); closed.close()
by_default = vpool.empty(1000); vpool.allocate(1000); vpool.set_default_pool(make()); then = vpool.empty(1000)
""",
    "kept by others": """
import builtins, sys, numpy
pool = make()
builtins.kept = pool.empty(1000); sys.kept = pool.empty(2000); numpy.kept = [pool, pool.empty(3000)]
vpool.kept = make().empty(10); vpool.errors.kept = vpool._interface.pool.kept = make().empty(10)
""",
    "cycles": """
pool = make(); cycle = [pool]; cycle += [cycle, pool.empty(1000)]
pool.on_pressure(lambda nbytes: cycle.clear())
class Node: pass
node = Node(); node.me = node; node.pool = make(); node.buffer = node.pool.empty(1000); del node
class Held(vpool.Pool): pass
held = Held(source='host'); held.me = held; held.buffer = held.empty(1000); del held
class Last:
    def __init__(self): self.pool = make(); self.buffer = self.pool.empty(1000); self.me = self
    def __del__(self):
        self.pool.deallocate(self.pool.allocate(100)); self.buffer.close(); self.pool.stats; self.pool.trim()
        for nbytes in (1 << 40, 1 << 62):
            try: self.pool.allocate(nbytes)
            except MemoryError as error: assert error.requested == nbytes
        self.pool.close()
last = Last(); Last()
class Stream:
    def __init__(self, handle): self.handle = handle
    def __del__(self): self.pool.deallocate(self.pool.allocate(3 << 20)); self.pool.stats
for number in range(6):
    stream = Stream(0x1000 + number); stream.pool = (pool, make(), last.pool)[number % 3]
    stream.me = stream if number % 2 else None
    for one in (pool, stream.pool): one.empty(1000, stream=stream).close()
import sys; sys.stream = stream
import gc; gc.disable()
""",
    "threads": """
import sys, threading, time
pool = make(); helped = [make(maintain_every=0.001) for _ in range(3)]; buffers = [one.empty(1000) for one in helped]
kept = []
def work(number):
    while True:
        with pool.empty(100 * number), pool.empty(70_000, stream=number):
            kept.append(pool.empty(100, stream=number)); kept[:-50] = []
        pool.deallocate(pool.allocate(5000))
        pool.stats, pool.inspect(), pool.trim()
def leave():
    threading.current_thread().kept = pool.empty(1000)
    sys.exit(5)
for number in range(4):
    threading.Thread(target=work, args=(number,), daemon=True).start()
    leaving = threading.Thread(target=leave); leaving.start(); leaving.join()
time.sleep(0.01 * (NUMBER % 5))
""",
    "threads that look": """
import threading, time
pool = vpool.Pool(vpool.Dynamic(initial=0), 'host')
full = make(); held = [full.allocate(1000, stream) for stream in (0, 3)]
def look(call):
    while True: call()
for call in (pool.trim, pool.trim, pool.trim, full.snapshot):
    threading.Thread(target=look, args=(call,), daemon=True).start()
time.sleep(0.02 + 0.01 * (NUMBER % 5))
""",
    "functions of atexit": """
import atexit
def use():
    pool.deallocate(pool.allocate(100)); pool.inspect(); pool.maintain(); pool.trim(); buffer.close()
    with make(maintain_every=0.01) as late, late.empty(1000):
        late.check()
    later.append(make()); later.append(later[0].empty(10))
later = []; pool = make(maintain_every=0.01); buffer = pool.empty(1000)
atexit.register(use)
""",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_alive_at_the_end(ending, times):
    assert run_often(MAKE + ENDINGS[ending], times) == ""


def test_functions_of_atexit_that_run_after_vpools_own(times):
    before = """
import atexit
atexit.register(lambda: use())
"""
    program = before + MAKE + ENDINGS["functions of atexit"].replace("atexit.register(use)", "")
    assert run_often(program, times) == ""


def test_a_pool_that_is_made_at_the_very_end(times):
    """By a function of atexit that was there before vpool was imported."""
    program = f"""
import atexit
def late():
{MAKE.replace(chr(10), chr(10) + "    ")}
    global pool, buffer
    pool = make(); buffer = pool.empty(1000)
atexit.register(late)
"""
    assert run_often(program, times) == ""


LEAVING = {
    "sys.exit": ("import sys; sys.exit(3)", 3, ""),
    "os._exit": ("import os; os._exit(7)", 7, ""),
    "an error of vpool": ("pool.deallocate(12345)", 1, "\nvpool.errors.ForeignPointerError: "),
    "out of memory": ("pool.empty(1 << 40)", 1, "\nvpool.errors.OutOfMemoryError: "),
    # Whoever starts the tests in the background may have had the signal ignored.
    "an interrupt": (
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "while True: signal.raise_signal(signal.SIGINT)",
        -2,
        "\nKeyboardInterrupt\n",
    ),
}


@pytest.mark.parametrize("way", LEAVING)
def test_ways_of_leaving(way, times):
    program, status, last = LEAVING[way]
    said = run_often(f"{MAKE}\npool = make(); kept = [pool.empty(1000)]; kept.append(kept)\n{program}", times, status)
    assert said.count(last) == times + 1 if last else said == ""
    assert not any(word in said for word in ("ignored", "Fatal", "terminate"))


# A device that answers every call with an error from some moment on, as CUDA does after an illegal address.
BROKEN = """
import vpool
from vpool._storage.driver import CALL_NAMES
from vpool._storage.fake_cuda import FakeCudaDriver
driver = vpool.sources._cuda_driver = FakeCudaDriver(1 << 30)
pool = vpool.Pool(vpool.Dynamic(initial='1MiB'), source='cuda')
streams = [driver.create_stream() for _ in range(3)]
buffers = [pool.empty(700_000, stream=stream) for stream in streams]
buffers.pop().close(stream=streams[0])
buffers[0].record_stream(streams[1])
def broken():
    for call in CALL_NAMES:
        driver.fail(call, 700, times=1 << 62)
def fails(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except vpool.SourceError as error:
        assert '700' in str(error) or 'cudaError' in str(error)
    else:
        raise AssertionError(call)
broken()
"""
AFTER_AN_ERROR = {
    "nothing more": "",
    "frees, and a request that has to grow": """
pool.deallocate(pool.allocate(100)); fails(pool.allocate, 50 << 20); buffers.clear()
""",
    "closing": "fails(pool.close); buffers.clear()",
    "a block of with": """
def block():
    with pool:
        buffers.clear()
fails(block); fails(pool.trim); fails(vpool.Pool, source='cuda')
""",
}


@pytest.mark.parametrize("then", AFTER_AN_ERROR)
def test_after_an_error_that_does_not_go_away(then, times):
    # Each error is told once, by the call that met it; the frees of a pool whose `close` has told it say nothing.
    assert run_often(BROKEN + AFTER_AN_ERROR[then], times) == ""


@pytest.mark.parametrize("refuses", [False, True])
def test_events_are_left_alone_where_the_device_takes_nothing_back(refuses):
    """After a reset they are gone, and CUDA's driver may crash on them."""
    driver = FakeCudaDriver(1 << 30)
    pool = vpool.Pool(vpool.Dynamic(initial="1MiB"), source=Source(driver, "cuda", 0))
    pool.deallocate(pool.allocate(700_000, stream=1))
    pool.deallocate(pool.allocate(700_000, stream=3))
    assert driver.calls()["event_create"][0] > 0
    if refuses:
        driver.fail("free", 1, times=100)
    del pool
    gc.collect()
    assert driver.calls()["event_destroy"][0] == (0 if refuses else driver.calls()["event_create"][0])


MODULES = sorted(module.name for module in pkgutil.walk_packages(vpool.__path__, "vpool."))


def test_any_module_may_be_imported_first(times):
    """And be the first to go."""
    names = [name for name in MODULES if name not in ("vpool.__main__", "vpool._storage.cuda_driver")]
    program = f"""
import importlib
names = {names}
first = importlib.import_module(names[NUMBER % len(names)])
{MAKE}
first.kept = make().empty(1000)
pool = make(); buffer = pool.empty(1000)
"""
    assert run_often(program, max(times, len(names))) == ""


SUBINTERPRETERS = """
try:
    import _interpreters as interpreters          # Python 3.13
except ImportError:
    import _xxsubinterpreters as interpreters
def inside(code):
    number = interpreters.create()
    try:
        failed = interpreters.run_string(number, code)
        return '' if failed is None else str(failed.formatted)
    except interpreters.RunFailedError as error:
        return str(error)
    finally:
        interpreters.destroy(number)
"""


@pytest.mark.parametrize("first", ["the main one", "another one"])
def test_subinterpreters(first, times):
    """Compiled modules are of the interpreter that has them first; another one gets an ImportError."""
    program = f"{MAKE}\npool = make(); buffer = pool.empty(1000)\n" if first == "the main one" else ""
    # NumPy has a warning for subinterpreters.
    code = "import warnings; warnings.simplefilter('ignore'); import vpool; vpool.Pool(source='host').empty(10)"
    program += f"{SUBINTERPRETERS}\nprint(sum('ImportError' in inside({code!r}) for _ in range({times})))\n"
    refused = int(run_cleanly(program, timeout=180))
    # From Python 3.12 on NumPy lets itself be imported by the main one alone, so that nobody else is the first.
    assert refused == times or (first == "another one" and refused == times - 1)

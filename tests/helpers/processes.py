"""Programs of tests that fork, as text: each runs in a fresh interpreter."""

import contextlib
import pickle
import subprocess
import sys

from tests.helpers.pools import run_cleanly, run_python

# A program forks children one after the other, or several at once, and looks how each ended.
FORKING = """
import gc, os, signal, sys, threading, time
import vpool

TIMES = int(sys.argv[1])
signal.alarm(150 + 3 * TIMES)

def fork(work, fork=os.fork):
    '''Run `work` in a child, which ends as a program does; its number.'''
    number = fork()
    if number == 0:
        signal.alarm(90)          # a child that hangs is seen
        work()
        sys.exit()
    return number

def ended(*children):
    '''Wait for children, which must end well.'''
    for number in children:
        status = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
        assert status == 0, f'child ended with {status}'

def refused(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except vpool.ForkedProcessError as error:
        assert 'spawn' in str(error) and isinstance(error, RuntimeError)
        return
    raise AssertionError(f'{call} was not refused')

def make(**options):
    return vpool.Pool(vpool.Dynamic(initial='64KiB', limit='64MiB'), source='host', **options)

def works(pool, stream=3):
    '''A pool of this process does all that a pool does.'''
    before = pool.stats.allocations
    with pool:
        kept = pool.empty(1000, stream=stream)
        pool.deallocate(pool.allocate(5000))
        pool.inspect()
        pool.check()
        assert pool in vpool.pools() and not pool.forked
        assert pool.stats.allocations == before + 2
"""


def run_forking(program, times):
    """Run a program with the helpers above; it must print its last line and nothing on standard error."""
    assert run_cleanly(f"{FORKING}\n{program}\nprint('done')", times, timeout=200 + 3 * times) == "done\n"


# Runs a program as often as asked, each time in a process of its own that has loaded nothing of vpool: a child of
# one that has loaded what vpool needs of others.  The program's names are those of the main module.
OFTEN = """
import contextlib, importlib, os, signal, sys

PROGRAM, TIMES, STATUS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def ended(number):
    found = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
    if found != STATUS:
        sys.exit(f'run {NUMBER} ended with {found}, not {STATUS}')

reader, writer = os.pipe()
if os.fork() == 0:
    import vpool
    os.write(writer, ' '.join(name for name in sys.modules if not name.startswith('vpool')).encode())
    os._exit(0)
os.wait()
for name in os.read(reader, 1 << 16).decode().split():
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
assert 'vpool' not in sys.modules

running = []
for NUMBER in range(TIMES):
    if len(running) == (2 if STATUS == 0 else 1):     # what several say would be mixed up
        ended(running.pop(0))
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        break
    running.append(child)
else:
    for child in running:
        ended(child)
    sys.exit()
exec(compile(PROGRAM, '<program>', 'exec'))
"""


def run_often(program, times, status=0):
    """Run a program so many times, and once more in an interpreter of its own; what all wrote on standard error.

    Each must end with the given status.
    """
    once = run_python(f"NUMBER = 0\n{program}", timeout=60)
    assert once.returncode == status, once.stderr
    done = run_python(OFTEN, program, times, status, timeout=200 + 3 * times)
    assert done.returncode == 0, done.stderr
    assert once.stdout == done.stdout == ""
    return once.stderr + done.stderr


# Holds a block until its standard input ends.
LENDING = """
import pickle, sys
import vpool

{pool}
block = pool.empty(1000)
print(pickle.dumps(pool.ipc_handle(block)).hex(), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def handle_of_another_process(pool):
    """A handle of a block that another process has; `pool` is the code that makes its pool."""
    command = [sys.executable, "-W", "error", "-c", LENDING.format(pool=pool)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield pickle.loads(bytes.fromhex(process.stdout.readline()))
        finally:
            process.stdin.close()
            assert process.wait(60) == 0

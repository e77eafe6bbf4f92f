"""Programs of tests that fork, as text: each runs in a fresh interpreter."""

from tests.helpers.pools import run_cleanly

# A program forks children one after the other, or several at once, and looks how each ended.
FORKING = """
import gc, os, signal, sys, threading, time
import vpool

signal.alarm(100)
TIMES = int(sys.argv[1])

def fork(work, fork=os.fork):
    '''Run `work` in a child, which ends as a program does; its number.'''
    number = fork()
    if number == 0:
        signal.alarm(30)          # a child that hangs is seen
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

def works(pool):
    '''A pool of this process does all that a pool does.'''
    before = pool.stats.allocations
    with pool:
        kept = pool.empty(1000, stream=3)
        pool.deallocate(pool.allocate(5000))
        pool.inspect()
        pool.check()
        assert pool in vpool.pools() and not pool.forked
        assert pool.stats.allocations == before + 2
"""


def run_forking(program, times, timeout=120):
    """Run a program with the helpers above; it must print its last line and nothing on standard error."""
    assert run_cleanly(f"{FORKING}\n{program}\nprint('done')", times, timeout=timeout) == "done\n"

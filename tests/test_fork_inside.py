"""Forks inside a call of the pool, by code that it runs: callbacks, finalisers, log handlers, arguments.

As often as in `test_fork.py`.
"""

import pytest

from tests.helpers.processes import run_forking


@pytest.fixture(params=[20, pytest.param(200, marks=pytest.mark.repeat)])
def times(request):
    """How often each test forks."""
    return request.param


IN_A_CALLBACK = """
for how in ('callback', 'finaliser'):
    for _ in range(TIMES // 2):
        parent = os.getpid()
        pool = vpool.Pool(vpool.Dynamic(initial='1MiB', limit='1MiB'), source='host')
        kept = [pool.empty(1 << 20)]

        def fork_here(nbytes=None):
            number = os.fork()
            if number:
                ended(number)
                kept.clear()

        class Finalised:
            def __init__(self):
                self.me = self

            def __del__(self):
                fork_here()

        if how == 'callback':
            pool.on_pressure(fork_here)
        else:
            gc.collect()
            Finalised()
        try:
            pool.allocate(1 << 20)
        except vpool.ForkedProcessError:
            assert os.getpid() != parent
            sys.exit()
        assert os.getpid() == parent
"""


def test_a_fork_inside_a_call_of_the_pool(times):
    run_forking(IN_A_CALLBACK, times)


IN_A_LOG_HANDLER = """
import logging

class Forking(logging.Handler):
    now = False

    def handle(self, record):      # not `emit`, for which logging itself holds a lock that it makes anew in a child
        if self.now:
            self.now = False
            number = os.fork()
            if number:
                ended(number)
            else:
                signal.alarm(20)

handler = Forking(logging.DEBUG)
logger = logging.getLogger('vpool')
logger.setLevel(logging.DEBUG)
logger.propagate = False
logger.addHandler(handler)
parent = os.getpid()
for _ in range(TIMES // 2):
    # It tells that it grew, and what it cannot lend.
    for call in (lambda: pool.allocate(1 << 20), lambda: pool.allocate(1 << 40)):
        pool = vpool.Pool(vpool.Dynamic(initial='64KiB', limit='8MiB'), source='host')
        handler.now = True
        try:
            call()
        except vpool.ForkedProcessError:
            assert os.getpid() != parent
            works(make())
            os._exit(0)
        except vpool.OutOfMemoryError:
            pass
        assert os.getpid() == parent
        assert not handler.now, 'nothing was logged'
        pool.check()
        pool.close()
"""


def test_a_fork_inside_a_log_handler(times):
    run_forking(IN_A_LOG_HANDLER, times)


# A child that other threads of its parent have left with locks which nobody will ever release.
IN_AN_ARGUMENT = """
import tempfile, threading

class Forking:
    def __init__(self, number):
        self.number = number

    def fork(self):
        if os.getpid() == parent and not children:
            children.append(os.fork())
            if not children[0]:
                signal.alarm(20)
        return self.number

    __index__ = __fspath__ = fork

    def __cuda_stream__(self):
        return (0, self.fork())

def no_more(pool):
    while not over:
        pool.deallocate(pool.allocate(70_000, stream=16), stream=32)
        pool.inspect()

parent, over = os.getpid(), []
handle, path = tempfile.mkstemp(suffix='.toml')
os.close(handle)
vpool.Policy(vpool.Dynamic(initial='1MiB')).save(path)
pools = [vpool.Pool(vpool.Dynamic(initial='1MiB'), source='host', debug=debug) for debug in ('', 'guard,quarantine')]
threads = [threading.Thread(target=no_more, args=(pool,)) for pool in pools]
for thread in threads:
    thread.start()
for _ in range(TIMES):
    for pool in pools:
        ptr, buffer, other = pool.allocate(1000), pool.empty(1000), pool.empty(1000)
        # What raises in the child, and frees, which are silent there.
        refused_there = {
            'allocate': lambda: pool.deallocate(pool.allocate(100, stream=Forking(48))),
            'empty': lambda: pool.empty(100, stream=Forking(48)),
            'a size': lambda: pool.deallocate(pool.allocate(Forking(100))),
            'record': lambda: pool.record_stream(ptr, Forking(48)),
            'record a block': lambda: pool.record_stream(Forking(ptr), 48),
            'forget': lambda: pool.forget_stream(Forking(64)),
            'set_limit': lambda: pool.set_limit(Forking(1 << 30)),
            'trim': lambda: pool.trim(Forking(0)),
            'apply': lambda: pool.apply(Forking(path)),
        }
        silent_there = {
            'close': lambda: buffer.close(Forking(48)),
            'deallocate a buffer': lambda: pool.deallocate(other, stream=Forking(48)),
            'deallocate': lambda: pool.deallocate(ptr, stream=Forking(48)),
        }
        for name, call in {**refused_there, **silent_there}.items():
            children = []
            try:
                call()
            except vpool.ForkedProcessError:
                os._exit(0 if os.getpid() != parent and name in refused_there else 3)
            if os.getpid() != parent:
                os._exit(0 if name in silent_there else 4)
            ended(*children)
        for pool_ in pools:
            pool_.check()
over.append(True)
for thread in threads:
    thread.join()
os.remove(path)
"""


def test_a_fork_while_an_argument_is_looked_at(times):
    run_forking(IN_AN_ARGUMENT, 2 if times == 20 else 20)

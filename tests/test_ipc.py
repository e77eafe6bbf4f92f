"""Blocks in other processes, on a fake CUDA whose memory can be opened there as the real one's."""

import pickle

import pytest

import vpool
from tests.helpers.pools import GIB, MIB, run_cleanly
from vpool._storage.fake_cuda import FakeCudaDriver
from vpool._storage.source import Source
from vpool.ipc import IpcHandle

INVALID_HANDLE = 400

# A consumer is forked before CUDA is used; the two send each other pickled objects.
TWO_PROCESSES = """
import ctypes, gc, os, pickle, signal, sys
from multiprocessing import Pipe
import vpool
from vpool._storage.fake_cuda import FakeCudaDriver
from vpool.errors import SourceError

signal.alarm(30)
here, there = Pipe()

def use_cuda():
    vpool.sources._cuda_driver = FakeCudaDriver(1 << 30, 2)
    return vpool.sources._cuda_driver

def word(address):
    return ctypes.c_uint64.from_address(address)

number = os.fork()
(here if number == 0 else there).close()          # whoever waits for one that failed is told
driver = use_cuda()
if number == 0:
    consume(there)
    sys.exit()
pool = vpool.Pool(vpool.Dynamic(initial='1MiB'), source='cuda', device=1)
produce(here)
assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 0
print('done')
"""


def run_two(program):
    assert run_cleanly(program + TWO_PROCESSES) == "done\n"


BLOCKS = """
def produce(pipe):
    first, second = pool.empty(1000), pool.empty(5000)
    word(first.ptr).value, word(second.ptr).value, word(second.ptr + 4992).value = 11, 22, 33
    handles = [pool.ipc_handle(first), pool.ipc_handle(second.ptr)]
    assert handles[0].handle == handles[1].handle and handles[0].base == handles[1].base
    assert [handle.offset for handle in handles] == [block.ptr - handles[0].base for block in (first, second)]
    assert [handle.nbytes for handle in handles] == [1024, 5120]
    assert {(handle.device, handle.source) for handle in handles} == {(1, 'cuda')}
    pipe.send(handles)
    assert pipe.recv() == 'written'
    assert word(first.ptr).value == 44

def consume(pipe):
    handles = pipe.recv()
    with handles[0].open() as first:
        second = handles[1].open()
        assert (first.nbytes, second.nbytes, int(second)) == (1024, 5120, second.ptr)
        assert second.ptr - first.ptr == handles[1].offset - handles[0].offset
        assert [word(first.ptr).value, word(second.ptr).value, word(second.ptr + 4992).value] == [11, 22, 33]
        word(first.ptr).value = 44
    # The other block has the segment open still, and again: CUDA would not open it twice.
    assert first.closed and first.ptr == 0 and driver.calls()['ipc_close'][0] == 0
    assert word(second.ptr).value == 22
    again = handles[0].open()
    assert driver.calls()['ipc_open'][0] == 1
    second.close(), second.close(), again.close()
    assert driver.calls()['ipc_close'][:2] == (1, 0)
    # A segment that was let go of is opened anew; what is dropped is closed, also at the end.
    assert handles[0].open().ptr
    gc.collect()
    assert driver.calls()['ipc_open'][:2] == driver.calls()['ipc_close'][:2] == (2, 0)
    global kept
    kept = handles[0].open()
    pipe.send('written')
"""


def test_blocks_of_one_segment_in_another_process():
    run_two(BLOCKS)


SIGNALS = """
class Signal(BaseException):
    pass

def interrupted(after, call):
    # Whether an exception, raised where a signal's would be, came out of a call before its end.
    def trace(frame, event, argument):
        nonlocal after
        if frame.f_code.co_filename != vpool.ipc.__file__:
            return
        frame.f_trace_opcodes = True
        if event == 'opcode':
            after -= 1
            if after < 0:
                sys.settrace(None)
                raise Signal
        return trace
    sys.settrace(trace)
    try:
        call()
    except Signal:
        return True
    finally:
        sys.settrace(None)

def produce(pipe):
    kept = pool.empty(1000)
    word(kept.ptr).value = 66
    pipe.send(pool.ipc_handle(kept))
    pipe.recv()

def consume(pipe):
    handle = pipe.recv()
    def everything():
        with handle.open() as block, handle.open():
            assert word(block.ptr).value == 66
    after = 0
    while interrupted(after, everything):
        gc.collect()
        assert vpool.ipc._open.here == {}, after
        calls = driver.calls()
        assert calls['ipc_open'][:2] == calls['ipc_close'][:2], after
        after += 1
    assert after > 300
    assert driver.calls()['ipc_open'][0] > after / 2
    pipe.send('looked')
"""


def test_a_signal_at_any_moment_leaves_nothing_open():
    run_two(SIGNALS)


DROPPED = """
class Signal(BaseException):
    pass

def produce(pipe):
    kept = pool.empty(1000)
    pipe.send(pool.ipc_handle(kept))
    pipe.recv()

def consume(pipe):
    handle, left = pipe.recv(), vpool.ipc._left
    sys.unraisablehook = lambda told: signals.append(told.exc_type)
    signals = []
    def interrupted(*arguments):
        vpool.ipc._left = left
        if after == 'before':
            raise Signal
        left(*arguments)
        raise Signal
    for after in ('before', 'behind'):
        block, other = handle.open(), handle.open()
        del other
        vpool.ipc._left = interrupted
        del block
        assert vpool.ipc._open.here == {}
    assert signals == [Signal, Signal]
    pipe.send('looked')
"""


def test_a_signal_while_a_dropped_block_is_closed_leaves_it_not_open():
    run_two(DROPPED)


REFUSALS = """
def produce(pipe):
    kept = pool.empty(1000)
    word(kept.ptr).value = 55
    handle = pool.ipc_handle(kept)
    try:
        handle.open()
    except ValueError as error:
        assert 'this process' in str(error) and hex(kept.ptr) in str(error)
    pipe.send(handle)
    assert pipe.recv() == 'looked'
    kept.close()
    pool.close()
    pipe.send('gone')
    pipe.recv()

def consume(pipe):
    handle = pipe.recv()
    for wrong, kind in ((9, ValueError), ('0', TypeError), (True, TypeError)):
        try:
            handle.open(device=wrong)
            raise AssertionError(wrong)
        except kind:
            pass
    with handle.open(device=0):
        pass
    driver.fail('ipc_open', 700)
    try:
        handle.open()
        raise AssertionError
    except SourceError as error:
        pass
    shared = handle.open()
    driver.fail('ipc_close', 700)
    try:
        shared.close()
        raise AssertionError
    except SourceError as error:
        pass
    # It is open still, here and for who opens it again, until somebody closes it.
    assert not shared.closed and word(shared.ptr).value == 55
    with handle.open() as again:
        assert again.ptr == shared.ptr
    shared.close()
    assert shared.closed
    with handle.open() as anew:
        assert word(anew.ptr).value == 55
    calls = driver.calls()
    assert calls['ipc_open'][0] - calls['ipc_open'][1] == calls['ipc_close'][0] - calls['ipc_close'][1]
    pipe.send('looked')
    pipe.recv()
    try:
        handle.open(device=0)
        raise AssertionError
    except SourceError as error:
        assert 'another process' in str(error)
    pipe.send('done')
"""


def test_what_cannot_be_opened():
    run_two(REFUSALS)


ORDERS = """
def produce(pipe):
    global pool
    first, second = pool.empty(1000), pool.empty(2000)
    word(first.ptr).value, word(second.ptr).value = 77, 88
    pipe.send([pool.ipc_handle(first), pool.ipc_handle(second)])
    assert pipe.recv() == 'opened'
    second.close(), first.close()
    pool.trim()
    pipe.send('trimmed')
    assert pipe.recv() == 'opened again'
    pool.close()
    pipe.send('closed')
    assert pipe.recv() == 'let go'
    pool = vpool.Pool(vpool.Dynamic(initial='1MiB'), source='cuda', device=1)
    other = pool.empty(1000)
    word(other.ptr).value = 99
    pipe.send(pool.ipc_handle(other))
    assert pipe.recv() == 'read'

def refused(handle):
    try:
        handle.open()
    except SourceError as error:
        return 'another process' in str(error)

def consume(pipe):
    first, second = pipe.recv()
    # The order of handles is anybody's, and so is that of closing.
    blocks = [second.open(), first.open(), second.open()]
    assert [word(block.ptr).value for block in blocks] == [88, 77, 88]
    for block in blocks[:2]:
        block.close()
    pipe.send('opened')
    assert pipe.recv() == 'trimmed'
    # What was exported stays mapped in both, for who has it open and for who opens it late.
    assert word(blocks[2].ptr).value == 88
    blocks[2].close()
    assert vpool.ipc._open.here == {}
    late = first.open()
    assert word(late.ptr).value == 77
    pipe.send('opened again')
    assert pipe.recv() == 'closed'
    # Who has it open may close it; but nobody opens it any more.
    late.close(), late.close()
    assert late.closed and vpool.ipc._open.here == {}
    assert refused(first) and refused(second) and vpool.ipc._open.here == {}
    pipe.send('let go')
    new = pipe.recv()
    with new.open() as block:
        assert word(block.ptr).value == 99
        assert refused(first), 'the new segment is not the old one, wherever it lies'
    calls = driver.calls()
    assert calls['ipc_open'][0] - calls['ipc_open'][1] == calls['ipc_close'][0]
    pipe.send('read')
"""


def test_any_order_of_opening_and_closing_on_both_sides():
    run_two(ORDERS)


CHILD_OF_A_CONSUMER = """
def produce(pipe):
    kept = pool.empty(1000)
    pipe.send(pool.ipc_handle(kept))
    pipe.recv()

def consume(pipe):
    shared = pipe.recv().open()
    child = os.fork()
    if child == 0:
        before = driver.calls()
        shared.close()
        assert driver.calls() == before
        sys.exit()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert word(shared.ptr).value == 0
    pipe.send('done')
"""


def test_a_child_of_who_opened_a_block():
    run_two(CHILD_OF_A_CONSUMER)


def fake_pool(strategy=None):
    source = Source(FakeCudaDriver(GIB), "cuda", 0)
    return vpool.Pool(strategy or vpool.Dynamic(initial=MIB, growth=MIB), source=source)


@pytest.mark.parametrize("adaptive", [False, True])
def test_an_exported_segment_stays_until_the_pool_is_closed(adaptive):
    pool = fake_pool(vpool.Dynamic(initial=0, growth=2 * MIB, adaptive=adaptive))
    other, exported = pool.empty(2 * MIB), pool.empty(2 * MIB)
    handle = pool.ipc_handle(exported)
    exported.close(), other.close()
    assert pool.trim() == 2 * MIB
    assert pool.stats.reserved_bytes == 2 * MIB == pool.source.driver.used()
    pool.check()
    # Adaptive pools and requests that find no memory give idle segments back too, but not this one.
    for _ in range(10_000 if adaptive else 1):
        pool.deallocate(pool.allocate(2 * MIB))
    with pytest.raises(vpool.OutOfMemoryError):
        pool.allocate(GIB)
    pool.trim()
    with pool.empty(2 * MIB) as again:
        assert again.ptr == handle.base
    pool.close()
    assert pool.source.driver.used() == 0


@pytest.mark.parametrize("strategy", [vpool.Fixed("1MiB"), vpool.Fixed("1MiB", block="4KiB")])
def test_a_fixed_core_exports_too(strategy):
    pool = fake_pool(strategy)
    with pool.empty(4096) as first, pool.empty(4096) as second:
        handles = [pool.ipc_handle(block) for block in (first, second)]
        assert [handle.base + handle.offset for handle in handles] == [first.ptr, second.ptr]
    pool.close()
    assert pool.source.driver.used() == 0


def test_a_handle_can_be_pickled_and_compared():
    with fake_pool() as pool, pool.empty(1000) as block:
        handle = pool.ipc_handle(block)
        copy = pickle.loads(pickle.dumps(handle))
        assert copy == handle
        assert len(handle.handle) == 64
        assert isinstance(copy, IpcHandle)


@pytest.mark.parametrize("source", ["host", "simulated"])
def test_sources_that_cannot_share_say_so(source):
    with vpool.Pool(vpool.Dynamic(initial=MIB), source=source) as pool, pool.empty(1000) as block:
        with pytest.raises(vpool.SourceError, match=f'"{source}"|\'{source}\'.*"cuda" can') as refused:
            pool.ipc_handle(block)
        assert refused.value.name == "cudaErrorNotSupported"
        pool.check()


@pytest.mark.parametrize("source", ["host", "simulated", "fake cuda"])
def test_a_segment_that_was_not_exported_goes_back(source):
    pool = fake_pool() if source == "fake cuda" else vpool.Pool(vpool.Dynamic(initial=MIB), source=source)
    exported, refused = pool.empty(MIB), pool.empty(MIB)
    if source == "fake cuda":
        pool.ipc_handle(exported)
        pool.source.driver.fail("ipc_get", 2, times=2)
    for block in (exported, refused):
        with pytest.raises(vpool.SourceError):
            pool.ipc_handle(block)
        block.close()
    assert pool.trim() > 0
    # What another process can open stays, though another handle of it was refused.
    assert pool.stats.reserved_bytes == (MIB if source == "fake cuda" else 0)
    pool.close()


def test_bad_addresses():
    pool = fake_pool()
    buffer = pool.empty(1000)
    ptr = pool.allocate(1000)
    with pytest.raises(vpool.ForeignPointerError):
        pool.ipc_handle(ptr + 256)
    pool.deallocate(ptr)
    with pytest.raises(vpool.DoubleFreeError):
        pool.ipc_handle(ptr)
    for nothing in (0, 12345):
        with pytest.raises(vpool.ForeignPointerError):
            pool.ipc_handle(nothing)
    closed, by_hand = pool.empty(1000), pool.empty(2000)
    closed.close()
    pool.deallocate(by_hand.ptr)
    # Their addresses are others' now, to whom the handles would lead.
    others = [pool.empty(1000), pool.empty(2000)]
    for gone in (closed, by_hand):
        with pytest.raises(vpool.DoubleFreeError):
            pool.ipc_handle(gone)
    with fake_pool() as another, another.empty(1000) as foreign, pytest.raises(vpool.ForeignPointerError):
        pool.ipc_handle(foreign)
    del others
    pool.source.driver.fail("ipc_get", INVALID_HANDLE)
    with pytest.raises(vpool.SourceError):
        pool.ipc_handle(buffer)
    pool.close()
    with pytest.raises(vpool.ClosedPoolError):
        pool.ipc_handle(buffer)


def test_a_handle_of_another_length_is_refused():
    with fake_pool() as pool, pytest.raises(ValueError, match="64"):
        pool.source.open_shared(b"short")

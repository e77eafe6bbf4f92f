"""Every driver call that a pool makes fails, in every scenario, at every position, with what CUDA gives there.

The scenarios are run clean first, which tells the calls that they make.  One that no scenario makes fails a test.
"""

import functools
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import vpool
from tests.helpers.pools import KIB, MIB, run_cleanly
from tests.helpers.rig import Fake, Mapped, Rig, Simulated, Stopped, Watched, sample
from tests.helpers.scenarios import coalesce, move, move_blocks, open_exported, reserve, resize, suspend, watch
from vpool._storage.driver import CALL_NAMES

OUT_OF_MEMORY = 2
NOT_READY = 600
ILLEGAL_ADDRESS = 700
# What any call may give: an error of work before it among others.
ANY = (3, 36, ILLEGAL_ADDRESS, 999)
# And each call besides.  A call that is not named here is tried with all that others give.
OWN = {
    "malloc": (1, OUT_OF_MEMORY, 900),
    "free": (1, 900),
    "memory_info": (1, OUT_OF_MEMORY),
    "device_count": (),
    "get_device": (1,),
    "set_device": (OUT_OF_MEMORY, 101),
    "fill": (1,),
    "read": (1,),
    "write": (1,),
    "synchronize": (900,),
    "stream_create": (1, OUT_OF_MEMORY),
    "stream_destroy": (1, 400),
    "stream_id": (1, 400),
    "event_create": (1, OUT_OF_MEMORY),
    "event_destroy": (1, 400),
    "event_record": (1, 400),
    "event_query": (1, 400, NOT_READY, 900),
    "event_synchronize": (1, 400, 900),
    "stream_wait_event": (1, 400, 900),
    "stream_captures": (1, 400),
    "capture_info": (1, 400),
    "capture_mode": (1,),
    "graph_retain": (1, OUT_OF_MEMORY),
    "ipc_get": (1, OUT_OF_MEMORY, 801),
    "ipc_open": (1, OUT_OF_MEMORY, 208, 400, 801),
    "ipc_close": (1, 400),
    "fill_on": (1, 400, 900),
    "device_attribute": (1, 101),
    "handle_granularity": (1, 101, 801),
    "address_reserve": (1, OUT_OF_MEMORY),
    "address_free": (1,),
    "handle_create": (1, OUT_OF_MEMORY, 101),
    "handle_release": (1,),
    "handle_map": (1, OUT_OF_MEMORY, 801),
    "handle_unmap": (1,),
    "access_set": (1, OUT_OF_MEMORY, 101),
    "read_on": (1, 400, 900),
    "copy_on": (1, 400, 900),
}
# Of each call in each scenario; all of them in the long run.
POSITIONS = int(os.environ.get("VPOOL_FAULT_POSITIONS", "7"))

SMALL = vpool.Dynamic(initial="1MiB", growth="1MiB", limit="8MiB")
ONE_SEGMENT = vpool.Dynamic(initial="4MiB", limit="4MiB")
STRATEGIES = {
    "dynamic": SMALL,
    "adaptive": vpool.Dynamic(initial="1MiB", adaptive=True),
    "slab": vpool.Fixed("4MiB"),
    "equal blocks": vpool.Fixed("4MiB", "64KiB"),
    "direct": vpool.Fixed("4MiB", [4096, "64KiB"], oversize="direct"),
    "hybrid": vpool.Hybrid("4MiB", "64KiB", dynamic=vpool.Dynamic(initial="1MiB", limit="16MiB")),
}


# Scenarios.


def construct(rig):
    """Each strategy's pool is made, used and closed."""
    for strategy in STRATEGIES.values():
        pool = rig.pool(strategy)
        rig.free(pool, rig.allocate(pool, 60 * KIB))
        rig.do(pool.close)


def hit(rig):
    pool = rig.pool(SMALL)
    for _ in range(10):
        rig.free(pool, rig.allocate(pool, 1000))


def grow(rig):
    pool = rig.pool(vpool.Dynamic(initial="1MiB"))
    for ptr in [rig.allocate(pool, nbytes) for nbytes in (100, MIB, 5 * MIB, 700, 40 * MIB)]:
        rig.free(pool, ptr)


def grow_from_a_base_that_does_not_suit(rig):
    pool = rig.pool(SMALL)
    rig.allocate(pool, MIB)
    rig.allocate(pool, MIB, alignment=MIB)


def run_out(rig):
    """Up to the limit and no further, with the whole ladder and its callbacks."""
    pool = rig.pool(SMALL)
    other = rig.stream()
    asked = []
    pool.on_pressure(asked.append)
    kept = [rig.allocate(pool, 2 * MIB + 100) for _ in range(3)]
    rig.refused(pool.allocate, 3 * MIB)
    rig.refused(pool.allocate, 3 * MIB, other)
    rig.refused(pool.empty, 60 * MIB)
    rig.free(pool, kept[0])
    rig.allocate(pool, 2 * MIB, other)
    assert asked


def crowded_device(rig):
    """The device has less than the growth rule wants."""
    pool = rig.pool(vpool.Dynamic(initial="2MiB", growth="16MiB", limit="60MiB"))
    for nbytes in (MIB, 3 * MIB, 20 * MIB):
        rig.allocate(pool, nbytes)
    rig.refused(pool.allocate, 30 * MIB)


def trim(rig):
    pool = rig.pool(vpool.Dynamic(initial="1MiB", growth="1MiB"))
    blocks = [rig.allocate(pool, MIB) for _ in range(5)]
    for ptr in blocks[1:]:
        rig.free(pool, ptr)
    rig.do(pool.trim, "3MiB")
    rig.do(pool.trim)
    rig.allocate(pool, 2 * MIB)


def close_with_live_blocks(rig):
    pool = rig.pool(vpool.Dynamic(initial="1MiB", growth="1MiB"))
    kept = [rig.allocate(pool, 3 * MIB), rig.empty(pool, MIB), rig.empty(pool, 100)]
    rig.free(pool, rig.allocate(pool, 9 * MIB))
    rig.do(pool.close)
    rig.drop(pool, kept[2])
    rig.free(pool, kept[0])
    rig.drop(pool, kept[1])
    rig.do(pool.close)


def drop_buffers(rig):
    pool = rig.pool(SMALL)
    stream = rig.stream()
    for nbytes in (100, MIB, 2 * MIB):
        rig.drop(pool, rig.empty(pool, nbytes))
        rig.drop(pool, rig.empty(pool, nbytes, stream))


def steal(rig):
    """Memory freed on one stream serves another: proved, behind an event, and cut from what is in use."""
    pool = rig.pool(ONE_SEGMENT)
    one, other = rig.stream(), rig.stream()
    for first, second in ((0, one), (one, other), (other, 0)):
        rig.free(pool, rig.allocate(pool, 3 * MIB, first))
        kept = [rig.allocate(pool, MIB, second), rig.allocate(pool, 100, second)]
        for ptr in kept:
            rig.free(pool, ptr)


def free_elsewhere(rig):
    pool = rig.pool(ONE_SEGMENT)
    one, other = rig.stream(), rig.stream()
    for stream, freer in ((0, one), (one, other), (other, 0)):
        rig.free(pool, rig.allocate(pool, 3 * MIB, stream), freer)
        rig.free(pool, rig.allocate(pool, 3 * MIB, stream))


def record_and_free(rig):
    pool = rig.pool(ONE_SEGMENT)
    one, other = rig.stream(), rig.stream()
    for stream, user in ((0, one), (one, other), (other, 0)):
        ptr = rig.allocate(pool, 2 * MIB, stream)
        rig.record_stream(pool, ptr, user)
        rig.free(pool, ptr)
        rig.free(pool, rig.allocate(pool, 3 * MIB, stream))
        rig.driver.complete(user)


def wait_for_pending(rig):
    """All memory is pending on a stream that no event can be recorded on: the device is waited for."""
    pool = rig.pool(ONE_SEGMENT)
    for _ in range(2):
        dying = rig.stream()
        ptr = rig.allocate(pool, 4 * MIB)
        rig.record_stream(pool, ptr, dying)
        rig.free(pool, ptr)
        rig.destroy(dying)
        rig.free(pool, rig.allocate(pool, 4 * MIB))


def raise_rather_than_wait(rig):
    pool = rig.pool(ONE_SEGMENT, on_pressure="raise")
    dying, other = rig.stream(), rig.stream()
    ptr = rig.allocate(pool, 4 * MIB, dying)
    rig.refused(pool.allocate, MIB, other)
    rig.free(pool, ptr)
    rig.destroy(dying)
    rig.refused(pool.allocate, MIB, other)
    rig.driver.complete()
    rig.do(pool.trim)
    rig.allocate(pool, MIB, other)


def streams_die(rig):
    """With live, free and pending blocks; one is freed on its own stream when that is gone."""
    pool = rig.pool(vpool.Dynamic(initial="1MiB", growth="1MiB", limit="6MiB"))
    other = rig.stream()
    for _ in range(2):
        dying = rig.stream()
        live = rig.allocate(pool, MIB, dying)
        rig.free(pool, rig.allocate(pool, MIB, dying))
        shared = rig.allocate(pool, MIB)
        rig.record_stream(pool, shared, dying)
        rig.free(pool, shared)
        rig.destroy(dying)
        of = rig.of(pool)
        rig.do(pool.deallocate, live, dying)  # its work is waited for with the device
        del of.live[live]
        rig.free(pool, rig.allocate(pool, 2 * MIB, other))


def handles_come_back(rig):
    pool = rig.pool(ONE_SEGMENT)
    handle = rig.stream()
    for _ in range(3):
        ptr = rig.allocate(pool, 3 * MIB, handle)
        rig.free(pool, rig.allocate(pool, MIB, handle))
        rig.free(pool, ptr)
        rig.destroy(handle)
        rig.stream(handle)
        rig.free(pool, rig.allocate(pool, 2 * MIB, handle))


def forget_streams(rig):
    pool = rig.pool(ONE_SEGMENT)
    other = rig.stream()
    for _ in range(3):
        dying = rig.stream()
        rig.free(pool, rig.allocate(pool, 3 * MIB, dying))
        rig.do(pool.forget_stream, dying)
        rig.destroy(dying)
        rig.free(pool, rig.allocate(pool, 2 * MIB, other))


def many_streams(rig):
    """More than a pool makes slots for before it gives those of dead streams again."""
    pool = rig.pool(ONE_SEGMENT)
    for number in range(70):
        stream = rig.stream()
        rig.free(pool, rig.allocate(pool, 1000, stream))
        if number % 2:
            rig.destroy(stream)
    rig.allocate(pool, 3 * MIB)


def per_thread_stream(rig):
    pool = rig.pool(ONE_SEGMENT)
    other = rig.stream()
    for first, second in ((2, other), (other, 2), (2, 0), (0, 2)):
        rig.free(pool, rig.allocate(pool, 3 * MIB, first))
        rig.free(pool, rig.allocate(pool, 2 * MIB, second))


def maintain(rig):
    """A hybrid pool past its watermark takes memory ahead."""
    pool = rig.pool(vpool.Hybrid("2MiB", "64KiB", watermark=0.5, dynamic=vpool.Dynamic(initial="1MiB", limit="20MiB")))
    blocks = [rig.allocate(pool, 64 * KIB) for _ in range(20)]
    rig.do(pool.maintain)
    rig.allocate(pool, 3 * MIB)
    blocks += [rig.allocate(pool, 64 * KIB) for _ in range(20)]
    rig.do(pool.maintain)
    for ptr in blocks:
        rig.free(pool, ptr)
    rig.do(pool.trim)


def cross_in_a_fixed_core(rig):
    pool = rig.pool(vpool.Fixed("256KiB", "64KiB"))
    one, other = rig.stream(), rig.stream()
    blocks = [rig.allocate(pool, 60 * KIB, one) for _ in range(4)]
    rig.record_stream(pool, blocks[0], other)
    rig.refused(pool.allocate, 60 * KIB)
    rig.refused(pool.allocate, 65 * KIB)
    for ptr in blocks:
        rig.free(pool, ptr)
    rig.free(pool, rig.allocate(pool, 60 * KIB, other), 0)
    for _ in range(4):
        rig.allocate(pool, 60 * KIB)
    rig.do(pool.trim)
    rig.do(pool.close)


def adapt(rig):
    """An adaptive pool gives back what is idle, and makes room before it grows."""
    pool = rig.pool(vpool.Dynamic(initial="1MiB", adaptive=True))
    stream = rig.stream()
    for _ in range(2):
        blocks = [rig.allocate(pool, MIB, stream if i % 4 == 0 else 0) for i in range(16)]
        for ptr in blocks[2:]:
            rig.free(pool, ptr)
        rig.driver.complete()
        for _ in range(20):
            rig.free(pool, rig.allocate(pool, 1000))
        rig.do(pool.maintain)


def two_devices(rig):
    """Pools on both devices of one thread."""
    devices = (0, 1) if hasattr(rig.machine, "on") else (None, None)
    pools = [rig.pool(ONE_SEGMENT, device) for device in devices]
    streams = [rig.stream() for _ in pools]
    for pool, stream in zip(pools, streams, strict=True):
        rig.free(pool, rig.allocate(pool, 3 * MIB, stream))
        rig.free(pool, rig.allocate(pool, 3 * MIB))
    for pool in pools:
        rig.do(pool.close)


def look(rig):
    """Reports, figures and limits."""
    pool = rig.pool(SMALL)
    rig.allocate(pool, 100)
    for _ in range(2):
        str(rig.do(pool.inspect))
        rig.do(pool.source.memory)
        assert rig.do(getattr, pool, "stats").allocations == 1
        rig.do(pool.reset_peaks)
        rig.do(pool.set_limit, "6MiB")
        rig.do(pool.apply, SMALL)
        assert rig.do(getattr, pool, "ladder")


def capture(rig):
    """Memory for graphs, with growth meanwhile: on the capturing stream and on another one."""
    pool = rig.pool(vpool.Dynamic(initial="1MiB", growth="1MiB", limit="16MiB"))
    stream, other = rig.stream(), rig.stream()
    rig.free(pool, rig.allocate(pool, 3 * MIB, other))
    for _ in range(2):
        rig.begin_capture(stream)
        temporary = rig.allocate(pool, MIB, stream, work=False)
        rig.free(pool, temporary)
        kept = rig.allocate(pool, 2 * MIB, stream, work=False)
        eager = rig.allocate(pool, 100, other)
        rig.do(pool.inspect)
        rig.free(pool, eager)
        rig.end_capture(stream)
        rig.free(pool, kept)
        rig.free(pool, rig.allocate(pool, 4 * MIB, other))


def export(rig):
    """A block for another process, whose segment stays."""
    pool = rig.pool(SMALL)
    ptr = rig.allocate(pool, 1000)
    for _ in range(2):
        assert rig.do(pool.ipc_handle, ptr).nbytes == 1024
    rig.free(pool, ptr)
    rig.do(pool.trim)
    assert pool.stats.reserved_bytes > 0


def replay(rig):
    """A trace of two streams with patterns, which the driver writes and reads; the streams are the replay's own."""
    rig.drops_pools = True
    ops = np.array([0, 0, 0, 1, 0, 1, 1, 1], np.uint8)
    ids = np.array([0, 1, 2, 0, 3, 1, 3, 2], np.uint32)
    sizes = np.array([5000, 3 * MIB, 700, 900], np.uint64)[ids]
    streams = np.array([0, 1, 2, 0, 1, 1, 1, 2], np.uint16)
    trace = vpool.Trace(ops, ids, sizes, streams, np.arange(8), marks_us=[4])
    patterns = rig.source.has_memory
    result = rig.do(vpool.replay, trace, SMALL, rig.source, passes=2, patterns=patterns, maintain=True)
    assert result.oom is None or rig.met  # it ends there, and says so


SCENARIOS = {
    construct: (Fake, Simulated),
    hit: (Fake, Simulated),
    grow: (Fake, Simulated, Mapped),
    grow_from_a_base_that_does_not_suit: (functools.partial(Simulated, base_offset=100),),
    run_out: (Fake, Simulated, Mapped, Watched),
    move: (Mapped,),
    crowded_device: (functools.partial(Fake, 40 * MIB), functools.partial(Simulated, 40 * MIB)),
    trim: (Fake, Simulated, Mapped, Watched),
    close_with_live_blocks: (Fake, Simulated, Mapped, Watched),
    drop_buffers: (Fake, Simulated, Watched),
    steal: (Fake, Simulated, Mapped, Watched),
    free_elsewhere: (Fake, Simulated, Watched),
    record_and_free: (Fake, Simulated, Watched),
    wait_for_pending: (Fake, Simulated, Mapped),
    raise_rather_than_wait: (Fake, Simulated, Mapped),
    streams_die: (Fake, Simulated, Watched),
    handles_come_back: (Fake, Simulated),
    forget_streams: (Fake, Simulated, Watched),
    many_streams: (Fake, Simulated),
    per_thread_stream: (Fake, Simulated),
    coalesce: (Fake, Simulated),
    maintain: (Fake, Simulated, Watched),
    reserve: (Fake, Simulated, Mapped, Watched),
    cross_in_a_fixed_core: (Fake, Simulated, Watched),
    adapt: (Fake, Simulated, Watched),
    two_devices: (Fake, Watched),
    look: (Fake, Simulated),
    capture: (Fake, Simulated, Mapped, Watched),
    export: (Fake,),
    suspend: (Mapped,),
    resize: (Fake, Mapped, Watched),
    move_blocks: (Fake, Simulated, Mapped),
    replay: (Fake, Simulated),
    watch: (Fake, Watched),
    open_exported: (Fake,),
}
CASES = [
    pytest.param(scenario, make, id=f"{scenario.__name__}-{getattr(make, 'func', make).__name__}")
    for scenario, machines in SCENARIOS.items()
    for make in machines
]


def statuses_of(call):
    every = sorted({status for own in OWN.values() for status in own})
    return (*OWN.get(call, every), *ANY)


@functools.cache
def clean_run(scenario, make):
    """How often a scenario makes each call up to its end, where nothing fails."""
    rig = Rig(make())
    before = rig.driver.calls()
    scenario(rig)
    made = {name: figures[0] - before[name][0] for name, figures in rig.driver.calls().items()}
    rig.finish()
    # What is destroyed with a pool is made to fail, too.
    made["event_destroy"] = rig.calls("event_destroy")
    assert not rig.errors
    return made


def run(scenario, make, call, status, position, **how):
    """A scenario with one fault; the names of the errors that it met.

    In a thread of its own: a fault may leave another current device or capture mode behind.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run_here, scenario, make, call, status, position, how).result()


def run_here(scenario, make, call, status, position, how):
    rig = Rig(make())
    rig.arm(call, status, position, **how)
    try:
        try:
            scenario(rig)
        except Stopped:
            rig.break_off()
        rig.finish()
        assert rig.met
    except Exception as error:
        error.add_note(f"{scenario.__name__}: {call} {position} gave {status} {how or 'once'}; met {rig.errors}")
        raise
    return rig.errors


def faults(scenario, make, most, thorough=False):
    """Call, position and status: all that a call may give at its first position, else two by turns."""
    for call, count in clean_run(scenario, make).items():
        statuses = statuses_of(call)
        for turn, position in enumerate(sample(count, most)):
            some = {statuses[(2 * turn + i) % len(statuses)] for i in range(2)}
            for status in statuses if thorough or turn == 0 else sorted(some):
                yield call, position, status


def each_once(scenario, make, most, thorough=False):
    for call, position, status in faults(scenario, make, most, thorough):
        run(scenario, make, call, status, position)


def each_for_good(scenario, make, most, thorough=False):
    for call, position, status in faults(scenario, make, most, thorough):
        if status != NOT_READY:
            run(scenario, make, call, status, position, stays=True)
        if status == ILLEGAL_ADDRESS:
            run(scenario, make, call, status, position, sticky=True)


@pytest.fixture(autouse=True)
def quiet():
    """What a closed pool cannot give back is logged, not raised, and what leaves quarantine unread is reported."""
    logger, hook = logging.getLogger("vpool"), sys.unraisablehook
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    sys.unraisablehook = lambda args: None if isinstance(args.exc_value, vpool.SourceError) else hook(args)
    yield
    sys.unraisablehook = hook
    logger.setLevel(level)


@pytest.mark.parametrize(("scenario", "make"), CASES)
def test_a_call_that_fails_once_gives_a_typed_error_and_the_next_call_works(scenario, make):
    each_once(scenario, make, min(POSITIONS, 2) if scenario is many_streams else POSITIONS)


@pytest.mark.parametrize(("scenario", "make"), CASES)
def test_a_fault_that_stays_loses_nothing_and_close_is_clean(scenario, make):
    each_for_good(scenario, make, 1 if scenario is many_streams else min(POSITIONS, 3))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("scenario", "make"), CASES)
def test_every_call_at_every_position(scenario, make):
    each_once(scenario, make, 1000, thorough=True)
    each_for_good(scenario, make, 40, thorough=True)


def test_no_driver_call_is_left_out():
    """A new call needs a scenario that makes it."""
    runs = [clean_run(scenario, make) for scenario, machines in SCENARIOS.items() for make in machines]
    assert [call for call in CALL_NAMES if not any(made[call] for made in runs)] == []


@pytest.mark.parametrize(
    ("scenario", "call", "status", "expected"),
    [
        (grow, "malloc", ILLEGAL_ADDRESS, ["cudaErrorIllegalAddress"]),
        (grow, "malloc", OUT_OF_MEMORY, []),          # it asks for less
        (construct, "memory_info", 999, ["cudaErrorUnknown"]),
        (construct, "device_count", 36, ["cudaErrorCallRequiresNewerDriver"]),
        (look, "memory_info", 3, ["cudaErrorInitializationError"]),
        (trim, "free", 1, ["cudaErrorInvalidValue"]),
        (trim, "event_synchronize", 1, []),           # the device is waited for instead
        (replay, "synchronize", ILLEGAL_ADDRESS, ["cudaErrorIllegalAddress"]),
        (capture, "stream_captures", 1, ["cudaErrorInvalidValue"]),
        (capture, "capture_mode", 1, ["cudaErrorInvalidValue"]),
        (capture, "graph_retain", OUT_OF_MEMORY, []),
        (steal, "stream_id", 400, ["cudaErrorInvalidResourceHandle"]),
        (steal, "event_create", OUT_OF_MEMORY, []),
        (steal, "event_record", 400, []),
        (steal, "event_query", NOT_READY, []),
        (steal, "stream_wait_event", 900, []),
        (replay, "fill", ILLEGAL_ADDRESS, ["cudaErrorIllegalAddress"]),
        (replay, "read", ILLEGAL_ADDRESS, ["cudaErrorIllegalAddress"]),
    ],
)  # fmt: skip
def test_what_a_fault_comes_to(scenario, call, status, expected):
    """An error that names it, or a way around it: the matrix above takes either."""
    make = Simulated if call in ("event_query", "stream_wait_event") else Fake
    assert run(scenario, make, call, status, 0) == expected


EXIT = """
import vpool
from tests.helpers.rig import {machine}
machine = {machine}()
pool = vpool.Pool(vpool.Dynamic(initial="1MiB"), machine.source, maintain_every=0.01)
kept = [pool.allocate(100), pool.empty(2 << 20), pool.empty(100, machine.driver.create_stream())]
stream = machine.driver.create_stream()
pool.record_stream(kept[1], stream)
machine.driver.fail("malloc", 700, sticky=True)
for call in (lambda: pool.allocate(50 << 20), pool.trim, pool.source.memory, pool.{close}):
    try:
        call()
    except vpool.SourceError as error:
        print(error.name)
"""


@pytest.mark.parametrize("close", ["close", "trim"])
@pytest.mark.parametrize("machine", ["Fake", "Simulated"])
def test_after_a_sticky_error_the_process_ends_cleanly(machine, close):
    """With live blocks, buffers, events and a maintainer; each call before has said what is wrong."""
    assert run_cleanly(EXIT.format(machine=machine, close=close)).split() == 4 * ["cudaErrorIllegalAddress"]

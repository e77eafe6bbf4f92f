"""Python code runs in the middle of the pool's own: collections with finalisers, other threads, and signals."""

import dis
import functools
import itertools
import os
import sys
import threading

import pytest

import vpool
from tests.helpers.debug import debug_pool
from tests.helpers.pools import MIB, run_cleanly, simulated_pool
from vpool import defaults
from vpool._interface import tags
from vpool.sites import Sites

PACKAGE = os.path.dirname(vpool.__file__)


def free_and_make(pool):
    """What a thread does that a finaliser may wait for."""
    pool.deallocate(pool.allocate(1000))
    pool.empty(500).close()
    with vpool.Pool(source="simulated") as other:
        assert other in vpool.pools()


@pytest.fixture
def watched():
    with debug_pool("guard,poison,quarantine,sites") as pool:
        yield pool


def free_nothing(pool):
    with pytest.raises(vpool.ForeignPointerError):
        pool.deallocate(12345)


CALLS = {
    "free": lambda pool: pool.deallocate(pool.allocate(100)),
    "a buffer": lambda pool: pool.empty(100),
    "a stray free": free_nothing,
    "stats": lambda pool: pool.stats,
    "leaks": lambda pool: pool.leaks(),
    "inspect": lambda pool: pool.inspect(),
    "snapshot": lambda pool: pool.snapshot(),
    "check": lambda pool: pool.check(),
    "trim": lambda pool: pool.trim(),
    "reserve": lambda pool: pool.reserve("1MiB"),
    "a limit": lambda pool: pool.set_limit(32 * MIB),
    "pools": lambda pool: vpool.pools(),
    "a new pool": lambda pool: vpool.Pool(source="simulated"),
    "the first tag": lambda pool: [note() for note in tags.first_use],
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_finaliser_may_wait_for_a_thread_that_uses_the_pool(watched, call):
    """A collection may begin on every line of Python: nothing may be held there that the thread wants."""
    kept = [watched.empty(1000), watched.empty(2000)]
    seen, hung = set(), []

    def line(frame, event, arg):
        place = frame.f_code, frame.f_lineno
        if place not in seen and not hung:
            seen.add(place)
            thread = threading.Thread(target=free_and_make, args=(watched,), daemon=True)
            thread.start()
            thread.join(10)
            hung.extend([place] if thread.is_alive() else [])
        return line

    sys.settrace(line)
    try:
        call(watched)
    finally:
        sys.settrace(None)
    assert not hung
    assert len(kept) == watched.leaks().blocks
    watched.check()


class Interrupted:
    """An interrupt behind a number of steps of the package's Python code, as of a signal that comes then."""

    def __init__(self, after):
        self.after, self.steps = after, 0

    def _step(self):
        self.steps += 1
        if self.steps == self.after + 1:
            sys.settrace(None)
            raise KeyboardInterrupt

    def _opcode(self, frame, event, arg):
        if event == "opcode":
            self._step()
        return self._opcode

    def _call(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        self._step()
        return self._opcode

    def __enter__(self):
        sys.settrace(self._call)

    def __exit__(self, *exc_info):
        sys.settrace(None)
        return exc_info[0] is KeyboardInterrupt


@functools.cache
def after_looks(code):
    """Offsets of the instructions of a function before which Python has looked whether a signal came."""
    steps = list(dis.get_instructions(code))
    looks = ("CALL", "RESUME", "JUMP_BACKWARD")
    return {step.offset for before, step in itertools.pairwise(steps) if before.opname.startswith(looks)}


class Signalled(Interrupted):
    """An interrupt where Python runs the handlers of signals, and nowhere else.

    Between the last line of a ``with`` block and the call that leaves it, it runs none: nothing could be written in
    Python that holds there.
    """

    def _opcode(self, frame, event, arg):
        if event == "opcode" and frame.f_lasti in after_looks(frame.f_code):
            self._step()
        return self._opcode


class Profiler:
    """NVTX, as far as pools use it."""

    def __init__(self):
        self.open, self.value = set(), 0

    def get_counter(self, name, dtype):
        return self

    def sample(self, value):
        self.value = value

    def start_range(self, message, category, payload):
        self.open.add(len(self.open) + 1000 * payload)
        return len(self.open) - 1 + 1000 * payload

    def end_range(self, number):
        self.open.remove(number)


STEPS = {
    "allocate": lambda pool, kept: kept.append(pool.allocate(900)),
    "empty": lambda pool, kept: kept.append(pool.empty(900)),
    "free": lambda pool, kept: pool.deallocate(kept[0]),
    "close": lambda pool, kept: kept[1].close(),
    "drop": lambda pool, kept: kept.pop(),
    "resize": lambda pool, kept: pool.resize(kept[1], 5000),
}


@pytest.mark.parametrize("debug", ["guard,poison,quarantine,sites", "quarantine,sites,nvtx", "nvtx"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_signal_at_any_moment_loses_nothing(step, debug, monkeypatch):
    profiler = Profiler()
    if "nvtx" in debug:
        monkeypatch.setattr(pytest.importorskip("nvtx"), "get_domain", lambda name: profiler)
    monkeypatch.setattr(sys, "unraisablehook", lambda args: None)
    after, interrupt = 0, None
    while interrupt is None or interrupt.steps > interrupt.after:
        with debug_pool(debug, "host" if "guard" in debug else "simulated") as pool:
            kept = [pool.allocate(700), pool.empty(800)]
            before = len(kept)
            interrupt = Interrupted(after)
            with interrupt:
                step(pool, kept)
            pool.check()
            for one in kept[before:]:
                pool.deallocate(one)
            del kept[1:]
            if pool.leaks().blocks:
                pool.deallocate(kept[0])
            assert pool.leaks().blocks == 0
            pool.trim()
            stats = pool.stats
            assert (stats.allocated_bytes, stats.pending_bytes, stats.allocations) == (0, 0, stats.frees)
            assert (profiler.open, profiler.value) == (set(), 0)
        after += 1 + after // 40  # every step of the short ones


FIRST_TAG = """
from vpool._interface import tags
names, asked = ["inner"], []
def finaliser():
    if names:
        asked.append(tags.number_of(names.pop()))
tags.first_use.append(finaliser)
numbers = [tags.number_of("outer"), tags.number_of("inner")]
assert asked == numbers[1:]
assert [tags.name_of(number) for number in numbers] == ["outer", "inner"], numbers
"""


def test_a_finaliser_may_use_a_tag_while_the_first_one_gets_its_number():
    run_cleanly(FIRST_TAG)


def test_a_signal_handler_may_meet_a_site_while_another_gets_its_number():
    after, numbers = 0, {}
    while len(numbers) != 1:
        sites, numbers, steps = Sites(), {}, 0

        def meet(name, sites=sites, numbers=numbers):
            scope = {"number": sites.number}
            exec(compile("found = number()", name, "exec"), scope)
            numbers[name] = scope["found"]

        def step(frame, event, argument, after=after, meet=meet):
            nonlocal steps
            frame.f_trace_opcodes = True
            if event == "opcode" and frame.f_code is Sites.number.__code__:
                steps += 1
                if steps == after + 1:
                    sys.settrace(None)
                    meet("handler.py")
            return step

        sys.settrace(step)
        try:
            meet("program.py")
        finally:
            sys.settrace(None)
        assert {name: sites.texts[number].split(":")[0] for name, number in numbers.items()} == {
            name: name for name in numbers
        }
        after += 1
    assert after > 10


def test_a_default_pool_is_seen_by_others_once_whoever_watches_has_it(monkeypatch):
    monkeypatch.setattr(defaults, "_defaults", {})
    monkeypatch.setattr(defaults, "when_made", [lambda pool: known.append(dict(defaults._defaults))])
    known = []
    with vpool.default_pool(0):
        assert known == [{}]


def measured():
    with simulated_pool() as pool, pool.measure():
        pool.reset_peaks()


LOCKED = {
    "measure": (measured, None),
    "default pool": (lambda: vpool.default_pool(0).close(), lambda: defaults._making.here),
}


@pytest.mark.parametrize(("call", "lock"), LOCKED.values(), ids=LOCKED)
def test_a_signal_at_any_moment_leaves_no_lock_taken(call, lock, monkeypatch):
    monkeypatch.setattr(defaults, "_defaults", {})
    made, make = [], threading.RLock
    monkeypatch.setattr(threading, "RLock", lambda: made.append(make()) or made[-1])
    after, interrupt = 0, None
    while interrupt is None or interrupt.steps > interrupt.after:
        made.clear()
        interrupt = Signalled(after)
        with interrupt:
            call()
        locks = made if lock is None else [lock()]
        assert not any(one._is_owned() for one in locks), after
        after += 1 + after // 100
    call()

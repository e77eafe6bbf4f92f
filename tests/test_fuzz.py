"""The whole interface with hostile arguments in any order: typed errors only, and the pool agrees with a model.

In full length: `pytest -m long tests/test_fuzz.py`.
"""

import collections
import copy
import logging
import operator
import os
import pickle
import random

import pytest

import vpool
from tests.helpers.hostile import NO_NUMBERS, NO_STREAMS, NUMBERS, Handle, Index, Refusal, Slotted, Stream, refuse
from tests.helpers.model import Model, assert_disjoint
from tests.helpers.pools import KIB, MIB, round_up
from vpool._storage.driver import CALL_NAMES
from vpool._storage.fake_cuda import FakeCudaDriver
from vpool._storage.mapped_source import MappedSource
from vpool._storage.source import Source

# What a call may raise for its arguments, besides vpool's own errors.
TYPED = (vpool.Error, TypeError, ValueError, OverflowError, OSError, Refusal)
STATUSES = (1, 2, 3, 36, 101, 400, 700, 900, 999)
STRATEGIES = (
    vpool.Dynamic(initial=0, growth="256KiB", limit="4MiB"),
    vpool.Dynamic(initial="1MiB", limit="4MiB", adaptive=True),
    vpool.Fixed("2MiB"),
    vpool.Fixed("2MiB", [1024, "64KiB"], oversize="direct", limit="4MiB"),
    vpool.Hybrid("1MiB", "4KiB", dynamic=vpool.Dynamic(initial="64KiB", growth="64KiB", limit="4MiB")),
)
# Calls whose effect on the live blocks the rules below know.  Every other public name is called, or read, as it is.
KNOWN = {"allocate", "deallocate", "empty", "close", "check"}
OTHERS = sorted(name for name in dir(vpool.Pool) if not name.startswith("_") and name not in KNOWN)
OF_BUFFERS = sorted(name for name in dir(vpool.Buffer) if not name.startswith("_") and name != "close")
# Rather than nonsense, sometimes what those take.
SENSIBLE = (
    0, 64 * KIB, "1MiB", "3MiB", "4MiB", 7, None, refuse, STRATEGIES[0], STRATEGIES[1], vpool.Dynamic(limit="2MiB"),
    vpool.Policy(STRATEGIES[0]), "no such file", "nonsense.toml", "raise", "wait",
)  # fmt: skip

OPTIONS = (
    *("strategy", "source", "device", "name", "on_pressure", "rounding", "minimum_remainder", "maintain_every"),
    *("captures", "debug"),
)
MODES = ((), (), (), "sites", "quarantine=64KiB", ("sites", "quarantine=64KiB"))
# Of sources whose memory can be written.
WRITING_MODES = ("guard", "poison", ("guard", "poison"), ("guard", "poison", "quarantine=64KiB", "sites"))
PROGRAMS = int(os.environ.get("VPOOL_FUZZ", "300"))
WEIGHTS = {
    "step_lend": 8,
    "step_free": 6,
    "step_end_a_buffer": 3,
    "step_record_a_stream": 3,
    "step_close": 1,
    "step_capture": 1,
}
ACTS = ("raise", "allocate", "free", "close a buffer", "trim", "inspect", "forget", "close")


def plain(number):
    """The number of an integer-like, without running its code once more."""
    return number.number if isinstance(number, Index) else operator.index(number)


class Fuzz:
    """A small pool and another one, their blocks and buffers, streams alive and dead, and a program by a seed."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.model = Model()
        self.buffers = []
        self.ended = []
        self.gone = [1]
        self.suspended = set()
        self.inside = False
        self.broken = None  # the call that a fault is set for
        self.counts = collections.Counter()
        kind = self.random.choice(["host", "simulated", "fake", "fake, unchecked", "mapped"])
        strategy = self.random.choice(STRATEGIES)
        on_pressure = self.random.choice(["wait", "raise"])
        if kind == "host":
            source = vpool.sources.Host()
        elif kind == "simulated":
            source = vpool.sources.Simulated("3MiB")
        elif kind == "mapped":
            driver = FakeCudaDriver(16 * MIB, devices=2)
            driver.current_device = 0
            source = MappedSource(driver, "cuda-vmm", 1, handle_bytes=2 * MIB)
            strategy = vpool.Dynamic(limit=self.random.choice(["4MiB", "16MiB"]))
        else:
            driver = FakeCudaDriver(3 * MIB, devices=2)
            driver.current_device = 0
            source = Source(driver, "cuda", 1, checks_handles=None if kind == "fake" else False)
        self.fronts = {}  # of each live block: the guard before it
        debug = self.random.choice(MODES if kind == "simulated" else MODES + WRITING_MODES)
        self.pool = vpool.Pool(strategy, source, on_pressure=on_pressure, name="fuzzed", debug=debug)
        self.graphs = {}  # of each stream that captures: the capture's id, and whether no fault was set since it began
        self.launchable = []
        self.driver = source.driver
        # Its addresses are not the pool's own, which those of another simulated device would be.
        self.other = vpool.Pool(vpool.Dynamic(initial="1MiB", limit="1MiB"), "host", name="another")
        self.foreign = self.other.empty(1000)
        self.former = dict(vpool.defaults._defaults)
        self.kept = self.other.allocate(1000)
        if self.pool.device == 0:
            vpool.set_default_pool(self.pool)
        self.alive = [self.driver.create_stream() for _ in range(2)]
        self.dead = [self.driver.create_stream()]
        self.driver.destroy_stream(self.dead[0])

    # Choices.

    def pick(self, sequence, choice):
        return sequence[choice % len(sequence)]

    def stream(self, choice):
        """What may be passed as a stream, and its handle where that is sure."""
        way, choice = choice % 8, choice // 8
        if way < 4:
            handle = self.pick([None, 0, 1, 7, *self.alive], choice)
            # Code that is called back within `with vpool.stream` has another default stream.
            return handle, None if handle is None and self.inside else handle or 0
        handle = self.pick(self.alive, choice)
        if way == 4:
            return self.pick([Stream((0, handle)), Handle(handle), Slotted(handle)], choice // 2), handle
        if way == 5:
            act = self.act(choice // 4)
            return self.pick([Stream((0, handle), act), Handle(handle, act)], choice // 2), handle
        if way == 6:
            return self.pick([*self.dead, 2, "current", Stream((0, self.dead[0]))], choice), None
        return self.pick(NO_STREAMS, choice), None

    def act(self, choice):
        """Code that calls back into the pool; what is called back into the pool by that does not."""
        kind, choice = self.pick(ACTS, choice), choice // len(ACTS)

        def run(*arguments):
            if kind == "raise":
                raise Refusal
            if self.inside:
                return
            self.inside = True
            try:
                if kind == "allocate":
                    self.lend(choice % 5000, choice)
                elif kind == "free":
                    self.take_back(self.pointer(choice), choice)
                elif kind == "close a buffer" and self.buffers:
                    self.end_buffer(choice, choice, "close")
                elif kind == "trim":
                    self.attempt(self.pool.trim)
                elif kind == "inspect":
                    str(self.pool.inspect())
                elif kind == "forget":
                    self.attempt(self.pool.forget_stream, self.pick(self.alive, choice))
                elif kind == "close" and choice % 8 == 0:
                    self.attempt(self.pool.close)
            finally:
                self.inside = False

        return run

    def number(self, choice):
        way, choice = choice % 3, choice // 3
        return Index(choice, self.act(choice)) if way == 0 else self.pick(NO_NUMBERS if way == 1 else NUMBERS, choice)

    def pointer(self, choice):
        """What may be passed as a block: mostly one that is live."""
        way, choice = choice % 8, choice // 8
        live = list(self.model.live)
        if way < 3 and live:
            return self.pick(live, choice)
        if way == 3 and live:
            return self.pick([self.pick(live, choice) + 1 + choice % 300, Index(live[0], self.act(choice))], choice)
        if way == 4:
            return self.pick([*self.gone, 0, self.kept, self.foreign.ptr, 256, 2**64 - 256], choice)
        if way == 5 and self.buffers:
            return self.pick(self.buffers, choice)
        if way == 6:
            return self.pick([*self.ended, self.foreign, vpool.Buffer.__new__(vpool.Buffer)], choice)
        return self.number(choice)

    # Calls, with what they do to the model.  Code that is called back does its part first.

    def attempt(self, call, *arguments, **options):
        """The result of a call and True, or the error that it may raise and False."""
        name = getattr(call, "__name__", "")
        try:
            result = call(*arguments, **options)
            self.counts[name, None] += 1
            return result, True
        except TYPED as error:
            self.counts[name, type(error)] += 1
            error.__traceback__ = error.__context__ = error.__cause__ = None  # they would keep buffers alive
            lacks = getattr(error, "name", None) == "cudaErrorNotSupported"  # what the source cannot do
            if not self.broken and type(error) is vpool.SourceError and "stream" not in str(error) and not lacks:
                raise AssertionError("the driver works") from error
            return error, False

    def lend(self, nbytes, choice, alignment=256, how="allocate"):
        stream, handle = self.stream(choice)
        calls = {
            "allocate": (self.pool.allocate, nbytes, stream, alignment),
            "empty": (self.pool.empty, nbytes, stream),
            "with": (self.in_stream, stream, nbytes),
            "module": (vpool.allocate, nbytes, stream, alignment),
        }
        found, done = self.attempt(*calls[how])
        if not done:
            return
        requested, ptr = plain(nbytes), int(found)
        assert 0 <= requested < 2**63
        assert not self.pool.closed
        if requested == 0:
            assert ptr == 0
        else:
            row = self.row(ptr)
            self.fronts[ptr] = ptr - int(row["address"])
            assert handle is None or int(row["stream"]) == (0 if handle == 1 else handle)
            assert ptr % (plain(alignment) if how in ("allocate", "module") else 256) == 0
            self.model.allocated(ptr, requested, int(row["stream"]))
        if how == "empty":
            self.buffers.append(found)

    def in_stream(self, stream, nbytes):
        with vpool.stream(stream):
            return self.pool.allocate(nbytes)

    def row(self, ptr):
        blocks = self.pool.inspect().blocks
        holds = (blocks["address"] <= ptr) & (ptr < blocks["address"] + blocks["nbytes"])
        (row,) = blocks[holds & (blocks["state"] == "live")]
        return row

    def freed(self, ptr):
        self.model.freed(ptr)
        self.gone = [*self.gone[-6:], ptr]
        for buffer in [buffer for buffer in self.buffers if buffer.closed]:
            self.buffers.remove(buffer)
            self.ended = [*self.ended[-4:], buffer]

    def take_back(self, what, choice, how=None):
        """Free what may be a block."""
        stream, _ = self.stream(choice)
        buffer = what if isinstance(what, vpool.Buffer) else None
        ptr = None if buffer is None else buffer.ptr
        mine = buffer is not None and buffer.pool is self.pool
        error, done = self.attempt(how or self.pool.deallocate, what, stream)
        if buffer is None and (done or isinstance(error, vpool.InvalidPointerError)):
            ptr = plain(what)
            assert (ptr in self.model.live or ptr == 0) == done
        if done and ptr in self.model.live and (buffer is None or mine):
            self.freed(ptr)

    def end_buffer(self, choice, on, how):
        buffer = self.pick(self.buffers, choice)
        ptr = buffer.ptr
        if how == "drop":
            self.buffers.remove(buffer)
            del buffer
        elif how == "close":
            self.attempt(buffer.close, self.stream(on)[0])
        else:
            self.attempt(buffer.__exit__, None, None, None)
        if ptr and (how == "drop" or (buffer.closed and ptr in self.model.live)):
            self.freed(ptr)

    # Steps.

    def step(self):
        names = [name for name in dir(self) if name.startswith("step_")]
        weights = [WEIGHTS.get(name, 2) for name in names]
        getattr(self, self.random.choices(names, weights)[0])()
        self.agree()

    def choice(self):
        return self.random.randrange(1 << 32)

    def step_lend(self):
        way = self.random.randrange(6)
        nbytes = self.random.choice([MIB, 3 * MIB, 5 * MIB]) if way == 0 else self.random.randrange(1 << 4 * (way + 1))
        self.lend(nbytes, self.choice(), how=self.random.choice(["allocate", "empty", "with"]))

    def step_lend_nonsense(self):
        alignment = self.random.choice([256, 1, 512, 64 * KIB, MIB, 3, 0, 4 * MIB, self.number(self.choice())])
        nbytes = self.random.choice([300, self.number(self.choice())])
        self.lend(nbytes, self.choice(), alignment, self.random.choice(["allocate", "empty", "with"]))

    def step_ask_the_module(self):
        if self.pool.device or self.pool.closed:
            return
        self.lend(self.random.choice([700, self.number(self.choice())]), self.choice(), how="module")
        if not self.pool.closed:
            self.take_back(self.pointer(self.choice()), self.choice(), vpool.deallocate)
        self.attempt(vpool.set_default_pool, self.random.choice(NO_NUMBERS))
        self.attempt(vpool.stream, self.random.choice(NO_STREAMS))

    def step_free(self):
        self.take_back(self.pointer(self.choice()), self.choice())

    def step_end_a_buffer(self):
        if self.buffers:
            self.end_buffer(self.choice(), self.choice(), self.random.choice(["close", "drop", "with"]))

    def step_record_a_stream(self):
        what = self.pointer(self.choice())
        error, done = self.attempt(self.pool.record_stream, what, self.stream(self.choice())[0])
        if not isinstance(what, vpool.Buffer) and (done or isinstance(error, vpool.InvalidPointerError)):
            used = self.model.live.keys() - self.suspended
            assert done == (plain(what) == 0 or plain(what) in used)

    def step_call_anything(self):
        """Every other method and property of a pool, with the right number of arguments or not."""
        name = self.random.choice(OTHERS)
        found = getattr(self.pool, name)
        if callable(found):
            found, _ = self.attempt(found, *self.arguments(2))
        if isinstance(found, vpool.Pool):
            self.attempt(found.close)

    def arguments(self, most):
        return [
            self.number(self.choice()) if self.random.random() < 0.3 else self.random.choice(SENSIBLE)
            for _ in range(self.random.randrange(most + 1))
        ]

    def step_ask_a_buffer(self):
        nobody = vpool.Buffer.__new__(vpool.Buffer)
        buffer = self.random.choice([*self.buffers, *self.ended, self.foreign, nobody])
        found = getattr(buffer, self.random.choice(OF_BUFFERS))
        if callable(found):
            self.attempt(found, self.stream(self.choice())[0])
        for call in (copy.copy, copy.deepcopy, pickle.dumps, type(buffer)):
            with pytest.raises(TypeError):
                call(buffer)
        assert int(buffer) == buffer.ptr
        assert repr(buffer)

    def step_make_a_pool(self):
        options = {"strategy": STRATEGIES[1], "source": "simulated"}
        options[self.random.choice(OPTIONS)] = (self.arguments(1) or [None])[0]
        for arguments, given in (((), options), (self.arguments(4), {})):
            made, done = self.attempt(vpool.Pool, *arguments, **given)
            if done:
                assert made.stats.allocated_bytes == 0
                self.attempt(made.close)

    def step_add_a_callback(self):
        priority = self.random.choice([0, 1, -1, self.number(self.choice())])
        self.attempt(self.pool.on_pressure, self.random.choice([self.act(self.choice()), None]), priority)

    def step_streams(self):
        handle = self.random.choice(self.alive)
        way = self.random.randrange(6)
        if way < 2:
            self.driver.queue_work(handle)
        elif way == 2:
            self.driver.complete()
        elif way == 3:
            self.attempt(self.pool.forget_stream, self.stream(self.choice())[0])
        elif handle not in self.graphs and self.attempt(self.driver.destroy_stream, handle)[1]:
            self.alive.remove(handle)
            self.dead.append(handle)
            back = self.dead.pop(0) if way == 5 else None
            self.mend()
            self.alive.append(self.driver.create_stream(back))

    def step_capture(self):
        """Begin a capture, or end one; graphs stay for a while."""
        handle = self.random.choice(self.alive)
        if handle in self.graphs:
            self.end_capture(handle)
        else:
            mode = self.random.choice(["global", "thread_local", "relaxed"])
            self.graphs[handle] = (self.driver.begin_capture(handle, mode), not self.broken)

    def end_capture(self, handle):
        graph, untouched = self.graphs.pop(handle)
        valid = self.driver.end_capture(handle)
        assert valid or not untouched, "the pool has invalidated a capture"
        if valid:
            self.launchable.append(graph)

    def step_end_a_graph(self):
        if self.launchable:
            graph = self.launchable.pop(self.random.randrange(len(self.launchable)))
            if self.random.random() < 0.5:
                self.attempt(self.pool.release_capture, graph)
            self.driver.destroy_graph(graph)

    def step_break(self):
        self.mend()
        self.graphs = {handle: (graph, False) for handle, (graph, _) in self.graphs.items()}
        self.broken = self.random.choice(CALL_NAMES)
        status, sticky = self.random.choice(STATUSES), self.random.random() < 0.2
        self.driver.fail(self.broken, status, self.random.randrange(4), self.random.randrange(1, 4), sticky=sticky)

    def mend(self):
        if self.broken:
            self.driver.fail(self.broken, times=0)
            self.broken = None

    step_mend = mend

    def step_close(self):
        if self.random.random() < 0.2:
            self.attempt(self.pool.close)

    def agree(self):
        self.attempt(self.pool.check)  # which reads guards, where the driver works
        blocks = self.pool.inspect().blocks
        live = blocks["state"] == "live"
        self.suspended = set(map(int, blocks["address"][blocks["state"] == "suspended"]))
        rows = blocks[live | (blocks["state"] == "suspended") & (blocks["requested"] > 0)]
        found = {int(row["address"]): (int(row["requested"]), int(row["stream"])) for row in rows}
        assert found == {ptr - self.fronts[ptr]: block for ptr, block in self.model.live.items()}
        assert all(int(row["nbytes"]) >= round_up(int(row["requested"])) for row in rows)
        assert_disjoint(rows["address"], rows["nbytes"])
        stats = self.pool.stats
        assert (stats.allocations, stats.frees) == (self.model.allocations, self.model.frees)
        assert stats.allocated_bytes == blocks["nbytes"][live].sum()
        assert stats.requested_bytes == blocks["requested"][live].sum()
        assert self.other.stats.allocated_bytes == 2048

    def end(self):
        """Everything goes back."""
        self.mend()
        for handle in list(self.graphs):
            self.end_capture(handle)
        for graph in self.launchable:
            self.driver.destroy_graph(graph)
            self.attempt(self.pool.release_capture, graph)  # a fault may have kept the driver from telling
        vpool.defaults._defaults.clear()
        vpool.defaults._defaults.update(self.former)
        vpool.defaults._former.clear()
        self.inside = True  # nobody calls back any more
        for ptr in list(self.model.live):
            self.pool.deallocate(ptr)
        self.pool.close()
        self.pool.check()
        stats = self.pool.stats
        assert (stats.allocated_bytes, stats.pending_bytes, stats.reserved_bytes) == (0, 0, 0)
        self.foreign.close()
        self.other.deallocate(self.kept)
        self.other.close()
        used = getattr(self.driver, "used", 0)
        assert (used(1) if callable(used) else used) == 0
        if hasattr(self.driver, "current_device"):
            self.driver.current_device = 0


@pytest.fixture(autouse=True, scope="module")
def quiet():
    """What a closed pool cannot give back is logged, not raised."""
    logger = logging.getLogger("vpool")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def fuzz(seeds, steps=60):
    """Programs by these seeds; how often each call ended how."""
    counts = collections.Counter()
    for seed in seeds:
        machine = Fuzz(seed)
        left = steps
        try:
            while left:
                left -= 1
                machine.step()
            machine.end()
        except BaseException as error:
            error.add_note(f"step {steps - left} of the program of seed {seed}")
            raise
        counts += machine.counts
    return counts


def test_random_calls():
    counts = fuzz(range(PROGRAMS))
    # Every call ended in every way that it can.
    for name in ("allocate", "empty", "deallocate", "record_stream"):
        seen = {error for call, error in counts if call == name}
        assert seen >= {None, TypeError, ValueError, vpool.SourceError, Refusal}, name
    assert counts["allocate", vpool.OutOfMemoryError]
    assert counts["allocate", vpool.ClosedPoolError]
    assert counts["allocate", OverflowError]
    assert counts["deallocate", vpool.DoubleFreeError]
    assert counts["deallocate", vpool.ForeignPointerError]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(10))
def test_many_random_calls(block):
    fuzz(range(10_000 * (block + 1), 10_000 * (block + 1) + 1000), steps=150)

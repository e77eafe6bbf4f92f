"""A driver whose calls fail on order, and a program on it that notes what is lost or changed by that."""

import contextlib
import gc
from typing import ClassVar

import numpy as np

import vpool
from tests.helpers.order import Checker
from tests.helpers.pools import GIB
from vpool._storage.fake_cuda import FakeCudaDriver
from vpool._storage.mapped_source import MappedSource
from vpool._storage.source import Source


class Stopped(Exception):
    """A fault that stays: the program cannot go on."""


class Simulated:
    """One device of addresses, whose streams can be asked whether they are still there."""

    options: ClassVar = {}  # of the pools on it

    def __init__(self, capacity=GIB, base_offset=0):
        self.source = vpool.sources.Simulated(capacity, base_offset=base_offset)
        self.driver = self.source.driver
        self.device = 0

    def used(self):
        return self.driver.used


class Fake:
    """The second device of two, where the program's current one is the first; a dead handle must not be touched."""

    options: ClassVar = {}

    def __init__(self, capacity=GIB):
        self.driver = FakeCudaDriver(capacity, devices=2)
        self.driver.current_device = 0
        self.device = 1
        self.source = self.on(1)

    def on(self, device):
        return Source(self.driver, "cuda", device, checks_handles=False)

    def used(self):
        return self.driver.used(0) + self.driver.used(1)


class Watched(Fake):
    """The same machine, whose pools have all debug modes."""

    options: ClassVar = {"debug": "guard,poison,quarantine=1MiB,sites"}


class Mapped(Fake):
    """The same machine with memory that moves, in the smallest handles."""

    def on(self, device):
        return MappedSource(self.driver, "cuda-vmm", device, handle_bytes=2 << 20, checks_handles=False)

    def leaks(self):
        """Whether something is mapped or reserved without a pool."""
        return any(self.driver.virtual())


class Rig:
    """A machine, the pools on it and their blocks, and one fault that the program may meet.

    What the program calls through `do` may fail by the fault: with an error of vpool's, and nothing live is
    changed.  A fault that was there once is over then, and the same call must succeed; one that stays ends
    the program.

    Attributes
    ----------
    errors : list of str
        Names of the errors that the program met by the fault.
    """

    def __init__(self, machine):
        self.machine = machine
        self.driver = machine.driver
        self.source = machine.source
        self.checkers = []
        self.buffers = {}
        self.streams = []
        self.graphs = {}  # ids of the captures that go on, by stream
        self.errors = []
        self.call = None
        self.stays = self.sticky = False
        self.drops_pools = False  # a pool that cannot be made, or is dropped, is one that nobody can close later

    # The fault.

    def arm(self, call, status, position, stays=False, sticky=False):
        self.call, self.stays, self.sticky = call, stays or sticky, sticky
        self.position = self.calls(call) + position
        self.driver.fail(call, status, after=position, times=1_000_000 if stays else 1, sticky=sticky)

    def disarm(self):
        if self.call is not None:
            self.driver.fail(self.call, times=0)

    def calls(self, name):
        return self.driver.calls()[name][0]

    @property
    def met(self):
        """Whether the fault has struck."""
        return self.call is not None and self.calls(self.call) > self.position

    # The program.

    def do(self, call, *arguments, **options):
        """Call something; again if the fault made it fail."""
        before = self.kept()
        try:
            return call(*arguments, **options)
        except vpool.Error as error:
            if not self.met or self.errors:
                raise
            self.note(error, before)
        if self.stays:
            raise Stopped
        return call(*arguments, **options)

    def refused(self, call, *arguments, **options):
        """Call something that finds no memory, fault or not."""
        before = self.kept()
        for _ in range(2):
            try:
                call(*arguments, **options)
            except vpool.OutOfMemoryError:
                assert self.kept() == before
                return
            except vpool.SourceError as error:
                assert self.met
                assert not self.errors
                self.note(error, before)
                if self.stays:
                    raise Stopped from None
        raise AssertionError("there was memory")

    def note(self, error, before):
        """An error is of the kinds that a fault may give, names what the driver said, and has changed nothing."""
        assert type(error) in (vpool.SourceError, vpool.OutOfMemoryError), error
        if type(error) is vpool.SourceError:
            assert error.name.startswith("cudaError"), error
            assert error.name in str(error)
        self.errors.append(getattr(error, "name", "") or type(error).__name__)
        assert self.kept() == before, "a call that failed has changed what is live"
        self.check()

    def kept(self):
        """What no error may change: pending memory may have become free, and what is suspended may be so still.

        A resize that fails may have lent a block and taken it back.
        """
        found = []
        for one in self.checkers:
            stats = one.pool.stats
            lent = stats.allocated_bytes + stats.suspended_bytes
            requested = stats.requested_bytes if stats.suspended_bytes == 0 else None
            found.append((lent, requested, stats.allocations - stats.frees))
        return found

    def pool(self, strategy, device=None, **options):
        """A pool, made and checked."""
        source = self.source if device is None else self.machine.on(device)
        ordinal = self.machine.device if device is None else device
        before, self.drops_pools = self.drops_pools, True
        options = {**self.machine.options, **options}
        pool = self.do(vpool.Pool, strategy, source=source, device=ordinal, **options)
        self.drops_pools = before
        self.checkers.append(Checker(pool))
        return pool

    def of(self, pool):
        """The checker of a pool."""
        return next(one for one in self.checkers if one.pool is pool)

    def allocate(self, pool, nbytes, stream=0, work=True, **options):
        """A block and work on it."""
        ptr = self.do(pool.allocate, nbytes, stream, **options)
        self.of(pool).take(ptr, nbytes, stream)
        if work:
            self.of(pool).use(ptr, stream)
        self.do(pool.check)
        return ptr

    def free(self, pool, ptr, stream=None):
        self.do(self.of(pool).free, ptr, stream)
        self.do(pool.check)

    def record_stream(self, pool, ptr, stream):
        """A stream that uses a block too, and its work."""
        self.do(self.of(pool).record_stream, ptr, stream)
        self.of(pool).use(ptr, stream)

    def empty(self, pool, nbytes, stream=0):
        buffer = self.do(pool.empty, nbytes, stream)
        self.of(pool).take(buffer.ptr, nbytes, stream)
        self.buffers[buffer.ptr] = buffer
        return buffer.ptr

    def resize(self, pool, ptr, nbytes, stream, owner):
        """Give a buffer another size; its address then."""
        buffer = self.buffers[ptr]
        self.do(pool.resize, buffer, nbytes, stream)
        del self.of(pool).live[ptr], self.buffers[ptr]
        self.of(pool).take(buffer.ptr, nbytes, owner)
        self.buffers[buffer.ptr] = buffer
        return buffer.ptr

    def drop(self, pool, ptr):
        """Drop a buffer, which cannot fail."""
        del self.of(pool).live[ptr]
        del self.buffers[ptr]
        self.do(pool.check)

    def stream(self, handle=None):
        """A new stream of the program's own."""
        made = self.do(self.driver.create_stream, handle)
        self.streams.append(made)
        return made

    def destroy(self, stream):
        self.do(self.driver.destroy_stream, stream)
        self.streams.remove(stream)

    def begin_capture(self, stream):
        self.graphs[stream] = self.driver.begin_capture(stream)

    def end_capture(self, stream):
        """End a capture; what it gave is destroyed, unless a fault spoiled it."""
        graph = self.graphs.pop(stream)
        valid = self.driver.end_capture(stream)
        assert valid or self.met, "the pool invalidated the capture"
        if valid:
            self.driver.destroy_graph(graph)
        if self.call == "graph_retain" and self.met:
            for one in self.checkers:  # which nobody tells that the graph is gone
                one.pool.release_capture(graph)

    # What holds in the end.

    def check(self):
        """What is live is what the program has, and every invariant holds."""
        for one in self.checkers:
            try:
                one.check()
            except vpool.SourceError:
                assert self.stays, "the driver works"  # what was freed cannot be read
                assert one.pool.debug.guard or one.pool.debug.poison
            blocks = one.pool.inspect().blocks
            rows = blocks[(blocks["state"] == "live") | (blocks["state"] == "suspended")]
            guard = one.pool.debug.guard
            found = dict(zip((rows["address"] + guard).tolist(), rows["nbytes"].tolist(), strict=True))
            assert found.keys() == one.live.keys()
            assert all(found[ptr] >= size + 2 * guard for ptr, (size, *_) in one.live.items())

    def break_off(self):
        """End the program while the fault stays: each call returns or says what is wrong, and nothing is lost."""
        before = self.kept()
        for one in self.checkers:
            for call in (one.pool.coalesce, one.pool.trim, one.pool.maintain, one.pool.inspect, one.pool.close):
                with contextlib.suppress(vpool.SourceError, vpool.ClosedPoolError):
                    call()
            str(one.pool.inspect())
        assert self.kept() == before
        self.check()

    def finish(self):
        """Once the driver works again, everything is given back."""
        if hasattr(self.driver, "current_device"):
            restored = self.driver.current_device == 0
            assert restored or self.call == "set_device" or self.sticky, "the current device was not restored"
            self.driver.current_device = 0
        self.disarm()
        for stream in list(self.graphs):
            self.end_capture(stream)
        self.check()
        self.use_all()
        self.check()
        self.driver.complete()
        while self.checkers:
            self.give_back(self.checkers.pop())
        if any(self.lost()):
            gc.collect()  # an error's traceback may have been all that kept a pool
        assert self.lost() == (0, 0) or (self.drops_pools and self.stays)
        if isinstance(self.machine, Mapped) and not self.drops_pools:
            # Addresses that the driver did not take back it is asked to with the next that are reserved.
            with vpool.Pool(vpool.Dynamic(limit="8MiB"), source=self.source) as pool:
                pool.deallocate(pool.allocate(1))
            assert not self.machine.leaks()

    def lost(self):
        """Bytes and events that nobody has given back."""
        calls = self.driver.calls()
        return self.machine.used(), calls["event_create"][0] - calls["event_create"][1] - calls["event_destroy"][0]

    def use_all(self):
        """The next calls work."""
        for one in self.checkers:
            if not one.pool.closed:
                one.pool.trim()
                one.pool.deallocate(one.pool.allocate(300))
                one.pool.maintain()

    def give_back(self, checker):
        """Free what is live of a pool and close it."""
        pool = checker.pool
        for ptr in list(checker.live):
            if self.buffers.pop(ptr, None) is None:
                pool.deallocate(ptr)
        pool.close()
        checker.check()
        stats = pool.stats
        assert (stats.allocated_bytes, stats.pending_bytes, stats.reserved_bytes) == (0, 0, 0)


def sample(count, most):
    """Positions of so many calls: all, or the first, the last and some between."""
    if count <= most:
        return list(range(count))
    first = most // 2
    return sorted({*range(first), *np.linspace(first, count - 1, most - first).astype(int).tolist()})

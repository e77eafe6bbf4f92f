"""Reported cases: JSON files of events and checks, run on a simulated device whose streams know the true order.

Beside the checks of a case itself, these always hold: live blocks never overlap, `Pool.check` passes,
no driver call names a destroyed stream, and a block never has bytes that unfinished work of an earlier
owner may touch, unless its stream is ordered after that work.
"""

import gc
import json
import os
import statistics
import time
from bisect import bisect_left, insort
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import vpool
from tests.helpers import case_checks
from tests.helpers.pools import GRANULE, MIB, round_up

FOLDER = Path(__file__).parents[1] / "cases"
PER_THREAD = 2
SOURCE_CALLS = ("malloc", "free")
WAITS = ("synchronize", "event_synchronize")
UNSAFE_IN_CAPTURE = (*SOURCE_CALLS, *WAITS, "event_query")
SIZE_BITS = 63
MANY_EVENTS = 1000
CORE_SHARE = 4  # of the capacity, for the core of a hybrid pool at most
FOREIGN = 0xDEAD0000


def load_all(folders=None):
    """Every case of the repository and of the folder in ``VPOOL_CASES``, as ``{name: case}``."""
    if folders is None:
        folders = [FOLDER, *filter(None, [os.environ.get("VPOOL_CASES")])]
    found = {}
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.json")):
            found[path.stem] = json.loads(path.read_text())
    return found


def is_prose(case):
    """Whether only words describe the case."""
    return not case.get("events")


def options_of(event):
    """The trailing object of an event; for `inspect` it is the argument."""
    return event[-1] if len(event) > 1 and isinstance(event[-1], dict) else {}


def arguments_of(event, count):
    """The first `count` arguments of an event; None for those that it does not have."""
    given = [argument for argument in event[1:] if not isinstance(argument, dict)]
    return (given + [None] * count)[:count]


def needs_of(case):
    """What a case wants of the pool that the pool does not have, or this reader does not know."""
    needs = set()
    for event in case["events"]:
        kind = event[0]
        if kind in ("capture_begin", "capture_end") and not hasattr(vpool.Pool, "release_capture"):
            needs.add("captures")
        elif kind == "trim" and not hasattr(vpool.Pool, "trim"):
            needs.add("Pool.trim")
        elif kind == "reset_peak" and not hasattr(vpool.Pool, "reset_peaks"):
            needs.add("Pool.reset_peaks")
        if not hasattr(Runner, f"on_{kind}"):
            needs.add(f"an event {kind!r}")
    needs.update(f"a check {name!r}" for name in case.get("checks", {}) if name not in case_checks.KNOWN)
    return sorted(needs)


def pool_of(case, source):
    """The pool that a case describes."""
    options = case.get("options", {})
    capacity, total = case.get("capacity") or 0, options.get("device_total")
    # Where the case gives the device's size and 80% of it as the capacity, the default limit is the subject.
    is_share = total is not None and (capacity == 0 or abs(capacity - 0.8 * total) < 256)
    limit = 0.8 if is_share else capacity or 1.0
    growth = options.get("growth", 1.5)
    growth = max(float(growth), 1.0001) if growth <= 16 else int(growth)
    if case.get("strategy") == "fixed":
        return vpool.Pool(vpool.Dynamic(initial=capacity, limit=limit), source=source)
    strategy = vpool.Dynamic(initial=options.get("initial", 0), growth=growth, limit=limit)
    if case.get("strategy") == "hybrid":
        core, blocks = core_of(capacity or total or MIB, options.get("bins", ()))
        strategy = vpool.Hybrid(core, blocks, dynamic=strategy)
    return vpool.Pool(strategy, source=source)


def core_of(capacity, bins):
    """Bytes and blocks of a small core that has some of each bin; a slab where no bin is as small."""
    most = max(capacity // CORE_SHARE, GRANULE)
    blocks = sorted({round_up(nbytes) for nbytes in bins})
    while blocks and len(blocks) * blocks[-1] > most:
        blocks.pop()
    return len(blocks) * blocks[-1] if blocks else round_up(most), blocks or None


class Work:
    """A piece of work, queued on a stream, that touches some bytes."""

    def __init__(self, block, key):
        device = block.device
        self.owner = block.name
        self.address = block.address
        self.end = block.end
        self.key = key
        handle = device.handle(key)
        self.number = device.driver.number_of(handle)
        self.position = device.driver.queue_work(handle)


class Device:
    """One simulated device with its pool, its streams and the work on them."""

    def __init__(self, case, reuse_handles=False):
        options = case.get("options", {})
        capacity = options.get("device_total") or case.get("capacity") or None
        self.source = vpool.sources.Simulated(capacity, base_offset=options.get("upstream_base_offset", 0))
        self.driver = self.source.driver
        self.pool = pool_of(case, self.source)
        self.handles = {}
        self.free_handles = []
        self.reuse_handles = reuse_handles
        self.work = []
        self.live = []  # (address, end, id), sorted

    def handle(self, key):
        """The handle of a stream of the case; a stream that nobody made is there from the start."""
        name, thread = key
        if name == 0 or thread is not None:
            return PER_THREAD if thread is not None else 0
        if name not in self.handles:
            self.handles[name] = self.driver.create_stream()
        return self.handles[name]

    def create(self, name):
        again = self.free_handles.pop() if self.reuse_handles and self.free_handles else None
        self.handles[name] = self.driver.create_stream(again) if again else self.driver.create_stream()

    def destroy(self, name):
        handle = self.handle((name, None))
        self.driver.destroy_stream(handle)
        self.free_handles.append(handle)
        del self.handles[name]

    def count(self, *names):
        calls = self.driver.calls()
        return sum(calls[name][0] for name in names)

    def is_complete(self, work):
        return self.driver.finished(work.number, work.position)

    def is_ordered(self, key, work):
        """Whether work that is queued now on a stream comes after that work."""
        handle = self.handle(key)
        if work.number == self.driver.number_of(handle) and work.key != key:
            return self.is_complete(work)  # per-thread streams of two threads, which the driver takes for one
        return self.driver.ordered(handle, None, work.position, number=work.number)

    def forget_complete_work(self):
        self.work = [work for work in self.work if not self.is_complete(work)]

    def enlist(self, address, end, name):
        """Note a live block; it must overlap no other one."""
        place = bisect_left(self.live, (address,))
        for other in self.live[max(0, place - 1) : place + 1]:
            assert end <= other[0] or other[1] <= address, f"{name} and {other[2]} are live on the same bytes"
        insort(self.live, (address, end, name))


class Block:
    def __init__(self, device, name, nbytes, address, key):
        self.device = device
        self.name = name
        self.nbytes = nbytes
        self.address = address
        self.end = address + nbytes
        self.key = key
        self.is_live = True


class Runner:
    """Runs the events of one case and keeps what its checks ask for."""

    def __init__(self, case, reuse_handles=False):
        self.case = case
        self.checks = case.get("checks", {})
        self.reuse_handles = reuse_handles
        self.devices = {}
        self.threads = {}
        self.blocks = {}
        self.served = []  # ids of allocations, in order
        self.refused = []  # (id, bytes, exception)
        self.unordered = []  # (new id, old id)
        self.waits_by_event = []  # (event, driver calls that wait)
        self.calls_by_event = []  # (segments asked for and given back, waits), after each event
        self.most_reserved = 0
        self.nanoseconds = []  # of each call of the pool
        self.capture_calls = 0
        # A per-thread default stream is another one in each thread; 0 is one where the program says so.
        per_thread = {0, PER_THREAD} if case.get("options", {}).get("ptds") else {PER_THREAD}
        made = {event[1] for event in case["events"] if event[0] == "stream_create"}
        with_thread = any("thread" in options_of(event) for event in case["events"])
        self.per_thread = per_thread - made if with_thread or 0 in per_thread else set()

    def run(self):
        every = 1 + len(self.case["events"]) // MANY_EVENTS
        if "construct_raises" in self.checks:
            case_checks.construction_fails(self)
            return
        self.device(None)
        was_enabled = gc.isenabled()
        gc.collect()
        gc.disable()  # garbage of the case goes when it says so, or when the pool collects it
        try:
            for index, event in enumerate(self.case["events"]):
                self.step(event, index % every == 0)
            for device in self.devices.values():
                device.pool.check()
            for name, wanted in self.checks.items():
                case_checks.KNOWN[name](self, wanted)
            self.finish()
        finally:
            if was_enabled:
                gc.enable()
            for thread in self.threads.values():
                thread.shutdown()

    def step(self, event, is_checked):
        before = self.count("stream_wait_event", *WAITS)
        getattr(self, f"on_{event[0]}")(event)
        self.waits_by_event.append((event, self.count("stream_wait_event", *WAITS) - before))
        self.calls_by_event.append((self.count(*SOURCE_CALLS), self.count(*WAITS)))
        for device in self.devices.values():
            if is_checked:
                device.pool.check()
            self.most_reserved = max(self.most_reserved, device.pool.stats.peak_reserved_bytes)
            assert device.driver.calls_on_dead_streams == 0
        assert not self.unordered, f"handed out under unfinished work (new block, old block): {self.unordered}"

    def finish(self):
        """Free what is left; then nothing is live, and all memory goes back."""
        for block in list(self.blocks.values()):
            if block.is_live:
                self.release(block, None, None)
        gc.collect()
        for device in self.devices.values():
            device.driver.complete()
            device.pool.check()
            assert device.pool.stats.requested_bytes == 0
            device.pool.close()
            assert device.driver.used == 0

    # What events share.

    def make_pool(self, source):
        return pool_of(self.case, source)

    def device(self, number):
        number = number or 0
        if number not in self.devices:
            self.devices[number] = Device(self.case, self.reuse_handles)
        return self.devices[number]

    def key(self, stream, thread):
        stream = 0 if stream is None else stream
        return (stream, thread or "main") if stream in self.per_thread else (stream, None)

    def count(self, *names):
        return sum(device.count(*names) for device in self.devices.values())

    def call(self, thread, function, *arguments, **options):
        """Call the pool, in a named thread if one is named, and take the time."""
        if thread is not None and thread not in self.threads:
            self.threads[thread] = ThreadPoolExecutor(1)

        def timed():
            started = time.perf_counter_ns()
            try:
                return function(*arguments, **options)
            finally:
                self.nanoseconds.append(time.perf_counter_ns() - started)

        return timed() if thread is None else self.threads[thread].submit(timed).result(60)

    def allowed(self, options, nbytes=0):
        """Exceptions that an event may raise, and whether it must."""
        must, may = options.get("raises"), options.get("may_raise")
        kinds = case_checks.kinds_of(must, may, self.checks.get("raises_any") if must else None)
        if vpool.OutOfMemoryError in kinds and isinstance(nbytes, int) and nbytes >> SIZE_BITS:
            kinds.append(OverflowError)  # vpool's word for more than any device has
        return tuple(kinds), bool(must)

    # Events.

    def on_alloc(self, event):
        name, nbytes, stream = arguments_of(event, 3)
        options = options_of(event)
        thread = options.get("thread")
        key = self.key(stream, thread)
        device = self.device(options.get("device"))
        allowed, must_raise = self.allowed(options, nbytes)
        arguments = {"alignment": options["align"]} if "align" in options else {}
        try:
            address = self.call(thread, device.pool.allocate, nbytes, stream=device.handle(key), **arguments)
        except allowed as error:
            self.refused.append((name, nbytes, error))
            return
        assert not must_raise, f"{name} was served"
        self.served.append(name)
        self.blocks[name] = block = Block(device, name, nbytes, address, key)
        assert address % max(256, options.get("align", 1)) == 0
        if nbytes:
            device.enlist(address, block.end, name)
        for work in device.work:
            if address < work.end and work.address < block.end and not device.is_ordered(key, work):
                self.unordered.append((name, work.owner))

    def on_free(self, event):
        name, stream = arguments_of(event, 2)
        options = options_of(event)
        block = self.blocks.get(name)
        if block is None and any(name == refused for refused, _, _ in self.refused):
            return
        if block is None:  # of somebody else
            block = Block(self.device(options.get("device")), name, 0, FOREIGN, (0, None))
        stream = options.get("stream", stream)
        if options.get("deferred"):
            _Garbage(self, block, stream)
            return
        allowed, must_raise = self.allowed(options)
        try:
            self.release(block, stream, options.get("thread"))
        except allowed:
            return
        assert not must_raise, f"{name} was freed"

    def release(self, block, stream, thread):
        device = block.device
        key = block.key if stream is None else self.key(stream, thread)
        if block.is_live and block.nbytes and block.name in self.checks.get("free_stream", {}):
            self.touch(block, self.key(self.checks["free_stream"][block.name], thread))
        arguments = {} if stream is None else {"stream": device.handle(key)}
        self.call(thread, device.pool.deallocate, block.address, **arguments)
        if block.is_live and block.nbytes:
            device.live.remove((block.address, block.end, block.name))
        block.is_live = False

    def touch(self, block, key):
        """Queue work that touches a block and stays unfinished."""
        block.device.work.append(Work(block, key))

    def on_use(self, event):
        name, stream = arguments_of(event, 2)
        thread = options_of(event).get("thread")
        block = self.blocks.get(name)
        if block is None or not block.is_live or not block.nbytes:
            return
        key = block.key if stream is None else self.key(stream, thread)
        if key != block.key:
            self.call(thread, block.device.pool.record_stream, block.address, block.device.handle(key))
        self.touch(block, key)

    def on_sync(self, event):
        (stream,) = arguments_of(event, 1)
        key = self.key(stream, options_of(event).get("thread"))
        for device in self.devices.values():
            device.driver.complete(device.handle(key))
            device.forget_complete_work()

    def on_sync_all(self, event):
        for device in self.devices.values():
            device.driver.complete()
            device.work = []

    def on_stream_create(self, event):
        self.device(options_of(event).get("device")).create(event[1])

    def on_stream_destroy(self, event):
        self.device(options_of(event).get("device")).destroy(event[1])

    def on_trim(self, event):
        for device in self.devices.values():
            device.pool.trim()

    def on_gc(self, event):
        gc.collect()

    def on_reset_peak(self, event):
        for device in self.devices.values():
            device.pool.reset_peaks()

    def on_capture_begin(self, event):
        device = self.device(options_of(event).get("device"))
        self.capture_calls = device.count(*UNSAFE_IN_CAPTURE)
        device.driver.begin_capture(device.handle(self.key(event[1], None)))

    def on_capture_end(self, event):
        device = self.device(options_of(event).get("device"))
        assert device.driver.end_capture(device.handle(self.key(event[1], None))), "the capture was invalidated"
        assert device.count(*UNSAFE_IN_CAPTURE) == self.capture_calls

    def on_upstream_free(self, event):
        self.device(options_of(event).get("device")).driver.set_free(event[1])

    def on_inspect(self, event):
        options = options_of(event)
        case_checks.compare_figures(self, self.device(options.get("device")).pool, options)

    def on_note(self, event):
        pass

    # What checks ask for.

    def nanoseconds_early_and_late(self):
        """Medians of the first and the last quarter of the calls."""
        quarter = max(1, len(self.nanoseconds) // 4)
        return statistics.median(self.nanoseconds[:quarter]), statistics.median(self.nanoseconds[-quarter:])


class _Garbage:
    """A reference cycle that holds a block, which is freed when the cycle is collected."""

    def __init__(self, runner, block, stream):
        self.cycle = self
        self.runner = runner
        self.block = block
        self.stream = stream

    def __del__(self):
        if self.block.is_live:
            self.runner.release(self.block, self.stream, None)

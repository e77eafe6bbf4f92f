"""A soak of one pool: threads lend, fill, share, verify and free blocks on several streams.

    python tests/gpu/soak.py --seed 1 --seconds 480            # on a GPU, with CuPy
    python tests/gpu/soak.py --seed 1 --seconds 300 --dry      # on the host, streams simulated

Each block is filled by a kernel on its stream and verified on it before it is freed, some after a delay
on the device; words differ by place, so a block that overlaps another one shows.  Some blocks are read on
a second stream too (`record_stream`), some are freed on a second stream that was made to wait for the
first, some are freed by another thread.  One line of JSON is printed; the exit status is 0 if no word was
wrong, every invariant held, the limit too, and the device has its memory back.
"""

import argparse
import collections
import ctypes
import faulthandler
import json
import random
import sys
import threading
import time
import traceback

import numpy as np

import vpool
from vpool.sizes import parse_size

SMALLEST = 256
GRANULE = 256
GRACE = 10  # seconds after which a soak that should have ended is taken for hung
DELAY = 400_000  # clock cycles that some kernels wait before they look
SLACK = 256 << 20  # bytes of the device's own figures: contexts, code and other processes
STEP = 2654435761  # between the words of a pattern
STRATEGIES = {
    "dynamic": lambda limit: vpool.Dynamic(initial=0, limit=limit),
    "adaptive": lambda limit: vpool.Dynamic(initial=0, limit=limit, adaptive=True),
    "fixed": lambda limit: vpool.Fixed(limit),
    "blocks": lambda limit: vpool.Hybrid(
        limit // 2, block=limit // 8192, dynamic=vpool.Dynamic(initial=0, limit=limit)
    ),
    "hybrid": lambda limit: vpool.Hybrid(limit // 4, dynamic=vpool.Dynamic(initial=0, limit=limit)),
}
KERNELS = r"""
extern "C" __global__ void fill(unsigned* words, unsigned long long count, unsigned value) {
    unsigned long long step = (unsigned long long) gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long) blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step)
        words[i] = value + (unsigned) i * 2654435761u;
}
extern "C" __global__ void verify(const unsigned* words, unsigned long long count, unsigned value,
                                  unsigned long long* wrong, long long delay) {
    long long started = clock64();
    while (clock64() - started < delay) {}
    unsigned long long step = (unsigned long long) gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long) blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        unsigned expected = value + (unsigned) i * 2654435761u;
        unsigned found = words[i];
        if (found != expected && atomicAdd(wrong, 1ull) == 0) {
            wrong[1] = (unsigned long long) (words + i);
            wrong[2] = found;
            wrong[3] = expected;
        }
    }
}
"""


class Block:
    """A block, what was written into it, and the last work that touched it on each stream."""

    def __init__(self, handle, ptr, nbytes, value, stream):
        self.handle = handle  # what the pool takes: an address or a Buffer
        self.ptr = ptr
        self.end = ptr + -(-nbytes // GRANULE) * GRANULE
        self.words = nbytes // 4
        self.value = value
        self.stream = stream
        self.work = {}


class CudaDevice:
    """Streams, kernels and events of CuPy."""

    def __init__(self, streams, largest):
        import cupy

        self.cupy = cupy
        self.source = vpool.sources.Cuda()
        module = cupy.RawModule(code=KERNELS)
        self.fill_kernel = module.get_function("fill")
        self.verify_kernel = module.get_function("verify")
        self.wrong = cupy.zeros(4, cupy.uint64)
        self.streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(streams)]
        self.events = threading.local()
        # Code is loaded on first use, and takes device memory: before that is looked at.
        warm = Block(None, cupy.zeros(64, cupy.uint32).data.ptr, 0, 0, self.streams[0])
        cupy.cuda.Device().synchronize()
        self.fill(warm)
        self.verify(warm, self.streams[0], delayed=True)
        self.order(self.streams[-1], self.streams[0])
        self.synchronize()

    def begin_thread(self):
        self.cupy.cuda.Device(self.source.device).use()

    def spelled(self, stream, rng):
        return stream if rng.random() < 0.5 else stream.ptr

    def launch(self, kernel, stream, words, *arguments):
        with stream:
            kernel((max(1, min(256, words // 2048)),), (256,), arguments)

    def fill(self, block):
        arguments = np.uint64(block.ptr), np.uint64(block.words), np.uint32(block.value)
        self.launch(self.fill_kernel, block.stream, block.words, *arguments)

    def verify(self, block, stream, delayed=False):
        arguments = np.uint64(block.ptr), np.uint64(block.words), np.uint32(block.value)
        delay = np.int64(DELAY if delayed else 0)
        self.launch(self.verify_kernel, stream, block.words, *arguments, self.wrong, delay)

    def order(self, later, earlier):
        if not hasattr(self.events, "event"):
            self.events.event = self.cupy.cuda.Event(disable_timing=True)
        self.events.event.record(earlier)
        later.wait_event(self.events.event)

    def lent(self, block):
        pass

    def freeing(self, block, streams):
        pass

    def synchronize(self):
        self.cupy.cuda.Device(self.source.device).synchronize()

    def mismatches(self):
        self.synchronize()
        found = [int(word) for word in self.wrong.get()]
        if found[0]:
            print(f"first wrong word: at {found[1]:#x} {found[2]:#x}, not {found[3]:#x}", file=sys.stderr)
        return found[0]

    def free_bytes(self):
        return self.cupy.cuda.runtime.memGetInfo()[0]


class HostDevice:
    """The same over the host source.  Bytes are written at once; what is simulated is when work is complete.

    `lent` knows which work was queued on a range before and asks the source's streams, which know
    the true order, whether the new owner's stream comes after it.
    """

    PAGE = 1 << 16

    def __init__(self, streams, largest):
        self.source = vpool.sources.Host()
        self.driver = self.source.driver
        self.streams = [self.driver.create_stream() for _ in range(streams)]
        self.ramp = (np.arange(largest // 4, dtype=np.uint64) * STEP).astype(np.uint32)
        self.lock = threading.Lock()
        self.wrong = 0
        self.done = dict.fromkeys(self.streams, 0)
        self.queued = 0
        self.past = collections.defaultdict(list)  # page -> (begin, end, {stream: position}) of freed blocks

    def begin_thread(self):
        pass

    def spelled(self, stream, rng):
        return stream

    def queue(self, block, stream):
        with self.lock:
            position = block.work[stream] = self.driver.queue_work(stream)
            self.queued += 1
            if self.queued % 16 == 0:
                # Work completes some time after it was queued; on some streams much later.
                late = self.streams[self.queued // 16 % len(self.streams)]
                self.done[late] = max(self.done[late], self.driver.queue_work(late) - 40)
                self.driver.complete(late, self.done[late])
            return position

    def array(self, block):
        return np.ctypeslib.as_array((ctypes.c_uint32 * block.words).from_address(block.ptr))

    def fill(self, block):
        self.queue(block, block.stream)
        np.add(self.ramp[: block.words], np.uint32(block.value), out=self.array(block))

    def verify(self, block, stream, delayed=False):
        self.queue(block, stream)
        wrong = np.count_nonzero(self.array(block) - np.uint32(block.value) != self.ramp[: block.words])
        if wrong:
            with self.lock:
                self.wrong += int(wrong)

    def order(self, later, earlier):
        pass

    def pages(self, begin, end):
        return range(begin // self.PAGE, (end - 1) // self.PAGE + 1)

    def lent(self, block):
        begin, end = block.ptr, block.end
        with self.lock:
            for page in self.pages(begin, end):
                kept = []
                for first, last, work in self.past[page]:
                    if last <= begin or end <= first:
                        if any(position > self.done[stream] for stream, position in work.items()):
                            kept.append((first, last, work))
                        continue
                    for stream, position in work.items():
                        assert self.driver.ordered(block.stream, stream, position), (
                            f"{begin:#x} is lent to stream {block.stream:#x} while work {position} of stream "
                            f"{stream:#x} may use it"
                        )
                    # What comes after the new owner comes after this too, so only the rest is still of interest.
                    kept += [(*rest, work) for rest in ((first, begin), (end, last)) if rest[0] < rest[1]]
                self.past[page] = kept

    def freeing(self, block, streams):
        begin, end = block.ptr, block.end
        work = {stream: block.work[stream] for stream in streams}
        with self.lock:
            for page in self.pages(begin, end):
                inside = max(begin, page * self.PAGE), min(end, (page + 1) * self.PAGE)
                self.past[page].append((*inside, work))

    def synchronize(self):
        self.driver.complete()

    def mismatches(self):
        return self.wrong

    def free_bytes(self):
        return 0


class Soak:
    """The threads, and what they counted."""

    def __init__(self, device, pool, options):
        self.device = device
        self.pool = pool
        self.options = options
        self.share = options.limit // 2 // options.threads
        self.inboxes = [collections.deque() for _ in range(options.threads)]
        self.counts = [collections.Counter() for _ in range(options.threads)]
        self.errors = []
        self.stop = threading.Event()

    def lend(self, rng, counts):
        nbytes = int(SMALLEST * (self.options.largest / SMALLEST) ** rng.random())
        stream = rng.choice(self.device.streams)
        spelled = self.device.spelled(stream, rng)
        try:
            if rng.random() < 0.3:
                handle = self.pool.empty(nbytes, stream=spelled)
                ptr = handle.ptr
            else:
                handle = ptr = self.pool.allocate(nbytes, stream=spelled)
        except vpool.OutOfMemoryError:
            counts["ooms"] += 1
            return None
        block = Block(handle, ptr, nbytes, rng.getrandbits(32), stream)
        self.device.lent(block)
        self.device.fill(block)
        counts["allocations"] += 1
        counts["bytes"] += nbytes
        return block

    def free(self, block, rng, counts):
        device, pool, own = self.device, self.pool, block.stream
        other = rng.choice(device.streams)
        way = rng.random()
        delayed = rng.random() < 0.02
        counts["frees"] += 1
        if way < 0.25 and other is not own:
            # Read on another stream too, and freed on its own while that may still go on.
            device.order(other, own)
            pool.record_stream(block.handle, device.spelled(other, rng))
            device.verify(block, other, delayed)
            device.verify(block, own)
            device.freeing(block, (own, other))
            counts["recorded"] += 1
        elif way < 0.5 and other is not own:
            # Handed on to another stream, and freed there.
            device.order(other, own)
            device.verify(block, other, delayed)
            device.freeing(block, (other,))
            counts["freed_elsewhere"] += 1
            pool.deallocate(block.handle, stream=device.spelled(other, rng))
            return
        else:
            device.verify(block, own, delayed)
            device.freeing(block, (own,))
        if isinstance(block.handle, vpool.Buffer):
            block.handle = None  # dropped, which gives it back
        else:
            pool.deallocate(block.handle, stream=rng.choice((None, own)))

    def work(self, number):
        rng = random.Random(self.options.seed * 1000 + number)
        counts, inbox = self.counts[number], self.inboxes[number]
        blocks = []
        live = 0
        self.device.begin_thread()
        try:
            while not self.stop.is_set():
                while inbox:
                    blocks.append(inbox.popleft())
                    live += blocks[-1].words * 4
                if blocks and (live > self.share or rng.random() < 0.45):
                    block = blocks.pop(rng.randrange(len(blocks)))
                    live -= block.words * 4
                    if rng.random() < 0.1:
                        rng.choice(self.inboxes).append(block)
                        counts["handed_over"] += 1
                    else:
                        self.free(block, rng, counts)
                    continue
                block = self.lend(rng, counts)
                if block is not None:
                    blocks.append(block)
                    live += block.words * 4
                elif blocks:
                    # Out of memory: the largest goes.
                    block = max(blocks, key=lambda block: block.words)
                    blocks.remove(block)
                    live -= block.words * 4
                    self.free(block, rng, counts)
            for block in blocks:
                self.free(block, rng, counts)
        except BaseException:
            self.errors.append(f"thread {number}: {traceback.format_exc()}")
            self.stop.set()

    def watch(self, until):
        """Look at the pool while it is used, until the time is over or something failed."""
        looks = 0
        while not self.stop.wait(min(0.25, max(0.0, until - time.monotonic()))):
            if time.monotonic() >= until:
                break
            self.pool.check()
            if self.pool.stats.reserved_bytes > self.options.limit:
                raise AssertionError(f"the pool has more than its limit: {self.pool.stats}")
            looks += 1
            if looks % 8 == 0:
                report = self.pool.inspect()
                assert report.allocated_bytes <= report.reserved_bytes
        return looks

    def run(self, until):
        threads = [threading.Thread(target=self.work, args=(i,), daemon=True) for i in range(self.options.threads)]
        for thread in threads:
            thread.start()
        looks = 0
        try:
            looks = self.watch(until)
        except Exception:
            self.errors.append(traceback.format_exc())
        self.stop.set()
        for thread in threads:
            thread.join()
        rng = random.Random(self.options.seed)
        for inbox in self.inboxes:
            while inbox:
                self.free(inbox.popleft(), rng, self.counts[0])
        return looks


def soak(options):
    """Run one; its figures, with what went wrong under ``errors``."""
    device = (HostDevice if options.dry else CudaDevice)(options.streams, options.largest)
    before = device.free_bytes()
    faulthandler.dump_traceback_later(options.seconds + GRACE, exit=True)
    strategy = STRATEGIES[options.strategy](options.limit)
    pool = vpool.Pool(strategy, source=device.source, name="soak", maintain_every=0.01)
    run = Soak(device, pool, options)
    started = time.monotonic()
    looks = run.run(started + options.seconds)
    wall = time.monotonic() - started
    errors = run.errors
    mismatches = device.mismatches()
    counts = sum(run.counts, collections.Counter())
    stats = pool.stats
    peak = stats.peak_reserved_bytes
    try:
        pool.check()
        pool.coalesce()
        pool.check()
    except AssertionError as error:
        errors.append(str(error))
    pool.close()
    after = pool.stats
    kept = before - device.free_bytes()
    faulthandler.cancel_dump_traceback_later()
    expectations = {
        "words are wrong": mismatches == 0,
        "blocks are live": (stats.allocated_bytes, stats.allocations) == (0, stats.frees),
        "the limit was passed": peak <= options.limit,
        "memory was not given back": (after.reserved_bytes, after.pending_bytes) == (0, 0),
        "the device has less free memory": options.shared or kept <= SLACK,
        "nothing was done": counts["allocations"] > 0 and counts["allocations"] == counts["frees"],
    }
    errors += [what for what, holds in expectations.items() if not holds]
    return {
        **{
            name: getattr(options, name)
            for name in ("strategy", "seed", "seconds", "threads", "streams", "limit", "largest")
        },
        "source": pool.source.name,
        "wall_s": round(wall, 2),
        "operations": counts["allocations"] + counts["frees"],
        **{name: counts[name] for name in ("bytes", "recorded", "freed_elsewhere", "handed_over", "ooms")},
        "checks": looks,
        "crossings": pool.crossings,
        "ladder": pool.ladder,
        "peak_allocated_bytes": stats.peak_allocated_bytes,
        "peak_reserved_bytes": peak,
        "live_bytes": stats.allocated_bytes,
        "reserved_bytes_after": after.reserved_bytes,
        "device_bytes_kept": kept,
        "mismatches": mismatches,
        "errors": errors,
    }


def parsed(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--limit", default=None, help="of the pool; 8 GiB, or 64 MiB with --dry")
    parser.add_argument("--largest", default=None, help="block; 64 MiB, or 512 KiB with --dry")
    parser.add_argument("--strategy", default="dynamic", choices=tuple(STRATEGIES))
    parser.add_argument("--shared", action="store_true", help="others use the device: do not compare its free memory")
    parser.add_argument("--dry", action="store_true", help="on the host source with simulated streams")
    options = parser.parse_args(arguments)
    options.limit = parse_size(options.limit or ("64MiB" if options.dry else "8GiB"), "limit")
    options.largest = parse_size(options.largest or ("512KiB" if options.dry else "64MiB"), "largest")
    return options


def main():
    figures = soak(parsed())
    print(json.dumps(figures))
    return 1 if figures["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())

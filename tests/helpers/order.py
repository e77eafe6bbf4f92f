"""The proof that a pool keeps stream order: a record of every piece of work, held against the streams' own clocks."""

from tests.helpers.pools import round_up


class Checker:
    """A pool on a simulated source, and what a correct program does with it.

    A program is correct if a block that is used on a stream other than its own is recorded for that
    stream, or freed on it.  Whoever frees on another stream than the block's own has made that stream
    wait for the others that used it: `free` does so.
    """

    def __init__(self, pool):
        self.pool = pool
        self.driver = pool.source.driver
        self.live = {}  # address -> [bytes, number of its stream, numbers it is recorded for, unrecorded users]
        self.work = []  # (begin, end, number of the stream, position), of work that may be unfinished
        self.allocated = 0
        self.unordered = 0  # pieces of work that the new owner had to wait for

    def allocate(self, nbytes, stream=0):
        """A block, after the proof that its owner's work comes after whatever used its bytes before."""
        ptr = self.pool.allocate(nbytes, stream)
        self.take(ptr, nbytes, stream)
        return ptr

    def take(self, ptr, nbytes, stream):
        """The proof, of a block that the pool has just given."""
        end = ptr + round_up(nbytes)
        for other, (size, *_) in self.live.items():
            assert end <= other or other + size <= ptr, f"{ptr:#x} overlaps the live block at {other:#x}"
        unfinished = []
        for piece in self.work:
            begin, behind, number, position = piece
            if self.driver.finished(number, position):
                continue
            unfinished.append(piece)
            if begin < end and ptr < behind:
                assert self.driver.ordered(stream, None, position, number=number), (
                    f"{ptr:#x} was given to stream {stream:#x}, but piece {position} of stream {number} may use it"
                )
                self.unordered += number != self.driver.number_of(stream)
        self.work = unfinished
        self.live[ptr] = [round_up(nbytes), self.driver.number_of(stream), set(), set()]
        self.allocated += 1

    def use(self, ptr, stream=None):
        """Queue a piece of work that touches the whole block, on a stream that is not destroyed."""
        nbytes, _, recorded, unrecorded = self.live[ptr]
        position = self.driver.queue_work(stream)
        number = self.driver.number_of(stream)
        self.work.append((ptr, ptr + nbytes, number, position))
        if number not in recorded:
            unrecorded.add(number)

    def record_stream(self, ptr, stream):
        self.pool.record_stream(ptr, stream)
        number = self.driver.number_of(stream)
        self.live[ptr][2].add(number)
        self.live[ptr][3].discard(number)

    def free(self, ptr, stream=None):
        """Free a block, on its own stream or on another that is not destroyed."""
        _, own, _, unrecorded = self.live[ptr]
        number = own if stream is None else self.driver.number_of(stream)
        for user in unrecorded - {number}:
            assert user == own, "the program is wrong: a use that the pool was not told of"
            self.driver.wait(stream, user)
        self.pool.deallocate(ptr, stream)
        del self.live[ptr]

    def may_free(self, ptr, stream=None):
        """Whether the program would be correct if it freed the block so."""
        _, own, _, unrecorded = self.live[ptr]
        number = own if stream is None else self.driver.number_of(stream)
        return unrecorded <= {own, number}

    def check(self):
        """Every invariant of the pool; and it never called a stream that was gone."""
        self.pool.check()
        assert self.driver.calls_on_dead_streams == 0

    def finish(self, stuck=False):
        """Free what is live and let all work end: then nothing is pending, and the source gets everything back.

        With `stuck`, blocks may wait for streams that were destroyed: only the device can be waited for then.
        """
        for ptr in list(self.live):
            self.pool.deallocate(ptr)
        self.live.clear()
        self.check()
        self.driver.complete()
        self.pool.coalesce()
        self.check()
        assert self.pool.stats.allocated_bytes == 0
        assert stuck or self.pool.stats.pending_bytes == 0
        self.pool.close()
        self.check()
        assert (self.pool.stats.pending_bytes, self.pool.stats.reserved_bytes, self.driver.used) == (0, 0, 0)

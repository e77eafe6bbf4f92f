"""Programs of a few operations on a few streams, each a list of choices among what is possible at that point."""

import gc

import vpool
from tests.helpers.order import Checker
from tests.helpers.pools import GRANULE


class Program:
    """A checked pool of a few granules, its streams, and what a correct program may do next."""

    def __init__(self, streams, capacity, *, sizes=(1,), most_live=3, on_pressure="raise", handles=None):
        source = vpool.sources.Simulated(capacity)
        strategy = vpool.Dynamic(initial=capacity, limit=capacity)
        self.pool = vpool.Pool(strategy, source, on_pressure=on_pressure)
        self.driver = source.driver
        self.checker = Checker(self.pool)
        self.streams = [self.driver.create_stream(None if handles is None else handles[i]) for i in range(streams)]
        self.alive = [True] * streams
        self.sizes = sizes
        self.most_live = most_live
        self.refused = 0
        self.done = []

    def choices(self):
        """What can be done now; streams are tried in the order in which they are first used."""
        checker, found = self.checker, []
        seen = 1 + max((one[-1] for one in self.done if one[0] != "query"), default=-1)
        streams = [i for i in range(len(self.streams)) if self.alive[i]]
        if len(checker.live) < self.most_live:
            found += [("allocate", size, i) for size in self.sizes for i in streams if i <= seen]
        for k, ptr in enumerate(checker.live):
            own, recorded = checker.live[ptr][1:3]
            numbers = {i: self.driver.number_of(self.streams[i]) for i in streams}
            others = [i for i in streams if numbers[i] != own and i <= seen]
            if checker.may_free(ptr):
                found.append(("free", k, -1))
            found += [("free_on", k, i) for i in others if checker.may_free(ptr, self.streams[i])]
            found += [("record", k, i) for i in others if numbers[i] not in recorded]
        if self.done and self.done[-1][0] != "query":
            found.append(("query", 0, -1))
        for i in streams:
            number = self.driver.number_of(self.streams[i])
            pieces = [piece for piece in checker.work if piece[2] == number]
            if any(not self.driver.finished(number, position) for *_, position in pieces):
                found.append(("complete", 0, i))
            if i < seen:
                found += [("destroy", 0, i), ("recycle", 0, i)]
        return found

    def do(self, choice):
        """One operation; every allocation and record is followed by work on that stream."""
        kind, what, i = choice
        checker = self.checker
        stream = self.streams[i] if i >= 0 else None
        ptr = list(checker.live)[what] if kind in ("free", "free_on", "record") else None
        self.done.append(choice)
        if kind == "allocate":
            try:
                ptr = checker.allocate(what * GRANULE, stream)
            except vpool.OutOfMemoryError:
                self.refused += 1
            else:
                checker.use(ptr, stream)
        elif kind in ("free", "free_on"):
            checker.free(ptr, stream)
        elif kind == "record":
            checker.record_stream(ptr, stream)
            checker.use(ptr, stream)
        elif kind == "complete":
            self.driver.complete(stream)
        elif kind == "query":
            self.pool.coalesce()
        else:
            self.driver.destroy_stream(stream)
            if kind == "recycle":
                self.driver.create_stream(stream)
            else:
                self.alive[i] = False
        self.check()

    def check(self):
        self.checker.check()

    def finish(self, stuck=False):
        self.checker.finish(stuck or any(one[0] in ("destroy", "recycle") for one in self.done))


def run_all(make, depth):
    """Every program of that many operations; how many there were.  What fails names the program."""
    count = 0
    path = [0]
    gc.collect()
    gc.freeze()  # a request that fails collects: it need not look at the whole suite each time
    while path:
        program = make()
        widths = []
        try:
            for level in range(depth):
                choices = program.choices()
                if not choices:
                    break
                if level == len(path):
                    path.append(0)
                widths.append(len(choices))
                program.do(choices[path[level]])
            program.finish()
        except Exception as error:
            error.add_note(f"in the program {program.done}")
            raise
        count += 1
        path = path[: len(widths)]
        while path and path[-1] + 1 == widths[len(path) - 1]:
            path.pop()
        if path:
            path[-1] += 1
    return count

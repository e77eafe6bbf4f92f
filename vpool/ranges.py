"""Ranges of addresses: what a model of a pool has free, and what of an address space is not mapped."""

from bisect import bisect_left, insort

__all__ = ["Ranges", "Space"]


class Ranges:
    """Free ranges of addresses: the smallest that fits, of equal ones that at the lowest address.

    Every operation takes O(log n) comparisons, and moves at most n words.
    """

    __slots__ = ("begins", "order", "sizes")

    def __init__(self):
        self.order = []  # (size, address), sorted
        self.sizes = {}  # by address
        self.begins = {}  # addresses by end

    def take(self, size):
        """Remove the best range for `size` bytes, and give its address and size; None if there is none."""
        at = bisect_left(self.order, (size,))
        if at == len(self.order):
            return None
        whole, address = self.order.pop(at)
        del self.sizes[address], self.begins[address + whole]
        return address, whole

    def add(self, address, size):
        """Add a range that has no free neighbour."""
        insort(self.order, (size, address))
        self.sizes[address] = size
        self.begins[address + size] = address

    def remove(self, address):
        """Remove the range at an address, and give its size."""
        size = self.sizes.pop(address)
        del self.begins[address + size], self.order[bisect_left(self.order, (size, address))]
        return size

    def put(self, address, size):
        """Add a range, merged with its neighbours."""
        before = self.begins.get(address)
        if before is not None:
            size += self.remove(before)
            address = before
        if address + size in self.sizes:
            size += self.remove(address + size)
        self.add(address, size)

    def drain(self):
        """Remove all ranges, and give their addresses and sizes in the order of addresses."""
        found = sorted(self.sizes.items())
        self.order.clear()
        self.sizes.clear()
        self.begins.clear()
        return found


class Space(Ranges):
    """One expandable segment: ranges that are free, and holes where nothing is mapped."""

    __slots__ = ("holes", "page")

    def __init__(self, page):
        super().__init__()
        self.page = page
        self.holes = Ranges()
        # Real ones have 1.125 times the device's memory, and a second one follows; no end is as good.
        self.holes.add(0, 1 << 80)

    def take(self, size):
        """The best range as in `Ranges.take`; one beside a hole counts as large as it could grow.

        So the end of the segment is kept for requests that no other range can serve.
        """
        at = bisect_left(self.order, (size,))
        if at == len(self.order):
            return None
        while at + 1 < len(self.order) and self._grown(at + 1) < self._grown(at):
            at += 1
        whole, address = self.order[at]
        self.remove(address)
        return address, whole

    def _grown(self, at):
        size, address = self.order[at]
        return size + self.holes.sizes.get(address + size, 0)

    def candidate(self, size):
        """The lowest address before or at a hole from which free ranges and holes come to `size` bytes."""
        for hole in sorted(self.holes.sizes):
            begin = end = self.begins.get(hole, hole)
            while end - begin < size:
                step = self.sizes.get(end) or self.holes.sizes.get(end)
                if step is None:
                    break
                end += step
            else:
                return begin
        raise AssertionError("the last hole has no end")

    def unmap(self):
        """Make holes of every whole page that is free, and give the bytes of them."""
        total = 0
        for address, size in list(self.sizes.items()):
            first = -(-address // self.page) * self.page
            last = (address + size) // self.page * self.page
            if first >= last:
                continue
            self.remove(address)
            for begin, end in ((address, first), (last, address + size)):
                if begin < end:
                    self.add(begin, end - begin)
            self.holes.put(first, last - first)
            total += last - first
        return total

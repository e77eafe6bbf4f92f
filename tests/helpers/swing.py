"""Demand that swings between two levels."""

import random

from tests.helpers.pools import GIB

LOW, HIGH = GIB, 10 * GIB
OPERATIONS = 2000


class Swing:
    """Live blocks of a pool, the newest of which are freed first, of sizes spread evenly over their logarithm."""

    def __init__(self, pool, seed=0, smallest=20, largest=26):
        self.pool = pool
        self.rng = random.Random(seed)
        self.bits = smallest, largest
        self.blocks = []
        self.live = 0

    def allocate(self):
        nbytes = int(2 ** self.rng.uniform(*self.bits))
        self.blocks.append((self.pool.allocate(nbytes), nbytes))
        self.live += nbytes

    def free(self, place=-1):
        ptr, nbytes = self.blocks.pop(place)
        self.pool.deallocate(ptr)
        self.live -= nbytes

    def toward(self, level, operations=OPERATIONS):
        """Allocate while less is live, else free the newest; what is reserved for each live byte at the end."""
        for _ in range(operations):
            if self.live < level or not self.blocks:
                self.allocate()
            else:
                self.free()
        return self.pool.stats.reserved_bytes / self.live

    def toggle(self, level, operations):
        """Allocate while less is live, else free any."""
        for _ in range(operations):
            if self.live < level or not self.blocks:
                self.allocate()
            else:
                self.free(self.rng.randrange(len(self.blocks)))

    def free_to(self, level):
        while self.live > level:
            self.free()

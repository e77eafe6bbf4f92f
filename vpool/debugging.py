"""The debug modes of a pool: guards around blocks, poison, quarantine, call sites, and a report at exit."""

import atexit
import contextlib
import dataclasses
import gc
import logging
import os
import sys
import time
import weakref

import numpy as np

from vpool._interface.ledger import Ledger, NotLive
from vpool._interface.tags import tag
from vpool.arrays import among, distinct
from vpool.errors import DoubleFreeError, ForeignPointerError, GuardError
from vpool.leaks import UNKNOWN_SITE, Leaks
from vpool.sites import NOT_SAMPLED, Sites

__all__ = ["Debugger", "NotLive"]

logger = logging.getLogger("vpool")

GUARDED = 0xFD  # what bytes beside a block hold
UNSET = 0xCD  # of a block that was lent
FREED = 0xDD  # of one that was freed

_GRANULE = 256  # bytes
_MOST_WAITING = 1 << 16  # blocks in quarantine
_MOST_FREED = 1 << 16  # addresses whose last free is remembered
_PIECE = 4 << 20  # bytes of a freed block that are looked at together


class _Block:
    """A block that is live, or was."""

    __slots__ = (
        "address", "base", "born", "freed_at", "freer", "guarded", "label", "left", "lent", "lookers", "nbytes",
        "poisoned", "range", "requested", "site", "slot", "users",
    )  # fmt: skip

    def __init__(self, address, base, nbytes, requested, slot, site):
        self.address = address  # as the caller knows it
        self.base = base  # as the pool does
        self.nbytes = nbytes  # from there
        self.requested = requested
        self.slot = slot
        self.site = site
        self.label = "block"  # what tools are told
        self.range = None  # a profiler's
        self.born = time.monotonic()
        self.guarded = False
        self.users: tuple[int, ...] = ()  # slots of further streams
        self.lookers = 0  # who look at its memory and do not own it
        self.left = False  # freed meanwhile, by the last of them
        self.lent = True  # to a caller; not where that failed before it had the address
        self.freer = None  # slot that it was freed on; None: its own
        self.freed_at = None
        self.poisoned = False

    def holds(self, address):
        return self.base <= address < self.base + self.nbytes

    @property
    def last_slot(self):
        return self.slot if self.freer is None else self.freer


def _label_of(block):
    """What tools call a block that the calling thread has just got: its tag, or else its call site."""
    return tag.current() or (None if block.site is NOT_SAMPLED else block.site) or "block"


class Debugger(Ledger):
    """What watches the blocks of one pool.

    It knows each live block by the address that its caller has, which lies `front` bytes inside what the
    pool has lent.  A free first makes the block one that was freed, so that of two threads one succeeds;
    only then is memory touched.

    Parameters
    ----------
    name : str
        Of the pool.
    modes : vpool.modes.Modes
    access : vpool._interface.access.Access
    limit : int
        Bytes that the pool may reserve.
    ranges : vpool._interface.ledger.Ranges, optional
        What tells a profiler of live blocks.

    Notes
    -----
    Thread safety: every method may be called from any thread, and in the middle of another one: a buffer
    may be dropped by a garbage collection at any moment.
    """

    def __init__(self, name, modes, access, limit, ranges=None):
        poison = FREED if modes.poison else None
        super().__init__(access, poison, most_waiting=_MOST_WAITING, most_freed=_MOST_FREED, ranges=ranges)
        self.name = name
        self.modes = modes
        self.process = os.getpid()
        self._sites = Sites(modes.sites, modes.depth) if modes.sites else None
        self.set_limit(limit)
        if modes.leaks:
            _reported_at_exit.add(self)

    def set_limit(self, limit):
        """The pool may reserve so many bytes from now on; 0 for one that is closed."""
        self.bound = min(self.modes.quarantine, limit // 8)
        self.release(self.bound)

    def front(self, alignment):
        """Bytes before the caller's address, which keep it aligned."""
        return -(-self.modes.guard // alignment) * alignment

    # A block's way out, and back.

    def lent(self, base, front, nbytes, requested, slot, named):
        """Watch a block that the pool has just lent, perhaps on a stream that was just named; nobody has it yet."""
        site = None
        if self._sites is not None:
            site = self._sites.here() if self._sites.sampled() else NOT_SAMPLED
        block = _Block(base + front, base, nbytes, requested, slot, site)
        if self._may_touch(slot, named):
            if self.modes.poison:
                self.access.fill(slot, named, block.address, UNSET, requested)
            if self.modes.guard:
                self._fill_guards(block, slot, named)
                block.guarded = True
        if self.modes.nvtx or self.modes.nvtx_memory:
            block.label = _label_of(block)
        self.enter(block)

    def leave(self, block, slot, surely):
        """Look at the guards of a block that is being freed on the stream of a slot, in stream order.

        Returns
        -------
        GuardError or None
            For bytes beside it that were written; unless it is freed surely, it has a new guard.
        int or None
            Slot of the stream whose work all work on the block is now before; None where that may not be touched.
        """
        block.freer = slot
        if self._sites is not None and block.site is not NOT_SAMPLED:
            block.freed_at = self._sites.here()
        last, named = block.last_slot, slot is not None
        if not self._may_touch(last, named):
            return None, None
        if not all(self.access.follow(last, user, named) for user in {block.slot, *block.users} - {last}):
            return None, None
        damage = self._damage(block, last, named) if block.guarded else None
        if damage is not None and not surely:
            self._fill_guards(block, last, named)
        return damage, last

    def _may_touch(self, slot, named):
        """Whether memory is to be looked at, and can be: not while the stream captures."""
        return (self.modes.guard or self.modes.poison) and self.access.may(slot, named)

    # Quarantine.

    def written_late(self, block):
        """The exception for a block that was written after its free; None where it holds its poison."""
        slot = block.last_slot
        if not block.poisoned or not self._may_touch(slot, False):
            return None
        for start in range(0, block.nbytes, _PIECE):
            nbytes = min(_PIECE, block.nbytes - start)
            content = np.frombuffer(self.access.read(slot, False, block.base + start, nbytes), np.uint8)
            wrong = np.flatnonzero(content != FREED)
            if len(wrong):
                found, offset = int(content[wrong[0]]), block.base - block.address + start + int(wrong[0])
                return GuardError(
                    f"pool {self.name!r}: {found:#04x} was written {_place(block, offset)} after it was freed."
                    f"{self._history(block)}",
                    block.address,
                    block.requested,
                    offset,
                    found,
                )
        return None

    # Guards.

    def _guards(self, block):
        """Address and bytes of what is guarded before and behind a block."""
        end = block.address + block.requested
        behind = min(block.base + block.nbytes, -(-(end + self.modes.guard) // _GRANULE) * _GRANULE)
        return (block.address - self.modes.guard, self.modes.guard), (end, behind - end)

    def _fill_guards(self, block, slot, named):
        for address, nbytes in self._guards(block):
            self.access.fill(slot, named, address, GUARDED, nbytes)

    def _damage(self, block, slot, named):
        """The exception for a block whose guards do not hold what they should; None where they do."""
        wrong: list[tuple[int, int]] = []
        for address, nbytes in self._guards(block):
            content = np.frombuffer(self.access.read(slot, named, address, nbytes), np.uint8)
            places = np.flatnonzero(content != GUARDED)
            wrong += zip(content[places].tolist(), (places + (address - block.address)).tolist(), strict=True)
        if not wrong:
            return None
        # The one nearest to the block.
        found, offset = min(wrong, key=lambda one: -one[1] if one[1] < 0 else one[1] - block.requested + 1)
        others = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return GuardError(
            f"pool {self.name!r}: {found:#04x} was written {_place(block, offset)}{others}"
            f", stream {self.access.stream_of(block.slot):#x}.{self._history(block)}",
            block.address,
            block.requested,
            offset,
            found,
        )

    def check(self):
        """Look at the guards of all live blocks, and at all that waits in quarantine.

        Returns
        -------
        GuardError or None
            For the first that is not whole.  Nothing is changed.
        """
        live, waiting = list(self.live.values()), list(self.waiting.values())
        for block in live:
            error = self.look_at(block, self._damage_of_live)
            # Unless it was freed meanwhile: its owner is told then.
            if error is not None and self.live.get(block.address) is block:
                return error
        for block in waiting:
            error = self.look_at(block, self.written_late)
            if error is not None and self.waiting.get(block.address) is block:
                return error
        return None

    def _damage_of_live(self, block):
        looks = block.guarded and self._may_touch(block.slot, False)
        return self._damage(block, block.slot, False) if looks else None

    def report(self, error):
        """Tell of what nobody can catch: the log, and ``sys.unraisablehook``, which writes to standard error."""
        with contextlib.suppress(Exception):
            logger.info("%s", error)
        self.access.tell(error, f"pool {self.name!r}")

    # What people read.

    def stray(self, address):
        """The exception for an address that is no live block; None where the pool's records know more."""
        live, waiting = list(self.live.values()), list(self.waiting.values())
        freed = self.freed.get(address)
        for block in live:
            if block.address == address:
                return DoubleFreeError(
                    f"{address:#x} was freed in pool {self.name!r}, and is another block's now.{self._history(block)}"
                )
            # An older block may have begun inside this one.
            if block.holds(address):
                return ForeignPointerError(
                    f"{address:#x} lies {_place(block, address - block.address)}, which is live.{self._history(block)}"
                )
        if freed is not None:
            waits = ", and waits in quarantine" if address in self.waiting else ""
            return DoubleFreeError(f"{address:#x} is free already in pool {self.name!r}{waits}.{self._history(freed)}")
        for block in waiting:
            if block.holds(address):
                return ForeignPointerError(
                    f"{address:#x} lies {_place(block, address - block.address)}, which is free.{self._history(block)}"
                )
        return None

    def _history(self, block):
        """Where a block was allocated and freed, as a sentence, as far as it is known."""
        if block.site is None:
            return ""
        if block.site is NOT_SAMPLED:
            return f" Where it was allocated was {NOT_SAMPLED}."
        return f" Allocated at {block.site}{'' if block.freed_at is None else f', freed at {block.freed_at}'}."

    def stats(self, stats):
        """The pool's counters, with what waits in quarantine as pending, and without blocks that nobody got."""
        waiting, never_lent = list(self.waiting.values()), self.never_lent
        nbytes = sum(block.nbytes for block in waiting)
        return dataclasses.replace(
            stats,
            allocated_bytes=stats.allocated_bytes - nbytes,
            requested_bytes=stats.requested_bytes - sum(block.requested for block in waiting),
            pending_bytes=stats.pending_bytes + nbytes,
            allocations=stats.allocations - never_lent,
            frees=stats.frees - never_lent + len(waiting),
        )

    def records(self, figures, blocks, segments):
        """A copy of the pool's records, with what waits in quarantine as pending."""
        waiting = [block.base for block in list(self.waiting.values())]
        held = among(blocks["address"], np.array(waiting, np.uint64)) & (blocks["state"] == "live")
        blocks["state"][held] = "pending"
        blocks["requested"][held] = 0
        for stream in distinct(blocks["stream"][held]).tolist():
            mine = blocks["nbytes"][held & (blocks["stream"] == stream)]
            row = {"stream": stream, "waits_for": None, "blocks": len(mine), "pending_bytes": int(mine.sum())}
            figures["pending"].append({**row, "reason": "in quarantine"})
        figures["guarded"] = self.modes.guard > 0
        figures["guard_bytes"] = 2 * self.front(_GRANULE)
        if figures["core"] is not None:
            in_core = blocks[held & (blocks["segment"] == 0)]
            figures["core"]["allocated_bytes"] -= int(in_core["nbytes"].sum(dtype=np.uint64))
        return figures, blocks, segments

    def fill_origins(self, addresses, texts, site, age_us):
        """Tell sites and ages of live blocks, by where the pool has them; new sites are added to `texts`."""
        now = time.monotonic()
        # A list first: a collection while they are looked at may free one of them.
        live = {block.base: (block.site, block.born) for block in list(self.live.values())}
        numbers: dict[str, int] = {}
        for index, address in enumerate(addresses.tolist()):
            known = live.get(address)
            if known is not None:
                age_us[index] = (now - known[1]) * 1e6
                if known[0] is not None and known[0] is not NOT_SAMPLED:
                    if known[0] not in numbers:
                        numbers[known[0]] = len(texts)
                        texts.append(known[0])
                    site[index] = numbers[known[0]]

    def leaks(self):
        """What is live, by site."""
        now = time.monotonic()
        return Leaks(
            self.name,
            [
                (
                    block.site or UNKNOWN_SITE,
                    block.requested,
                    block.nbytes,
                    now - block.born,
                    self.access.stream_of(block.slot),
                )
                for block in list(self.live.values())
            ],
        )


def _bytes(count):
    return f"{count:,} byte{'' if count == 1 else 's'}"


def _place(block, offset):
    """Where a byte lies, by its distance from the start of a block."""
    what = f"the block of {_bytes(block.requested)} at {block.address:#x}"
    if offset < 0:
        return f"{_bytes(-offset)} before the start of {what}"
    if offset >= block.requested:
        return f"{_bytes(offset - block.requested + 1)} after the end of {what}"
    return f"{_bytes(offset)} inside {what}"


# At exit.

_reported_at_exit: "weakref.WeakSet[Debugger]" = weakref.WeakSet()


@atexit.register
def _report_leaks():
    with contextlib.suppress(Exception):
        if not _reported_at_exit:
            return
        gc.collect()  # what only a collection would free is no leak
        for debugger in sorted(_reported_at_exit, key=lambda one: one.name):
            # A child of a fork has nothing to give back, and may wait for a lock that nobody holds any more.
            leaks = debugger.leaks() if debugger.process == os.getpid() else None
            if leaks and sys.stderr is not None:
                print(f"vpool at exit: {leaks}", file=sys.stderr)

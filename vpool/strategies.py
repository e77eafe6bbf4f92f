"""Strategies: when a pool asks its source for memory, and for how much."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from vpool.sizes import MAX_SIZE, format_bytes, parse_size

__all__ = ["Dynamic", "Fixed", "Hybrid", "Numbers", "Strategy"]

GRANULE = 256  # bytes
MAX_BLOCKS = 1 << 24
_DEFAULT_INITIAL = "256MiB"
_SMALLEST_STEP = 4096


# Of a limit in bytes, which is a budget; a share of the device is a guard against taking all of it.
EASE_OF_BYTES = 1 / 16
EASE_OF_SHARE = 1 / 2


class Numbers(NamedTuple):
    """What a strategy comes to on one device: the numbers that a pool works with.  Sizes in bytes."""

    limit: int  # of the whole pool
    initial: int = 0  # first segment of what grows
    factor: float = 0.0  # of what has grown so far; 0 where `step` says it
    step: int = 0
    adaptive: bool = False
    trims: bool = False  # idle segments go back before another one comes, and steps are bounded
    core: int = 0  # taken at construction, and kept
    blocks: tuple[tuple[int, int], ...] = ()  # size and count of the core's blocks; none: one slab
    smallest: int = 1  # requests from `smallest` to `largest` are served from the core
    largest: int = 0
    watermark: float = 1.0  # share of the core above which memory is taken ahead of need
    headroom: int | None = None  # free bytes that what grows keeps ready; None: what it once had to grow for
    grows: bool = True  # beyond the core
    planned: bool = False  # the core is a plan's, and serves nothing else
    exact: bool = False  # beyond the core only what is not common, in segments of its own size
    ease: float = (
        EASE_OF_SHARE  # share of the limit that may be live before a source whose memory moves saves every byte
    )


class Strategy:
    """What all strategies are."""

    def rule(self, device_total):
        """The numbers that a pool works with.

        Parameters
        ----------
        device_total : int
            Bytes that the device has.

        Returns
        -------
        Numbers

        Raises
        ------
        ValueError
            Where the strategy does not fit the device.
        """
        raise NotImplementedError

    def limit_of(self):
        """The limit of the whole pool, as it was given."""
        raise NotImplementedError

    def with_limit(self, limit):
        """This strategy with another limit of the whole pool."""
        raise NotImplementedError

    def within(self, nbytes):
        """This strategy where the pool may take so many bytes: what it takes at first is made no larger."""
        raise NotImplementedError


def _check_limit(limit):
    if isinstance(limit, float):
        if not 0 < limit <= 1:
            raise ValueError(f"a limit that is a share must be above 0 and at most 1, got {limit}")
    elif parse_size(limit, "limit") == 0:
        raise ValueError("limit must not be 0 bytes")


def _limit_bytes(limit, device_total):
    if isinstance(limit, float):
        return int(device_total * limit) if device_total < MAX_SIZE else MAX_SIZE
    return parse_size(limit, "limit")


@dataclass(frozen=True)
class Dynamic(Strategy):
    """Grow as needed: a first segment, then steps, never past a limit.

    Parameters
    ----------
    initial : int or str
        Bytes of the first segment, taken at the first request.  0 means as much as that request
        needs.
    growth : float, int or str
        A float is a factor: each further segment brings the total to that many times what it was.
        A size is a step: each further segment has that many bytes.  Either way a request that needs
        more gets more.
    limit : float, int or str
        The most that the pool ever reserves: a float is a share of the device's total memory, a size
        is bytes.
    adaptive : bool or "growth"
        True lets steps follow recent demand, at most as large as `growth` says, and gives idle segments
        back once demand has fallen.  ``"growth"`` gives them back only where the pool has to grow past what it ever
        had; a step is 640 MiB at most then, and requests of 128 MiB and more get segments of their own.

    Raises
    ------
    ValueError, TypeError, OverflowError
        For numbers that make no sense; the message names the parameter.

    Notes
    -----
    Near the limit, and where the device refuses a step, the pool asks for less, down to exactly what
    the request needs.  Steps of 2 MiB and more are rounded up to whole 2 MiB; a segment whose size a
    request alone decides is not, since what is left over would be taken by small blocks that pin it.

    Examples
    --------
    >>> Dynamic(initial="1GiB", growth=2.0, limit=0.5)
    Dynamic(initial='1GiB', growth=2.0, limit=0.5, adaptive=False)
    """

    initial: int | str = _DEFAULT_INITIAL
    growth: float | int | str = 1.5
    limit: float | int | str = 0.8
    adaptive: bool | str = False

    def __post_init__(self):
        parse_size(self.initial, "initial")
        if isinstance(self.growth, float):
            if not 1 < self.growth <= 16:
                raise ValueError(f"a growth factor must be above 1 and at most 16, got {self.growth}")
        elif parse_size(self.growth, "growth") < _SMALLEST_STEP:
            raise ValueError(
                f"a growth step must be at least {_SMALLEST_STEP} bytes, got {self.growth!r}; "
                f"write a factor as a float, such as 2.0"
            )
        _check_limit(self.limit)
        if not isinstance(self.adaptive, bool | str):
            raise TypeError(f'adaptive must be "growth" or a bool, not {type(self.adaptive).__name__}')
        if isinstance(self.adaptive, str) and self.adaptive != "growth":
            raise ValueError(f'adaptive must be True, False or "growth", not {self.adaptive!r}')

    def rule(self, device_total):
        """The numbers that a pool works with: see `Strategy.rule`."""
        limit = _limit_bytes(self.limit, device_total)
        initial = parse_size(self.initial, "initial")
        if initial > limit:
            # Who says nothing about the first segment means no particular size.
            if self.initial != _DEFAULT_INITIAL:
                raise ValueError(
                    f"initial is {format_bytes(initial)}, but the pool may take {format_bytes(limit)} "
                    f"of the device's {format_bytes(device_total)}"
                )
            initial = limit
        adaptive, trims = self.adaptive is True, self.adaptive == "growth"
        if isinstance(self.growth, float):
            numbers = Numbers(limit, initial, factor=self.growth, adaptive=adaptive, trims=trims)
        else:
            step = parse_size(self.growth, "growth")
            numbers = Numbers(limit, initial, step=step, adaptive=adaptive, trims=trims)
        return numbers if isinstance(self.limit, float) else numbers._replace(ease=EASE_OF_BYTES)

    def limit_of(self):
        """The limit of the whole pool: see `Strategy.limit_of`."""
        return self.limit

    def with_limit(self, limit):
        """The same with another limit: see `Strategy.with_limit`."""
        return replace(self, limit=limit)

    def within(self, nbytes):
        """The same within so many bytes: see `Strategy.within`."""
        return replace(self, limit=nbytes, initial=min(nbytes, parse_size(self.initial)))


@dataclass(frozen=True)
class Fixed(Strategy):
    """Take all memory at construction, and never more.

    Parameters
    ----------
    capacity : int or str
        Bytes, in one segment.
    block : int, str, list or None
        Cut it into equal blocks of this size: every allocation takes one, the fastest way there is.  A
        list of sizes, or of pairs of size and count, makes blocks of several sizes.  None keeps one
        slab, from which blocks of any size are cut.
    oversize : {"error", "direct"}
        What becomes of a request that is larger than every block, or than the slab: an `OutOfMemoryError`
        that names both, or a segment of its own, which is counted as a miss.  Smaller requests are never
        served from such segments: where all blocks that fit are lent, they fail.
    limit : float, int or str
        The most that the pool ever reserves, `capacity` and such segments together; as for `Dynamic`.

    Raises
    ------
    ValueError, TypeError, OverflowError
        For numbers that make no sense; the message names the parameter.

    Examples
    --------
    >>> Fixed("1GiB", block="4MiB").blocks()
    ((4194304, 256),)
    """

    capacity: int | str
    block: int | str | list | tuple | None = None
    oversize: str = "error"
    limit: float | int | str = 1.0

    def __post_init__(self):
        _core_size(self.capacity, "capacity")
        self.blocks()
        if self.oversize not in ("error", "direct"):
            raise ValueError(f'oversize must be "error" or "direct", got {self.oversize!r}')
        _check_limit(self.limit)

    def blocks(self):
        """Size and count of the blocks, the smallest first; empty for one slab."""
        return _blocks_of(parse_size(self.capacity, "capacity"), self.block, "capacity")

    def rule(self, device_total):
        """The numbers that a pool works with: see `Strategy.rule`."""
        capacity = parse_size(self.capacity, "capacity")
        limit = _limit_bytes(self.limit, device_total)
        blocks = self.blocks()
        if capacity > limit:
            raise ValueError(
                f"capacity is {format_bytes(capacity)}, but the pool may take {format_bytes(limit)} "
                f"of the device's {format_bytes(device_total)}"
            )
        return Numbers(
            limit=limit,
            step=GRANULE,
            core=capacity,
            blocks=blocks,
            largest=blocks[-1][0] if blocks else capacity,
            grows=self.oversize == "direct",
            exact=True,
        )

    def limit_of(self):
        """The limit of the whole pool: see `Strategy.limit_of`."""
        return self.limit

    def with_limit(self, limit):
        """The same with another limit: see `Strategy.with_limit`."""
        return replace(self, limit=limit)

    def within(self, nbytes):
        """The same within so many bytes, which must be enough for the capacity."""
        return self.with_limit(nbytes)


@dataclass(frozen=True)
class Hybrid(Strategy):
    """A fixed core for the common requests, and an area that grows for the rest.

    Parameters
    ----------
    core : int or str
        Bytes of the core, taken at construction in one segment.
    block : int, str, list or None
        As for `Fixed`: equal blocks of one or several sizes, or None for one slab.
    watermark : float
        Share of the core: while more of it is live, `Pool.maintain` makes the dynamic area grow ahead
        of need.  1.0 turns that off.
    dynamic : Dynamic
        Of the rest.  Its limit is that of the whole pool.
    smallest, largest : int or str
        Requests of these sizes are served from the core while it has room, and others never; by
        default all that it can hold.
    headroom : int, str or None
        Bytes in one piece that the dynamic area keeps ready while the core is above its watermark; by
        default the largest request that it once had to grow for.

    Raises
    ------
    ValueError, TypeError, OverflowError
        For numbers that make no sense; the message names the parameter.

    Examples
    --------
    >>> Hybrid("4GiB", watermark=0.9, dynamic=Dynamic(growth="512MiB")).watermark
    0.9
    """

    core: int | str
    block: int | str | list | tuple | None = None
    watermark: float = 0.8
    dynamic: Dynamic = field(default_factory=Dynamic)
    smallest: int | str = 1
    largest: int | str | None = None
    headroom: int | str | None = None

    def __post_init__(self):
        _core_size(self.core, "core")
        if self.headroom is not None:
            parse_size(self.headroom, "headroom")
        self.blocks()
        if isinstance(self.watermark, bool) or not isinstance(self.watermark, (int, float)):
            raise TypeError(f"watermark must be a number, not {type(self.watermark).__name__}")
        if not 0 < self.watermark <= 1:
            raise ValueError(f"watermark must be above 0 and at most 1, got {self.watermark}")
        if not isinstance(self.dynamic, Dynamic):
            raise TypeError(f"dynamic must be a vpool.Dynamic, not {type(self.dynamic).__name__}")
        least, most = self._band()
        if least > most:
            raise ValueError(
                f"smallest is {format_bytes(least)}, but the largest request of the core is {format_bytes(most)}"
            )

    @classmethod
    def from_trace(cls, trace, coverage=0.9):
        """A hybrid that is made for a trace: of those that are tried, the one with the least memory.

        Parameters
        ----------
        trace : Trace or path
        coverage : float
            Share of the requests, above 0 and at most 1, that the core shall at least serve.

        Returns
        -------
        Hybrid
            One slab that all requests are served from, or one for the requests up to a size, or equal
            blocks where few sizes occur; the sizes are just enough for the trace.

        Raises
        ------
        ValueError, TypeError
            For a coverage that is no share, or a trace without allocations.
        FormatError, OSError
            For a file that cannot be read.

        Notes
        -----
        Replays the trace some hundred times on simulated memory.
        """
        from vpool.sizing import hybrid_for

        return hybrid_for(trace, coverage)

    def blocks(self):
        """Size and count of the core's blocks, the smallest first; empty for one slab."""
        return _blocks_of(parse_size(self.core, "core"), self.block, "core")

    def _band(self):
        blocks = self.blocks()
        most = blocks[-1][0] if blocks else MAX_SIZE
        if self.largest is not None:
            most = min(most, parse_size(self.largest, "largest"))
        return max(1, parse_size(self.smallest, "smallest")), most

    def rule(self, device_total):
        """The numbers that a pool works with: see `Strategy.rule`."""
        core = parse_size(self.core, "core")
        numbers = self.dynamic.rule(device_total)
        if core > numbers.limit:
            raise ValueError(
                f"core is {format_bytes(core)}, but the pool may take {format_bytes(numbers.limit)} "
                f"of the device's {format_bytes(device_total)}"
            )
        least, most = self._band()
        return numbers._replace(
            initial=min(numbers.initial, numbers.limit - core),
            core=core,
            blocks=self.blocks(),
            smallest=least,
            largest=most,
            watermark=float(self.watermark),
            headroom=None if self.headroom is None else parse_size(self.headroom, "headroom"),
        )

    def limit_of(self):
        """The limit of the whole pool: see `Strategy.limit_of`."""
        return self.dynamic.limit

    def with_limit(self, limit):
        """The same with another limit: see `Strategy.with_limit`."""
        return replace(self, dynamic=self.dynamic.with_limit(limit))

    def within(self, nbytes):
        """The same within so many bytes: see `Strategy.within`."""
        smaller = replace(self, dynamic=self.dynamic.within(nbytes))
        if self.block is None and parse_size(self.core) > nbytes:
            smaller = replace(smaller, core=nbytes)
        return smaller


def _core_size(size, what):
    if parse_size(size, what) < GRANULE:
        raise ValueError(f"{what} must be at least {GRANULE} bytes, got {size!r}")


def _blocks_of(capacity, block, what):
    """Size and count of each kind of block that a capacity is cut into, the smallest first."""
    if block is None:
        return ()
    several = block if isinstance(block, (list, tuple)) else [block]
    if not several:
        raise ValueError("block must not be an empty list")
    counts: dict[int, int] = {}
    for one in several:
        if isinstance(one, (list, tuple)):
            if len(one) != 2:
                raise ValueError(f"a block must be a size, or a pair of size and count, got {one!r}")
            size, count = _block_size(one[0]), one[1]
            if isinstance(count, bool) or not isinstance(count, int):
                raise TypeError(f"a count of blocks must be an integer, got {count!r}")
            if count < 1:
                raise ValueError(f"a count of blocks must be at least 1, got {count}")
        else:
            size = _block_size(one)
            count = capacity // len(several) // size
            if count < 1:
                share = f"its share of {what}" if len(several) > 1 else what
                raise ValueError(
                    f"block is {format_bytes(size)}, more than {share} ({format_bytes(capacity // len(several))})"
                )
        counts[size] = counts.get(size, 0) + count
    needed = sum(size * count for size, count in counts.items())
    if needed > capacity:
        raise ValueError(f"the blocks come to {format_bytes(needed)}, more than {what} ({format_bytes(capacity)})")
    if sum(counts.values()) > MAX_BLOCKS:
        raise ValueError(f"at most {MAX_BLOCKS:,} blocks, got {sum(counts.values()):,}: larger ones would do")
    return tuple(sorted(counts.items()))


def _block_size(size):
    """Bytes of a block, in whole granules."""
    nbytes = parse_size(size, "block")
    if nbytes == 0:
        raise ValueError("block must not be 0 bytes")
    return -(-nbytes // GRANULE) * GRANULE

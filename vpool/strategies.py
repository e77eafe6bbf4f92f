"""Strategies: when a pool asks its source for memory, and for how much."""

from dataclasses import dataclass

from vpool.sizes import MAX_SIZE, format_bytes, parse_size

__all__ = ["Dynamic"]

_DEFAULT_INITIAL = "256MiB"
_SMALLEST_STEP = 4096


@dataclass(frozen=True)
class Dynamic:
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
    Dynamic(initial='1GiB', growth=2.0, limit=0.5)
    """

    initial: int | str = _DEFAULT_INITIAL
    growth: float | int | str = 1.5
    limit: float | int | str = 0.8

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
        if isinstance(self.limit, float):
            if not 0 < self.limit <= 1:
                raise ValueError(f"a limit that is a share must be above 0 and at most 1, got {self.limit}")
        elif parse_size(self.limit, "limit") == 0:
            raise ValueError("limit must not be 0 bytes")

    def rule(self, device_total):
        """The numbers that a pool works with.

        Parameters
        ----------
        device_total : int
            Bytes that the device has.

        Returns
        -------
        limit, initial : int
            In bytes.
        factor : float
            0 where `growth` is a step.
        step : int
            Bytes; 0 where `growth` is a factor.
        """
        if isinstance(self.limit, float):
            limit = int(device_total * self.limit) if device_total < MAX_SIZE else MAX_SIZE
        else:
            limit = parse_size(self.limit, "limit")
        initial = parse_size(self.initial, "initial")
        if initial > limit:
            # Who says nothing about the first segment means no particular size.
            if self.initial != _DEFAULT_INITIAL:
                raise ValueError(
                    f"initial is {format_bytes(initial)}, but the pool may take {format_bytes(limit)} "
                    f"of the device's {format_bytes(device_total)}"
                )
            initial = limit
        if isinstance(self.growth, float):
            return limit, initial, self.growth, 0
        return limit, initial, 0.0, parse_size(self.growth, "growth")

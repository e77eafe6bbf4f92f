"""Sizes: the bytes that users write, and the bytes that people read."""

import operator
import re

__all__ = ["MAPPED_GRANULE", "MAX_SIZE", "format_bytes", "parse_count", "parse_size", "plural"]

MAX_SIZE = 2**63 - 1
MAPPED_GRANULE = 2 << 20  # bytes, the smallest piece that a virtual-memory source maps

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}iB"] = _UNITS[_letter] = 1024**_power
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGTP]?i?B?)\s*", re.ASCII)


def parse_size(value, what="size"):
    """Bytes that a configured size means.

    Parameters
    ----------
    value : int-like or str
        Bytes, or a number with a unit: ``"256MiB"``, ``"1.5 GiB"``, ``"10GB"``, ``"2G"`` (= GiB).
    what : str
        What the size is of, for the error message.

    Returns
    -------
    int
        Bytes, 0 to 2**63 - 1.

    Raises
    ------
    TypeError
        For a float, a bool, or anything else that is no integer and no string.
    ValueError
        For a negative size, or a string that is none.
    OverflowError
        Beyond 63 bits.

    Examples
    --------
    >>> parse_size("256MiB")
    268435456
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        unit = _UNITS.get(match[2]) if match else None
        if match is None or unit is None or (unit == 1 and "." in match[1]):
            raise ValueError(f'{what} must be bytes or a size such as "256MiB", not {value!r}')
        whole, _, fraction = match[1].partition(".")
        # In integers: a float would round sizes beyond 2**53.
        size = int(whole) * unit + (int(fraction) * unit // 10 ** len(fraction) if fraction else 0)
    elif isinstance(value, bool):
        raise TypeError(f"{what} must be an integer or a string, not a bool")
    else:
        try:
            size = operator.index(value)
        except TypeError:
            kind = type(value).__name__
            raise TypeError(f"{what} must be an integer or a string, not {kind}") from None
    if size < 0:
        raise ValueError(f"{what} must not be negative, got {size}")
    if size > MAX_SIZE:
        raise OverflowError(f"{what} must fit 63 bits, got {size}")
    return size


def parse_count(value, what):
    """A number of at least 1.

    Raises
    ------
    TypeError
        For a bool, or what is no integer.
    ValueError
        For a smaller one.
    """
    if isinstance(value, bool):
        raise TypeError(f"{what} must be an integer, not a bool")
    count = operator.index(value)
    if count < 1:
        raise ValueError(f"{what} must be at least 1, got {count}")
    return count


def format_bytes(nbytes):
    """Bytes for people: three digits and a binary unit, as ``'1.50 GiB'``.

    Examples
    --------
    >>> format_bytes(1536)
    '1.50 KiB'
    """
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if abs(size) < 1000 or unit == "EiB":
            break
        size /= 1024
    return f"{int(size)} B" if unit == "B" else f"{size:.{max(0, 3 - len(str(int(abs(size)))))}f} {unit}"


def plural(count, noun):
    """A count with its noun, as ``'1 block'`` and ``'1,200 blocks'``; for a noun that takes an s."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"

"""Which debug modes a pool has: the words of ``Pool(debug=...)`` and of the variable ``VPOOL_DEBUG``."""

import os
from collections.abc import Mapping
from typing import NamedTuple

from vpool.sizes import parse_size

__all__ = ["VARIABLE", "Modes", "modes_of", "with_guards"]

VARIABLE = "VPOOL_DEBUG"

_GRANULE = 256  # bytes
_MOST_GUARD = 2 << 20  # bytes
_MOST_DEPTH = 100


class Modes(NamedTuple):
    """What `Pool(debug=...)` has asked for.  Sizes in bytes; 0 is off."""

    guard: int = 0  # on each side of a block, a multiple of the granule
    poison: bool = False
    quarantine: int = 0  # the most that waits
    sites: int = 0  # one allocation of so many
    depth: int = 1  # callers that a site names
    leaks: bool = False
    nvtx: bool = False  # ranges for profilers
    nvtx_memory: bool = False  # heaps and regions for sanitizers


def _guard(value):
    size = parse_size(_GRANULE if value is None else value, "guard")
    if not 0 < size <= _MOST_GUARD:
        raise ValueError(f"guard must be 1 byte to 2 MiB, got {size} bytes")
    return -(-size // _GRANULE) * _GRANULE


def _quarantine(value):
    size = parse_size("64MiB" if value is None else value, "quarantine")
    if size == 0:
        raise ValueError("quarantine must be more than 0 bytes")
    return size


def _count(what, most):
    def count(value):
        if value is None:
            return 1
        if not (value.isascii() and value.isdigit() and 0 < int(value) <= most):
            raise ValueError(f"{what} must be a number from 1 to {most:,}, not {value!r}")
        return int(value)

    return count


def _switch(what):
    def switch(value):
        if value is not None:
            raise ValueError(f"{what} takes no value, got {value!r}")
        return True

    return switch


_READERS = {
    "guard": _guard,
    "poison": _switch("poison"),
    "quarantine": _quarantine,
    "sites": _count("sites", 10**9),
    "depth": _count("depth", _MOST_DEPTH),
    "leaks": _switch("leaks"),
    "nvtx": _switch("nvtx"),
    "nvtx-memory": _switch("nvtx-memory"),
}


def modes_of(debug, has_memory, maps=False):
    """The modes that words ask for.

    Parameters
    ----------
    debug : str, iterable of str, or None
        Words such as ``"guard"`` or ``"quarantine=16MiB"``, in a string with commas between; None is what the
        environment variable ``VPOOL_DEBUG`` says.
    has_memory : bool
        Whether there is something at the pool's addresses.
    maps : bool
        Whether memory is mapped there in handles.

    Raises
    ------
    ValueError, TypeError
        For a word that is none; for guards or poison where there is no memory to write to; for heaps on virtual
        memory.  Of the variable, which speaks of all pools, such a pool takes the other words.
    """
    if debug is not None:
        modes = _parse(debug)
        if not has_memory and (modes.guard or modes.poison):
            raise ValueError(
                'debug="guard" and "poison" need memory at the addresses: a source such as "cuda" or "host"; '
                '"quarantine", "sites", "leaks" and "nvtx" work on any'
            )
        if maps and modes.nvtx_memory:
            # compute-sanitizer counts that as an error of the program, and then watches nothing.
            raise ValueError(
                'debug="nvtx-memory" does not work on virtual memory: a tool takes for a heap only what one call has '
                'allocated, such as a segment of source "cuda"'
            )
        return modes
    try:
        modes = _parse(os.environ.get(VARIABLE, ""))
    except ValueError as error:
        raise ValueError(f"{VARIABLE}: {error}") from None
    if not has_memory:
        modes = modes._replace(guard=0, poison=False)
    return modes._replace(nvtx_memory=modes.nvtx_memory and not maps)


def _parse(debug):
    # Walking through a mapping would drop its values, and through bytes give numbers.
    if isinstance(debug, (Mapping, bytes, bytearray)):
        raise _no_words(debug)
    if isinstance(debug, str):
        words = [word.strip() for word in debug.split(",")] if debug.strip() else []
    else:
        try:
            words = list(debug)
        except TypeError:
            raise _no_words(debug) from None
    found = {}
    for word in words:
        if not isinstance(word, str):
            raise _no_words(word)
        name, _, value = (part.strip() for part in word.partition("="))
        if name not in _READERS:
            raise ValueError(f"no debug mode {word!r}; the modes are {', '.join(_READERS)}")
        found[name] = _READERS[name](value or None)
    if "depth" in found and "sites" not in found:
        raise ValueError('debug="depth" says how many callers a site names, and needs "sites"')
    if "nvtx-memory" in found and not found.keys().isdisjoint({"guard", "poison"}):
        raise ValueError(
            'debug="nvtx-memory" has a tool watch who writes outside blocks, as "guard" and "poison" would'
        )
    return Modes(**{name.replace("-", "_"): value for name, value in found.items()})


def _no_words(value):
    modes, kind = ", ".join(_READERS), type(value).__name__
    return TypeError(f'debug must be words such as "guard,sites=100", not {kind}; the modes are {modes}')


def with_guards(numbers, modes):
    """The numbers of a strategy whose core has blocks of fixed sizes, with room for guards.

    The core grows for that as far as the limit allows; beyond it there are fewer blocks.
    """
    more = 2 * modes.guard
    if not numbers.blocks or not more:
        return numbers
    core = sum((size + more) * count for size, count in numbers.blocks)
    share = min(1.0, numbers.limit / core)
    blocks = tuple((size + more, max(1, int(count * share))) for size, count in numbers.blocks)
    core = sum(size * count for size, count in blocks)
    if core > numbers.limit:
        raise ValueError(
            f"with guards the core's blocks are {more} bytes larger: {core:,} bytes, more than the pool may take"
        )
    return numbers._replace(blocks=blocks, core=core, initial=min(numbers.initial, numbers.limit - core))

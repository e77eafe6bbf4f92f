"""Where in a program a block was allocated or freed: lines of Python, kept once each."""

import itertools
import os
import sys
from types import FrameType

__all__ = ["NOT_SAMPLED", "NO_PYTHON", "TOO_MANY", "Sites"]

NOT_SAMPLED = "not sampled"
NO_PYTHON = "no Python code"
TOO_MANY = "one of too many sites to tell apart"

MOST_SITES = 10_000  # kept in one pool; code that is made anew and run by `exec` has no end of them


class Sites:
    """The call sites that one pool has seen.

    Parameters
    ----------
    every : int
        Look at one allocation of so many.
    depth : int
        How many callers a site names, the nearest first.

    Notes
    -----
    A site costs about a microsecond, and no more where the stack is deep: only the frames that it names are
    looked at, and vpool's own before them.

    Thread safety: `here` and `number` may be called from any thread, and in the middle of another call.
    """

    def __init__(self, every=1, depth=1):
        self.every = every
        self.depth = depth
        self._counter = itertools.count()
        self._names: dict[tuple, str] = {}
        # No lock: the first to enter a site gives it its number; one that another was faster with stays unused.
        self._numbers: dict[str, int] = {}
        self._next = itertools.count(1)

    def sampled(self):
        """Whether this allocation is one to look at."""
        return next(self._counter) % self.every == 0

    def number(self):
        """A number for `here`, the index of its text in `texts`; 0 where this allocation is none to look at."""
        if not self.sampled():
            return 0
        site = self.here()
        number = self._numbers.get(site)
        return self._numbers.setdefault(site, next(self._next)) if number is None else number

    @property
    def texts(self):
        """The sites that have a number, by it; empty for 0 and for numbers that no site has."""
        numbers = self._numbers.copy()
        texts = [""] * (1 + max(numbers.values(), default=0))
        for site, number in numbers.items():
            texts[number] = site
        return texts

    def here(self):
        """The line that has called vpool, such as ``train.py:12 in step``; behind ``<`` those that called it."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_OWN):
            frame = frame.f_back
        lines: list[tuple[str, int, str]] = []
        while frame is not None and len(lines) < self.depth:
            # What the code is called, and not the code, which a site would keep alive.
            lines.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        if not lines:
            return NO_PYTHON
        key = tuple(lines)
        site = self._names.get(key)
        if site is None:
            if len(self._names) >= MOST_SITES:
                return TOO_MANY
            site = self._names.setdefault(key, " < ".join(f"{file}:{line} in {name}" for file, line, name in key))
        return site


# As the interpreter spells it in the frames of this package.
_OWN = os.path.dirname(Sites.here.__code__.co_filename) + os.sep

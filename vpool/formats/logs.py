"""What readers of logs share: lines that tell where they are."""

import re
from datetime import datetime

from vpool.errors import FormatError

__all__ = ["DATED", "Others", "cells_of", "microseconds", "read_lines"]

# A date with a time of day.
DATED = re.compile(rb"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d{1,9})?")
_MOST_KINDS, _SHOWN = 100, 40


def cells_of(line):
    """The cells of a line of CSV, without blanks and quotes around them.  O(n)."""
    return [cell.strip().strip(b'"').strip() for cell in line.split(b",")]


def microseconds(dated):
    """Microseconds from 1970 to what `DATED` matches.  A day or hour that there is not is a ValueError."""
    whole, _, part = dated.decode().partition(".")
    since = datetime.fromisoformat(whole) - datetime(1970, 1, 1)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + int(part.ljust(6, "0")[:6])


class Others:
    """Lines that were left out, by what they begin with; of very many kinds only the first are told apart."""

    def __init__(self):
        self.count, self.first = 0, None
        self.kinds = {}

    def add(self, line, kind):
        self.count += 1
        self.first = self.first or line
        if len(self.kinds) < _MOST_KINDS:
            self.kinds[kind[:_SHOWN]] = None

    def __str__(self):
        """Some of the kinds, and where the first line is."""
        kinds = ", ".join(ascii(kind.decode("utf-8", "replace")) for kind in list(self.kinds)[:4])
        return f"({kinds}), the first in line {self.first}"


def read_lines(source, add, notes):
    """Call a function with each line.

    What it raises of ValueError and its like is a FormatError that names the line, unless the file ends within
    that line; then it is a note.

    Parameters
    ----------
    source : Source
    add : callable
        Gets the number of a line and its bytes, without blanks around.
    notes : list of str
    """
    failed, line = None, 0
    for line, text in source.lines():
        if text is None:
            # The line before was the last and has no end.
            notes.append(f"line {line}, the last, has no end: {'left out' if failed else 'it may have been cut'}")
            failed = None
            break
        if failed:
            raise failed
        text = text.strip()
        if line == 1:
            text = text.removeprefix(b"\xef\xbb\xbf")
        if not text:
            continue
        try:
            add(line, text)
        except KeyError as reason:
            failed = FormatError(f"line {line}: no {reason}")
        except (TypeError, ValueError, IndexError, OverflowError, AttributeError) as reason:
            failed = FormatError(f"line {line}: {reason}")
    if failed:
        raise failed
    if source.cut:
        notes.append(f"the gzip data ends too early, in line {line}: read up to there")

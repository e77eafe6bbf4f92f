"""Text for terminals: tables, and names that are cut to fit.  Names may be anybody's."""

import textwrap
import unicodedata

__all__ = ["columns", "cut", "listing", "padded", "printable", "shortened", "table", "wrapped"]


def columns(text):
    """How many columns of a terminal a text takes; that of a printable one."""
    return len(text) if text.isascii() else sum(map(_width, text))


def _width(character):
    if unicodedata.east_asian_width(character) in "WF":
        return 2
    return 0 if unicodedata.combining(character) else 1


def printable(text):
    """Text of one line in which nothing moves a cursor or hides: other characters stand as their escapes."""
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def cut(text, most):
    """The beginning of a text, printable, in at most so many columns."""
    return _fitting(printable(text), most)


def shortened(name, most):
    """A name, printable, in at most so many columns: of a longer one its end, where paths and numbers differ."""
    name = printable(name)
    return name if columns(name) <= most else f"...{_fitting(name[::-1], most - 3)[::-1]}"


def _fitting(text, most):
    while columns(text) > most:
        # No character takes more than two: so many at least are too many.
        text = text[: len(text) - (columns(text) - most + 1) // 2]
    return text


def padded(text, width, right=False):
    """A text with blanks up to so many columns, behind it or to the left of it."""
    blanks = " " * (width - columns(text))
    return blanks + text if right else text + blanks


def wrapped(text, most):
    """Lines of at most so many columns for one point of a list."""
    # A wide character counts as two with something beside it that is no blank.
    spread = "".join(one + "\0" * (_width(one) - 1) for one in printable(text))
    lines = textwrap.wrap(spread, most, initial_indent="* ", subsequent_indent="  ")
    return [line.replace("\0", "") for line in lines]


def table(header, rows):
    """Text of a table: the first column to the left, the others to the right."""
    cells = [[printable(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(columns(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        first, *others = row
        rest = [padded(cell, width, right=True) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([padded(first, widths[0]), *rest]).rstrip())
    return "\n".join(lines)


def listing(rows):
    """Text of names and what they mean, both to the left: what is long pushes nothing away."""
    cells = [(printable(name), printable(text)) for name, text in rows]
    width = max(columns(name) for name, _ in cells)
    return "\n".join(f"{padded(name, width)}  {text}" for name, text in cells)

"""Tables of plain text."""

__all__ = ["printable", "shortened", "table"]


def shortened(name, most):
    """A name of at most so many characters: of a longer one its end, where paths and numbers differ."""
    return name if len(name) <= most else f"...{name[3 - most :]}"


def printable(text):
    """Text of one line in which nothing moves a cursor or hides: other characters stand as their escapes."""
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def table(header, rows):
    """Text of a table: the first column to the left, the others to the right.  Names in it may be anybody's."""
    cells = [[printable(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        first, *others = row
        rest = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *rest]).rstrip())
    return "\n".join(lines)

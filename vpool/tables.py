"""Tables of plain text."""

__all__ = ["shortened", "table"]


def shortened(name, most):
    """A name of at most so many characters: of a longer one its end, where paths and numbers differ."""
    return name if len(name) <= most else f"...{name[3 - most :]}"


def table(header, rows):
    """Text of a table: the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        first, *others = row
        rest = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *rest]).rstrip())
    return "\n".join(lines)

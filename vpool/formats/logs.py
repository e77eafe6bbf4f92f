"""What readers of logs share: lines that tell where they are."""

from vpool.errors import FormatError

__all__ = ["read_lines"]


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

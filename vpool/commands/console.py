"""What commands share: files to write, progress on a terminal, and tables of plain text."""

import contextlib
import errno
import os
import sys

from vpool.errors import Error
from vpool.files import whole_file
from vpool.tables import printable, table

__all__ = ["expect_output", "expect_plot", "progress", "save_plot", "show_tables", "table"]


def expect_output(path, *inputs, beside=()):
    """Before anything takes time: a file can be written, and is none of those that are read.

    Parameters
    ----------
    path : str or None
    *inputs : str or None
        Files to read; what is none, as the name of a strategy, does no harm.
    beside : iterable of str or None
        Other files to write.

    Raises
    ------
    ValueError
        For a file that is read: what is written lacks what only that had, and a write that fails would leave neither.
        For one that is written already.
    OSError
        Where there is no folder for it, or no permission.
    """
    if path is None:
        return
    if any(one is not None and os.path.realpath(one) == os.path.realpath(path) for one in beside):
        raise ValueError(f"{path} is to be written twice: name another file")
    reason = None
    if os.path.exists(path):
        if any(one is not None and os.path.exists(one) and os.path.samefile(one, path) for one in inputs):
            raise ValueError(f"{path} is the file to read: name another one to write")
        if os.path.isdir(path):
            reason = errno.EISDIR
        elif not os.access(path, os.W_OK):
            reason = errno.EACCES
    else:
        folder = os.path.dirname(path) or os.curdir
        if not os.path.isdir(folder):
            reason = errno.ENOENT
        elif not os.access(folder, os.W_OK):
            reason = errno.EACCES
    if reason is not None:
        raise OSError(reason, os.strerror(reason), path)


def expect_plot(path, *inputs, beside=()):
    """Before anything takes time: a picture can be drawn and written there, as `expect_output` says of any file.

    Raises
    ------
    ValueError, OSError
        As of `expect_output`, and for an ending that is of no kind of picture.
    Error
        Where matplotlib is not installed.
    """
    if path is None:
        return
    expect_output(path, *inputs, beside=beside)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Error('--plot needs matplotlib: pip install "vpool[plot]"') from None
    kinds = Figure().canvas.get_supported_filetypes()
    if _ending(path) not in ("", *kinds):
        raise ValueError(f"{path} is of no kind of picture: name one of {', '.join(sorted(kinds))}")


def save_plot(figure, path):
    """Write a picture whole or not at all, by the kind that its ending names; PNG where it has none."""
    with whole_file(path) as file:
        figure.savefig(file, format=_ending(path) or "png")


def _ending(path):
    return os.path.splitext(path)[1].removeprefix(".").lower()


@contextlib.contextmanager
def progress(label):
    """A function to call with what is done and what there is in all; it draws on a terminal only.

    Uses rich where it is installed.
    """
    if not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:

        def show(done, total):
            print(f"\r{label}: {done / total:.0%}", end="", file=sys.stderr, flush=True)

        try:
            yield show
        finally:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show_tables(tables):
    """Print tables, each with a title, a header and rows; rich draws them on a terminal where it is installed."""
    console = None
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            from rich.console import Console

            console = Console()
    for title, header, rows in tables:
        if console is None:
            print(f"\n{title}:\n\n{table(header, rows)}")
            continue
        from rich.table import Table
        from rich.text import Text

        drawn = Table(title=title, title_justify="left")
        for number, name in enumerate(header):
            drawn.add_column(name, justify="right" if number else "left", no_wrap=not number)
        for row in rows:
            # As text: a name with brackets is no markup.
            drawn.add_row(*(Text(printable(str(cell))) for cell in row))
        console.print(drawn)

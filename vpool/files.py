"""Files that are written whole or not at all."""

import contextlib
import os
import secrets
import stat
from pathlib import Path

__all__ = ["whole_file"]


@contextlib.contextmanager
def whole_file(path):
    """A file to write that takes the place of another one once all of it is written.

    Parameters
    ----------
    path : str or os.PathLike
        Where that fails, what stood there stays as it was.  A link stays one, and permissions stay.  A device or a
        pipe is written as it is, and so is a file in a folder where no other one can be made.

    Yields
    ------
    binary file

    Raises
    ------
    OSError
        Where the file cannot be written.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        with open(target, "wb") as file:
            yield file
        return
    target = target.resolve()
    part = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with _opened(part, target) as file:
            yield file
        if part.exists():
            os.replace(part, target)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename == str(part):
            error.filename, error.filename2 = str(path), None
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _opened(part, target):
    """The file beside the target, with its permissions; or else the target."""
    try:
        file = open(part, "xb")  # noqa: SIM115 - the caller closes it
    except PermissionError:
        if target.exists():
            return open(target, "wb")
        raise
    with contextlib.suppress(OSError):
        os.chmod(part, stat.S_IMODE(target.stat().st_mode))
    return file

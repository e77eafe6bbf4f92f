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
    if not _is_or_will_be_a_file(target):
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
        with contextlib.suppress(OSError):
            part.unlink()
        if isinstance(error, OSError) and error.filename == str(part):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def _is_or_will_be_a_file(target):
    try:
        return stat.S_ISREG(target.stat().st_mode)
    except FileNotFoundError:
        return True


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

"""A process that tells of its pools while it runs: `vpool.serve`, and what ``vpool top`` reads.

A Unix socket in a folder of the user's own.  Whoever connects gets one JSON object and no more; nothing is read from
them.
"""

import atexit
import contextlib
import dataclasses
import json
import logging
import os
import socket
import stat
import struct
import sys
import threading
import time
from pathlib import Path

from vpool._interface.lender import pools
from vpool._storage.fork import PerProcess
from vpool.errors import ClosedPoolError, Error, ForkedProcessError, FormatError
from vpool.stats import PoolStats

__all__ = ["FORMAT_VERSION", "Server", "ask", "serve", "serving"]

logger = logging.getLogger("vpool")

FORMAT_VERSION = 1
_PATIENCE = 1.0  # seconds that a reader may keep the server waiting
_MOST_BYTES = 16 << 20  # of an answer
_SILENT = "process {} does not answer: it may be stopped, or hold the GIL"
_TOLD = {"format_version": int, "pid": int, "program": str, "time": float, "pools": list}
_TOLD_OF_POOLS = {
    **dict.fromkeys(("name", "source"), str),
    **dict.fromkeys(("device", *(one.name for one in dataclasses.fields(PoolStats))), int),
}


def _folder():
    """The user's folder for sockets, which nobody else may enter."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "vpool" if base else Path("/tmp") / f"vpool-{os.geteuid()}"


def _own_folder():
    """The folder, made if need be.  In a folder for all, what stands under its name may be somebody else's."""
    folder = _folder()
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise Error(f"{folder} is not a folder of this user alone: no socket is opened in it")
    return folder


def _peer(connection):
    """Process and user at the other end."""
    process, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process, user


class Server:
    """The socket of a process.  Made by `vpool.serve`; a context manager.

    Attributes
    ----------
    path : pathlib.Path
        Of the socket, which its owner alone may use.
    """

    def __init__(self):
        self.path = _own_folder() / f"{os.getpid()}.sock"
        self._process = os.getpid()
        self.ends = False  # `close` was called, and perhaps interrupted
        self.path.unlink(missing_ok=True)  # of a process that had this number before
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(str(self.path))
            os.chmod(self.path, 0o600)
            self._socket.listen(8)
        except BaseException:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._run, name="vpool serves", daemon=True)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def __repr__(self):
        return f"<vpool server at {self.path}, {'closed' if self.closed else 'open'}>"

    @property
    def closed(self):
        """Whether it serves no more."""
        return self._socket.fileno() < 0

    def close(self):
        """Serve no more, and remove the socket.  May be called again."""
        self.ends = True
        if self.closed:
            return
        if os.getpid() == self._process:
            self.path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes who accepts
            self._thread.join()
        self._socket.close()

    def _run(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self.ends:
                    return
                logger.warning("vpool serves: %s", error)  # as where all files are open that may be
                time.sleep(_PATIENCE)
                continue
            with connection:
                try:
                    self._answer(connection)
                except Exception as error:
                    logger.warning("vpool serves: %s", error)

    def _answer(self, connection):
        connection.settimeout(_PATIENCE)
        if _peer(connection)[1] == os.geteuid():
            connection.sendall(json.dumps(_told()).encode())


def _told():
    """What is told of this process."""
    rows = []
    for pool in pools():
        with contextlib.suppress(ClosedPoolError, ForkedProcessError):
            row = {"name": pool.name, "device": pool.device, "source": pool.source.name}
            rows.append({**row, **dataclasses.asdict(pool.stats)})
    rows.sort(key=lambda row: (-row["reserved_bytes"], row["name"]))
    told = {"format_version": FORMAT_VERSION, "pid": os.getpid(), "program": sys.argv[0], "time": time.time()}
    return {**told, "pools": rows}


class _Current:
    """The server of this process, if it has one."""

    def __init__(self):
        self.server = None
        self.changing = threading.RLock()


_current = PerProcess(_Current)


def serve():
    """Open a socket from which ``vpool top`` reads the counters of every pool of this process.

    It is `Server.path`, in ``$XDG_RUNTIME_DIR/vpool`` or else in ``/tmp/vpool-UID``, for the same user alone:
    folder and socket have such modes, and the process asks the kernel who connects.  A thread of Python answers.

    Returns
    -------
    Server
        To close when it has served its purpose; at the end of the process it is closed anyway.  Another call gives
        the same one, as long as it is open.

    Raises
    ------
    Error
        Where the folder is somebody else's.
    OSError
        Where there cannot be a socket.

    Notes
    -----
    The counters are those of `Pool.stats`: no lock of a pool is taken.  After a fork the child has no socket until it
    calls this itself.

    Examples
    --------
    >>> import vpool
    >>> with vpool.serve() as server:
    ...     server.path.is_socket()
    True
    """
    current = _current.here
    with current.changing:
        if current.server is not None and current.server.ends:
            current.server.close()
        if current.server is None or current.server.closed:
            current.server = Server()
            # Not one that was inherited: each process closes its own.
            atexit.register(current.server.close)
        return current.server


def serving():
    """Numbers of the processes of this user that have a socket, in order."""
    try:
        found = sorted(int(path.stem) for path in _folder().glob("*.sock") if path.stem.isdigit())
    except OSError:
        return []
    return [pid for pid in found if os.path.exists(f"/proc/{pid}")]  # what was killed leaves its socket


def ask(pid):
    """What a process tells of its pools.

    Parameters
    ----------
    pid : int

    Returns
    -------
    dict
        ``format_version``, ``pid``, ``program``, ``time`` (seconds since 1970) and ``pools``: a dict of each with
        ``name``, ``device``, ``source`` and the counters of `vpool.stats.PoolStats`, the largest first.

    Raises
    ------
    Error
        Where the process serves nothing, does not answer within 10 seconds, or is somebody else's.
    FormatError
        Where its answer is none, or of a newer vpool.
    """
    path = _folder() / f"{pid}.sock"
    begin = time.monotonic()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10 * _PATIENCE)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            others = ", ".join(map(str, serving())) or "none"
            raise Error(
                f"process {pid} serves no counters: it has to call vpool.serve(); those that do: {others}"
            ) from None
        except PermissionError:
            raise Error(f"process {pid} belongs to another user") from None
        except TimeoutError:
            raise Error(_SILENT.format(pid)) from None
        process, user = _peer(connection)
        if user != os.geteuid() or process != pid:
            raise Error(f"{path} is not a socket of process {pid} of this user")
        parts, size = [], 0
        try:
            while part := connection.recv(1 << 16):
                parts.append(part)
                size += len(part)
                if size > _MOST_BYTES or time.monotonic() - begin > 10 * _PATIENCE:
                    raise FormatError(f"process {pid} does not stop telling")
        except TimeoutError:
            raise Error(_SILENT.format(pid)) from None
    return _checked(b"".join(parts), pid)


def _checked(content, pid):
    try:
        told = json.loads(content)
        version = told["format_version"]
        if version > FORMAT_VERSION:
            raise FormatError(f"process {pid} tells format version {version}; this vpool reads up to {FORMAT_VERSION}")
        for name, kind in _TOLD.items():
            if not isinstance(told[name], kind):
                raise TypeError(name)
        for row in told["pools"]:
            if not all(isinstance(row[name], kind) for name, kind in _TOLD_OF_POOLS.items()):
                raise TypeError(row)
        time.localtime(told["time"])
    except (ValueError, KeyError, TypeError, OverflowError, OSError, RecursionError) as reason:
        if isinstance(reason, FormatError):
            raise
        raise FormatError(f"process {pid} tells nothing that vpool understands") from None
    return told

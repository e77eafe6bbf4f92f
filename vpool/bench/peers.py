"""The peers that are installed, each in a process of its own that is told what to measure, line by line."""

import contextlib
import importlib.util
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

from vpool.bench.build import BuildError, program
from vpool.errors import Error

__all__ = ["PEERS", "Peer", "PeerError", "Worker", "started_peers"]

_MOST_SECONDS = 300  # of one answer
_EXPANDABLE = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")
_COMPILED = frozenset(
    (
        *("pair", "pair_among", "random", "latency_pair", "latency_random", "handoff", "miss", "blocks", "trace"),
        *("own_same", "own_random", "one_same", "one_random"),
    )
)
_PYTHON = frozenset(("python_pair", "buffer"))


class PeerError(Error):
    """A peer does not answer, or answers that it cannot; the message is one line."""


@dataclass(frozen=True)
class Peer:
    """An allocator of others.

    Attributes
    ----------
    title : str
    name : str
        What its program is told.
    flavour : str or None
        Of the compiled program (`vpool.bench.build`); None for a peer in Python.
    package : str or None
        What has to be installed.
    cases : frozenset of str
        Names of the cases that it takes part in.
    environment : dict
        Variables of its process.
    on_device : bool
        Whether it needs a CUDA device.
    """

    title: str
    name: str
    flavour: str | None = None
    package: str | None = None
    cases: frozenset = _COMPILED
    environment: dict = field(default_factory=dict)
    on_device: bool = True

    def missing(self):
        """Whether what it needs is not installed."""
        try:
            return self.package is not None and importlib.util.find_spec(self.package) is None
        except ImportError:
            return True

    def command(self):
        """The program to start, which may have to be compiled first."""
        if self.flavour is None:
            return [sys.executable, "-m", "vpool.bench.python_peer", self.name]
        return [str(program(self.flavour)), self.name]


# A driver call an operation: what would take minutes is left out.
_SLOW = frozenset(("pair", "random", "miss"))

PEERS = (
    Peer("malloc", "malloc", "host", cases=_COMPILED - {"trace", "miss"}, on_device=False),
    Peer("cudaMalloc", "cudaMalloc", "cuda", cases=_SLOW),
    Peer("cudaMallocAsync", "cudaMallocAsync", "cuda", cases=_COMPILED - {"blocks"}),
    Peer("RMM pool", "rmm_pool", "rmm", "librmm"),
    Peer("RMM arena", "rmm_arena", "rmm", "librmm"),
    # The smallest of its bins is 256 KiB: a million blocks would need 256 GB.
    Peer("RMM binning", "rmm_binning", "rmm", "librmm", cases=_COMPILED - {"blocks"}),
    Peer("RMM cuda_async", "rmm_async", "rmm", "librmm", cases=_COMPILED - {"blocks"}),
    Peer("PyTorch", "torch", "torch", "torch"),
    Peer("PyTorch expandable", "torch", "torch", "torch", environment=_EXPANDABLE),
    Peer("CuPy pool", "cupy", None, "cupy", _PYTHON),
    Peer("CuPy async pool", "cupy_async", None, "cupy", _PYTHON),
    Peer("RMM pool", "rmm_pool", None, "rmm", _PYTHON),
    Peer("RMM arena", "rmm_arena", None, "rmm", _PYTHON),
    Peer("RMM cuda_async", "rmm_async", None, "rmm", _PYTHON),
    Peer("PyTorch", "torch", None, "torch", _PYTHON),
    Peer("PyTorch expandable", "torch", None, "torch", _PYTHON, _EXPANDABLE),
    Peer("cuda.core", "cuda_core", None, "cuda.core", frozenset({"buffer"})),
    Peer("cudaMalloc", "cudaMalloc", None, "cuda.bindings", frozenset({"python_pair"})),
    Peer("cudaMallocAsync", "cudaMallocAsync", None, "cuda.bindings", frozenset({"python_pair"})),
)


class Worker:
    """The process of one peer.

    Parameters
    ----------
    peer : Peer
    seconds : float
        The most that one answer may take.

    Raises
    ------
    BuildError, PeerError
        Where it cannot be built, or does not start.
    """

    kind = "peer"

    def __init__(self, peer, seconds=_MOST_SECONDS):
        self.peer = peer
        self.who = peer.title
        self.seconds = seconds
        self.version = None
        self.ended = False
        self._pending = b""
        command = peer.command()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, **peer.environment},
            )
        except OSError as error:
            self._errors.close()
            raise PeerError(f"does not start: {error}") from None
        self._questions: Any = self._process.stdin
        self._answers: Any = self._process.stdout
        try:
            self.version = self._answer("the start")["ready"]
        except BaseException:
            self.close()
            raise

    def supports(self, case):
        """Whether it takes part in a case."""
        return not self.ended and case.name in self.peer.cases

    def measure(self, case, count):
        """The figures of one sample.

        Raises
        ------
        PeerError
            With the peer's own words, or where it does not answer in time; it has ended then.
        """
        if case.name == "trace":
            line = f"trace {count} {case.subject[1]}"
        else:
            line = case.line(count).replace("pair_among", "pair")
        try:
            self._questions.write(f"{line}\n".encode())
            self._questions.flush()
        except OSError:
            raise self._end() from None
        return self._answer(case.name)

    def _answer(self, what):
        line = self._line(what)
        try:
            answer = json.loads(line)
        except ValueError:
            raise PeerError(f"answered {line[:100]!r}") from None
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _line(self, what):
        deadline = time.monotonic() + self.seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self._process.kill()
                    self.ended = True
                    raise PeerError(f"{what} took more than {self.seconds:g} seconds")
                part = os.read(self._answers.fileno(), 1 << 16)
                if not part:
                    raise self._end()
                self._pending += part
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode(errors="replace")

    def _end(self):
        """The error of a process that is no more, with its last words."""
        self.ended = True
        status = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return PeerError(f"has ended: {lines[-1][:200] if lines else f'exit status {status}'}")

    def close(self):
        """End the process."""
        self.ended = True
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):  # what was not written has no reader
            self._questions.close()
        self._answers.close()
        self._errors.close()


def started_peers(cases, on_device, notes, peers=PEERS):
    """A worker for each peer that takes part in one of some cases and can run here.

    Parameters
    ----------
    cases : list of Case
    on_device : bool
        Whether there is a CUDA device.
    notes : list of str
        Gets a line for each peer that cannot be built or started.
    peers : iterable of Peer
    """
    names = {case.name for case in cases}
    wanted = [peer for peer in peers if peer.cases & names]
    if not on_device and any(peer.on_device for peer in wanted):
        notes.append("peers that allocate on a device: no CUDA device is here, none is measured")
    workers = []
    try:
        for peer in wanted:
            language = "compiled" if peer.flavour else "from Python"
            if peer.on_device and not on_device:
                continue
            if peer.missing():
                notes.append(f"{peer.title} ({language}): {peer.package} is not installed")
                continue
            try:
                workers.append(Worker(peer))
            except (BuildError, PeerError) as error:
                notes.append(f"{peer.title} ({language}): {' '.join(str(error).split())}")
    except BaseException:
        for worker in workers:
            worker.close()
        raise
    return workers

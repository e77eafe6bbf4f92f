"""Trials: policies measured on traces, on the threads of this process or on a cluster, and kept in a study file."""

import contextlib
import hashlib
import json
import os
import pickle
import zlib

import numpy as np

from vpool.errors import FormatError
from vpool.policy import Policy
from vpool.runs import Figures, measure
from vpool.trace import ALLOCATE, Trace
from vpool.version import __version__

__all__ = ["FORMAT_VERSION", "Study", "Workload", "halves", "on_threads"]

FORMAT_VERSION = 1
_KIND = "vpool study"


class Workload:
    """Traces, and how they are replayed.

    Parameters
    ----------
    traces : dict of Trace
        By name.
    capacity : int, optional
        Bytes that a pool may take.
    passes : int
        How often each trace is replayed into the same pool.
    maintain : bool
        Whether to call `Pool.maintain` before each event.
    """

    def __init__(self, traces, capacity=None, passes=1, maintain=False):
        self.traces = dict(traces)
        self.capacity = capacity
        self.passes = passes
        self.maintain = maintain
        self.peaks = [trace.peak_live_bytes for trace in self.traces.values()]
        self.events = [passes * len(trace) for trace in self.traces.values()]

    def measure(self, policy):
        """`Figures` of each trace by a policy."""
        return tuple(self._measured(trace, policy) for trace in self.traces.values())

    def measure_text(self, text):
        """The same of a policy's text, which travels between machines."""
        return self.measure(Policy.loads(text))

    def _measured(self, trace, policy):
        try:
            return measure(trace, policy, self.capacity, self.passes, self.maintain)
        except ValueError:
            if self.capacity is None:
                raise
            return Figures(0, 0, 0, 0, False)  # what it takes at first is more than there is

    @property
    def fingerprint(self):
        """A digest of all that figures depend on besides the policy."""
        digest = hashlib.sha256(repr((self.capacity, self.passes, self.maintain)).encode())
        for trace in self.traces.values():
            for array in (trace.op, trace.number, trace.bytes, trace.stream, trace.t_us, trace.marks_us):
                digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def pack(self):
        """The workload as compressed bytes, to be sent to another process of the same version."""
        return zlib.compress(pickle.dumps(self), 1)

    @staticmethod
    def unpack(packed):
        """The workload that `pack` made bytes of."""
        return pickle.loads(zlib.decompress(packed))


@contextlib.contextmanager
def on_threads(workers=None):
    """A function that measures policies on a workload, on threads of this process.

    Parameters
    ----------
    workers : int, optional
        Threads; as many as there are cores for this process if not given.

    Notes
    -----
    A replay runs without the GIL, so threads are as good as processes here, need no copy of the traces, and
    neither fork a process that uses CUDA nor import the caller's script anew.
    """
    from concurrent.futures import ThreadPoolExecutor  # refuses once the interpreter ends, where vpool does not

    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), "vpool-tune") as pool:
        try:
            yield lambda workload, texts: list(pool.map(workload.measure_text, texts))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def halves(trace):
    """A trace's first and second half of steps.

    Returns
    -------
    pair of Trace, or None
        Where there are no steps, the halves of its events.  What is live in the middle is allocated at the
        beginning of the second half, in its old order.  None where one of them would ask for no bytes.

    Notes
    -----
    O(n) for n events.
    """
    marks, steps = np.sort(trace.marks_us), trace.mark_events
    middle = int(steps[len(steps) // 2]) if len(steps) > 1 else len(trace) // 2
    births = trace.op == ALLOCATE
    before = np.arange(len(trace)) < middle
    asks = births & (trace.bytes > 0)
    if not (asks & before).any() or not (asks & ~before).any():
        return None
    live = np.zeros(trace.allocations, bool)
    live[trace.number[births & before]] = True
    live[trace.number[~births & before]] = False
    carried = births & before & live[trace.number]
    late = steps >= middle
    return _chosen(trace, before, marks[~late]), _chosen(trace, ~before | carried, marks[late])


def _chosen(trace, mask, marks_us):
    return Trace(trace.op[mask], trace.id[mask], trace.bytes[mask], trace.stream[mask], trace.t_us[mask], marks_us)


class Study:
    """Figures of the policies that were measured, in memory and in a file that a later run goes on from.

    Parameters
    ----------
    workloads : dict of Workload
        By name.
    path : str or os.PathLike, optional
        Lines of JSON: what the study is of, then a line for each trial.  It is made where it does not exist;
        a last line that was cut is dropped.

    Raises
    ------
    FormatError
        For a file that is no study, is of a newer format, of other traces or settings, or of another vpool,
        whose figures may differ.
    OSError
        For a file that cannot be read or written.
    """

    def __init__(self, workloads, path=None):
        self.workloads = workloads
        self.figures: dict[str, dict[str, tuple]] = {name: {} for name in workloads}
        self.file = None
        if path is not None:
            self._open(path)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def close(self):
        """Close the file."""
        if self.file is not None:
            self.file.close()
            self.file = None

    def measure(self, evaluate, name, policies):
        """Figures of policies on one of the workloads, those that are not known yet measured by `evaluate`."""
        known = self.figures[name]
        texts = [policy.dumps() for policy in policies]
        new = [text for text in dict.fromkeys(texts) if text not in known]
        for text, figures in zip(new, evaluate(self.workloads[name], new) if new else (), strict=True):
            known[text] = figures
            if self.file is not None:
                self.file.write(json.dumps({"workload": name, "policy": text, "figures": figures}) + "\n")
        if self.file is not None:
            self.file.flush()
        return [known[text] for text in texts]

    def _open(self, path):
        digests = {name: workload.fingerprint for name, workload in self.workloads.items()}
        header = {"kind": _KIND, "format_version": FORMAT_VERSION, "vpool": __version__, "workloads": digests}
        file = open(path, "a+b")  # noqa: SIM115 - it stays open as long as the study
        try:
            file.seek(0)
            good = self._read(file, header)
            file.truncate(good)
        except FormatError as reason:
            file.close()
            raise FormatError(f"{os.fspath(path)}: {reason}") from None
        except BaseException:
            file.close()
            raise
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        file.close()
        if not good:
            self.file.write(json.dumps(header) + "\n")
            self.file.flush()

    def _read(self, file, header):
        """Take in the trials of a file; the bytes of its whole lines."""
        good = 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                if number == 1:
                    raise FormatError("not a study of vpool tune (line 1)")
                break  # cut by the end of the run that wrote it
            try:
                record = json.loads(line)
                if number == 1:
                    _check_header(record, header)
                else:
                    figures = tuple(_figures(values) for values in record["figures"])
                    self.figures[record["workload"]][str(record["policy"])] = figures
            except FormatError:
                raise
            except (ValueError, TypeError, KeyError, RecursionError):
                raise FormatError(f"not a study of vpool tune (line {number})") from None
            good += len(line)
        return good


def _figures(values):
    figures = Figures(*values)
    if [type(one) for one in figures] != [int, int, int, int, bool]:
        raise ValueError(values)
    return figures


def _check_header(record, header):
    if not isinstance(record, dict) or record.get("kind") != _KIND or type(record.get("format_version")) is not int:
        raise ValueError("not a header")
    if record["format_version"] > FORMAT_VERSION:
        raise FormatError(f"version {record['format_version']}; this vpool reads up to version {FORMAT_VERSION}")
    if record.get("vpool") != header["vpool"]:
        raise FormatError(
            f"made by vpool {record.get('vpool')}, whose figures may differ from those of {header['vpool']}"
        )
    if record.get("workloads") != header["workloads"]:
        raise FormatError("of other traces, held-out halves, capacity, number of passes or maintenance")

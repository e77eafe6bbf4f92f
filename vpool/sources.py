"""Sources: where a pool's memory comes from.

A name (``"cuda"``, ``"cuda-vmm"``, ``"cuda-async"``, ``"pinned"``, ``"managed"``, ``"host"``, ``"simulated"``,
``"simulated-vmm"``) means a source with its default options; the functions here build one with options.
"""

import operator
import os
import threading
from collections.abc import Callable

from vpool._storage.cuda_built import CUDA_MAJOR
from vpool._storage.driver import Driver
from vpool._storage.fork import forks
from vpool._storage.host_driver import HostDriver
from vpool._storage.mapped_source import MappedSource
from vpool._storage.simulated_driver import SimulatedDriver
from vpool._storage.source import Source
from vpool.errors import ForkedProcessError, SourceError
from vpool.sizes import MAPPED_GRANULE, parse_size

__all__ = [
    "Cuda",
    "CudaAsync",
    "CudaVmm",
    "Host",
    "Managed",
    "Pinned",
    "Simulated",
    "SimulatedVmm",
    "Source",
    "checked_ordinal",
    "cuda_missing",
    "current_device",
    "host_beside",
    "resolve",
]

_UNBOUNDED = 2**62

_FORKED = (
    "CUDA was used before this process was forked, and does not survive a fork: start processes by"
    ' "spawn" or "forkserver", or use CUDA only after the fork'
)
_NOT_AFTER_FORK = "cudaErrorInitializationError"  # what CUDA says in a child if somebody used it in the parent
_OLD_DRIVER = "cudaErrorInsufficientDriver"  # also where there is no driver at all

# Of what looks for CUDA on first use.  A fork waits for it: a child that loads a module which another thread of its
# parent was loading would wait for that thread forever.
_loading = threading.RLock()
os.register_at_fork(before=_loading.acquire, after_in_parent=_loading.release, after_in_child=_loading.release)

_cuda_driver = None
_other_drivers: dict[tuple, Driver] = {}  # of pinned, managed and the driver's own memory
_cuda_missing = None


def _load_cuda(again=False):
    """The one driver table of this process's CUDA; SourceError where there is none, ForkedProcessError in a child.

    A failure is remembered, unless the caller wants CUDA and nothing else: then it is tried `again`.
    """
    global _cuda_driver, _cuda_missing
    if _cuda_driver is None and (again or _cuda_missing is None):
        try:
            with _loading:
                _check_major()
                from vpool._storage.cuda_driver import CudaDriver
            _cuda_driver = CudaDriver()
        except (ImportError, RuntimeError) as reason:
            if forks() and _NOT_AFTER_FORK in str(reason):
                raise ForkedProcessError(f"{_FORKED} ({reason})") from None
            _cuda_missing = str(reason)
            if _OLD_DRIVER in _cuda_missing:
                _cuda_missing += (
                    f": this machine has no driver, or one older than CUDA {CUDA_MAJOR}, which vpool was built for"
                )
    if _cuda_driver is None:
        raise SourceError(f"CUDA cannot be used here: {_cuda_missing}", "cudaErrorNoDevice")
    if _cuda_driver.forked:
        raise ForkedProcessError(_FORKED)
    return _cuda_driver


def cuda_missing():
    """Why CUDA cannot be used in this process, as one sentence; None where it can."""
    try:
        _load_cuda()
    except SourceError as error:
        return str(error)
    return None


def _check_major():
    """The functions of another major version may take other arguments: nothing of it is called, or even loaded."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        found = version("cuda-bindings")
    except PackageNotFoundError:
        return  # the import tells
    if found.partition(".")[0] != str(CUDA_MAJOR):
        raise ImportError(
            f"vpool was built for CUDA {CUDA_MAJOR}, and cuda-bindings {found} is installed:"
            f' pip install "cuda-python>={CUDA_MAJOR},<{CUDA_MAJOR + 1}"'
        )


def Cuda(device=None):
    """cudaMalloc and cudaFree on one device.

    Parameters
    ----------
    device : int, optional
        Ordinal; the thread's current device if not given.

    Raises
    ------
    SourceError
        Where CUDA cannot be used; the message says why.
    ForkedProcessError
        In a child of a process that used CUDA.
    ValueError
        For a device that is not there; the message says how many there are.
    """
    return _cuda_source(_load_cuda(again=True), device)


def CudaVmm(device=None, *, handle=None, tight=False, peers=(), exportable=False):
    """Virtual memory of one device: handles that are mapped where they are needed.

    Parameters
    ----------
    device : int, optional
        Ordinal; the thread's current device if not given.
    handle : int or str, optional
        Bytes of a handle where nothing else decides, a multiple of 2 MiB; 34 MiB if not given.  A handle moves whole
        or not at all, so smaller ones waste less memory and cost more driver calls.
    tight : bool
        Waste as little memory as possible: handles of 2 MiB, at about ten times the driver time.
    peers : iterable of int
        Further devices that may access the memory.
    exportable : bool
        Whether another library of this process can export the handles, as file descriptors, by
        ``cuMemRetainAllocationHandle``.

    Raises
    ------
    SourceError
        Where CUDA cannot be used, or the device has no virtual memory; the message says why.
    ForkedProcessError
        In a child of a process that used CUDA.
    TypeError, ValueError
        For a device that is not there, a size that is no multiple of 2 MiB, or `tight` that is no bool.
    """
    driver = _load_cuda(again=True)
    peers = [_ordinal(driver, peer) for peer in peers]
    options = {"peers": peers, "exportable": exportable, **_moves(handle, tight)}
    return _cuda_source(driver, device, "cuda-vmm", MappedSource, **options)


def SimulatedVmm(capacity=None, *, handle=None, tight=False):
    """Addresses without memory, modelled on `CudaVmm` with the time its driver's calls take.

    Parameters
    ----------
    capacity : int or str, optional
        Bytes that the device has; unbounded if not given.
    handle, tight
        As for `CudaVmm`.
    """
    size = _UNBOUNDED if capacity is None else parse_size(capacity, "capacity")
    return MappedSource(SimulatedDriver(size), "simulated-vmm", has_memory=False, **_moves(handle, tight))


def _moves(handle, tight):
    """How a mapped source moves memory, as arguments for it."""
    if not isinstance(tight, bool):
        raise TypeError(f"tight must be a boolean, not {type(tight).__name__}")
    if tight:
        return {
            "handle_bytes": MAPPED_GRANULE if handle is None else parse_size(handle, "handle"),
            "slack": 0.005,
        }
    return {} if handle is None else {"handle_bytes": parse_size(handle, "handle")}


def CudaAsync(device=None):
    """Segments from the driver's own default pool of a device: cudaMallocAsync and cudaFreeAsync.

    For programs that share a device with others that use cudaMallocAsync: what they freed and the driver still holds
    serves here, and the other way round.

    Parameters and errors are those of `Cuda`; also SourceError for a device that has no such pool.
    """
    device = _ordinal(_load_cuda(again=True), device)
    return _cuda_source(_driver_of("cuda-async", device), device, "cuda-async")


def Managed(device=None):
    """Memory that moves between the host and the device that uses it: cudaMallocManaged.

    The host may use a block while no work does that has it.  The limit of a pool is a share of the device's memory, so
    that it never has to be moved out for want of room.

    Parameters and errors are those of `Cuda`.
    """
    device = _ordinal(_load_cuda(again=True), device)
    return _cuda_source(_driver_of("managed"), device, "managed", host_accessible=True)


def Pinned(device=None):
    """Page-locked memory of the host, for copies that run beside other work: cudaHostAlloc.

    Every device of this process can use it, at the same addresses.  A pool's limit is a share of the host's memory;
    what is pinned the system cannot swap out, so choose one (``vpool.Dynamic(limit="4GiB")``).

    Parameters and errors are those of `Cuda`; the device is the one whose streams order the memory's use.
    """
    device = _ordinal(_load_cuda(again=True), device)
    return _cuda_source(_driver_of("pinned"), device, "pinned", host_accessible=True)


def _driver_of(kind, *arguments):
    """The driver of this process for another kind of CUDA's memory; SourceError where there is none."""
    from vpool._storage import cuda_driver

    if (kind, *arguments) not in _other_drivers:
        made = {
            "cuda-async": cuda_driver.AsyncDriver,
            "managed": cuda_driver.ManagedDriver,
            "pinned": cuda_driver.PinnedDriver,
        }
        try:
            _other_drivers[kind, *arguments] = made[kind](*arguments)
        except RuntimeError as reason:
            raise SourceError(f"source {kind!r} cannot be used here: {reason}", "cudaErrorNotSupported") from None
    return _other_drivers[kind, *arguments]


def _cuda_source(driver, device, name="cuda", kind=Source, **options):
    try:
        source = kind(driver, name, _ordinal(driver, device), **options)
        if forks():
            source.memory()  # the first call that needs the device tells what a fork has broken
    except SourceError as error:
        if forks() and error.name == _NOT_AFTER_FORK:
            raise ForkedProcessError(f"{_FORKED} ({error})") from None
        raise
    return source


def Host():
    """Ordinary memory of this process, page-aligned and writable."""
    return Source(HostDriver(), "host", host_accessible=True)


def host_beside(source):
    """Memory of the host for what a source's memory holds: page-locked where the source is CUDA's."""
    if source.driver is _cuda_driver and not isinstance(source.driver, SimulatedDriver):
        return Pinned(source.device)
    return Host()


def Simulated(capacity=None, *, base_offset=0):
    """Addresses without memory, for replay, tuning and tests.

    Parameters
    ----------
    capacity : int or str, optional
        Bytes that the device has; unbounded if not given.
    base_offset : int
        Bytes by which the first segment's address is past a multiple of 2 MiB.
    """
    size = _UNBOUNDED if capacity is None else parse_size(capacity, "capacity")
    return Source(SimulatedDriver(size, operator.index(base_offset)), "simulated", has_memory=False)


def _ordinal(driver, device):
    """A device's ordinal, checked; the current one for None."""
    current, count = driver.devices()
    if device is None:
        return current
    device = checked_ordinal(device)
    if not 0 <= device < count:
        raise ValueError(f"no device {device}: this machine has {count}, numbered from 0")
    return device


def checked_ordinal(device):
    """A device's ordinal as an int; TypeError for what is no integer."""
    if isinstance(device, bool):
        raise TypeError("device must be an integer, not a bool")
    return operator.index(device)


def current_device():
    """Ordinal of the calling thread's current device; 0 without CUDA, and in a child that cannot use it."""
    if _cuda_driver is None and _cuda_missing is not None:
        return 0  # as below, without an exception: each call of `vpool.allocate` asks
    try:
        return _load_cuda().current()
    except (SourceError, ForkedProcessError):
        return 0


BY_NAME: dict[str, Callable[..., Source]] = {
    "cuda": Cuda,
    "cuda-async": CudaAsync,
    "cuda-vmm": CudaVmm,
    "host": Host,
    "managed": Managed,
    "pinned": Pinned,
    "simulated": Simulated,
    "simulated-vmm": SimulatedVmm,
}
# Of these a source is of one device.
_ON_DEVICES = ("cuda", "cuda-async", "cuda-vmm", "managed", "pinned")


def resolve(source=None, device=None):
    """The source that a name, an object or None means, on the given device.

    None takes the best that works here: ``"cuda"``, else ``"host"``.
    """
    if isinstance(source, Source):
        if device is not None and _ordinal(source.driver, device) != source.device:
            raise ValueError(f"the source is of device {source.device}, not {device}")
        return source
    if source is None:
        try:
            driver = _load_cuda()
        except SourceError:
            source = "host"
        else:
            return _cuda_source(driver, device)  # a device that does not answer is no reason to lend host memory
    if not isinstance(source, str):
        raise TypeError(f"source must be a name or a vpool source, not {type(source).__name__}")
    if source not in BY_NAME:
        names = ", ".join(f'"{name}"' for name in sorted(BY_NAME))
        raise ValueError(f"no source {source!r}; the sources are {names}")
    if source in _ON_DEVICES:
        return BY_NAME[source](device)
    made = BY_NAME[source]()
    _ordinal(made.driver, device)
    return made

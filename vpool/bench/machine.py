"""What a run was made on: the machine and the versions of what is installed."""

import contextlib
import datetime
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

from vpool.version import __version__

__all__ = ["cores", "machine", "packages"]

_PACKAGES = (
    *("numpy", "cuda-bindings", "cuda-core", "nvidia-cuda-runtime", "cupy-cuda13x", "rmm-cu13", "librmm-cu13", "torch"),
)


def cores():
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine():
    """The processor, its load, the devices and their driver; and the day."""
    return {
        "processor": _processor(),
        "cores": cores(),
        "load": round(os.getloadavg()[0], 1),
        "system": platform.platform(terse=True),
        "devices": _devices(),
        "date": datetime.date.today().isoformat(),
    }


def packages():
    """Versions of vpool, Python and everything installed that is measured."""
    found = {"vpool": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _processor():
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _devices():
    """Name and driver of each device, as NVIDIA's own tool tells them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line.split(",") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return [{"name": name.strip(), "driver": rest[0].strip()} for name, *rest in lines if rest]

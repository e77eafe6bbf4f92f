"""``vpool doctor``."""

import platform
from importlib.metadata import PackageNotFoundError, version

from vpool import sources
from vpool.errors import SourceError
from vpool.sizes import format_bytes
from vpool.tables import listing
from vpool.version import __version__

HELP = "Tell what this machine offers: CUDA, devices, memory, frameworks, and the default source."

_PACKAGES = ("numpy", "cuda-bindings", "torch", "cupy-cuda13x", "cupy-cuda12x", "numba-cuda", "rmm-cu13", "jax", "rich")


def prepare(parser):
    pass


def run(args):
    found = {
        "vpool": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _installed(name) for name in _PACKAGES if _installed(name)},
        "host": _memory(sources.Host()),
        "cuda": _cuda(),
        "default_source": sources.resolve().name,
    }
    if not args.json:
        print(listing(_lines(found)))
    return found


def _installed(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _memory(source):
    free, total = source.memory()
    return {"free_bytes": free, "total_bytes": total}


def _cuda():
    """What CUDA offers, or why it cannot be used."""
    try:
        first = sources.Cuda()
    except SourceError as error:
        return {"usable": False, "reason": str(error), "devices": []}
    devices = []
    for ordinal in range(first.driver.devices()[1]):
        try:
            devices.append({"device": ordinal, **_memory(sources.Cuda(ordinal))})
        except SourceError as error:
            devices.append({"device": ordinal, "reason": str(error)})
    return {"usable": True, "reason": None, "devices": devices}


def _lines(found):
    lines = [(name, found[name]) for name in ("vpool", "python", "platform")]
    lines += [(name, number) for name, number in found["packages"].items()]
    lines.append(("host memory", _size(found["host"])))
    if not found["cuda"]["usable"]:
        lines.append(("CUDA", found["cuda"]["reason"]))
    for device in found["cuda"]["devices"]:
        lines.append((f"CUDA device {device['device']}", device.get("reason") or _size(device)))
    lines.append(("default source", found["default_source"]))
    return lines


def _size(memory):
    return f"{format_bytes(memory['free_bytes'])} free of {format_bytes(memory['total_bytes'])}"

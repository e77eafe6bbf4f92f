"""Which device of a file's is read."""

from vpool.errors import FormatError

__all__ = ["chosen"]

_NAMED = 8


def chosen(devices, wanted, left_out=()):
    """The device to read, and a sentence about the others or None.

    Parameters
    ----------
    devices : dict
        What counts for each device, by its name: the one with the most is read.
    wanted : object or None
        The name of the device that was asked for.
    left_out : iterable
        Devices that are read only when they are asked for.
    """
    if wanted is None:
        offered = [name for name in devices if name not in left_out]
        best = max(offered, key=devices.get, default=None)
    else:
        best = next((name for name in devices if str(name) == str(wanted)), None)
        if best is None and devices:
            raise FormatError(f"no events of device {wanted}; the file has {_listed(devices)}")
    others = [name for name in devices if name != best]
    return best, f"read device {best}, not {_listed(others)}: name a device to read it" if others else None


def _listed(names):
    names = list(names)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(str(name)[:40] for name in names[:_NAMED]) + more

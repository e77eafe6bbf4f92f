"""A device that is not there, for the plug-ins of frameworks that are."""

import sys

import vpool
from tests.helpers.pools import MIB
from vpool._storage.fake_cuda import FakeCudaDriver
from vpool._storage.source import Source


class Stream:
    """A stream that lives as long as this, as those of frameworks do."""

    def __init__(self, driver, **options):
        self.ptr = driver.create_stream(**options)


def fake_pool(strategy=None, *, name="cuda", device=0, driver=None, **options):
    """A pool on a device of ordinary memory, with streams that are modelled."""
    driver = driver or FakeCudaDriver(64 * MIB, devices=2, pins=name == "pinned")
    strategy = strategy or vpool.Dynamic(initial=MIB, limit=4 * MIB)
    source = Source(driver, name, device, checks_handles=False, host_accessible=name in ("pinned", "managed"))
    return vpool.Pool(strategy, source, **options)


def without(monkeypatch, *names):
    """As where packages are not installed."""
    for name in names:
        for loaded in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setitem(sys.modules, name, None)

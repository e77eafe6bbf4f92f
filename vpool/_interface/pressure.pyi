from collections.abc import Callable

from vpool._management.core import Core

class Pressure:
    def __new__(cls, core: Core) -> Pressure: ...
    def add(self, fn: Callable[[int], object], priority: int) -> None: ...

from collections.abc import Callable

from vpool._management.areas import Areas

class Pressure:
    def __new__(cls, areas: Areas) -> Pressure: ...
    def add(self, fn: Callable[[int], object], priority: int) -> None: ...

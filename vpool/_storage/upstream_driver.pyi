from collections.abc import Callable

from vpool._storage.driver import Driver

class UpstreamDriver(Driver):
    def __new__(
        cls, base: Driver, lend: Callable[[int], int], take: Callable[[int, int], object]
    ) -> UpstreamDriver: ...
    @property
    def base(self) -> Driver: ...

from collections.abc import Iterable

from vpool._storage.driver import Driver
from vpool._storage.source import Source

class MappedSource(Source):
    def __new__(
        cls,
        driver: Driver,
        name: str,
        device: int = 0,
        *,
        handle_bytes: int = 34 << 20,
        slack: float = 0.01,
        peers: Iterable[int] = (),
        exportable: bool = False,
        **options: object,
    ) -> MappedSource: ...
    @property
    def handle_bytes(self) -> int: ...
    @property
    def slack(self) -> float: ...
    @property
    def exportable(self) -> bool: ...

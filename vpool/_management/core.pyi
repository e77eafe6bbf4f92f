from vpool._storage.source import Source

RUNG_NAMES: tuple[str, ...]

class Core:
    def __new__(cls, source: Source, limit: int, initial: int, factor: float, step: int) -> Core: ...
    @property
    def source(self) -> Source: ...

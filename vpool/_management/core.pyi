from vpool._storage.source import Source

RUNG_NAMES: tuple[str, ...]

class Core:
    @property
    def source(self) -> Source: ...

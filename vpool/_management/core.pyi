from vpool._storage.source import Source

class Core:
    @property
    def source(self) -> Source: ...

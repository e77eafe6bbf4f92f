from vpool._interface.deferred import Deferred
from vpool._interface.pool import Pool

def bind(pool: Pool, tag: str | None = None) -> tuple[int, int, Deferred]: ...

from vpool._interface.deferred import Deferred
from vpool._interface.pool import Pool

def bind(pool: Pool) -> tuple[int, int, Deferred]: ...

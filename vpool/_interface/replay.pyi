from vpool._interface.pool import Pool
from vpool.trace import Trace

class Replayer:
    def __init__(
        self,
        pool: Pool,
        trace: Trace,
        streams: dict[int, int],
        pessimistic: bool = False,
        patterns: bool = False,
        maintain: bool = False,
        lag: int = 0,
    ) -> None: ...
    @property
    def nanoseconds(self) -> int: ...
    worst_ns: int
    @property
    def verified(self) -> int: ...
    @property
    def mismatch(self) -> int: ...
    @property
    def source_failed(self) -> str | None: ...
    def run(self, begin: int, end: int) -> int: ...
    def finish(self) -> bool: ...

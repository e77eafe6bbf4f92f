import numpy as np
from numpy.typing import NDArray

from vpool._interface.pool import Pool

class Replayer:
    def __init__(
        self,
        pool: Pool,
        op: NDArray[np.uint8],
        number: NDArray[np.uint32],
        nbytes: NDArray[np.uint64],
        allocations: int,
        patterns: bool = False,
    ) -> None: ...
    @property
    def nanoseconds(self) -> int: ...
    @property
    def mismatch(self) -> int: ...
    def run(self, begin: int, end: int) -> int: ...
    def finish(self) -> bool: ...

"""What Python code sees of `vpool._management.planned`."""

from numpy.typing import ArrayLike

from vpool._management.core import Core

class Planned:
    def __new__(cls, fixed: Core, nbytes: ArrayLike, offset: ArrayLike, below: ArrayLike) -> Planned: ...
    def figures(self) -> tuple[int, int, int]: ...

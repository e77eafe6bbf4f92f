from collections.abc import Callable

from vpool._interface.pool import Pool

class Blocks:
    def __new__(
        cls,
        pool_of: Callable[[int], Pool],
        current_stream: Callable[[], object],
        error_of: Callable[[Exception], BaseException],
        tag: str | None = None,
    ) -> Blocks: ...
    def functions(self) -> tuple[int, int, int]: ...

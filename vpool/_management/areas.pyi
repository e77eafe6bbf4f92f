"""What Python code sees of `vpool._management.areas`."""

from vpool._management.core import Core

class Areas:
    core: Core
    fixed: Core | None
    block_sizes: tuple[tuple[int, int], ...]

class CoreNotTaken(Exception): ...

from typing import SupportsIndex

from vpool._interface.buffer import Buffer
from vpool._interface.upkeep import Upkeep
from vpool.trimming import Suspended

class Mover(Upkeep):
    def resize(self, buf: Buffer, nbytes: SupportsIndex, stream: object = None) -> None: ...
    def suspend(self, tag: str | None = None, offload: bool = False) -> Suspended: ...
    def resume(self) -> int: ...

from types import TracebackType
from typing import Self

from vpool._management.core import Core

class stream:
    stream: object
    def __init__(self, stream: object) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

class StreamTable:
    def __new__(cls, core: Core) -> StreamTable: ...
    def thread_ended(self, slot: int, thread: int) -> None: ...
    def forget(self, stream: object) -> None: ...

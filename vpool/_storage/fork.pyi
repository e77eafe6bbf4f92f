from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")

def forks() -> int: ...

class PerProcess(Generic[_T]):
    def __init__(self, make: Callable[[], _T]) -> None: ...
    @property
    def here(self) -> _T: ...

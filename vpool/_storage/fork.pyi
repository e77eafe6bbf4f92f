from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

def forks() -> int: ...

class PerProcess(Generic[T]):
    def __init__(self, make: Callable[[], T]) -> None: ...
    @property
    def here(self) -> T: ...

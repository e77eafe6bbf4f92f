from collections.abc import Sequence

FUNCTIONS: tuple[str, ...]

class Heaps:
    def __new__(cls, name: str, domain: int, functions: Sequence[int]) -> Heaps: ...

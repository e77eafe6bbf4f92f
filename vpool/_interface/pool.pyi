from collections.abc import Callable, Iterable
from os import PathLike
from types import TracebackType
from typing import Self, SupportsIndex

from vpool._interface.buffer import Buffer
from vpool._interface.mover import Mover
from vpool._storage.source import Source
from vpool.ipc import IpcHandle
from vpool.modes import Modes
from vpool.placement import Plan
from vpool.policy import Policy
from vpool.strategies import Strategy

class Pool(Mover):
    def __new__(
        cls,
        strategy: Strategy | None = None,
        source: str | Source | None = None,
        device: int | None = None,
        name: str | None = None,
        *,
        on_pressure: str = "wait",
        rounding: SupportsIndex = 256,
        minimum_remainder: SupportsIndex = 256,
        maintain_every: float | None = None,
        trim_marks: tuple[int | str, int | str] | None = None,
        captures: bool = True,
        debug: str | Iterable[str] | None = None,
        plan: Plan | str | PathLike[str] | None = None,
    ) -> Self: ...
    @classmethod
    def from_policy(
        cls,
        policy: str | PathLike[str] | Policy | Strategy,
        source: str | Source | None = None,
        device: int | None = None,
        name: str | None = None,
        debug: str | Iterable[str] | None = None,
    ) -> Self: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...
    @property
    def strategy(self) -> Strategy: ...
    @property
    def debug(self) -> Modes: ...
    @property
    def plan(self) -> Plan | None: ...
    @property
    def source(self) -> Source: ...
    @property
    def device(self) -> int: ...
    def allocate(self, nbytes: SupportsIndex, stream: object = None, alignment: SupportsIndex = 256) -> int: ...
    def deallocate(self, ptr: SupportsIndex | Buffer, stream: object = None) -> None: ...
    def empty(self, nbytes: SupportsIndex, stream: object = None) -> Buffer: ...
    def record_stream(self, ptr: SupportsIndex | Buffer, stream: object) -> None: ...
    def ipc_handle(self, ptr: SupportsIndex | Buffer) -> IpcHandle: ...
    def forget_stream(self, stream: object) -> None: ...
    def release_capture(self, id: int) -> None: ...
    def share_capture(self, id: int, other: int) -> None: ...
    def on_pressure(self, fn: Callable[[int], object], priority: int = 0) -> None: ...
    def apply(self, policy: str | PathLike[str] | Policy | Strategy) -> None: ...
    def set_limit(self, nbytes: int | str) -> None: ...
    def close(self) -> None: ...

"""Arguments that no program should pass: wrong, out of range, or with code of their own that raises or calls back."""

import numpy as np


class Refusal(Exception):
    """What hostile code raises; only from there may it come."""


class Index:
    """An integer-like that runs code when it is asked for its number."""

    def __init__(self, number, act=None):
        self.number, self.act = number, act

    def __index__(self):
        if self.act is not None:
            self.act()
        return self.number


class Stream:
    """A stream by cuda.core's protocol, that runs code when it is asked for its handle."""

    def __init__(self, answer, act=None):
        self.answer, self.act = answer, act

    def __cuda_stream__(self):
        if self.act is not None:
            self.act()
        return self.answer


class Handle:
    """A stream as CuPy has it, whose attribute may raise."""

    def __init__(self, handle, act=None):
        self.handle_, self.act = handle, act

    @property
    def ptr(self):
        if self.act is not None:
            self.act()
        return self.handle_


class Slotted:
    """A stream object that nothing can refer to weakly."""

    __slots__ = ("handle",)

    def __init__(self, handle):
        self.handle = handle


class Liar(int):
    """An int that says nothing right of itself."""

    def __index__(self):
        raise Refusal("index")

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


def refuse(*arguments):
    raise Refusal("hostile code")


NO_NUMBERS = (
    None, True, False, 1.5, 1.0, float("nan"), float("inf"), 2j, "8", "", "-1", "1e9", b"8", [8], (), {}, object(),
    object, np.bool_(True), np.float64(8), np.array([1, 2]), np.array([], int), Index("8"), Index(None), Ellipsis,
)  # fmt: skip
NUMBERS = (
    -1, -(2**63), -(2**64), -(2**200), 1, 255, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 510, 2**64 - 1,
    2**64, 2**200, np.int8(-1), np.int64(-5), np.uint64(2**64 - 1), np.array(2**40), Liar(300), Index(2**64), Index(-1),
)  # fmt: skip
NO_STREAMS = (
    True, -1, 2**64, 2**200, 1.5, "7", "", b"7", object(), object, [], Stream(None), Stream(()), Stream((0,)),
    Stream((0, None)), Stream((0, -1)), Stream((0, 2**64)), Stream((0, 1.5)), Stream("ab"), Stream(5), Stream({}),
    Stream((0, Index(-1))), Stream, Handle(None), Handle("x"), Handle(-1), Handle(2**64), Slotted(2**65), np.float64(7),
)  # fmt: skip

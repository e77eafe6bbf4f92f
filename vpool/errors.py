"""The exceptions of vpool.

Error
├── OutOfMemoryError        also a MemoryError
├── InvalidPointerError     also a ValueError
│   ├── DoubleFreeError
│   └── ForeignPointerError
├── ClosedPoolError         also a RuntimeError
├── ForkedProcessError      also a RuntimeError
├── SourceError             also a RuntimeError
├── GuardError              also a RuntimeError
├── PatternError            also a RuntimeError
└── FormatError             also a ValueError

After any of them no live block, limit or live figure has changed; caches may have been given back.
"""

__all__ = [
    "ClosedPoolError",
    "DoubleFreeError",
    "Error",
    "ForeignPointerError",
    "ForkedProcessError",
    "FormatError",
    "GuardError",
    "InvalidPointerError",
    "OutOfMemoryError",
    "PatternError",
    "SourceError",
]


class Error(Exception):
    """Root of vpool's exceptions."""


class OutOfMemoryError(Error, MemoryError):
    """The pool cannot serve a request.

    Attributes
    ----------
    requested : int
        Bytes that were asked for.
    report : vpool.Report or None
        The pool at that moment.  It holds figures and no memory.
    steps : tuple of str
        What the pool tried, in order.
    shortage : vpool.shortage.Shortage or None
        Who holds memory, and what would help.  The text of the error ends with it.
    """

    def __init__(self, message, requested=0, report=None, steps=(), shortage=None):
        super().__init__(message)
        self.requested = requested
        self.report = report
        self.steps = tuple(steps)
        self.shortage = shortage

    def __str__(self):
        return self.args[0] if self.shortage is None else f"{self.args[0]}\n{self.shortage}"

    def __reduce__(self):
        return type(self), (self.args[0], self.requested, self.report, self.steps, self.shortage)


class InvalidPointerError(Error, ValueError):
    """An address that is not a live block of this pool."""


class DoubleFreeError(InvalidPointerError):
    """An address whose block is free already."""


class ForeignPointerError(InvalidPointerError):
    """An address that this pool never gave: of somebody else, or inside a block."""


class ClosedPoolError(Error, RuntimeError):
    """The pool was closed."""


class ForkedProcessError(Error, RuntimeError):
    """The pool belongs to the parent process."""


class SourceError(Error, RuntimeError):
    """A driver call failed.

    Attributes
    ----------
    name : str
        CUDA's name of the error, as ``"cudaErrorIllegalAddress"``.
    """

    def __init__(self, message, name=""):
        super().__init__(message)
        self.name = name

    def __reduce__(self):
        return type(self), (self.args[0], self.name)


class GuardError(Error, RuntimeError):
    """Memory was written that was nobody's to write: beside a block, or in a block that was freed.

    Attributes
    ----------
    address : int
        Of the block.
    requested : int
        Its bytes, as they were asked for.
    offset : int
        Where the damaged byte that is nearest to the block lies, or the first inside it, from the block's start.
    found : int
        The value that was found there.
    """

    def __init__(self, message, address=0, requested=0, offset=0, found=0):
        super().__init__(message)
        self.address = address
        self.requested = requested
        self.offset = offset
        self.found = found

    def __reduce__(self):
        return type(self), (self.args[0], self.address, self.requested, self.offset, self.found)


class PatternError(Error, RuntimeError):
    """A block did not hold at its end what a replay wrote at its start: two owners had its memory."""


class FormatError(Error, ValueError):
    """A file that cannot be read; the message names the place in it."""

"""Arguments that are not what the quick case expects: converted, or refused with the right error."""
import operator

from libc.stdint cimport int64_t, uint64_t

from vpool._base.types cimport GRANULE, MAX_ALIGNMENT

from vpool.errors import ForeignPointerError


def _index(value, what):
    """An integer-like, as an int; a bool is refused, since it hides mistakes."""
    if isinstance(value, bool):
        raise TypeError(f"{what} must be an integer, not a bool")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be an integer, not {type(value).__name__}") from None


cdef int64_t checked_size(nbytes) except -1:
    number = _index(nbytes, "nbytes")
    if number < 0:
        raise ValueError(f"nbytes must not be negative, got {number}")
    if number >> 63:
        raise OverflowError(f"nbytes must fit 63 bits, got {number}")
    return number


cdef uint64_t checked_alignment(alignment) except 0:
    """An alignment in bytes, lifted to the granule."""
    number = _index(alignment, "alignment")
    if number <= 0 or number & (number - 1) or number > MAX_ALIGNMENT:
        raise ValueError(f"alignment must be a power of two of at most 2 MiB, got {number}")
    return max(number, GRANULE)


cdef uint64_t checked_rounding(rounding) except 0:
    number = _index(rounding, "rounding")
    if number < GRANULE or number & (number - 1) or number > MAX_ALIGNMENT:
        raise ValueError(f"rounding must be a power of two from 256 bytes to 2 MiB, got {number}")
    return number


cdef uint64_t checked_remainder(remainder) except 0:
    number = _index(remainder, "minimum_remainder")
    if number < GRANULE or number >> 63:
        raise ValueError(f"minimum_remainder must be at least {GRANULE} bytes, got {number}")
    return number


cdef uint64_t checked_address(ptr) except? 0:
    number = _index(ptr, "an address")
    if number < 0 or number >> 64:
        raise ForeignPointerError(f"{number:#x} is no address of 64 bits")
    return number

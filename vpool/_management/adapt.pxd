"""The cache policy of an adaptive pool: when idle memory goes back to the source."""
from vpool._management.core cimport Core


cdef void adapt_look(Core core, bint now) noexcept nogil

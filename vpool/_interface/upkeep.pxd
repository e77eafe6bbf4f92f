"""What a pool tells about itself, and what it does to stay in shape."""
from vpool._interface.lender cimport Lender


cdef class Upkeep(Lender):
    pass

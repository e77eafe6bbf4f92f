"""What a compiled module gets with ``cimport vpool``."""
from vpool._interface.buffer cimport Buffer
from vpool._interface.pool cimport Pool

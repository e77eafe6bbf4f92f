"""What a compiled module gets with ``cimport vpool``."""
from vpool._interface.pool cimport Buffer, Pool

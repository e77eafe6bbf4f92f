"""Columns of numbers as text for a page: packed, compressed, and unpacked again by a browser."""

import base64
import json
import struct
import zlib

import numpy as np

__all__ = ["Packed"]

_LEVEL = 6  # of compression; 9 takes four times as long for a twentieth less


class Packed:
    """A header and columns of numbers from 0 to 2**53.

    A column is cut into planes: the lowest byte of every number, then the next one, as many as the largest number
    needs.  Numbers that never fall are kept as differences.  So bytes stand together that are alike, which compression
    likes.
    """

    def __init__(self):
        self._columns = []
        self._planes = []

    def add(self, name, numbers, rising=False):
        """Add a column; one that is `rising` never falls."""
        values = np.asarray(numbers).astype(np.int64)
        if len(values) and (int(values.min()) < 0 or int(values.max()) > 2**53):
            raise ValueError(
                f"a page holds whole numbers from 0 to 2**53: {name} has some from {values.min()} to {values.max()}"
            )
        if rising and len(values):
            values = np.diff(values, prepend=0)
            if int(values.min()) < 0:
                raise ValueError(f"column {name} falls")
        width = max(1, -(-int(values.max(initial=0)).bit_length() // 8))
        planes = values.astype("<u8").view(np.uint8).reshape(len(values), 8)[:, :width]
        self._columns.append({"name": name, "length": len(values), "width": width, "rising": rising})
        self._planes.append(np.ascontiguousarray(planes.T).tobytes())

    def text(self, header):
        """Everything as base64."""
        told = json.dumps({**header, "columns": self._columns}).encode()
        raw = b"".join([struct.pack("<I", len(told)), told, *self._planes])
        return base64.b64encode(zlib.compress(raw, _LEVEL)).decode()

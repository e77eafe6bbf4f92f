"""A file that is read piece by piece, compressed or not."""

import gzip
import io
import zlib

from vpool.errors import FormatError

__all__ = ["BOMB_BYTES", "BOMB_RATIO", "Cut", "Source"]

_PIECE = 1 << 18
_LONGEST_LINE = 1 << 20
# What text compresses to stays far below this; what exceeds it was made to fill memory or disks.
BOMB_RATIO, BOMB_BYTES = 250, 1 << 26


class Cut(Exception):
    """The file ends in the middle of something."""


class Source:
    """The content of an open file, with gzip undone.

    Parameters
    ----------
    file : binary file, seekable

    Attributes
    ----------
    offset : int
        Bytes of content that were read.
    cut : bool
        The compressed data ends too early, as of a file that was not written or copied to its end.

    Raises
    ------
    FormatError
        From every method, for compressed data that is damaged or a bomb.
    """

    def __init__(self, file):
        self._file = file
        self.compressed = file.read(2) == b"\x1f\x8b"
        self.rewind()

    def rewind(self):
        """Start again."""
        self._file.seek(0)
        self._raw = gzip.GzipFile(fileobj=self._file) if self.compressed else self._file
        self.offset = 0
        self.cut = False

    def read(self, most=_PIECE):
        """Some bytes, at most so many; none at the end."""
        try:
            piece = self._raw.read1(most)
        except EOFError:
            self.cut = True
            return b""
        except (zlib.error, gzip.BadGzipFile) as reason:
            raise FormatError(f"byte {self.offset} of the content: damaged gzip data: {reason}") from None
        self.offset += len(piece)
        if self.compressed and self.offset > BOMB_BYTES and self.offset > BOMB_RATIO * self._file.tell():
            raise FormatError(f"byte {self.offset} of the content: gzip data that grows without end")
        return piece

    def head(self, most):
        """The first bytes; the next read starts again."""
        self.rewind()
        head = b""
        while len(head) < most and (piece := self.read(most - len(head))):
            head += piece
        self.rewind()
        return head

    def pieces(self):
        """All bytes, piece by piece."""
        while piece := self.read():
            yield piece

    def lines(self):
        """Pairs of the number of a line, from 1, and its bytes without its end.

        The last one is None if the file does not end with the end of a line, after that line itself.
        """
        number, rest = 0, b""
        for piece in self.pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                number += 1
                yield number, line
            if len(rest) > _LONGEST_LINE:
                raise FormatError(f"line {number + 1}: longer than {_LONGEST_LINE} bytes")
        if rest:
            yield number + 1, rest
            yield number + 1, None

    def seekable(self):
        """A file of the whole content, for what cannot be read in one pass."""
        self.rewind()
        if not self.compressed:
            return self._file
        content = io.BytesIO()
        for piece in self.pieces():
            content.write(piece)
        if self.cut:
            raise FormatError(f"byte {self.offset} of the content: the gzip data ends too early")
        content.seek(0)
        return content

"""JSON that is read value by value, so that only one small value is in memory at a time."""

import codecs
import json
import re

from vpool.errors import FormatError
from vpool.formats.source import Cut

__all__ = ["JsonStream", "parsed_line"]

_BEYOND_SPACE = re.compile(r"[^ \t\r\n]")
_DECODER = json.JSONDecoder()
# Characters of one value, and levels of what is walked through.
_LARGEST_VALUE = 1 << 24
_DEEPEST = 64
# What may be left of a value that the end of the file cut, if it is no text.
_BEGUN = re.compile(r"[\w.+\\-]*\s*")


class JsonStream:
    """A walk through one JSON text.

    At each value the caller takes it whole with `value`, walks into it with `items` or `members`, or leaves it
    with `skip`.  The end of the file inside of anything is `Cut`; what is no JSON is a `FormatError`.

    Parameters
    ----------
    source : Source
    """

    def __init__(self, source):
        self._source = source
        self._decode = codecs.getincrementaldecoder("utf-8-sig")(errors="replace").decode
        self._text = ""
        self._at = self._before = 0
        self._ended = False
        self._depth = 0

    @property
    def offset(self):
        """Characters before what comes next."""
        return self._before + self._at

    def peek(self):
        """The first character of what comes next; '' at the end."""
        while True:
            found = _BEYOND_SPACE.search(self._text, self._at)
            if found:
                self._at = found.start()
                return found[0]
            self._at = len(self._text)
            if not self._more():
                return ""

    def value(self):
        """The next value, whole."""
        if not self.peek():
            raise Cut
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                # A number may go on.
                if end < len(self._text) or self._text[end - 1] in '"}]' or not self._more():
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                place = error.pos - self._at
                if not self._more():
                    self._refuse(self._at + place, error.msg)
            except RecursionError:
                raise self.error("values within values without end") from None
            except ValueError as error:
                raise self.error(error) from None

    def items(self):
        """Walk through an array: before each item a number from 0; the caller takes the item."""
        for number, _ in enumerate(self._walk("[", "]", lambda: None)):
            yield number

    def head_of_items(self, most):
        """The first items of an array, which is then left."""
        head = []
        for _ in self.items():
            head.append(self.value())
            if len(head) == most:
                break
        return head

    def members(self):
        """Walk through an object: the name of each member; the caller takes its value."""
        yield from self._walk("{", "}", self._name)

    def skip(self):
        """Leave the next value, however large."""
        first = self.peek()
        if first in ("{", "["):
            try:
                _, self._at = _DECODER.raw_decode(self._text, self._at)
                return
            except (ValueError, RecursionError):
                pass
            for _ in self.members() if first == "{" else self.items():
                self.skip()
        else:
            self.value()

    def finish(self):
        """Nothing may follow."""
        if self.peek():
            raise self.error("more after the end")

    def error(self, reason):
        return FormatError(f"character {self.offset}: {reason}")

    def _walk(self, opening, closing, before):
        self._expect(opening)
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self.error("values within values without end")
        if self.peek() != closing:
            while True:
                yield before()
                if self.peek() != ",":
                    break
                self._at += 1
                if self.peek() == closing:
                    # Some writers leave a comma at the end.
                    break
        self._expect(closing)
        self._depth -= 1

    def _name(self):
        if self.peek() != '"':
            self._expect('"')
        name = self.value()
        self._expect(":")
        return name

    def _expect(self, character):
        found = self.peek()
        if not found:
            raise Cut
        if found != character:
            raise self.error(f"{character!r} expected, not {found!r}")
        self._at += 1

    def _more(self):
        """Read on.  Returns whether there is more."""
        if self._ended:
            return False
        if len(self._text) - self._at > _LARGEST_VALUE:
            raise self.error(f"a value of more than {_LARGEST_VALUE} characters, or none")
        # As much again as is there, or a value larger than a piece would be parsed again and again.
        wanted, pieces = max(1, len(self._text) - self._at), []
        while wanted > 0 and not self._ended:
            piece = self._source.read()
            self._ended = not piece
            pieces.append(self._decode(piece, final=self._ended))
            wanted -= len(piece)
        left = self._text[self._at :]
        self._text = left + "".join(pieces)
        self._before += self._at
        self._at = 0
        return len(self._text) > len(left)

    def _refuse(self, place, reason):
        """The file ended where a value was not complete, or this is none."""
        if reason.startswith("Unterminated string") or _BEGUN.fullmatch(self._text, place):
            raise Cut
        # Some of json's reasons end where it would name the place.
        raise FormatError(f"character {self._before + place}: {reason.rstrip().removesuffix(' at')}")


def parsed_line(line):
    """The JSON value on a line; a ValueError if it is none."""
    try:
        return json.loads(line.decode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("values within values without end") from None

"""Pickles of plain data: lists, dicts, numbers and text, and nothing that could run code.

The standard library's unpickler refuses classes when told to, but takes memory as a hostile pickle says, and keeps
all that a snapshot of gigabytes holds.  This one knows the opcodes of plain data alone, tells where it stopped,
and lets its owner put something small in the place of each dict that is complete.
"""

import codecs
import pickletools
import struct
from typing import Any

from vpool.errors import FormatError
from vpool.formats.source import Cut

__all__ = ["DROPPED", "PlainUnpickler"]

_OPCODES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
# What no honest pickle of plain data reaches: bytes of a text, of a number, of a line of a text opcode.
_LONGEST_TEXT, _LONGEST_INT, _LONGEST_LINE = 1 << 24, 16, 1 << 16
# Objects at once that are in no container yet: honest picklers put away some thousands at a time.
_DEEPEST = 1 << 17
# Containers take one byte in the file and fifty in memory; honest ones hold something.
_BYTES_PER_CONTAINER, _FREE_CONTAINERS = 8, 1000
_MARGIN = 16
# So far the opcodes of the fast loop reach.
_FARTHEST = 260


# Stands in the place of each dict that its owner drops, and of each list of such dicts alone.
DROPPED: Any = object()


class PlainUnpickler:
    """One pickle.

    Parameters
    ----------
    source : Source
    finish : callable
        Gets each dict when it is complete, and returns what takes its place everywhere: itself, or `DROPPED`.
        (Dicts that are filled key by key, as in protocol 0, are not complete before the end.)
    """

    def __init__(self, source, finish=lambda value: value):
        self._source = source
        self._finish = finish
        self._data = b""
        self._at = self._before = 0
        self._stack, self._marks, self._memo = [], [], []
        # Where in the memo is what stands at a place of the stack.
        self._places = {}
        self._containers = 0

    @property
    def offset(self):
        """Bytes before the opcode that is read."""
        return self._before + self._at

    def load(self):
        """The object.

        Raises
        ------
        FormatError
            For an opcode that is not plain data's, and for damage; with the byte where it is.
        Cut
            Where the pickle ends too early; `rest` is then what there was.
        """
        while True:
            self._run()
            if len(self._data) - self._at < _MARGIN and not self._more(1):
                raise Cut
            opcode = self._data[self._at]
            if opcode == 0x2E:
                break
            action = _ACTIONS.get(opcode)
            if action is None:
                raise self._refused(opcode)
            self._at += 1
            try:
                action(self)
            except (IndexError, TypeError, ValueError, OverflowError, struct.error) as reason:
                raise self._error(f"opcode {_OPCODES[opcode]} does not fit: {reason}") from None
        if len(self._stack) != 1 or self._marks:
            raise self._error(f"{len(self._stack)} objects at the end")
        return self._stack[0]

    def rest(self):
        """The object as far as it was read, from what was under construction; None if there is nothing."""
        while self._marks:
            begin = self._marks.pop()
            parts = self._stack[begin:]
            del self._stack[begin:]
            if self._stack:
                _put(self._stack[-1], parts)
        if len(self._stack) > 1:
            _put(self._stack[0], self._stack[1:])
        return self._stack[0] if self._stack else None

    def _run(self):
        """The opcodes that snapshots are made of, in one loop, while none can reach beyond what was read.

        It stops before any other, and near the end of what was read.
        """
        data, stack, memo, places = self._data, self._stack, self._memo, self._places
        at, last = self._at, len(self._data) - _FARTHEST
        get, push = memo.__getitem__, stack.append
        try:
            while at < last:
                opcode = data[at]
                if opcode == 0x6A:  # LONG_BINGET
                    push(get(int.from_bytes(data[at + 1 : at + 5], "little")))
                    at += 5
                elif opcode == 0x68:  # BINGET
                    push(get(data[at + 1]))
                    at += 2
                elif opcode == 0x94:  # MEMOIZE
                    places[len(stack) - 1] = len(memo)
                    memo.append(stack[-1])
                    at += 1
                elif opcode == 0x28:  # MARK
                    self._marks.append(len(stack))
                    at += 1
                elif opcode == 0x8C:  # SHORT_BINUNICODE
                    end = at + 2 + data[at + 1]
                    push(data[at + 2 : end].decode("utf-8", "replace"))
                    at = end
                elif opcode == 0x8A and data[at + 1] <= _LONGEST_INT:  # LONG1
                    end = at + 2 + data[at + 1]
                    push(int.from_bytes(data[at + 2 : end], "little", signed=True))
                    at = end
                elif opcode == 0x4B:  # BININT1
                    push(data[at + 1])
                    at += 2
                elif opcode == 0x4D:  # BININT2
                    push(data[at + 1] | data[at + 2] << 8)
                    at += 3
                elif opcode == 0x4A:  # BININT
                    push(int.from_bytes(data[at + 1 : at + 5], "little", signed=True))
                    at += 5
                else:
                    action = _OFTEN.get(opcode)
                    if action is None:
                        break
                    self._at = at
                    action(self)
                    at += 1
        except (IndexError, TypeError, ValueError, OverflowError) as reason:
            self._at = at
            raise self._error(f"opcode {_OPCODES[opcode]} does not fit: {reason}") from None
        self._at = at

    def _more(self, wanted):
        """Read on until so many bytes are there.  Returns whether they are."""
        if max(len(self._stack), len(self._marks)) > _DEEPEST:
            raise self._error(f"more than {_DEEPEST} objects that nothing holds")
        pieces, found = [self._data[self._at :]], len(self._data) - self._at
        self._before += self._at
        while found < wanted + _MARGIN and (piece := self._source.read()):
            pieces.append(piece)
            found += len(piece)
        self._data, self._at = b"".join(pieces), 0
        return found >= wanted

    def _take(self, count):
        """The next bytes."""
        if len(self._data) - self._at < count and not self._more(count):
            raise Cut
        self._at += count
        return self._data[self._at - count : self._at]

    def _line(self):
        """The text up to the end of a line."""
        while (end := self._data.find(b"\n", self._at)) < 0:
            had = len(self._data) - self._at
            if had > _LONGEST_LINE:
                raise ValueError("a line without end")
            if not self._more(had + 1):
                raise Cut
        line = self._data[self._at : end]
        self._at = end + 1
        return line

    def _error(self, reason):
        return FormatError(f"byte {self.offset} of the pickle: {reason}")

    def _refused(self, opcode):
        name = _OPCODES.get(opcode)
        if name is None:
            return self._error(f"{opcode:#04x} is no opcode; nothing of it was run")
        return self._error(f"opcode {name} is not one of plain data; nothing of it was run")

    def _contained(self, value):
        self._containers += 1
        if self._containers > _FREE_CONTAINERS + self.offset // _BYTES_PER_CONTAINER:
            raise ValueError("more lists, dicts and tuples than data")
        self._stack.append(value)

    def _marked(self):
        """What stands above the last mark, which is taken away."""
        begin = self._marks.pop()
        parts = self._stack[begin:]
        del self._stack[begin:]
        return parts

    def _text(self, count):
        if count > _LONGEST_TEXT:
            raise ValueError(f"a text of {count} bytes")
        self._stack.append(self._take(count).decode("utf-8", "replace"))

    def _int(self, count):
        if count > _LONGEST_INT:
            raise ValueError(f"a number of {count} bytes")
        self._stack.append(int.from_bytes(self._take(count), "little", signed=True))

    def _top_tuple(self, count):
        if len(self._stack) < count or (self._marks and self._marks[-1] > len(self._stack) - count):
            raise IndexError("nothing to take")
        parts = self._stack[-count:]
        del self._stack[-count:]
        self._contained(tuple(parts))

    def _pop(self):
        if self._marks and self._marks[-1] == len(self._stack):
            raise IndexError("nothing to take")
        return self._stack.pop()

    def _memoize(self):
        self._places[len(self._stack) - 1] = len(self._memo)
        self._memo.append(self._stack[-1])

    def _put(self, index):
        if index > self.offset:
            raise ValueError(f"memo of {index} entries")
        while len(self._memo) <= index:
            self._memo.append(None)
        self._memo[index] = self._stack[-1]
        self._places[len(self._stack) - 1] = index

    def _get(self, index):
        self._stack.append(self._memo[index])

    def _set_items(self, parts, complete=True):
        target = self._stack[-1]
        if type(target) is not dict or len(parts) % 2:
            raise TypeError("no dict, or a key without a value")
        # Text is hashed in time that its length limits; deep tuples and chosen numbers are not.
        if set(map(type, parts[::2])) - {str}:
            raise TypeError("a key that is no text")
        target.update(zip(parts[::2], parts[1::2], strict=True))
        if complete:
            self._replace(target, self._finish(target))

    def _append(self, parts):
        target: Any = self._stack[-1]
        if target is not DROPPED and type(target) is not list:
            raise TypeError("no list")
        if target and target is not DROPPED:
            target.extend(parts)
        elif parts and parts.count(DROPPED) == len(parts):
            # Of what was dropped nothing stays, however many parts a long list comes in.
            self._replace(target, DROPPED)
        elif target is DROPPED:
            self._replace(target, parts)
        else:
            target.extend(parts)

    def _replace(self, target, value):
        if value is target:
            return
        top = len(self._stack) - 1
        self._stack[top] = value
        index = self._places.get(top)
        if index is not None and self._memo[index] is target:
            self._memo[index] = value


def _put(target, parts):
    """Put parts into a container whose end was not read."""
    if isinstance(target, list):
        target.extend(parts)
    elif isinstance(target, dict):
        key = last = None
        for part in parts:
            if key is not None:
                target[key] = last = part
                key = None
            elif type(part) is str:
                key = part
            elif last is not None:
                # Begun inside of the value before it.
                _put(last, [part])
                last = part


def _unpack(code):
    form = struct.Struct(code)

    def action(self):
        self._stack.append(form.unpack(self._take(form.size))[0])

    return action


def _push(value):
    return lambda self: self._stack.append(value)


def _size(self, count):
    return int.from_bytes(self._take(count), "little")


def _int_line(self):
    line = self._line()
    self._stack.append({b"00": False, b"01": True}[line] if line in (b"00", b"01") else int(line))


def _string_line(self):
    line = self._line().strip()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise ValueError("no text between quotes")
    self._stack.append(codecs.escape_decode(line[1:-1])[0].decode("utf-8", "replace"))


def _proto(self):
    version = self._take(1)[0]
    if version > 5:
        raise ValueError(f"protocol {version}; this vpool reads up to protocol 5")


def _mark(self):
    self._marks.append(len(self._stack))


def _pop_one(self):
    if self._marks and self._marks[-1] == len(self._stack):
        self._marks.pop()
    else:
        self._stack.pop()


def _set_item(self):
    value = self._pop()
    self._set_items([self._pop(), value], complete=False)


def _dict(self):
    parts = self._marked()
    self._contained({})
    self._set_items(parts, complete=bool(parts))


_ACTIONS = {
    ord(code): action
    for code, action in {
        "\x80": _proto,
        "\x95": lambda self: self._take(8),
        "(": _mark,
        "0": _pop_one,
        "1": lambda self: self._marked(),
        "2": lambda self: self._stack.append(self._stack[-1]),
        "N": _push(None),
        "\x88": _push(True),
        "\x89": _push(False),
        "K": lambda self: self._stack.append(self._take(1)[0]),
        "M": _unpack("<H"),
        "J": _unpack("<i"),
        "G": _unpack(">d"),
        "\x8a": lambda self: self._int(self._take(1)[0]),
        "\x8b": lambda self: self._int(_size(self, 4)),
        "I": _int_line,
        "L": lambda self: self._stack.append(int(self._line().removesuffix(b"L"))),
        "F": lambda self: self._stack.append(float(self._line())),
        "\x8c": lambda self: self._text(self._take(1)[0]),
        "X": lambda self: self._text(_size(self, 4)),
        "\x8d": lambda self: self._text(_size(self, 8)),
        "V": lambda self: self._stack.append(self._line().decode("raw-unicode-escape")),
        "S": _string_line,
        "T": lambda self: self._text(_size(self, 4)),
        "U": lambda self: self._text(self._take(1)[0]),
        "}": lambda self: self._contained({}),
        "]": lambda self: self._contained([]),
        ")": lambda self: self._contained(()),
        "d": _dict,
        "l": lambda self: self._contained(self._marked()),
        "t": lambda self: self._contained(tuple(self._marked())),
        "\x85": lambda self: self._top_tuple(1),
        "\x86": lambda self: self._top_tuple(2),
        "\x87": lambda self: self._top_tuple(3),
        "a": lambda self: self._append([self._pop()]),
        "e": lambda self: self._append(self._marked()),
        "s": _set_item,
        "u": lambda self: self._set_items(self._marked()),
        "\x94": lambda self: self._memoize(),
        "q": lambda self: self._put(self._take(1)[0]),
        "r": lambda self: self._put(_size(self, 4)),
        "p": lambda self: self._put(int(self._line())),
        "h": lambda self: self._get(self._take(1)[0]),
        "j": lambda self: self._get(_size(self, 4)),
        "g": lambda self: self._get(int(self._line())),
    }.items()
}
# Opcodes without an argument that are frequent too.
_OFTEN = {ord(code): _ACTIONS[ord(code)] for code in "}]ue"}

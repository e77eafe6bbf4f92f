"""Damage to files, chosen by a random generator."""

# What readers of numbers, of rows, of JSON and of pickles may stumble over.
TOKENS = (
    b"0", b"-1", b"NaN", b"Infinity", b"-Infinity", b"1e400", b"1.5", b"9223372036854775807",
    b"9223372036854775808", b"18446744073709551616", b"-9223372036854775809", b"9" * 5000, b"0x", b"(nil)", b"",
    b"\x00", b"\xff\xfe", b"\n", b"\r\n", b",", b",,,,,,,", b"{", b"}", b"[", b"]", b"[" * 3000, b'{"a":' * 3000,
    b'"', b":", b"null", b"true", b"[]", b"{}", b"(", b"e", b"u", b".", b"]" * 100, b"\x85" * 100, b"h\x00", b"\x94",
    b"cos\nsystem\n", b"R", b"\x8c\xff", b"\x8b\xff\xff\xff\x7f", b"\x8d" + b"\xff" * 8, b"r\xff\xff\xff\xff",
    b"#", b" ", b"1", b"allocate", b"free", b"23:59:59.999999", b"00:00:00.000000",
)  # fmt: skip


def damaged(random, sound, most=8):
    """A copy of some bytes with up to so many kinds of damage."""
    data = bytearray(sound)
    for _ in range(random.randint(1, most)):
        at = random.randint(0, len(data))
        other = random.randint(0, len(data))
        kind = random.randrange(8)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << random.randrange(8)
        elif kind == 1 and data:
            data[at % len(data)] = random.randrange(256)
        elif kind == 2:
            del data[at : at + random.randint(1, 40)]
        elif kind == 3:
            data[at:at] = random.choice(TOKENS)
        elif kind == 4:
            piece = random.choice(TOKENS)
            data[at : at + len(piece)] = piece
        elif kind == 5:
            # A piece from elsewhere, as of lines that were written twice or in another order.
            data[at:at] = data[other : other + random.randint(1, 200)]
        elif kind == 6:
            number = _number_at(data, at)
            if number:
                data[slice(*number)] = random.choice(TOKENS)
        elif random.random() < 0.3:
            del data[at:]
    return bytes(data)


def _number_at(data, at):
    """Begin and end of the first number after a place."""
    digits = b"0123456789"
    begin = next((place for place in range(at, min(len(data), at + 200)) if data[place] in digits), None)
    if begin is None:
        return None
    end = begin
    while end < len(data) and data[end] in digits:
        end += 1
    return begin, end

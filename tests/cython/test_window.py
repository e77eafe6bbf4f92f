"""Where a request that misses shall go: the decision alone, against all that could be decided."""

import random

import pytest

GRANULARITY = 8


def pieces_of(rng, count):
    """Free blocks and holes with other blocks here and there between: (address, bytes, whether it is a hole)."""
    pieces = []
    at = GRANULARITY * rng.randrange(4)
    for _ in range(count):
        if (pieces and pieces[-1][2]) or rng.random() < 0.5:
            # Free, after whatever is live in a granule that has memory.
            if rng.random() < 0.5:
                at += rng.randint(1, 20)
            nbytes = rng.randint(1, 40)
            pieces.append((at, nbytes, False))
            at += nbytes
            if at % GRANULARITY and rng.random() < 0.8:
                at += GRANULARITY - at % GRANULARITY  # live
            elif at % GRANULARITY:
                rest = GRANULARITY - at % GRANULARITY
                pieces[-1] = (pieces[-1][0], nbytes + rest, False)
                at += rest
        else:
            at = -(-at // GRANULARITY) * GRANULARITY
            nbytes = GRANULARITY * rng.randint(1, 5)
            pieces.append((at, nbytes, True))
            at += nbytes
    at = -(-at // GRANULARITY) * GRANULARITY
    if pieces[-1][2]:
        address, nbytes, _ = pieces.pop()
        pieces.append((address, nbytes + 1000 * GRANULARITY, True))
    else:
        pieces.append((at, 1000 * GRANULARITY, True))
    return pieces


def runs_of(pieces):
    runs = []
    for piece in pieces:
        if runs and runs[-1][-1][0] + runs[-1][-1][1] == piece[0]:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def holes_in(run, begin, end):
    """Bytes of holes that a window touches, in whole granules."""
    total = 0
    for address, nbytes, hole in run:
        low, high = max(begin, address), min(end, address + nbytes)
        if hole and low < high:
            total += (-(-high // GRANULARITY) - low // GRANULARITY) * GRANULARITY
    return total


def least(pieces, nbytes):
    """The fewest bytes of holes that any window needs, wherever it begins; 0 needs none."""
    found = None
    for run in runs_of(pieces):
        first, last = run[0][0], run[-1][0] + run[-1][1]
        for begin in range(first, min(last - nbytes, first + 600) + 1):
            holes = holes_in(run, begin, begin + nbytes)
            found = holes if found is None else min(found, holes)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_the_window_is_the_best_there_is(probe, seed):
    rng = random.Random(seed)
    pieces, nbytes = [(0, 1, False), (1, 1000, True)], 1
    while least(pieces, nbytes) == 0:  # a free block holds it: no window is asked for
        pieces = pieces_of(rng, rng.randint(1, 12))
        nbytes = rng.randint(1, 120)
    address, size, block, holes = probe.best_window(pieces, nbytes, GRANULARITY)
    assert holes == least(pieces, nbytes)
    (run,) = (run for run in runs_of(pieces) if run[0][0] <= address < run[-1][0] + run[-1][1])
    assert holes == holes_in(run, address, address + size)
    assert address <= block
    assert block + nbytes <= address + size


def test_no_window_fits(probe):
    assert probe.best_window([(0, 16, True)], 17, GRANULARITY) is None
    assert probe.best_window([(0, 16, False), (32, 8, False)], 17, GRANULARITY) is None
    assert probe.best_window([], 1, GRANULARITY) is None


def test_the_window_behind_all_blocks_uses_the_free_block_before_it(probe):
    pieces = [(0, 8, True), (20, 12, False), (32, 800, True)]
    assert probe.best_window(pieces, 20, GRANULARITY) == (20, 20, 20, 8)
    assert probe.best_window(pieces[:1] + pieces[2:], 20, GRANULARITY) == (32, 20, 32, 24)


def stale_in(rng, pieces):
    """Handles that are mapped in the holes: (address, bytes, whether it may come back)."""
    stale = []
    for address, nbytes, hole in pieces:
        at = address
        while hole and at < min(address + nbytes, address + 40 * GRANULARITY):
            size = GRANULARITY * rng.randint(1, 3)
            if at + size <= address + nbytes and rng.random() < 0.7:
                stale.append((at, size, rng.random() < 0.5))
            at += size
    return stale


def cost_of(run, stale, begin, end):
    """Nanoseconds: what may come back costs nothing, the rest is moved there, and what is in the way unmapped."""
    total = 0
    for address, nbytes, hole in run:
        low, high = max(begin, address), min(-(-end // GRANULARITY) * GRANULARITY, address + nbytes)
        if not hole or low >= high:
            continue
        moved = high - low
        for at, size, free in stale:
            inside = min(at + size, high) - max(at, low)
            if inside == size and free:
                moved -= size
            elif inside > 0:
                total += 63_000
        total += moved // GRANULARITY * 34_500
    return total


@pytest.mark.parametrize("seed", range(40))
def test_the_cheapest_window_is_the_cheapest_of_those_that_begin_or_end_where_a_piece_does(probe, seed):
    rng = random.Random(1000 + seed)
    pieces, nbytes = [(0, 1, False), (1, 1000, True)], 1
    while least(pieces, nbytes) == 0:
        pieces = pieces_of(rng, rng.randint(1, 12))
        nbytes = rng.randint(1, 120)
    stale = stale_in(rng, pieces)
    address, size, block, holes = probe.best_window(pieces, nbytes, GRANULARITY, stale)
    costs = []
    for run in runs_of(pieces):
        first, last = run[0][0], run[-1][0] + run[-1][1]
        begins = [at for at, _, _ in run]
        begins += [
            at + length - nbytes if not is_hole_at(run, at + length - nbytes) else granule(at + length - nbytes)
            for at, length, _ in run
            if (at, length) != pieces[-1][:2]
        ]
        for begin, end in [(begin, begin + nbytes) for begin in begins[: len(run)]] + [
            (begin, at + length) for begin, (at, length, _) in zip(begins[len(run) :], run, strict=False)
        ]:
            if first <= begin and end <= last:
                costs.append(cost_of(run, stale, begin, end))
    (run,) = (run for run in runs_of(pieces) if run[0][0] <= address < run[-1][0] + run[-1][1])
    assert cost_of(run, stale, address, address + size) == min(costs)
    assert holes == holes_in(run, address, address + size)
    assert address <= block
    assert block + nbytes <= address + size


def is_hole_at(run, address):
    return any(hole and at <= address < at + nbytes for at, nbytes, hole in run)


def granule(address):
    return address // GRANULARITY * GRANULARITY

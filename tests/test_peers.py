"""Models of other pools: what they reserve is what those pools were measured to reserve."""

import functools
import itertools
import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.pools import MIB
from tests.helpers.traces import ALL, made, recorded
from vpool.peers import PEERS, Cupy, RmmPool, Torch, TorchExpandable, simulate

HERE = Path(__file__).parent
MEASURED = json.loads((HERE / "data" / "peers_h200.json").read_text())
TOLERANCE = 0.03
KIB = 1 << 10
SECONDS = 3.0  # for the longest recorded trace


@functools.cache
def simulated(trace, peer):
    """One pass of a recorded trace."""
    return simulate(recorded(trace), peer)


def table_of_the_docs():
    """Reserved / live of every trace and model, measured and modelled."""
    measured = {}
    for trace, peer, reserved, ratio in MEASURED["rows"]:
        # From bytes where they are known, or a ratio would be rounded twice.
        exact = reserved / simulated(trace, peer).peak_live_bytes if reserved else ratio
        measured[trace, peer] = f"{exact:.3f}"
    rows = [("trace", *(peer.title for peer in PEERS.values()))]
    for trace in ALL:
        both = (f"{measured.get((trace, p), '-')} {simulated(trace, p).reserved_over_live:.3f}" for p in PEERS)
        rows.append((trace, *both))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    rule = "  ".join("=" * width for width in widths)
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])


class TestMeasured:
    """The recorded traces, as measured on a real device with the real pools."""

    @pytest.mark.parametrize(("trace", "peer", "reserved", "ratio"), MEASURED["rows"])
    def test_reserves_what_was_measured(self, trace, peer, reserved, ratio):
        result = simulated(trace, peer)
        assert result.oom is None
        assert result.reserved_over_live == pytest.approx(ratio, rel=TOLERANCE)
        if reserved is not None:
            assert result.peak_reserved_bytes == pytest.approx(reserved, rel=TOLERANCE)

    def test_the_page_shows_these_figures(self):
        page = (HERE.parent / "docs" / "compare.rst").read_text()
        (shown,) = re.findall(r"^\.\. modelled\n\n(.*?)\n\n\.\. end of modelled$", page, re.MULTILINE | re.DOTALL)
        assert shown == table_of_the_docs()

    def test_every_model_was_measured(self):
        assert {row[1] for row in MEASURED["rows"]} == set(PEERS)

    @pytest.mark.parametrize("peer", PEERS)
    def test_is_fast(self, peer):
        trace = recorded("llm_generate")
        begin = time.process_time()
        simulate(trace, peer)
        assert time.process_time() - begin < SECONDS


def taken(model, *sizes, stream=0):
    """Blocks of these sizes."""
    return [model.allocate(nbytes, stream) for nbytes in sizes]


def free(model, *blocks, stream=0):
    for block in blocks:
        model.free(block, stream)


class TestCupy:
    """By its rules, computed by hand."""

    def test_segments_are_requests_in_whole_512_bytes(self):
        model = Cupy()
        taken(model, 1, 512, 513, 3 * MIB)
        assert model.reserved == 512 + 512 + 1024 + 3 * MIB
        assert (model.source_calls, model.waited) == (4, 4)

    def test_a_larger_block_is_split_and_its_parts_merge_again(self):
        model = Cupy()
        free(model, *taken(model, 10 * KIB))
        parts = taken(model, 4 * KIB, 2 * KIB, 4 * KIB)
        assert [block[1] for block in parts] == [0, 4 * KIB, 6 * KIB]
        assert model.free_ranges() == []
        free(model, parts[0], parts[2])
        assert sorted(model.free_ranges()) == [4 * KIB, 4 * KIB]
        free(model, parts[1])
        assert model.free_ranges() == [10 * KIB]
        assert (model.reserved, model.source_calls) == (10 * KIB, 1)

    def test_the_smallest_block_that_fits(self):
        model = Cupy()
        large, middle, small = taken(model, 8 * KIB, 4 * KIB, 2 * KIB)
        free(model, large, middle, small)
        (block,) = taken(model, 3 * KIB)
        assert block[1] == middle[1]
        assert sorted(model.free_ranges()) == [1 * KIB, 2 * KIB, 8 * KIB]

    def test_segments_do_not_merge(self):
        model = Cupy()
        free(model, *taken(model, 4 * KIB, 4 * KIB))
        taken(model, 8 * KIB)
        assert model.reserved == 16 * KIB

    def test_streams_do_not_share(self):
        model = Cupy()
        (block,) = taken(model, 4 * KIB)
        free(model, block, stream=1)
        taken(model, 4 * KIB, stream=1)
        assert model.reserved == 8 * KIB
        taken(model, 4 * KIB)
        assert model.reserved == 8 * KIB

    def test_unused_segments_are_given_back_when_the_device_refuses(self):
        model = Cupy(capacity=10 * KIB)
        whole, split = taken(model, 4 * KIB, 4 * KIB)
        free(model, whole, split)
        taken(model, 3 * KIB)
        # 1 KiB of the first is left over, so only the second can go.
        assert taken(model, 5 * KIB, 1 * KIB)[0] is not None
        assert (model.reserved, model.peak) == (9 * KIB, 9 * KIB)
        assert model.allocate(2 * KIB, 0) is None
        assert model.reserved == 9 * KIB


class TestTorch:
    """By its rules, computed by hand."""

    @pytest.mark.parametrize(
        ("nbytes", "segment"),
        [
            (1, 2 * MIB),
            (MIB, 2 * MIB),
            (MIB + 1, 20 * MIB),
            (10 * MIB - 512, 20 * MIB),
            (10 * MIB - 511, 10 * MIB),
            (10 * MIB + 1, 12 * MIB),
            (21 * MIB, 22 * MIB),
        ],
    )
    def test_segments(self, nbytes, segment):
        model = Torch()
        taken(model, nbytes)
        assert model.reserved == segment

    def test_a_large_block_is_split_only_where_more_than_1_mib_is_left(self):
        model = Torch()
        whole, cut = taken(model, 19 * MIB, 18 * MIB - 512)
        assert (whole[2], model.free_ranges()) == (20 * MIB, [])
        assert cut[2] == 18 * MIB
        free(model, whole)
        (cut,) = taken(model, 19 * MIB - 512)
        assert cut[2] == 19 * MIB - 512
        assert model.free_ranges() == [MIB + 512]

    def test_a_small_block_is_always_split(self):
        model = Torch()
        (block,) = taken(model, MIB - 1)
        assert block[2] == MIB
        assert model.free_ranges() == [MIB]
        taken(model, MIB - 512)
        assert model.free_ranges() == [512]

    def test_small_and_large_do_not_share(self):
        model = Torch()
        free(model, *taken(model, 2 * MIB))
        taken(model, 1000)
        assert model.reserved == 22 * MIB

    def test_streams_do_not_share(self):
        model = Torch()
        free(model, *taken(model, 2 * MIB), stream=1)
        taken(model, 2 * MIB, stream=1)
        assert model.reserved == 40 * MIB

    def test_unused_segments_are_given_back_when_the_device_refuses(self):
        model = Torch(capacity=64 * MIB)
        kept, unused, last = taken(model, 30 * MIB, 24 * MIB, 2 * KIB)
        free(model, unused)
        assert model.reserved == 56 * MIB
        assert model.allocate(30 * MIB, 0) is not None
        assert model.reserved == 62 * MIB
        assert (model.source_calls, model.waited) == (6, 4)
        assert model.allocate(3 * MIB, 0) is None
        free(model, kept, last)


class TestTorchExpandable:
    """By its rules, computed by hand."""

    def test_pages(self):
        model = TorchExpandable()
        taken(model, 1000, 2 * MIB)
        assert model.reserved == 22 * MIB
        taken(model, 41 * MIB)
        assert model.reserved == 62 * MIB
        assert (model.source_calls, model.waited) == (4, 3)

    def test_grows_the_free_range_at_the_end(self):
        model = TorchExpandable()
        first, last = taken(model, 15 * MIB, 5 * MIB)
        free(model, last)
        (block,) = taken(model, 24 * MIB)
        assert block[1] == first[2]
        assert model.reserved == 40 * MIB
        assert model.free_ranges() == [1 * MIB]

    def test_the_end_is_kept_for_what_fits_nowhere_else(self):
        model = TorchExpandable()
        hole, wall, _ = taken(model, 12 * MIB, 4 * MIB, 18 * MIB)
        free(model, hole)
        assert sorted(model.free_ranges()) == [6 * MIB, 12 * MIB]
        (block,) = taken(model, 5 * MIB)
        assert block[1] == hole[1]
        free(model, wall)

    def test_every_free_page_is_unmapped_when_the_device_refuses(self):
        model = TorchExpandable(capacity=100 * MIB)
        first, middle, last = taken(model, 10 * MIB, 50 * MIB, 15 * MIB)
        free(model, middle)
        assert model.reserved == 80 * MIB
        # Of the pages at 0, 20, 40 and 60 MiB the middle two are free.
        (block,) = taken(model, 52 * MIB)
        assert model.reserved == 100 * MIB
        # The lowest hole with what is free beside it has 50 MiB, so the block lies behind the last one.
        assert block[1] == 75 * MIB
        assert model.allocate(60 * MIB, 0) is None
        free(model, first, last, block)

    def test_a_hole_is_filled_again(self):
        model = TorchExpandable(capacity=84 * MIB)
        _, middle, _ = taken(model, 10 * MIB, 50 * MIB, 15 * MIB)
        free(model, middle)
        small = taken(model, *[MIB] * 6)
        assert model.reserved == 46 * MIB
        (block,) = taken(model, 45 * MIB)
        assert block is None
        free(model, *small)
        (block,) = taken(model, 45 * MIB)
        assert block[1] == 10 * MIB
        assert model.reserved == 80 * MIB


class TestRmmPool:
    """By its rules, computed by hand."""

    def test_doubles(self):
        model = RmmPool()
        assert model.reserved == 256 * MIB
        taken(model, 256 * MIB, 1)
        assert model.reserved == 512 * MIB
        taken(model, 1024 * MIB)
        assert model.reserved == 1536 * MIB
        assert (model.source_calls, model.waited) == (3, 2)

    def test_halves_the_step_where_the_device_refuses(self):
        model = RmmPool(capacity=400 * MIB)
        taken(model, 256 * MIB, 1)
        assert model.reserved == 384 * MIB
        assert model.source_calls == 3
        assert model.allocate(200 * MIB, 0) is None
        assert model.reserved == 384 * MIB

    def test_the_first_segment_fits_the_device(self):
        assert RmmPool(capacity=1000).reserved == 768
        assert RmmPool(capacity=100).reserved == 0

    def test_takes_from_another_stream_and_leaves_it_the_rest(self):
        model = RmmPool(initial=1 * MIB)
        (block,) = taken(model, 1 * MIB)
        free(model, block, stream=1)
        (part,) = taken(model, 4 * KIB, stream=2)
        assert part[1] == block[1]
        free(model, part, stream=1)
        assert model.free_ranges() == [1 * MIB]

    def test_merges_the_lists_of_streams_for_a_request_that_none_serves_alone(self):
        model = RmmPool(initial=1 * MIB)
        left, right = taken(model, 512 * KIB, 512 * KIB)
        free(model, left, stream=0)
        free(model, right, stream=1)
        assert model.free_ranges() == [512 * KIB, 512 * KIB]
        taken(model, 1 * MIB, stream=1)
        assert (model.reserved, model.waited) == (1 * MIB, 0)

    def test_segments_do_not_merge(self):
        model = RmmPool(initial=1 * MIB)
        free(model, *taken(model, 1 * MIB, 1 * MIB))
        taken(model, 2 * MIB)
        assert model.reserved == 4 * MIB


class TestAnyModel:
    """What holds for every model and every program."""

    @pytest.mark.parametrize("peer", PEERS)
    @given(st.data())
    @settings(max_examples=60, deadline=None)
    def test_blocks_are_disjoint_and_nothing_is_lost(self, peer, data):
        capacity = data.draw(st.sampled_from([None, 8 * MIB, 90 * MIB, 1000 * MIB]))
        model = PEERS[peer](capacity)
        live = []
        for _ in range(data.draw(st.integers(0, 60))):
            stream = data.draw(st.integers(0, 2))
            if live and data.draw(st.booleans()):
                model.free(live.pop(data.draw(st.integers(0, len(live) - 1))), stream)
            else:
                sizes = st.sampled_from([1, 512, 100_000, MIB, MIB + 1, 5 * MIB, 10 * MIB, 33 * MIB])
                block = model.allocate(data.draw(sizes), stream)
                if block is not None:
                    live.append(block)
            assert model.reserved == sum(block[2] for block in live) + sum(model.free_ranges())
            assert capacity is None or model.reserved <= capacity
            # Expandable segments have addresses of their own.
            spaces = [id(block[0]) if peer == "torch_expandable" else 0 for block in live]
            rows = sorted((space, block[1], block[2]) for space, block in zip(spaces, live, strict=True))
            for one, other in itertools.pairwise(rows):
                assert one[0] != other[0] or one[1] + one[2] <= other[1]

    @pytest.mark.parametrize("peer", PEERS)
    def test_a_pass_begins_with_nothing_live(self, peer):
        trace = made((1, 5 * MIB), (2, 3 * MIB), -1)
        once, twice = simulate(trace, peer), simulate(trace, peer, passes=3)
        assert once.peak_reserved_bytes == twice.peak_reserved_bytes
        assert once.utilization == twice.utilization

    @pytest.mark.parametrize("peer", PEERS)
    def test_out_of_memory_is_told_with_its_event(self, peer):
        trace = made((1, 5 * MIB), (2, 900 * MIB), -1)
        result = simulate(trace, peer, capacity="100MiB")
        assert result.oom == {"event": 1, "requested": 900 * MIB, "live_bytes": 5 * MIB}
        assert result.peak_reserved_bytes <= 100 * MIB
        assert simulate(trace, peer, capacity="2GiB").oom is None

    @pytest.mark.parametrize("peer", PEERS)
    def test_fragmentation_is_that_of_the_worst_moment(self, peer):
        trace = made((1, 12 * MIB), (2, 12 * MIB + 300), -1, -2)
        result = simulate(trace, peer)
        assert 0 < result.utilization <= 1
        assert 0 < result.internal_fragmentation < 0.1
        assert 0 <= result.external_fragmentation < 1

    @pytest.mark.parametrize("peer", PEERS)
    def test_nothing_and_zero_bytes(self, peer):
        empty = simulate(made(), peer)
        assert (empty.peak_live_bytes, empty.reserved_over_live, empty.oom) == (0, 0.0, None)
        zero = simulate(made((1, 0), -1, (2, 0)), peer, passes=2)
        assert zero.peak_reserved_bytes == empty.peak_reserved_bytes

    def test_progress_counts_to_the_end(self):
        seen = []
        trace = recorded("two_streams")
        simulate(trace, "torch", passes=2, progress=lambda done, total: seen.append((done, total)))
        assert seen[-1] == (2 * len(trace), 2 * len(trace))
        assert seen == sorted(seen)

    def test_wrong_arguments(self):
        trace = made((1, 5))
        with pytest.raises(ValueError, match="no model of 'jax'; there are torch"):
            simulate(trace, "jax")
        with pytest.raises(ValueError, match="passes"):
            simulate(trace, "torch", passes=0)
        with pytest.raises(ValueError, match="capacity must not be 0"):
            simulate(trace, "torch", capacity=0)
        with pytest.raises(TypeError, match="capacity"):
            simulate(trace, "torch", capacity=True)
        with pytest.raises(TypeError, match="trace must be"):
            simulate("trace.npz", "torch")

    def test_to_dict(self):
        result = simulate(made((1, 5)), "torch")
        assert result.to_dict()["peak_reserved_bytes"] == result.peak_reserved_bytes == 2 * MIB
        assert json.loads(json.dumps(result.to_dict()))["oom"] is None

"""The report: its figures against states made by hand, and its forms."""

import html
import json
import sys
import time

import numpy as np
import pytest

import vpool
from tests.helpers.pools import GIB, GRANULE, KIB, MIB, ODD_NAMES, WIDE_NAMES, columns, host_pool, simulated_pool
from vpool.report import BLOCK_DTYPE

jsonschema = pytest.importorskip("jsonschema")

SEGMENT = 16 * MIB
WIDEST_LINE = 100
# A state made by hand: block by block what is live or free behind it.
LIVE_SIZES = (1000, 70 * KIB, 300 * KIB, 2 * MIB)
HOLE = 128 * KIB


@pytest.fixture
def full():
    """A 16 MiB segment, with a hole between the live blocks and the tail free."""
    with simulated_pool(SEGMENT, initial=SEGMENT, name="made by hand") as pool:
        hole = None
        for nbytes in LIVE_SIZES:
            pool.allocate(nbytes)
            if hole is None:
                hole = pool.allocate(HOLE)
        pool.deallocate(hole)
        yield pool
        pool.check()


class TestFigures:
    """Each attribute, computed by hand."""

    def test_bytes_and_counts(self, full):
        report = full.inspect()
        live = 1024 + 70 * KIB + 300 * KIB + 2 * MIB
        assert report.reserved_bytes == SEGMENT
        assert report.allocated_bytes == live
        assert report.requested_bytes == sum(LIVE_SIZES)
        assert report.free_bytes == SEGMENT - live
        assert report.pending_bytes == 0
        assert report.largest_free_bytes == SEGMENT - live - HOLE
        assert report.peak_reserved_bytes == SEGMENT
        assert report.peak_allocated_bytes == live + HOLE
        assert report.peak_requested_bytes == sum(LIVE_SIZES) + HOLE
        assert (report.live_blocks, report.free_blocks, report.segments, report.source_calls) == (4, 2, 1, 1)
        assert (report.name, report.source, report.device) == ("made by hand", "simulated", 0)

    def test_ratios(self, full):
        report = full.inspect()
        assert report.utilization == report.allocated_bytes / SEGMENT
        assert report.external_fragmentation == pytest.approx(HOLE / report.free_bytes)
        assert report.internal_fragmentation == pytest.approx(24 / report.allocated_bytes)

    def test_it_adds_up(self, full):
        report = full.inspect()
        assert report.reserved_bytes == report.allocated_bytes + report.free_bytes + report.pending_bytes

    def test_size_classes(self, full):
        rows = full.inspect().size_classes
        assert [row.up_to for row in rows] == [64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, None]
        assert [row.live_blocks for row in rows] == [1, 1, 1, 1, 0, 0]
        assert [row.live_bytes for row in rows] == [1024, 70 * KIB, 300 * KIB, 2 * MIB, 0, 0]
        assert [row.requested_bytes for row in rows] == [*LIVE_SIZES, 0, 0]
        assert [row.free_blocks for row in rows] == [0, 1, 0, 0, 1, 0]
        assert sum(row.free_bytes for row in rows) == full.inspect().free_bytes

    @pytest.mark.parametrize(
        ("nbytes", "row"),
        [(64 * KIB, 0), (64 * KIB + 1, 1), (256 * KIB, 1), (MIB, 2), (4 * MIB + 1, 4), (16 * MIB, 4), (17 * MIB, 5)],
    )
    def test_the_bounds_of_size_classes_are_inclusive(self, pool, nbytes, row):
        pool.allocate(nbytes)
        counts = [tier.live_blocks for tier in pool.inspect().size_classes]
        assert counts == [int(number == row) for number in range(6)]

    @pytest.mark.parametrize(
        ("nbytes", "pieces"),
        [(0, 0), (1, 0), (HOLE, 0), (HOLE + 1, 1), (SEGMENT, 2), (2**62, 2)],
    )
    def test_unusable_bytes(self, full, nbytes, pieces):
        report = full.inspect()
        assert report.unusable_bytes(nbytes) == (0, HOLE, report.free_bytes)[pieces]

    def test_unusable_bytes_takes_sizes_alone(self, full):
        report = full.inspect()
        assert report.unusable_bytes(f"{HOLE + 1}B") == HOLE
        for wrong, error in ((-1, ValueError), (1.5, TypeError), ("much", ValueError)):
            with pytest.raises(error):
                report.unusable_bytes(wrong)

    def test_an_empty_pool(self, pool):
        report = pool.inspect()
        assert report.reserved_bytes == report.live_blocks == report.segments == len(report.blocks) == 0
        assert report.utilization == report.external_fragmentation == report.internal_fragmentation == 0
        assert report.advice == []
        assert [row.live_blocks for row in report.size_classes] == [0] * 6

    def test_a_full_pool(self):
        with simulated_pool(MIB, initial=MIB) as pool:
            pool.allocate(MIB)
            report = pool.inspect()
            assert report.utilization == 1
            assert report.external_fragmentation == report.free_bytes == report.largest_free_bytes == 0

    def test_an_idle_pool(self, pool):
        pool.deallocate(pool.allocate(1000))
        report = pool.inspect()
        assert report.utilization == report.internal_fragmentation == report.external_fragmentation == 0

    def test_streams(self, pool):
        pool.allocate(1000)
        pool.deallocate(pool.allocate(2000, stream=7), stream=7)
        pool.allocate(3000, stream=7)
        default, side = pool.inspect().streams
        assert (default["stream"], default["live_bytes"]) == (0, 1024)
        assert (side["stream"], side["live_bytes"], side["pending_bytes"]) == (7, 3072, 0)
        assert default["free_bytes"] + side["free_bytes"] == pool.inspect().free_bytes

    def test_tags(self, pool):
        pool.allocate(1000)
        with vpool.tag("kv-cache"):
            kept, dropped = pool.allocate(3000), pool.allocate(5000)
        pool.deallocate(dropped)
        pool.limit("kv-cache", MIB)
        none, cache = pool.inspect().tags
        figures = {"live_blocks": 1, "live_bytes": 1024, "requested_bytes": 1000}
        assert none == {"tag": None, **figures, "peak_bytes": None, "limit_bytes": None}
        figures = {"live_blocks": 1, "live_bytes": 3072, "requested_bytes": 3000}
        assert cache == {"tag": "kv-cache", **figures, "peak_bytes": 3072 + 5120, "limit_bytes": MIB}
        report = pool.inspect()
        (row,) = report.blocks[report.blocks["address"] == kept]
        assert report.tag_name(int(row["tag"])) == "kv-cache"

    def test_pending_and_why(self, pool):
        """What another stream may still use, and which one."""
        blocks = [pool.allocate(MIB) for _ in range(3)]
        pool.record_stream(blocks[0], 7)
        pool.record_stream(blocks[1], 9)
        for ptr in blocks:
            pool.deallocate(ptr)
        rows = {row["waits_for"]: row for row in pool.inspect().pending}
        assert set(rows) == {7, 9}
        assert all((row["blocks"], row["pending_bytes"]) == (1, MIB) for row in rows.values())
        assert "stream 0x7" in rows[7]["reason"]
        assert sum(row["pending_bytes"] for row in rows.values()) == pool.inspect().pending_bytes == 2 * MIB

    def test_pending_in_quarantine(self):
        with vpool.Pool(source="simulated", debug="quarantine") as pool:
            pool.deallocate(pool.allocate(1000))
            (row,) = pool.inspect().pending
            assert (row["reason"], row["blocks"], row["pending_bytes"]) == ("in quarantine", 1, 1024)

    def test_segment_rows(self, full):
        (row,) = full.inspect().segment_rows
        report = full.inspect()
        assert (row["nbytes"], row["live_blocks"], row["stream"]) == (SEGMENT, 4, 0)
        assert row["live_bytes"] == report.allocated_bytes
        assert row["free_bytes"] == report.free_bytes
        assert row["largest_free_bytes"] == report.largest_free_bytes

    def test_what_reuse_saves(self, pool):
        """Ten blocks one after the other in the memory of one."""
        for _ in range(10):
            pool.deallocate(pool.allocate(MIB))
        report = pool.inspect()
        assert report.sharing == pytest.approx(0.9)
        assert report.reuse_ratio == pytest.approx(0.9)

    @pytest.mark.parametrize("sizes", [[1], [1, 1], [100, 5 * MIB, 3], [MIB, 300, 300]])
    def test_the_reuse_ratio_is_a_ratio(self, pool, sizes):
        """Bytes served without a source call / bytes served, both as asked for: 0 for a lone first request."""
        served_by_source = 0
        for nbytes in sizes:
            calls = pool.stats.source_calls
            pool.allocate(nbytes)
            served_by_source += nbytes * (pool.stats.source_calls > calls)
        assert pool.inspect().reuse_ratio == pytest.approx(1 - served_by_source / sum(sizes))

    def test_it_keeps_the_moment(self, full):
        """A report does not change with the pool, and stays when the pool is gone."""
        report = full.inspect()
        before = report.to_dict()
        full.allocate(MIB)
        full.close()
        assert report.to_dict() == before


class TestLargestAllocatable:
    """What it says can be had, and not one granule more."""

    @pytest.mark.parametrize("capacity", [SEGMENT, 64 * MIB, 64 * MIB + 1000])
    @pytest.mark.parametrize("lent", [0, 1000, 5 * MIB, 15 * MIB])
    @pytest.mark.parametrize("others", [0, 3 * MIB])
    def test_it_is_true(self, capacity, lent, others):
        def make():
            pool = simulated_pool(capacity, initial=SEGMENT)
            if lent:
                pool.allocate(lent)
            pool.source.driver.set_free(max(0, capacity - pool.source.driver.used - others))
            return pool

        most = make().inspect().largest_allocatable()
        assert make().allocate(most)
        with pytest.raises(vpool.OutOfMemoryError):
            make().allocate(most + 1)

    def test_of_a_stream(self):
        with simulated_pool(SEGMENT, initial=SEGMENT) as pool:
            pool.allocate(MIB)
            report = pool.inspect()
            assert report.largest_allocatable() == report.largest_allocatable(0) == SEGMENT - MIB
            assert report.largest_allocatable(7) == SEGMENT - MIB, "what one stream has free serves every other"
            assert pool.allocate(SEGMENT - MIB, stream=7)
            assert pool.inspect().largest_allocatable() == pool.inspect().largest_allocatable(7) == 0

    def test_of_many_segments(self):
        """It costs no more than a few reports, and so does `explain`, however many segments there are."""
        with simulated_pool(initial=0, growth=2 * MIB, limit=64 * GIB) as pool:
            for _ in range(5000):
                pool.allocate(MIB + 1)
            begun = time.process_time()
            report = pool.inspect()
            pool.snapshot()
            reported = time.process_time()
            report.largest_allocatable()
            found = vpool.explain(int(report.segment_table["address"][-1]))
            seconds = time.process_time() - reported
        assert (found.pool, report.segments) == (pool.name, 5000)
        assert seconds < 10 * (reported - begun)

    @pytest.mark.parametrize("rounding", [256, 64 * KIB, MIB])
    @pytest.mark.parametrize("debug", [(), "guard", "guard=10KiB"])
    @pytest.mark.parametrize(
        "strategy",
        [
            vpool.Dynamic(initial=0, limit=8 * MIB + 1024),
            vpool.Dynamic(initial=8 * MIB + 1024, limit=8 * MIB + 1024),
            vpool.Fixed(8 * MIB + 1024),
            vpool.Fixed(8 * MIB, block=MIB),
        ],
        ids=["grows", "dynamic", "slab", "blocks"],
    )
    def test_with_rounding_and_guards(self, strategy, debug, rounding):
        with vpool.Pool(strategy, source="host", debug=debug, rounding=rounding) as pool:
            most = pool.inspect().largest_allocatable()
            assert most >= MIB - 20 * KIB
            pool.deallocate(pool.allocate(most))
            with pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(most + 1)

    def test_of_a_full_pool(self):
        with simulated_pool(MIB, initial=MIB) as pool:
            pool.allocate(MIB)
            assert pool.inspect().largest_allocatable() == 0


class TestBlocks:
    """The array of blocks."""

    def test_its_fields(self, full):
        blocks = full.inspect().blocks
        assert blocks.dtype == BLOCK_DTYPE
        assert set(blocks.dtype.names) == {"address", "nbytes", "requested", "state", "stream", "segment", "tag"}
        assert blocks["state"].tolist() == ["live", "free", "live", "live", "live", "free"]
        assert blocks["requested"].tolist() == [LIVE_SIZES[0], 0, *LIVE_SIZES[1:], 0]

    def test_it_tiles_every_segment(self):
        with simulated_pool(initial=0) as pool:
            blocks = [pool.allocate(nbytes, stream=nbytes % 3) for nbytes in range(1, 3 * MIB, 50_000)]
            for ptr in blocks[::2]:
                pool.deallocate(ptr)
            report = pool.inspect()
            assert report.segments > 3
            streams = []
            for number, segment in enumerate(report.segment_table):
                mine = report.blocks[report.blocks["segment"] == number]
                assert mine["address"][0] == segment["address"]
                assert np.array_equal(mine["address"][1:], (mine["address"] + mine["nbytes"])[:-1])
                assert mine["nbytes"].sum() == segment["nbytes"]
                streams.append(set(mine["stream"].tolist()))
            assert set.union(*streams) == {0, 2}
            assert {0, 2} in streams, "streams lend one another parts of a segment"


class TestForms:
    """Text, HTML and JSON."""

    @pytest.fixture(params=["empty", "small", "large"])
    def report(self, request):
        with simulated_pool(name="x" * 40) as pool:
            if request.param == "small":
                pool.allocate(1)
            if request.param == "large":
                for _ in range(1000):
                    pool.deallocate(pool.allocate(900 * GIB + 1))
                    pool.allocate(999)
                pool.allocate(2**55)
            return pool.inspect()

    def test_text_fits_a_terminal(self, report):
        lines = str(report).splitlines()
        assert max(map(len, lines)) <= WIDEST_LINE
        for word in ("reserved", "allocated", "requested", "free", "utilization", "source call"):
            assert any(word in line for line in lines)

    def test_long_names_are_told_apart(self):
        with simulated_pool(name="y" * 100 + "/7") as pool:
            for layer in (30, 31):
                with vpool.tag("serve/kv-cache/of-a-model-with-a-long-name/layer-" + str(layer)):
                    pool.allocate(1000)
            report = pool.inspect()
        lines = str(report).splitlines()
        assert max(map(len, lines)) <= WIDEST_LINE
        assert "yyy/7'" in lines[0]
        for name in ("layer-30'", "layer-31'"):
            assert sum(name in line for line in lines) == 1
            assert name in html.unescape(report._repr_html_())

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_names_move_no_cursor(self, name):
        with simulated_pool(name=name) as pool, vpool.tag(name):
            pool.allocate(1000)
            before, report = pool.snapshot(), pool.inspect()
            pool.allocate(5)
            shown = [
                report,
                report._repr_html_(),
                pool.leaks(),
                before.diff(pool.snapshot()),
                vpool.defrag.report(before),
            ]
        for text in shown:
            assert str(text).replace("\n", "").isprintable()
        assert len(str(report).splitlines()) == str(report).count("\n") + 1

    @pytest.mark.parametrize("name", WIDE_NAMES.values(), ids=WIDE_NAMES)
    def test_wide_names_fit_a_terminal(self, name):
        with simulated_pool(name=name, growth=2 * MIB) as pool:
            pool.limit(name, 5000)
            with vpool.tag(name), pool.record(sites=True):
                pool.allocate(5000)
            text = str(pool.inspect())
            assert "its limit of" in text
        assert columns(text) <= WIDEST_LINE

    def test_one_is_no_plural(self):
        with simulated_pool() as pool:
            with pool.record() as recording:
                pool.allocate(1000)
            with pool.record() as later:
                pool.allocate(1000)
                pool.deallocate(pool.allocate(5))
            assert "in 1 segment " in str(pool.inspect())
            assert "in 2 blocks " in str(pool.inspect())
            assert repr(recording) == "<vpool.Recording of 1 event, 1 allocation>"
            assert later.notes[0].startswith("1 block was live when")

    def test_html_is_escaped(self):
        with simulated_pool(name="<script>") as pool:
            assert "<script>" not in pool.inspect()._repr_html_()

    def test_json_is_the_dictionary(self, report):
        assert json.loads(report.to_json()) == report.to_dict()
        assert json.loads(report.to_json(indent=2)) == report.to_dict()

    def test_the_dictionary_is_plain_and_exact(self, report):
        figures = report.to_dict()
        assert figures["reserved_bytes"] == report.reserved_bytes
        assert type(figures["allocated_bytes"]) is int
        assert len(figures["size_classes"]) == 6

    def test_repr(self, report):
        assert "x" * 40 in repr(report)


class TestSchema:
    """What `to_json` writes is what the published schema says."""

    @pytest.fixture
    def validate(self):
        schema = vpool.report.schema()
        jsonschema.Draft202012Validator.check_schema(schema)
        return jsonschema.Draft202012Validator(schema).validate

    def test_of_pools(self, validate):
        strategies = (
            vpool.Dynamic(initial=MIB),
            vpool.Fixed(16 * MIB),
            vpool.Fixed(16 * MIB, block=MIB),
            vpool.Hybrid(16 * MIB, block=[MIB, 2 * MIB]),
        )
        for strategy in strategies:
            for debug in ((), ("quarantine", "sites")):
                with vpool.Pool(strategy, source=vpool.sources.Simulated(GIB), debug=debug) as pool:
                    validate(pool.inspect().to_dict())
                    pool.limit("some", GIB)
                    with vpool.tag("some"):
                        kept = pool.allocate(MIB, stream=7)
                    pool.deallocate(pool.allocate(1000))
                    pool.record_stream(kept, 9)
                    pool.deallocate(kept)
                    report = pool.inspect()
                    validate(report.to_dict())
                    assert json.loads(report.to_json()) == report.to_dict()

    def test_it_refuses_what_is_none(self, validate, pool):
        for change in ({"reserved_bytes": -1}, {"name": None}, {"tags": [{}]}, {"more": 1}):
            with pytest.raises(jsonschema.ValidationError):
                validate({**pool.inspect().to_dict(), **change})


class TestPlot:
    """Drawings, by what stands in them."""

    def test_map_and_sizes(self, full):
        figure = full.inspect().plot()
        titles = [axes.get_title() for axes in figure.axes]
        assert titles == ["memory map", "free memory by the size of its pieces (2)"]
        spans = {
            tuple(round(edge, 6) for edge in path.get_extents().intervalx)
            for collection in figure.axes[0].collections
            for path in collection.get_paths()
        }
        report = full.inspect()
        start = int(report.segment_table["address"][0])
        for row in report.blocks:
            begin = (int(row["address"]) - start) / MIB
            assert (round(begin, 6), round(begin + int(row["nbytes"]) / MIB, 6)) in spans
        heights = [bar.get_height() for bar in figure.axes[1].patches]
        assert sum(heights) == pytest.approx(report.free_bytes / MIB)

    def test_timeline(self, full):
        with full.record() as recording:
            full.deallocate(full.allocate(MIB))
            recording.mark()
        figure = full.inspect().plot(recording)
        line = figure.axes[2].lines[0]
        assert max(line.get_ydata()) == pytest.approx(recording.peak_live_bytes / MIB)
        reserved = figure.axes[2].lines[1]
        assert set(reserved.get_ydata()) == {full.stats.reserved_bytes / MIB}
        assert len(figure.axes[2].lines) == 3

    def test_without_anything(self, pool, tmp_path):
        pool.inspect().plot().savefig(tmp_path / "empty.png")
        assert (tmp_path / "empty.png").stat().st_size > 1000

    @pytest.mark.parametrize("name", [ODD_NAMES[0], ODD_NAMES[4], "$a_{pool$"])
    def test_names_of_any_characters(self, name, tmp_path):
        pytest.importorskip("matplotlib")
        with simulated_pool(name=name) as pool:
            pool.inspect().plot().savefig(tmp_path / "named.png", dpi=20)

    def test_segments_are_counted_in_whole_numbers(self):
        with vpool.Pool(vpool.Dynamic(initial="1MiB", growth="1MiB"), source="simulated") as pool:
            blocks = [pool.allocate(1 << 20) for _ in range(2)]
            figure = pool.inspect().plot()
            assert len(blocks) == 2
            assert all(place == round(place) for place in figure.axes[0].get_yticks())

    def test_matplotlib_may_be_missing(self, pool, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(vpool.Error, match=r'pip install "vpool\[plot\]"'):
            pool.inspect().plot()


@pytest.mark.usefixtures("no_default_pools")
class TestAllDevices:
    """vpool.inspect()."""

    def test_one(self):
        vpool.set_default_pool(host_pool(name="mine"))
        assert vpool.inspect().name == vpool.inspect(device=0).name == "mine"

    def test_each(self):
        assert vpool.inspect(device="all") == {}
        vpool.set_default_pool(host_pool(name="mine"))
        vpool.allocate(5)
        reports = vpool.inspect(device="all")
        assert list(reports) == [0]
        assert reports[0].allocated_bytes == GRANULE

    @pytest.mark.parametrize("device", ["some", 1.5])
    def test_no_device(self, device):
        with pytest.raises(TypeError):
            vpool.inspect(device=device)


def test_the_largest_free_range_is_of_all_that_lies_side_by_side():
    """Also where streams freed parts of it, or blocks never merge."""
    source = vpool.sources.Simulated(GIB)
    streams = [source.driver.create_stream() for _ in range(4)]
    with vpool.Pool(vpool.Dynamic(initial="16MiB", limit="16MiB"), source) as pool:
        for ptr in [pool.allocate(4 * MIB, stream) for stream in streams]:
            pool.deallocate(ptr)
        report = pool.inspect()
        assert (report.free_blocks, report.largest_free_bytes) == (4, 16 * MIB)
        assert report.external_fragmentation == 0
        assert report.segment_rows[0]["largest_free_bytes"] == 16 * MIB
        assert pool.coalesce() == 12 * MIB
    with vpool.Pool(vpool.Fixed("16MiB", block="1MiB"), source="simulated") as pool:
        ptr = [pool.allocate(MIB) for _ in range(3)][1]
        assert pool.inspect().largest_free_bytes == 13 * MIB
        pool.deallocate(ptr)
        assert pool.inspect().external_fragmentation == pytest.approx(1 / 14)

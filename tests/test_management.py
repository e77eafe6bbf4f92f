"""Splitting, merging, classes and alignment: what the management layer does with segments."""

import itertools

import pytest

import vpool
from tests.helpers.pools import GIB, GRANULE, KIB, MIB, TIB, assert_whole, live_rows, round_up, simulated_pool

SEGMENT = 64 * MIB
CLASSES_PER_DOUBLING = 32
LARGEST_TESTED = 8 * TIB
ALL_ORDERS = list(itertools.permutations(range(3)))


def class_bounds():
    """Smallest size of each class up to beyond 2 TiB."""
    granules = list(range(1, 2 * CLASSES_PER_DOUBLING))
    width = 2
    while granules[-1] * GRANULE < LARGEST_TESTED:
        start = CLASSES_PER_DOUBLING * width
        granules += range(start, 2 * start, width)
        width *= 2
    return [number * GRANULE for number in granules]


def boundary_sizes():
    sizes = {1, GRANULE - 1, GRANULE, GRANULE + 1}
    for size in (SEGMENT, MIB, 10 * MIB, 2 * GIB, 4 * GIB, 2 * TIB, 4 * TIB):
        sizes |= {size - 1, size, size + 1, size - GRANULE, size + GRANULE}
    return sorted(sizes)


@pytest.fixture
def segment():
    """A pool that holds one free segment and may not grow."""
    with simulated_pool(SEGMENT, initial=SEGMENT) as pool:
        pool.deallocate(pool.allocate(1))
        yield pool
        pool.check()


def free_sizes(pool):
    blocks = pool.inspect().blocks
    return sorted(blocks["nbytes"][blocks["state"] == "free"].tolist())


class TestSizes:
    """Every boundary of sizes and classes."""

    @pytest.mark.parametrize("nbytes", boundary_sizes())
    @pytest.mark.parametrize("alignment", [256, 4096])
    def test_a_block_is_large_enough_aligned_and_of_whole_granules(self, nbytes, alignment):
        with simulated_pool(initial=SEGMENT) as pool:
            ptr, again = (pool.allocate(nbytes, alignment=alignment) for _ in range(2))
            assert ptr % alignment == again % alignment == 0
            assert abs(again - ptr) >= round_up(nbytes)
            assert live_rows(pool)["nbytes"].tolist() == [round_up(nbytes)] * 2
            assert pool.stats.requested_bytes == 2 * nbytes
            pool.check()
            pool.deallocate(ptr)
            pool.deallocate(again)
            assert_whole(pool)

    def test_every_class_serves_its_bounds_and_their_neighbours_exactly(self):
        """A free block of each class bound and of one granule around it is found again, without growing."""
        with simulated_pool(initial=0) as pool:
            for bound in class_bounds():
                for nbytes in (bound - GRANULE, bound, bound + GRANULE):
                    if nbytes:
                        ptr = pool.allocate(nbytes)
                        pool.deallocate(ptr)
                        calls = pool.stats.source_calls
                        again = pool.allocate(nbytes)
                        assert pool.stats.source_calls == calls
                        pool.deallocate(again)
                if bound % (1 << 20) == 0:
                    pool.check()
            assert_whole(pool)

    def test_a_class_holds_live_blocks_of_all_its_bounds_at_once(self):
        bounds = class_bounds()
        with simulated_pool() as pool:
            addresses = [pool.allocate(bound) for bound in bounds]
            pool.check()
            assert sorted(live_rows(pool)["nbytes"].tolist()) == bounds
            assert pool.stats.allocated_bytes == sum(bounds)
            for ptr in addresses[::2] + addresses[1::2]:
                pool.deallocate(ptr)
            assert_whole(pool)

    def test_live_sizes_beyond_2_to_the_53_add_up_exactly(self):
        """Sums beyond what a float holds: counters and reports stay exact integers."""
        sizes = [2**56 + 1, 2**55 + 3, 2**53 + 5, 7]
        with simulated_pool(initial=0) as pool:
            for nbytes in sizes:
                pool.allocate(nbytes)
            report = pool.inspect()
            assert pool.stats.requested_bytes == report.requested_bytes == sum(sizes)
            assert report.to_dict()["requested_bytes"] == sum(sizes)
            assert report.allocated_bytes == sum(map(round_up, sizes))
            pool.check()

    def test_many_live_blocks_of_more_than_4_gib_together(self, pool):
        for _ in range(5000):
            pool.allocate(MIB + 1)
        assert pool.stats.requested_bytes == 5000 * (MIB + 1)
        pool.check()


class TestMerging:
    """Neighbours that are free are one block, in whatever order they became free."""

    @pytest.mark.parametrize("order", ALL_ORDERS)
    @pytest.mark.parametrize("nbytes", [GRANULE, 1000, MIB, 21 * MIB])
    def test_three_neighbours_in_all_six_orders_end_in_the_whole_segment(self, segment, order, nbytes):
        addresses = [segment.allocate(nbytes) for _ in range(3)]
        for number in order:
            segment.deallocate(addresses[number])
            segment.check()
        assert free_sizes(segment) == [SEGMENT]
        assert segment.allocate(SEGMENT) == addresses[0]

    @pytest.mark.parametrize("order", ALL_ORDERS)
    def test_three_that_fill_the_segment_exactly(self, segment, order):
        sizes = [SEGMENT // 2, SEGMENT // 4, SEGMENT // 4]
        addresses = [segment.allocate(nbytes) for nbytes in sizes]
        assert free_sizes(segment) == []
        for number in order:
            segment.deallocate(addresses[number])
            segment.check()
        assert free_sizes(segment) == [SEGMENT]

    @pytest.mark.parametrize("left_free", [False, True])
    @pytest.mark.parametrize("right_free", [False, True])
    def test_a_free_block_takes_in_exactly_its_free_neighbours(self, segment, left_free, right_free):
        _, left, middle, right, _ = (segment.allocate(nbytes) for nbytes in (256, 512, 1024, 2048, SEGMENT - 3840))
        if left_free:
            segment.deallocate(left)
        if right_free:
            segment.deallocate(right)
        segment.deallocate(middle)
        merged = 1024 + 512 * left_free + 2048 * right_free
        assert free_sizes(segment) == [merged]
        segment.check()

    @pytest.mark.parametrize("reverse", [False, True])
    def test_touching_segments_never_merge(self, reverse):
        """Segments of a simulated device lie side by side; half a merged block could not be given back."""
        with simulated_pool(initial=MIB, growth="1MiB") as pool:
            addresses = [pool.allocate(MIB) for _ in range(4)]
            table = pool.inspect().segment_table
            assert table["nbytes"].tolist() == [MIB] * 4
            assert (table["address"][1:] == table["address"][:-1] + table["nbytes"][:-1]).all(), "segments must touch"
            for ptr in reversed(addresses) if reverse else addresses:
                pool.deallocate(ptr)
                pool.check()
            assert free_sizes(pool) == [MIB] * 4
            assert pool.inspect().largest_free_bytes == MIB
            calls = pool.stats.source_calls
            pool.allocate(MIB + 1)
            assert pool.stats.source_calls == calls + 1

    def test_no_block_ever_spans_two_segments(self):
        with simulated_pool(initial=MIB, growth="1MiB") as pool:
            addresses = [pool.allocate(300 * KIB) for _ in range(40)]
            for ptr in addresses[::3]:
                pool.deallocate(ptr)
            report = pool.inspect()
            ends = report.segment_table["address"] + report.segment_table["nbytes"]
            for block in report.blocks:
                number = block["segment"]
                assert block["address"] >= report.segment_table["address"][number]
                assert block["address"] + block["nbytes"] <= ends[number]


class TestSplitting:
    """Blocks are cut to size, and the rest stays free."""

    @pytest.mark.parametrize("nbytes", [1, 256, 257, MIB, SEGMENT - GRANULE, SEGMENT - 1])
    def test_the_rest_of_a_block_stays_free(self, segment, nbytes):
        segment.allocate(nbytes)
        rest = SEGMENT - round_up(nbytes)
        assert free_sizes(segment) == ([rest] if rest else [])

    def test_a_segment_can_be_filled_to_its_last_granule(self, segment):
        for _ in range(1024):
            segment.allocate(SEGMENT // 1024)
        assert free_sizes(segment) == []
        assert segment.stats.allocated_bytes == SEGMENT == segment.stats.reserved_bytes
        assert segment.stats.source_calls == 1

    def test_the_tail_of_a_segment_is_used_before_the_pool_grows(self):
        with simulated_pool(initial=SEGMENT) as pool:
            pool.allocate(SEGMENT - 1000 * GRANULE)
            pool.allocate(999 * GRANULE)
            pool.allocate(GRANULE)
            assert pool.stats.source_calls == 1

    def test_a_smaller_block_of_the_class_is_never_lent_for_a_larger_request(self, segment):
        """Sizes that share a list differ: 150 may be free when 200 is asked for."""
        sizes = [bound * GRANULE for bound in (64, 65, 66, 67, 128, 130, 131, 133)]
        addresses = []
        for nbytes in sizes:
            addresses.append((segment.allocate(nbytes), nbytes))
            segment.allocate(GRANULE)
        for ptr, _ in addresses:
            segment.deallocate(ptr)
        for nbytes in sorted(sizes, reverse=True):
            ptr = segment.allocate(nbytes)
            row = next(row for row in live_rows(segment) if row["address"] == ptr)
            assert row["nbytes"] == nbytes
            segment.check()


class TestFit:
    """A fitting block of the request's own class is not missed."""

    # Sizes of one class: 64 and 65 granules share it.
    SMALL, LARGE = 64 * GRANULE, 65 * GRANULE

    def fill(self, pool, *sizes):
        """Free blocks of these sizes, freed in this order, with nothing else free; their addresses."""
        made = []
        for nbytes in sizes:
            made.append(pool.allocate(nbytes))
            pool.allocate(GRANULE)
        rest = pool.inspect().free_bytes
        if rest:
            pool.allocate(rest)
        for ptr in made:
            pool.deallocate(ptr)
        return made

    def test_the_head_of_the_exact_class_comes_before_a_larger_class(self, segment):
        exact, _ = self.fill(segment, self.LARGE, MIB)
        assert segment.allocate(self.LARGE) == exact
        assert free_sizes(segment) == [MIB]

    def test_a_larger_class_comes_before_the_depth_of_the_exact_one(self, segment):
        """The search is O(1): behind a head that is too small a larger class serves."""
        _, larger, _ = self.fill(segment, self.LARGE, MIB, self.SMALL)
        assert segment.allocate(self.LARGE) == larger

    def test_the_whole_class_is_searched_before_the_pool_grows(self):
        with simulated_pool(initial=SEGMENT) as pool:
            deep, *_ = self.fill(pool, self.LARGE, self.SMALL, self.SMALL, self.SMALL)
            assert pool.allocate(self.LARGE) == deep
            assert pool.stats.source_calls == 1

    def test_the_pool_grows_if_nothing_in_the_class_fits(self):
        with simulated_pool(initial=SEGMENT) as pool:
            self.fill(pool, self.SMALL, self.SMALL)
            pool.allocate(self.LARGE)
            assert pool.stats.source_calls == 2

    def test_requests_that_grow_slowly_reuse_what_was_freed(self):
        """n, n + 1, n + 2 bytes, each freed at once: what is reserved stays a constant."""
        with simulated_pool(initial=0) as pool:
            for step in range(10_000):
                pool.deallocate(pool.allocate(MIB + 64 * step))
            assert pool.stats.reserved_bytes <= 6 * pool.stats.peak_allocated_bytes
            pool.check()

    def test_freed_small_blocks_serve_a_large_request(self, segment):
        addresses = [segment.allocate(SEGMENT // 256) for _ in range(256)]
        for ptr in addresses[::2] + addresses[1::2]:
            segment.deallocate(ptr)
        assert segment.allocate(SEGMENT) == min(addresses)
        assert segment.stats.source_calls == 1


class TestAlignment:
    """Padding in front of an aligned block goes back to the lists."""

    @pytest.mark.parametrize("alignment", [512, 4096, 64 * KIB, MIB, 2 * MIB])
    def test_padding_is_free_and_counted(self, segment, alignment):
        first = segment.allocate(GRANULE)
        ptr = segment.allocate(1000, alignment=alignment)
        assert ptr % alignment == 0
        padding = ptr - first - GRANULE
        assert 0 < padding < alignment
        assert padding in free_sizes(segment)
        assert segment.stats.allocated_bytes == GRANULE + 1024
        assert sum(free_sizes(segment)) == SEGMENT - GRANULE - 1024
        assert segment.allocate(padding) == first + GRANULE

    @pytest.mark.parametrize("order", ALL_ORDERS)
    def test_padding_merges_again(self, segment, order):
        addresses = [segment.allocate(GRANULE), segment.allocate(1000, alignment=MIB), segment.allocate(5000)]
        for number in order:
            segment.deallocate(addresses[number])
            segment.check()
        assert free_sizes(segment) == [SEGMENT]

    def test_an_aligned_block_that_fits_exactly_is_found(self, segment):
        """Whether a free block can hold an aligned request depends on its address, not its size alone."""
        blocks = [segment.allocate(MIB) for _ in range(64)]
        aligned = next(ptr for ptr in blocks if ptr % (2 * MIB) == 0)
        segment.deallocate(aligned)
        assert segment.allocate(MIB, alignment=2 * MIB) == aligned

    def test_an_unaligned_block_of_the_right_size_is_refused(self, segment):
        blocks = [segment.allocate(MIB) for _ in range(64)]
        segment.deallocate(next(ptr for ptr in blocks if ptr % (2 * MIB)))
        with pytest.raises(vpool.OutOfMemoryError):
            segment.allocate(MIB, alignment=2 * MIB)

    def test_the_segment_that_an_aligned_request_asks_for_is_large_enough(self):
        with simulated_pool(initial=0, base_offset=GRANULE) as pool:
            for alignment in (512, 64 * KIB, 2 * MIB):
                assert pool.allocate(100, alignment=alignment) % alignment == 0
                pool.check()

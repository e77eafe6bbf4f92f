"""The advice of a report: what a user can act on, provoked by workloads that call for it."""

import pytest

import vpool
from tests.helpers.pools import GIB, KIB, MIB, simulated_pool


class TestAdvice:
    """Each sentence comes when a workload calls for it, and not otherwise."""

    def advice(self, pool):
        return " ".join(pool.inspect().advice)

    def test_none_for_a_pool_in_good_order(self):
        with simulated_pool(initial=16 * MIB) as pool:
            pool.allocate(14 * MIB)
            assert pool.inspect().advice == []

    def test_a_first_segment_that_is_too_large(self):
        with simulated_pool(initial=GIB) as pool:
            pool.allocate(MIB)
            assert "smaller first segment" in self.advice(pool)

    def test_no_segments_where_memory_comes_in_handles(self):
        """There neither a first segment nor growth would change what is reserved, or how often the source is called."""
        with vpool.Pool(source="simulated-vmm") as pool:
            pool.allocate(1000)
            assert "first segment" not in self.advice(pool)
            for _ in range(40):
                pool.allocate(3 * MIB)
            assert pool.stats.source_calls >= 32
            assert "first segment" not in self.advice(pool)

    def test_many_small_blocks(self):
        with simulated_pool(initial=0) as pool:
            for _ in range(1000):
                pool.allocate(10)
            assert "Rounding to 256 bytes wastes 96% of what is allocated: 1,000 blocks of 256 B" in self.advice(pool)

    def test_a_policy_that_rounds_to_more(self):
        with vpool.Pool(vpool.Dynamic(initial=0), source="simulated", rounding=2 * KIB) as pool:
            pool.allocate(100)
            assert "Rounding to 2,048 bytes wastes 95% of what is allocated: 1 block of 2.00 KiB" in self.advice(pool)

    def test_free_memory_in_pieces(self):
        with simulated_pool(initial=16 * MIB) as pool:
            blocks = [pool.allocate(MIB) for _ in range(16)]
            for ptr in blocks[::2]:
                pool.deallocate(ptr)
            assert "pieces" in self.advice(pool)

    def test_pieces_of_several_streams_are_none(self):
        """They become one where a request needs that: no advice says that they serve less."""
        with simulated_pool(16 * MIB, initial=16 * MIB) as pool:
            blocks = [(pool.allocate(2 * MIB, stream), stream) for stream in (0, 7) * 4]
            for ptr, stream in blocks:
                pool.deallocate(ptr, stream)
            assert pool.inspect().free_blocks == 8
            assert "pieces" not in self.advice(pool)
            assert pool.allocate(16 * MIB)

    def test_nobody_knows_what_was_in_use_before_peaks_began_anew(self):
        for strategy in (vpool.Dynamic(initial=GIB), vpool.Fixed(GIB)):
            with vpool.Pool(strategy, source="simulated") as pool:
                pool.deallocate(pool.allocate(900 * MIB))
                pool.allocate(MIB)
                with pool.measure():
                    assert "never in use" not in self.advice(pool)
                pool.reset_peaks()
                assert "never in use" not in self.advice(pool)
        with vpool.Pool(vpool.Dynamic(initial=0, growth="1MiB", limit=1.0), source="simulated") as pool:
            blocks = [pool.allocate(MIB) for _ in range(40)]
            for ptr in blocks[10:]:
                pool.deallocate(ptr)
            pool.trim()
            pool.reset_peaks()
            assert "which was the peak" not in self.advice(pool)

    def test_memory_that_was_reserved_and_not_used(self):
        with vpool.Pool(source="simulated") as pool:
            pool.reserve("4GiB")
            pool.allocate(MIB)
            assert "reserve() would do" in self.advice(pool)

    def test_a_core_that_is_too_large(self):
        with vpool.Pool(vpool.Fixed(64 * MIB), source="simulated") as pool:
            pool.allocate(4 * MIB)
            assert "At least 60.0 MiB of the fixed core's 64.0 MiB were never in use at once" in self.advice(pool)

    def test_a_limit_that_is_reached(self):
        with simulated_pool(16 * MIB, initial=16 * MIB) as pool:
            pool.allocate(16 * MIB)
            assert "limit" in self.advice(pool)

    def test_blocks_that_wait(self):
        with simulated_pool(initial=16 * MIB) as pool:
            ptr = pool.allocate(4 * MIB)
            pool.record_stream(ptr, 7)
            pool.deallocate(ptr)
            assert "4.00 MiB are freed but wait" in self.advice(pool)
            assert "stream 0x7" in self.advice(pool)

    def test_segments_that_few_blocks_pin(self):
        with simulated_pool(initial=16 * MIB) as pool:
            small, rest = pool.allocate(1000), pool.allocate(16 * MIB - 1024)
            pool.allocate(16 * MIB)
            assert "kept for" not in self.advice(pool)
            pool.deallocate(rest)
            assert "1 segment is kept for 1 block of 1.00 KiB, and holds 16.0 MiB" in self.advice(pool)
            pool.deallocate(small)
            assert "kept for" not in self.advice(pool)

    def test_segments_without_a_block(self):
        with simulated_pool(initial=0) as pool:
            pool.allocate(8 * MIB)
            ptr = pool.allocate(8 * MIB)
            pool.deallocate(ptr)
            assert "trim() gives them back" in self.advice(pool)
            assert pool.trim() == 8 * MIB
            assert "trim() gives them back" not in self.advice(pool)

    def test_what_the_pool_does_by_itself_is_no_advice(self):
        with vpool.Pool(vpool.Dynamic(initial=0, adaptive=True), source=vpool.sources.Simulated(GIB)) as pool:
            pool.allocate(8 * MIB)
            pool.deallocate(pool.allocate(16 * MIB))
            assert "trim() gives them back." in self.advice(pool)

    def test_rounding_is_the_policys(self):
        cases = (
            ({"rounding": MIB}, 10, "Rounding to 1,048,576 bytes wastes 100%"),
            ({"minimum_remainder": 4 * MIB}, 2 * MIB, "256 bytes and leaving no less than 4,194,304 bytes of a block"),
        )
        for options, nbytes, words in cases:
            policy = vpool.Policy(vpool.Dynamic(initial=4 * MIB), **options)
            with vpool.Pool.from_policy(policy, source="simulated") as pool:
                pool.allocate(nbytes)
                assert words in self.advice(pool)

    def test_many_source_calls(self):
        with vpool.Pool(vpool.Dynamic(initial=0, growth="1MiB", limit=1.0), source="simulated") as pool:
            for _ in range(40):
                pool.allocate(MIB)
            assert "The source was called 40 times" in self.advice(pool)
            assert "40.0 MiB" in self.advice(pool)

    @pytest.mark.parametrize("adaptive", [False, True])
    @pytest.mark.parametrize("size", [MIB, 64 * MIB])
    @pytest.mark.parametrize("initial", [0, 64 * MIB])
    def test_source_calls_for_what_went_back(self, initial, size, adaptive):
        """A first segment alone would go back too, so the sentence says what keeps it; and that works."""

        def run(initial, adaptive, keep):
            strategy = vpool.Dynamic(initial=initial, growth="1MiB", limit=1.0, adaptive=adaptive)
            with vpool.Pool(strategy, source="simulated") as pool:
                for _ in range(40):
                    pool.deallocate(pool.allocate(size))
                    pool.trim(keep=keep)
                return pool.stats.source_calls, pool.inspect().peak_reserved_bytes, self.advice(pool)

        calls, peak, advice = run(initial, adaptive, keep=0)
        assert calls == 80
        kept = f"would take one call if it were kept, by trim(keep={peak}) in place of trim(), or without adaptive=."
        assert kept in advice
        assert run(peak, adaptive, keep=0)[0] == 80
        calls, _, advice = run(peak, False, keep=peak)
        assert calls == 1
        assert "source was called" not in advice

    def test_a_first_segment_stands_beside_a_core(self):
        hybrid = vpool.Hybrid(8 * MIB, block="64KiB", dynamic=vpool.Dynamic(initial=0, growth="1MiB", limit=1.0))
        for strategy, told in ((hybrid, True), (vpool.Fixed(8 * MIB, block="64KiB", oversize="direct"), False)):
            with vpool.Pool(strategy, source="simulated") as pool:
                for _ in range(40):
                    pool.allocate(MIB)
                assert ("a first segment of 40.0 MiB, which was the peak beside the core" in self.advice(pool)) == told
                assert ("first segment" in self.advice(pool)) == told

    def test_mapped_memory_goes_back_from_beside_a_block(self):
        hybrid = vpool.Hybrid(4 * MIB, block="64KiB", dynamic=vpool.Dynamic(initial=0))
        with vpool.Pool(hybrid, source="simulated-vmm") as pool:
            large, _ = pool.allocate(64 * MIB), pool.allocate(MIB)
            pool.deallocate(large)
            assert "kept for" not in self.advice(pool)
            assert pool.trim() == 64 * MIB

    def test_a_device_that_others_fill(self):
        source = vpool.sources.Simulated(GIB)
        with vpool.Pool(vpool.Dynamic(initial=MIB, limit=1.0), source=source) as other:
            other.allocate(GIB - 16 * MIB)
            with vpool.Pool(vpool.Dynamic(initial=MIB, limit=1.0), source=source) as pool:
                pool.allocate(MIB)
                assert "taken by others" in self.advice(pool)

    def test_a_tag_near_its_limit(self):
        with simulated_pool(initial=MIB) as pool:
            pool.limit("activations", 100_000)
            with vpool.tag("activations"):
                pool.allocate(94_000)
                assert "activations" not in self.advice(pool)
                pool.allocate(2000)
            assert "Tag 'activations' has 93.8 KiB of its limit of 97.7 KiB" in self.advice(pool)

"""Lock, classes, free lists and address index by themselves, and vpool as a compiled caller sees it."""

import random
import threading

import pytest

from tests.helpers.pools import GIB, GRANULE, KIB, MIB, assert_whole, simulated_pool

LARGEST = 2**63 // GRANULE  # granules
ENTRIES = 100_000


def in_threads(work, count):
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class TestLock:
    """One holder at a time, without the GIL's help."""

    @pytest.mark.parametrize("threads", [1, 2, 4])
    def test_no_count_is_lost(self, probe, threads):
        lock = probe.Lock()
        in_threads(lambda: lock.hammer(300_000), threads)
        assert lock.counter == 300_000 * threads
        assert lock.most_inside == 1

    def test_trying_does_not_wait(self, probe):
        lock = probe.Lock()
        assert lock.try_lock()
        assert not lock.try_lock()
        lock.unlock()
        assert lock.try_lock()

    @pytest.mark.parametrize("threads", [1, 2, 4])
    @pytest.mark.parametrize(("rare", "patience"), [(0, 0), (1000, 2), (7, 2)])
    def test_no_count_is_lost_under_bias(self, probe, threads, rare, patience):
        """Also while the bias is earned and ended all the time."""
        lock = probe.BiasLock()
        in_threads(lambda: lock.hammer(200_000, rare, patience), threads)
        assert lock.counter == 200_000 * threads
        assert lock.most_inside == 1

    def test_no_count_is_lost_when_threads_try(self, probe):
        lock = probe.BiasLock()
        worked = []
        in_threads(lambda: worked.append(lock.hammer_trying(200_000)), 2)
        lock.hammer(1000, 10, 2)
        in_threads(lambda: (lock.hammer(200_000, 1000, 2), worked.append(lock.hammer_trying(200_000))), 2)
        assert lock.counter == sum(worked) + 401_000
        assert lock.most_inside == 1

    def test_the_bias_is_earned_and_each_time_dearer(self, probe):
        lock = probe.BiasLock()
        for round_number in range(4):
            patience = lock.patience
            assert patience == lock.first_patience << round_number
            lock.hammer(patience)
            assert not lock.biased
            lock.hammer(1)
            assert lock.biased
            in_threads(lambda: lock.hammer(1), 1)
            assert not lock.biased
        assert lock.revocations == 4

    def test_a_bias_of_another_thread_is_not_waited_for(self, probe):
        lock = probe.BiasLock()
        in_threads(lambda: lock.hammer(100), 1)
        assert lock.biased
        assert lock.hammer_trying(10) == 0
        lock.hammer(1)
        assert lock.hammer_trying(10) == 10

    def test_more_threads_than_seats(self, probe):
        lock = probe.BiasLock()
        for _ in range(20):
            lock.patience = 2
            in_threads(lambda: lock.hammer(10), 3)
        assert lock.counter == 20 * 3 * 10

    def test_who_waits_gets_it_in_the_end(self, probe):
        """The holder lost its core for long: the waiter yields and goes on."""
        lock = probe.Lock()
        assert lock.try_lock()
        waiter = threading.Thread(target=lock.hammer, args=(1,))
        waiter.start()
        waiter.join(0.2)
        assert waiter.is_alive()
        assert lock.counter == 0
        lock.unlock()
        waiter.join(10)
        assert lock.counter == 1


def test_turns_are_taken_by_one_at_a_time(probe):
    taker = probe.TurnTaker()
    in_threads(lambda: taker.hammer(50_000), 4)
    assert taker.counter == 200_000
    assert taker.waits <= taker.counter


class TestClasses:
    """The number of the class of a size."""

    def test_they_rise_with_the_size(self, probe):
        """Every size up to 16 MiB, and around every power of two and of its 32nds up to 2**63."""
        granules = set(range(1, 1 << 16))
        for power in range(16, 56):
            for part in range(32, 65):
                granules |= {(part << power >> 5) + step for step in (-1, 0, 1)}
        granules = sorted(number for number in granules if 0 < number <= LARGEST)
        numbers = probe.class_numbers([number * GRANULE for number in granules])
        assert numbers == sorted(numbers)
        assert numbers[0] == 1
        assert max(numbers) < probe.CLASSES

    def test_none_is_left_out(self, probe):
        numbers = probe.class_numbers([number * GRANULE for number in range(1, 1 << 16)])
        assert sorted(set(numbers)) == list(range(1, max(numbers) + 1))

    def test_small_sizes_have_one_each(self, probe):
        numbers = probe.class_numbers([number * GRANULE for number in range(1, 64)])
        assert len(set(numbers)) == 63

    @pytest.mark.parametrize("power", range(6, 55))
    def test_sizes_of_one_differ_by_at_most_a_32nd(self, probe, power):
        sizes = [((1 << power) + ((1 << power) * part >> 5)) * GRANULE for part in range(32)]
        numbers = probe.class_numbers(sizes)
        assert numbers == list(range(numbers[0], numbers[0] + 32))
        widths = [after - before for before, after in zip(sizes, [*sizes[1:], 2 * sizes[0]], strict=True)]
        assert all(width * 32 <= size for size, width in zip(sizes, widths, strict=True))
        lasts = probe.class_numbers([size + width - GRANULE for size, width in zip(sizes, widths, strict=True)])
        assert lasts == numbers

    @pytest.mark.parametrize("unit", [1, 2, 256, 2 * MIB])
    def test_rounding(self, probe, unit):
        for number in (0, 1, 255, 256, 257, 2**40 + 3, 2**63 - 1, 2**63):
            assert probe.rounded(number, unit) == (number // unit * unit, -(-number // unit) * unit)


class TestFreeLists:
    """Two levels of bitmaps against a plain list."""

    def test_against_a_plain_list(self, probe):
        rng = random.Random(1)
        arena = probe.Probe()
        listed = {}

        def size():
            return int(2 ** rng.uniform(0, 36)) * GRANULE

        for _ in range(30_000):
            action = rng.random()
            if action < 0.4 or not listed:
                nbytes = size()
                listed[arena.list_free(nbytes)] = nbytes
            elif action < 0.6:
                block = rng.choice(list(listed)) if len(listed) < 50 else next(iter(listed))
                del listed[block]
                arena.unlist(block)
            elif action < 0.7:
                block = next(iter(listed))
                listed[block] = listed.pop(block) + GRANULE * rng.choice([1, 100])
                arena.relist(block, listed[block])
            else:
                self.assert_right(probe, arena, listed, size())
            if len(listed) > 200:
                for block in list(listed)[:150]:
                    arena.unlist(block)
                    del listed[block]
        for block in listed:
            arena.unlist(block)
        assert arena.bitmaps_are_empty()

    @staticmethod
    def assert_right(probe, arena, listed, wanted):
        found = arena.find_free(wanted)
        wanted_class, *classes = probe.class_numbers([wanted, *listed.values()])
        larger = [number for number in classes if number > wanted_class]
        if found:
            assert listed[found] == arena.size(found) >= wanted
            (number,) = probe.class_numbers([listed[found]])
            assert number == wanted_class or number == min(larger)
        else:
            assert not larger


class TestIndex:
    """Linear hashing: every address is found at every size of the table."""

    def test_a_hundred_thousand_random_addresses(self, probe):
        rng = random.Random(2)
        arena = probe.Probe()
        addresses = [number * GRANULE for number in rng.sample(range(1, 2**48), ENTRIES)]
        numbers = {}
        for count, address in enumerate(addresses):
            numbers[address] = arena.insert(address)
            if count & (count - 1) == 0:
                assert all(arena.find(known) == number for known, number in numbers.items())
        assert all(arena.find(address) == number for address, number in numbers.items())
        assert arena.figures["live_blocks"] == ENTRIES
        assert arena.figures["buckets"] >= 2 * (ENTRIES - 1)
        assert arena.longest_chain() <= 12
        self.assert_removals(arena, numbers, addresses, rng)

    @staticmethod
    def assert_removals(arena, numbers, addresses, rng):
        assert not any(arena.find(address + GRANULE) for address in addresses if address + GRANULE not in numbers)
        rng.shuffle(addresses)
        gone, kept = addresses[: ENTRIES // 2], addresses[ENTRIES // 2 :]
        assert all(arena.remove(address) == numbers[address] for address in gone)
        assert not any(arena.find(address) or arena.remove(address) for address in gone)
        assert all(arena.find(address) == numbers[address] for address in kept)
        again = [arena.insert(address) for address in gone]
        assert [arena.find(address) for address in gone] == again
        assert all(arena.remove(address) for address in addresses)
        assert arena.figures["live_blocks"] == 0
        assert arena.longest_chain() == 0

    @pytest.mark.parametrize("step", [GRANULE, 512, 4 * KIB, 2 * MIB, 1 << 32])
    def test_regular_addresses_spread(self, probe, step):
        """Blocks of one size side by side, the usual case, make no long chains."""
        arena = probe.Probe()
        base = 0x7F00_0000_0000
        for number in range(20_000):
            arena.insert(base + step * number)
        assert arena.longest_chain() <= 8
        assert all(arena.find(base + step * number) for number in range(20_000))


class TestRemainders:
    """A rest that is too small to be of use stays with the block."""

    BASE, SEGMENT, MINIMUM = 1 << 40, 64 * KIB, 4 * KIB

    @pytest.mark.parametrize("rest", [0, GRANULE, MINIMUM - GRANULE, MINIMUM, MINIMUM + GRANULE])
    def test_a_rest_below_the_minimum_is_lent_too_and_counted(self, probe, rest):
        arena = probe.Probe(self.MINIMUM)
        arena.add_segment(self.BASE, self.SEGMENT)
        wanted = self.SEGMENT - rest
        block = arena.take(wanted)
        split = rest >= self.MINIMUM
        assert arena.size(block) == (wanted if split else self.SEGMENT)
        assert (arena.find_free(GRANULE) != 0) == split
        assert arena.figures["allocated_bytes"] == arena.size(block)
        assert arena.figures["requested_bytes"] == wanted
        arena.put(block)
        assert arena.figures["allocated_bytes"] == arena.figures["requested_bytes"] == 0
        assert arena.find_free(self.SEGMENT)

    def test_without_a_record_for_the_rest_the_whole_block_is_lent(self, probe):
        arena = probe.Probe()
        edge = arena.add_segment(self.BASE, self.SEGMENT)
        arena.allow_no_more_records()
        block = arena.take(1000)
        assert arena.size(block) == self.SEGMENT
        assert arena.add_segment(self.BASE + self.SEGMENT, self.SEGMENT) == 0
        assert not arena.remove_segment(edge, self.SEGMENT)
        arena.put(block)
        assert arena.remove_segment(edge, self.SEGMENT)
        assert arena.bitmaps_are_empty()


class TestPeaks:
    """The highest sums, where threads look for them at once."""

    @pytest.mark.timeout(60)
    def test_nobody_waits_for_who_adds_up(self, probe):
        with simulated_pool() as pool:
            pool.deallocate(pool.allocate(MIB))
            ptr, noted = probe.allocate_while_peaks_are_looked_at(pool, 2 * MIB)
            assert noted
            pool.check()
            assert pool.stats.peak_allocated_bytes == pool.inspect().peak_requested_bytes == 2 * MIB
            pool.deallocate(ptr)
            pool.check()

    def test_a_note_is_seen_by_the_next_look(self, probe):
        with simulated_pool() as pool:
            pool.deallocate(pool.allocate(MIB))
            held, _ = probe.allocate_while_peaks_are_looked_at(pool, 2 * MIB)
            pool.deallocate(pool.allocate(2 * MIB))
            pool.deallocate(held)
            assert pool.stats.peak_allocated_bytes == 4 * MIB

    @pytest.mark.parametrize(("nbytes", "looking"), [(4 * MIB, True), (MIB + KIB, False)], ids=["much", "a measure"])
    def test_some_wait_for_their_turn(self, probe, nbytes, looking):
        """A large block that is given back at once is not missed, and none that meets no other at a new peak."""
        with simulated_pool() as pool:
            pool.deallocate(pool.allocate(MIB))
            looker = threading.Thread(target=probe.look_at_peaks_for, args=(pool, 0.2, looking))
            looker.start()
            while not probe.peaks_are_looked_at(pool):
                pass
            pool.deallocate(pool.allocate(nbytes))
            looker.join()
            assert pool.stats.peak_allocated_bytes == nbytes

    def test_a_measure_begins_exactly(self, probe):
        with simulated_pool() as pool:
            pool.deallocate(pool.allocate(16 * MIB))
            pool.deallocate(probe.allocate_while_peaks_are_looked_at(pool, 16 * MIB + KIB)[0])
            with pool.measure() as phase:
                for nbytes in (16 * MIB, 16 * MIB + KIB, 16 * MIB + 2 * KIB):
                    pool.deallocate(pool.allocate(nbytes))
                    assert phase.peak_allocated_bytes == nbytes

    def test_they_are_a_little_lenient_then_and_exact_again(self, probe):
        with simulated_pool() as pool:
            pool.deallocate(pool.allocate(16 * MIB))
            held, _ = probe.allocate_while_peaks_are_looked_at(pool, 16 * MIB + KIB)
            for _ in range(100):
                before = pool.stats.peak_allocated_bytes
                step = pool.allocate(KIB)
                pool.deallocate(step)
                peak = pool.stats.peak_allocated_bytes
                assert 16 * MIB + 2 * KIB >= peak >= before
                assert (16 * MIB + 2 * KIB - peak) * 64 <= peak
            pool.deallocate(pool.allocate(2 * KIB))
            assert pool.stats.peak_allocated_bytes == 16 * MIB + 3 * KIB
            pool.deallocate(held)
            pool.check()

    def test_threads_with_streams_of_their_own(self, probe):
        """They hold more and more, and the sum at the end, which is the highest, is found."""
        with simulated_pool(GIB) as pool:
            held = []

            def work():
                stream = 0x7000 + 16 * threading.get_ident() % 2**40
                probe.compiled_calls(pool, 5000, 20_000)
                held.extend(pool.allocate(64 * KIB, stream) for _ in range(100))
                probe.compiled_calls(pool, 5000, 20_000)

            in_threads(work, 4)
            figures = pool.stats
            assert figures.allocated_bytes == 400 * 64 * KIB
            assert figures.allocated_bytes <= figures.peak_allocated_bytes <= figures.allocated_bytes + 4 * 5120
            pool.check()
            for ptr in held:
                pool.deallocate(ptr)
            assert_whole(pool)


class TestCompiledCallers:
    """Allocation from Cython, without the GIL."""

    def test_a_pair(self, probe):
        with simulated_pool() as pool:
            assert probe.compiled_calls(pool, 1000, 10_000) == 10_000
            assert pool.stats.allocations == pool.stats.frees == 10_000
            assert_whole(pool)

    def test_from_threads_without_the_gil(self, probe):
        with simulated_pool() as pool:
            in_threads(lambda: probe.compiled_calls(pool, 5000, 100_000), 4)
            assert pool.stats.frees == 400_000
            assert_whole(pool)

    @pytest.mark.timeout(60)
    def test_cheap_figures_take_no_lock(self, probe):
        """They would wait for ever: locks are not recursive."""
        with simulated_pool() as pool:
            pool.allocate(1000)
            pool.allocate(1000, stream=7)
            stats, info, _, _ = probe.figures_under_locks(pool)
            assert stats == pool.stats
            assert info.reserved_bytes == stats.reserved_bytes
            with pool.record(), pool.measure():
                assert probe.figures_under_locks(pool)[0] == pool.stats

    def test_a_closed_or_exhausted_pool_gives_nothing(self, probe):
        with simulated_pool(MIB) as pool:
            assert probe.compiled_calls(pool, 2 * MIB, 3) == 0
            assert pool.stats.ooms == 3
        assert probe.compiled_calls(pool, 1000, 3) == 0

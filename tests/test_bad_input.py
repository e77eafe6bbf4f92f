"""Arguments and addresses that are wrong: the right error each, and nothing live changes."""

import pickle
import threading

import numpy as np
import pytest

import vpool
from tests.helpers.pools import GRANULE, MIB, live_figures, run_cleanly, simulated_pool, unchanged

NO_SIZES = [
    (-1, ValueError),
    (-(2**70), ValueError),
    (np.int64(-5), ValueError),
    (2**63, OverflowError),
    (2**64 - 510, OverflowError),
    (2**64 - 1, OverflowError),
    (2**64, OverflowError),
    (np.uint64(2**63), OverflowError),
    (1.5, TypeError),
    (1.0, TypeError),
    (np.float64(8), TypeError),
    ("8", TypeError),
    (b"8", TypeError),
    (True, TypeError),
    (False, TypeError),
    (np.bool_(True), TypeError),
    (None, TypeError),
    ([8], TypeError),
]
NO_ALIGNMENTS = [
    (0, ValueError),
    (-256, ValueError),
    (3, ValueError),
    (257, ValueError),
    (4 * MIB, ValueError),
    (2 * MIB + 256, ValueError),
    (2**64, ValueError),
    (256.0, TypeError),
    ("256", TypeError),
    (True, TypeError),
    (None, TypeError),
]
NO_ADDRESSES = [(1.5, TypeError), ("0", TypeError), (None, TypeError), (True, TypeError), (b"", TypeError)]
FOREIGN_ADDRESSES = [1, 256, -1, -(2**80), 2**63, 2**64 - 256, 2**64 - 1, 2**64, 2**100]
NO_STREAMS = [(1.5, TypeError), ("7", ValueError), (True, TypeError), (object(), TypeError), (-1, ValueError),
              (2**64, ValueError)]  # fmt: skip


@pytest.fixture
def blocks(pool):
    """Addresses of live blocks with free ones between."""
    addresses = [pool.allocate(1000) for _ in range(7)]
    for ptr in addresses[1::2]:
        pool.deallocate(ptr)
    return addresses[0::2]


@pytest.mark.usefixtures("blocks")
class TestArguments:
    """Each is refused with a live pool around it."""

    @pytest.mark.parametrize(("nbytes", "error"), NO_SIZES)
    @pytest.mark.parametrize("method", ["allocate", "empty"])
    def test_sizes(self, pool, method, nbytes, error):
        with unchanged(pool), pytest.raises(error):
            getattr(pool, method)(nbytes)

    @pytest.mark.parametrize("nbytes", [2**63 - 1, 2**63 - 255, 2**63 - 256, 2**62 + 1, 2**62])
    @pytest.mark.parametrize("alignment", [256, 2 * MIB])
    def test_sizes_that_no_device_has(self, pool, nbytes, alignment):
        """Rounding and alignment never wrap a huge request around into a small block."""
        with unchanged(pool), pytest.raises(vpool.OutOfMemoryError) as caught:
            pool.allocate(nbytes, alignment=alignment)
        assert caught.value.requested == nbytes

    @pytest.mark.parametrize(("alignment", "error"), NO_ALIGNMENTS)
    @pytest.mark.parametrize("nbytes", [0, 100])
    def test_alignments(self, pool, nbytes, alignment, error):
        with unchanged(pool), pytest.raises(error):
            pool.allocate(nbytes, alignment=alignment)

    @pytest.mark.parametrize(("ptr", "error"), NO_ADDRESSES)
    def test_addresses(self, pool, ptr, error):
        with unchanged(pool), pytest.raises(error):
            pool.deallocate(ptr)

    @pytest.mark.parametrize(("stream", "error"), NO_STREAMS)
    def test_streams(self, pool, blocks, stream, error):
        for call in (pool.allocate, pool.empty):
            with unchanged(pool), pytest.raises(error):
                call(100, stream=stream)
        with unchanged(pool), pytest.raises(error):
            pool.deallocate(blocks[0], stream=stream)


class TestAddresses:
    """Addresses that are no live block of the pool."""

    @pytest.mark.parametrize("ptr", FOREIGN_ADDRESSES)
    @pytest.mark.parametrize("stream", [None, 0, 7])
    @pytest.mark.usefixtures("blocks")
    def test_a_foreign_one(self, pool, ptr, stream):
        with unchanged(pool), pytest.raises(vpool.ForeignPointerError):
            pool.deallocate(ptr, stream=stream)

    @pytest.mark.parametrize("offset", [1, 8, 255, 256, 257, 512, 1023])
    def test_inside_a_live_block(self, pool, blocks, offset):
        with unchanged(pool), pytest.raises(vpool.ForeignPointerError, match="inside"):
            pool.deallocate(blocks[1] + offset)

    def test_the_end_of_the_segment(self, pool, blocks):
        (segment,) = pool.inspect().segment_table
        for ptr in (segment["address"] - 1, segment["address"] + segment["nbytes"]):
            with unchanged(pool), pytest.raises(vpool.ForeignPointerError):
                pool.deallocate(ptr)

    def test_a_block_of_another_pool_names_that_pool(self, pool, blocks):
        # Other addresses than the pool's own: simulated devices all begin at the same one.
        with simulated_pool(base_offset=1 << 50, name="the owner") as other:
            ptr = other.allocate(100)
            with unchanged(pool), unchanged(other), pytest.raises(vpool.ForeignPointerError, match="the owner"):
                pool.deallocate(ptr)
            other.deallocate(ptr)

    def test_a_buffer_of_another_pool(self, pool, blocks):
        with simulated_pool(name="the owner") as other:
            buffer = other.empty(100)
            with unchanged(pool), unchanged(other), pytest.raises(vpool.ForeignPointerError, match="the owner"):
                pool.deallocate(buffer)
            assert not buffer.closed
            buffer.close()


class TestDoubleFrees:
    """Exactly one free succeeds, and whoever has the memory next does not notice."""

    @pytest.mark.parametrize("stream", [None, 0, 7])
    def test_at_once(self, pool, blocks, stream):
        pool.deallocate(blocks[0])
        with unchanged(pool), pytest.raises(vpool.DoubleFreeError):
            pool.deallocate(blocks[0], stream=stream)

    def test_after_merging_with_both_neighbours(self, pool):
        left, middle, right = (pool.allocate(1000) for _ in range(3))
        for ptr in (left, right, middle):
            pool.deallocate(ptr)
        for ptr in (left, middle, right):
            with unchanged(pool), pytest.raises(vpool.DoubleFreeError):
                pool.deallocate(ptr)

    def test_after_a_larger_block_was_lent_around_it(self, pool):
        left, middle = pool.allocate(1000), pool.allocate(1000)
        pool.deallocate(left)
        pool.deallocate(middle)
        assert pool.allocate(4000) == left
        with unchanged(pool), pytest.raises(vpool.ForeignPointerError, match="inside"):
            pool.deallocate(middle)

    def test_an_address_says_nothing_of_its_owner_so_after_reuse_it_frees_once_more(self, pool):
        ptr = pool.allocate(1000)
        pool.deallocate(ptr)
        assert pool.allocate(1000) == ptr
        pool.deallocate(ptr)
        with unchanged(pool), pytest.raises(vpool.DoubleFreeError):
            pool.deallocate(ptr)

    @pytest.mark.parametrize("stream", [None, 0, 7])
    def test_a_buffer_freed_by_hand_does_not_free_the_new_owner(self, pool, stream):
        buffer = pool.empty(1000)
        pool.deallocate(buffer.ptr)
        assert pool.allocate(1000) == buffer.ptr
        with unchanged(pool), pytest.raises(vpool.DoubleFreeError):
            buffer.close(stream=stream)

    def test_from_two_threads_at_once(self, pool):
        """Of two concurrent frees of each block exactly one succeeds."""
        rounds = 300
        outcomes = []
        barrier = threading.Barrier(2)
        addresses = [pool.allocate(1000) for _ in range(rounds)]

        def free_all():
            for ptr in addresses:
                barrier.wait()
                try:
                    pool.deallocate(ptr)
                except vpool.DoubleFreeError:
                    outcomes.append("refused")
                else:
                    outcomes.append("freed")

        threads = [threading.Thread(target=free_all) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes.count("freed") == outcomes.count("refused") == rounds
        assert pool.stats.frees == rounds
        pool.check()


class TestClosedPool:
    """A closed pool lends nothing more; what it lent can still be freed."""

    @pytest.fixture
    def closed(self):
        pool = simulated_pool(name="shut")
        pool.deallocate(pool.allocate(1000))
        pool.close()
        return pool

    @pytest.mark.parametrize("arguments", [{}, {"stream": 7}, {"alignment": 4096}])
    @pytest.mark.parametrize("nbytes", [0, 100, 2**62])
    def test_it_lends_nothing(self, closed, nbytes, arguments):
        with unchanged(closed), pytest.raises(vpool.ClosedPoolError, match="shut"):
            closed.allocate(nbytes, **arguments)
        assert closed.source.driver.used == 0

    @pytest.mark.parametrize("nbytes", [0, 100])
    def test_nor_buffers(self, closed, nbytes):
        with unchanged(closed), pytest.raises(vpool.ClosedPoolError):
            closed.empty(nbytes)

    @pytest.mark.parametrize("ptr", FOREIGN_ADDRESSES)
    def test_it_refuses_foreign_addresses(self, closed, ptr):
        with unchanged(closed), pytest.raises(vpool.ForeignPointerError):
            closed.deallocate(ptr)

    def test_its_figures_can_still_be_read(self, closed):
        assert closed.inspect().reserved_bytes == closed.stats.reserved_bytes == 0
        assert str(closed.inspect())

    def test_an_address_that_went_back_with_its_segment_is_refused(self):
        pool = simulated_pool()
        ptr = pool.allocate(1000)
        pool.close()
        pool.deallocate(ptr)
        with unchanged(pool), pytest.raises(vpool.InvalidPointerError):
            pool.deallocate(ptr)


class TestPoolArguments:
    """What a pool cannot be built from."""

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ({"source": "nowhere"}, ValueError),
            ({"source": 5}, TypeError),
            ({"source": "host", "device": -1}, ValueError),
            ({"source": "host", "device": 999}, ValueError),
            ({"source": "host", "device": 1.5}, TypeError),
            ({"source": "host", "device": True}, TypeError),
            ({"source": "host", "device": "0"}, TypeError),
            ({"source": vpool.sources.Host(), "device": 1}, ValueError),
            ({"source": vpool.sources.Host(), "device": False}, TypeError),
            ({"source": "host", "strategy": 1.5}, TypeError),
            ({"source": "host", "strategy": vpool.Dynamic}, TypeError),
        ],
    )
    def test_is_refused(self, arguments, error):
        with pytest.raises(error):
            vpool.Pool(**arguments)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"limit": "1GiB"}, r"^Pool\(\) .* 'limit': it is a strategy's, as in Pool\(Dynamic\(limit=...\)\)$"),
            ({"capacity": "1GiB"}, r"'capacity': it is a strategy's, as in Pool\(Fixed\(capacity=...\)\)$"),
            ({"core": "1GiB"}, r"'core': it is a strategy's, as in Pool\(Hybrid\(core=...\)\)$"),
            ({"nam": "x"}, r"^Pool\(\) got an unexpected keyword argument 'nam'$"),
        ],
    )
    def test_an_unknown_one_is_said_to_be_the_pools_or_a_strategys(self, arguments, message):
        with pytest.raises(TypeError, match=message):
            vpool.Pool(**arguments)
        with pytest.raises(TypeError, match=r"^Pool\(\) takes at most 4 positional arguments"):
            vpool.Pool(None, "host", None, None, 5)

    @pytest.mark.parametrize("device", [-1, 999])
    def test_a_bad_ordinal_is_told_how_many_devices_there_are(self, device):
        with pytest.raises(ValueError, match="has 1"):
            vpool.Pool(source="simulated", device=device)

    def test_an_unknown_source_is_told_which_there_are(self):
        with pytest.raises(ValueError, match="simulated"):
            vpool.Pool(source="nowhere")


class TestHalfMade:
    """A subclass's `__del__` runs although the pool could not be made."""

    @pytest.mark.parametrize(
        "arguments",
        [
            "5",
            "source=5",
            "device=99",
            'on_pressure=""',
            "rounding=3",
            'debug="nonsense"',
            'debug="guard", source="simulated"',
            "nonsense=1",
            "None, None, None, None, 5",
        ],
    )
    def test_it_finds_a_closed_pool(self, arguments):
        code = f"""
import vpool
class Mine(vpool.Pool):
    def __del__(self):
        self.check()
        for call in (self.maintain, lambda: self.allocate(100), lambda: self.empty(100, stream=7)):
            try:
                call()
            except vpool.ClosedPoolError:
                print("closed")
        self.close()
        print(self.closed, self.stats.reserved_bytes, self.inspect().live_blocks, self.ladder != {{}})
try:
    Mine({arguments})
except (TypeError, ValueError):
    print("refused")
"""
        assert run_cleanly(code).split() == ["closed"] * 3 + ["True", "0", "0", "True", "refused"]


class TestProtocol:
    """Streams whose `__cuda_stream__` gives no handle."""

    @pytest.mark.parametrize("answer", [None, (), (0,), 5, {}, "ab", (0, 1.5), (0, "7"), (0, object())])
    def test_is_a_type_error(self, pool, answer):
        class Stream:
            def __cuda_stream__(self):
                return answer

        with unchanged(pool), pytest.raises(TypeError):
            pool.allocate(100, stream=Stream())


class TestErrors:
    """The tree of exceptions."""

    @pytest.mark.parametrize(
        ("kind", "bases"),
        [
            (vpool.OutOfMemoryError, (vpool.Error, MemoryError)),
            (vpool.InvalidPointerError, (vpool.Error, ValueError)),
            (vpool.DoubleFreeError, (vpool.InvalidPointerError,)),
            (vpool.ForeignPointerError, (vpool.InvalidPointerError,)),
            (vpool.ForkedProcessError, (vpool.Error, RuntimeError)),
            (vpool.ClosedPoolError, (vpool.Error, RuntimeError)),
            (vpool.SourceError, (vpool.Error, RuntimeError)),
            (vpool.FormatError, (vpool.Error, ValueError)),
        ],
    )
    def test_each_can_be_caught_as_its_bases_and_pickled(self, kind, bases):
        for base in bases:
            assert issubclass(kind, base)
        copy = pickle.loads(pickle.dumps(kind("what went wrong")))
        assert type(copy) is kind
        assert str(copy) == "what went wrong"

    def test_an_out_of_memory_error_keeps_its_figures_when_pickled(self):
        with simulated_pool("1MiB") as pool:
            with pytest.raises(vpool.OutOfMemoryError) as caught:
                pool.allocate(2 * MIB)
            copy = pickle.loads(pickle.dumps(caught.value))
        assert (copy.requested, copy.steps) == (2 * MIB, caught.value.steps)
        assert copy.report.to_dict() == caught.value.report.to_dict()

    def test_a_source_error_keeps_its_name_when_pickled(self):
        assert pickle.loads(pickle.dumps(vpool.SourceError("failed", "cudaErrorUnknown"))).name == "cudaErrorUnknown"

    def test_errors_count_nothing_as_lent(self, pool):
        for nbytes, error in NO_SIZES:
            with pytest.raises(error):
                pool.allocate(nbytes)
        assert set(live_figures(pool).values()) == {0}
        assert pool.stats.source_calls == 0


def test_granule_is_the_unit_that_tests_assume(pool):
    pool.allocate(1)
    assert pool.stats.allocated_bytes == GRANULE

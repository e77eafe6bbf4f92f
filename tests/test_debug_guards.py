"""Guards: a byte that is written beside a block is found when the block is freed."""

import contextlib
import itertools
import threading

import pytest

import vpool
from tests.helpers.debug import SOURCES, debug_pool, line_above, line_below, read, unraised, write
from tests.helpers.pools import MIB, live_figures, round_up, unchanged
from vpool._interface import bench
from vpool._storage.fake_cuda import FakeCudaDriver

OUT_OF_MEMORY = 2
ILLEGAL_ADDRESS = 700
WITH_MEMORY = ["host", "fake cuda"]
SIZES = [1, 255, 256, 257, 1000, 3 * MIB + 1]


@pytest.fixture(params=WITH_MEMORY)
def pool(request):
    with debug_pool("guard,sites", request.param) as pool:
        yield pool


def error_of_free(pool, ptr):
    """What a free raises, and its site."""
    try:
        freed = line_below()
        pool.deallocate(ptr)
    except vpool.GuardError as error:
        return error, freed
    return pytest.fail("the damage was not found")


@pytest.mark.parametrize("alignment", [256, 4096, 2 * MIB])
@pytest.mark.parametrize("nbytes", SIZES)
def test_one_byte_beside_a_block_is_found_when_it_is_freed(pool, nbytes, alignment):
    """On each side, next to the block and as far away as the guard reaches; the error names place and sites."""
    for offset in (-1, -256, nbytes, nbytes + 255):
        ptr = pool.allocate(nbytes, alignment=alignment)
        allocated = line_above()
        assert ptr % alignment == 0
        write(ptr + offset)
        with unchanged(pool):
            error, freed = error_of_free(pool, ptr)
        assert (error.address, error.requested, error.offset, error.found) == (ptr, nbytes, offset, 0x41)
        place = f"{-offset:,} byte" if offset < 0 else f"{offset - nbytes + 1:,} byte"
        assert place in str(error)
        assert ("before the start" if offset < 0 else "after the end") in str(error)
        assert f"{nbytes:,} byte" in str(error)
        assert f"Allocated at {allocated}, freed at {freed}." in str(error)
        pool.deallocate(ptr)  # its guard is whole again
    assert pool.stats.allocated_bytes == 0


def test_all_that_was_asked_for_may_be_written(pool):
    blocks = [(pool.allocate(nbytes), nbytes) for nbytes in SIZES]
    for ptr, nbytes in blocks:
        write(ptr, 0xFF, nbytes)
    pool.check()
    for ptr, _ in blocks:
        pool.deallocate(ptr)
    assert live_figures(pool)["allocated_bytes"] == 0


def test_the_nearest_of_several_bytes_is_told(pool):
    ptr = pool.allocate(1000)
    write(ptr - 50, nbytes=20)
    write(ptr + 1005, 0x42, 10)
    with pytest.raises(vpool.GuardError, match=r"0x42 was written 6 bytes after the end.*, and 29 more, stream 0x0\."):
        pool.deallocate(ptr)


def test_check_looks_at_the_guards_of_live_blocks_and_changes_nothing(pool):
    blocks = [pool.allocate(100) for _ in range(10)]
    pool.check()
    write(blocks[7] + 100)
    for _ in range(2):
        with pytest.raises(vpool.GuardError, match="1 byte after the end"):
            pool.check()
    with pytest.raises(vpool.GuardError):
        pool.deallocate(blocks[7])
    pool.check()


def test_guards_count_as_allocated(pool):
    ptr = pool.allocate(1000)
    report = pool.inspect()
    assert (report.requested_bytes, report.allocated_bytes) == (1000, round_up(256 + 1000 + 256))
    assert pool.stats.requested_bytes == 1000
    # The rows tile their segment, so the block's own begins with its guard.
    (row,) = report.blocks[report.blocks["state"] == "live"]
    assert int(row["address"]) == ptr - 256
    assert not [sentence for sentence in report.advice if "Rounding" in sentence]


@pytest.mark.parametrize(("wanted", "bytes_each"), [("guard", 256), ("guard=1", 256), ("guard=1KiB", 1024)])
def test_the_guard_has_the_size_that_was_asked_for(wanted, bytes_each):
    with debug_pool(wanted) as pool:
        ptr = pool.allocate(256)
        assert pool.stats.allocated_bytes == 256 + 2 * bytes_each
        assert read(ptr - bytes_each, bytes_each) == read(ptr + 256, bytes_each) == b"\xfd" * bytes_each


@pytest.mark.parametrize("where", [-1, -256, 1, 999, 1000, 1255])
def test_addresses_beside_the_callers_are_refused(pool, where):
    ptr = pool.allocate(1000)
    allocated = line_above()
    with unchanged(pool), pytest.raises(vpool.ForeignPointerError) as caught:
        pool.deallocate(ptr + where)
    assert hex(ptr) in str(caught.value)
    assert allocated in str(caught.value)
    with pytest.raises(vpool.ForeignPointerError):
        pool.record_stream(ptr + where, 5)
    pool.deallocate(ptr)


def test_a_double_free_names_both_sites(pool):
    ptr = pool.allocate(1000)
    allocated = line_above()
    pool.deallocate(ptr)
    freed = line_above()
    with unchanged(pool), pytest.raises(vpool.DoubleFreeError) as caught:
        pool.deallocate(ptr)
    assert f"Allocated at {allocated}, freed at {freed}." in str(caught.value)


def test_without_sites_no_sites_are_named():
    with debug_pool("guard") as pool:
        ptr = pool.allocate(1000)
        write(ptr - 1)
        with pytest.raises(vpool.GuardError, match=r"stream 0x0\.$"):
            pool.deallocate(ptr)
        pool.deallocate(ptr)
        with pytest.raises(vpool.DoubleFreeError, match=r"is free already in pool 'watched'\.$"):
            pool.deallocate(ptr)
        with pytest.raises(vpool.ForeignPointerError, match="not of pool"):
            pool.deallocate(4096)


class TestBuffers:
    def test_a_buffer_stays_open_and_is_freed_by_the_next_close(self, pool):
        buffer = pool.empty(1000)
        assert (buffer.nbytes, buffer.requested, buffer.closed) == (1000, 1000, False)
        write(buffer.ptr + buffer.nbytes)
        with pytest.raises(vpool.GuardError):
            buffer.close()
        assert not buffer.closed
        assert pool.stats.requested_bytes == 1000
        buffer.close()
        assert (buffer.closed, buffer.ptr, pool.stats.requested_bytes) == (True, 0, 0)
        buffer.close()

    def test_a_dropped_buffer_is_reported_and_freed(self, pool):
        buffer = pool.empty(1000)
        write(buffer.ptr - 1)
        with unraised() as caught:
            del buffer
        assert isinstance(caught[0], vpool.GuardError)
        assert pool.stats.requested_bytes == 0
        with unraised(0):
            pool.empty(1000)

    def test_the_error_does_not_keep_the_buffer(self, pool):
        """No cycle of the exception with a frame that it passed: dropping the buffer frees it at once."""
        buffer = pool.empty(1000)
        write(buffer.ptr - 1)
        with contextlib.suppress(vpool.GuardError):
            buffer.close()
        del buffer
        assert pool.stats.requested_bytes == 0

    def test_an_address_freed_by_hand(self, pool):
        buffer = pool.empty(1000)
        pool.deallocate(buffer.ptr)
        assert (buffer.closed, buffer.nbytes) == (True, 0)
        other = pool.empty(1000)  # perhaps at the same address
        with unchanged(pool), pytest.raises(vpool.DoubleFreeError):
            buffer.close()
        del buffer
        assert not other.closed

    def test_dropped_after_its_address_was_freed_by_hand(self, pool):
        buffer = pool.empty(1000)
        pool.deallocate(buffer.ptr)
        with unraised(0):
            del buffer
        assert pool.stats.frees == 1

    def test_a_stream_that_closes_the_buffer_while_it_is_asked(self, pool):
        class Stream:
            @property
            def handle(self):
                buffer.close()
                return 7

        buffer = pool.empty(1000)
        buffer.close(Stream())
        assert pool.stats.requested_bytes == 0


class TestStreams:
    @pytest.fixture
    def machine(self):
        return FakeCudaDriver(64 * MIB)

    @pytest.fixture
    def pool(self, machine):
        with vpool.Pool(source=vpool.sources.Source(machine, "cuda"), debug="guard,poison") as pool:
            yield pool

    def test_a_free_looks_behind_the_work_of_every_stream_that_used_the_block(self, pool, machine):
        own, user, freer = (machine.create_stream() for _ in range(3))
        ptr = pool.allocate(1000, own)
        pool.record_stream(ptr, user)
        positions = {stream: machine.queue_work(stream) for stream in (own, user)}
        assert not any(machine.ordered(freer, stream, at) for stream, at in positions.items())
        pool.deallocate(ptr, freer)
        assert all(machine.ordered(freer, stream, at) for stream, at in positions.items())
        assert machine.calls()["synchronize"][0] == 0

    def test_a_stream_that_is_gone_is_waited_for_with_the_device(self, pool, machine):
        stream = machine.create_stream()
        ptr = pool.allocate(1000, stream)
        machine.queue_work(stream)
        machine.destroy_stream(stream)
        pool.deallocate(ptr)
        assert machine.calls()["synchronize"][0] > 0
        assert machine.calls_on_dead_streams == 0
        pool.check()

    @pytest.mark.parametrize("checks_handles", [False, True])
    def test_a_stream_known_by_its_number_is_not_touched_where_nobody_names_it(self, machine, checks_handles):
        source = vpool.sources.Source(machine, "cuda", checks_handles=checks_handles)
        with vpool.Pool(source=source, debug="guard") as pool:
            stream = machine.create_stream()
            ptr = pool.allocate(1000, stream)
            waits = machine.calls()["synchronize"][0]
            pool.deallocate(ptr)
            assert (machine.calls()["synchronize"][0] > waits) == (not checks_handles)

    @pytest.mark.parametrize("checks_handles", [False, True])
    @pytest.mark.parametrize("nbytes", [100, 5000])
    def test_a_buffer_is_resized_whose_stream_is_gone(self, machine, checks_handles, nbytes):
        """Nobody names the stream in that call, so its handle is not touched: the device is waited for."""
        source = vpool.sources.Source(machine, "cuda", checks_handles=checks_handles)
        with vpool.Pool(source=source, debug="guard,poison,quarantine") as pool:
            stream = machine.create_stream()
            buffer, again = pool.empty(1000, stream), pool.empty(1000, stream)
            write(buffer.ptr, 7, 100)
            position, number = machine.queue_work(stream), machine.number_of(stream)
            machine.destroy_stream(stream)
            pool.resize(buffer, nbytes)
            assert (buffer.requested, read(buffer.ptr, 100)) == (nbytes, bytes([7]) * 100)
            assert machine.finished(number, position)
            write(buffer.ptr + nbytes, 0)
            with pytest.raises(vpool.GuardError):
                buffer.close()
            pool.resize(again, 0)
            buffer.close()
            pool.check()

    def test_a_pool_that_never_waits_for_memory_waits_to_look(self, machine):
        source = vpool.sources.Source(machine, "cuda", checks_handles=False)
        with vpool.Pool(source=source, debug="guard,poison", on_pressure="raise") as pool:
            own, freer = machine.create_stream(), machine.create_stream()
            ptr = pool.allocate(1000, own)
            pool.deallocate(ptr, freer)
            pool.check()

    def test_calls_go_to_the_pools_device(self):
        machine = FakeCudaDriver(64 * MIB, devices=2)
        source = vpool.sources.Source(machine, "cuda", 1)
        with vpool.Pool(source=source, debug="guard,poison,quarantine") as pool:
            pool.deallocate(pool.allocate(1000))
            pool.check()
            assert machine.current_device == 0


def fails_at_each_call(pool, call, status, act):
    """Let an action fail at the first, the second, ... call, until it does not; how often it did."""
    for position in itertools.count():
        pool.source.driver.fail(call, status, after=position)
        try:
            act()
        except vpool.SourceError:
            continue
        else:
            return position
        finally:
            pool.source.driver.fail(call, times=0)


@pytest.mark.parametrize("status", [OUT_OF_MEMORY, ILLEGAL_ADDRESS])
class TestADriverThatFails:
    def test_an_allocation_lends_nothing(self, pool, status):
        pool.allocate(1000)
        figures = live_figures(pool)
        assert fails_at_each_call(pool, "fill_on", status, lambda: pool.allocate(500)) == 2
        assert pool.stats.requested_bytes == figures["requested_bytes"] + 500
        pool.check()

    @pytest.mark.parametrize("call", ["fill_on", "read_on"])
    def test_a_block_stays_live(self, call, status):
        with debug_pool("guard,poison,quarantine", "fake cuda") as pool:
            ptr = pool.allocate(1000)
            with unchanged(pool):
                pool.source.driver.fail(call, status)
                with pytest.raises(vpool.SourceError):
                    pool.deallocate(ptr)
            fails = fails_at_each_call(pool, call, status, lambda: pool.deallocate(ptr))
            assert fails == {"read_on": 2, "fill_on": 1}[call]
            assert pool.stats.requested_bytes == 0

    @pytest.mark.parametrize("call", ["get_device", "set_device"])
    def test_a_block_that_stays_live_with_poison_on_its_guards_is_not_taken_for_damaged(self, call, status):
        """What is called behind the fill may fail as well."""
        machine = FakeCudaDriver(64 * MIB, devices=2)
        source = vpool.sources.Source(machine, "cuda", 1)
        with vpool.Pool(source=source, debug="guard,poison") as pool:
            ptr = pool.allocate(1000)
            for position in itertools.count():
                machine.fail(call, status, after=position)
                try:
                    pool.deallocate(ptr)
                    break
                except vpool.SourceError:
                    machine.fail(call, times=0)
                    machine.current_device = 0
                    pool.check()
            machine.fail(call, times=0)
            assert position > 2
            assert pool.stats.requested_bytes == 0

    def test_a_dropped_buffer_is_freed_unseen(self, pool, status):
        buffer = pool.empty(1000)
        pool.source.driver.fail("read_on", status)
        with unraised() as caught:
            del buffer
        assert isinstance(caught[0], vpool.SourceError)
        assert pool.stats.requested_bytes == 0
        pool.check()


STRATEGIES = {
    "equal blocks": vpool.Fixed(MIB, block=4096),
    "blocks of two sizes": vpool.Fixed(MIB, block=[(4096, 128), (8192, 64)]),
    "blocks and the rest": vpool.Fixed(MIB, block=4096, oversize="direct"),
    "slab": vpool.Fixed(4 * MIB),
    "hybrid of blocks": vpool.Hybrid(MIB, block=4096, dynamic=vpool.Dynamic(initial=MIB, limit=64 * MIB)),
    "hybrid slab": vpool.Hybrid(MIB, dynamic=vpool.Dynamic(initial=MIB, limit=64 * MIB)),
    "adaptive": vpool.Dynamic(initial=MIB, limit=64 * MIB, adaptive=True),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_has_room_for_guards(strategy):
    """As many blocks of the core's size as without guards, where the limit allows."""
    with debug_pool("guard", strategy=STRATEGIES[strategy]) as pool:
        blocks = [pool.allocate(4096) for _ in range(128)]
        for ptr in blocks:
            write(ptr, 0x55, 4096)
        pool.check()
        assert pool.stats.requested_bytes == 128 * 4096
        write(blocks[77] + 4096)
        with pytest.raises(vpool.GuardError):
            pool.deallocate(blocks[77])
        for ptr in blocks:
            pool.deallocate(ptr)
        pool.check()
        assert pool.stats.allocated_bytes == 0


def test_where_the_limit_leaves_no_room_a_core_has_fewer_blocks():
    with debug_pool("guard", strategy=vpool.Fixed(MIB, block=4096, limit=MIB)) as pool:
        assert pool.stats.reserved_bytes <= MIB
        count = MIB // (4096 + 512)
        blocks = [pool.allocate(4096) for _ in range(count)]
        with unchanged(pool), pytest.raises(vpool.OutOfMemoryError):
            pool.allocate(4096)
        assert len(blocks) == count


def test_a_block_for_another_process_is_the_callers():
    with debug_pool("guard", "fake cuda") as pool:
        ptr = pool.allocate(1000)
        handle = pool.ipc_handle(ptr)
        assert (handle.base + handle.offset, handle.nbytes) == (ptr, 1000)
        with pytest.raises(vpool.ForeignPointerError):
            pool.ipc_handle(ptr - 256)
        pool.deallocate(ptr)
        with pytest.raises(vpool.DoubleFreeError):
            pool.ipc_handle(ptr)


def test_compiled_callers_have_guards_too():
    with debug_pool("guard,poison,quarantine,sites") as pool:
        bench.pair(pool, 4096, 100)
        assert (pool.stats.allocations, pool.stats.frees, pool.stats.requested_bytes) == (100, 100, 0)
        pool.check()


@pytest.mark.parametrize("debug", ["guard", "poison", "quarantine", "sites", "guard,poison,quarantine,sites"])
def test_of_threads_that_free_one_block_one_succeeds(debug):
    with debug_pool(debug) as pool:
        for _ in range(200):
            ptr = pool.allocate(1000)
            ready, outcomes = threading.Barrier(4), []

            def free(ptr=ptr, ready=ready, outcomes=outcomes):
                ready.wait()
                try:
                    pool.deallocate(ptr)
                    outcomes.append(None)
                except Exception as error:
                    outcomes.append(type(error))

            threads = [threading.Thread(target=free) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(outcomes, key=str) == sorted([None] + 3 * [vpool.DoubleFreeError], key=str)
        assert pool.stats.frees == 200
        pool.check()


def test_guards_and_poison_need_memory():
    for debug in ("guard", "poison", ("sites", "guard")):
        with pytest.raises(ValueError, match=r'need memory.*"host".*"quarantine", "sites"'):
            debug_pool(debug, "simulated")


@pytest.mark.parametrize("source", SOURCES)
def test_zero_bytes_have_no_guard(source):
    debug = "quarantine,sites" if source == "simulated" else "guard,poison,quarantine,sites"
    with debug_pool(debug, source) as pool:
        assert pool.allocate(0) == 0
        pool.deallocate(0)
        pool.empty(0).close()
        assert pool.stats.allocations == 0


def test_a_guard_error_can_be_pickled():
    import pickle

    error = pickle.loads(pickle.dumps(vpool.GuardError("message", 1, 2, 3, 4)))
    assert (str(error), error.address, error.requested, error.offset, error.found) == ("message", 1, 2, 3, 4)
    assert isinstance(error, vpool.Error)
    assert isinstance(error, RuntimeError)


def test_an_error_knows_of_guards():
    """Which are no rounding that a user could do without."""
    with vpool.Pool(vpool.Fixed("4MiB"), source="host", debug="guard=64KiB") as pool:
        for _ in range(8):
            pool.allocate(1000)
        with pytest.raises(vpool.OutOfMemoryError) as caught:
            pool.allocate(20 << 20)
        assert caught.value.report.guarded
        assert caught.value.report.advice == pool.inspect().advice

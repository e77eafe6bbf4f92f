"""NumPy arrays in a pool's memory."""

import numpy as np
import pytest

import vpool
from tests.helpers.pools import MIB, assert_whole, host_pool, simulated_pool, unchanged
from vpool._storage.fake_cuda import FakeCudaDriver
from vpool._storage.source import Source
from vpool.integrations import numpy as arrays


@pytest.fixture
def pinned():
    source = Source(FakeCudaDriver(64 * MIB, pins=True), "pinned", 0, host_accessible=True)
    with vpool.Pool(vpool.Dynamic(initial=MIB, limit=MIB), source) as pool:
        yield pool
        pool.check()


@pytest.mark.parametrize("dtype", ["f4", "u1", "c16", "S5", "i4,f8", "M8[s]"])
@pytest.mark.parametrize("shape", [7, (3, 5), (2, 1, 4), ()])
@pytest.mark.parametrize("order", "CF")
def test_an_array_is_like_any_other(writable_pool, dtype, shape, order):
    array = arrays.empty(shape, dtype, order, pool=writable_pool)
    model = np.empty(shape, dtype, order)
    assert (array.shape, array.dtype, array.strides) == (model.shape, model.dtype, model.strides)
    assert array.flags.writeable
    array[...] = np.ones(shape).astype(dtype) if dtype != "i4,f8" else (1, 2)
    assert writable_pool.stats.requested_bytes == array.nbytes
    del array
    assert_whole(writable_pool)


def test_the_block_comes_back_with_the_last_view(writable_pool):
    array = arrays.zeros((100, 100), pool=writable_pool)
    view = array[3:7].T.reshape(-1)[::2].view("u8")
    row = array[0]
    del array, view
    assert writable_pool.stats.allocated_bytes > 0
    del row
    assert_whole(writable_pool)


def test_values(writable_pool):
    assert (arrays.zeros(100, pool=writable_pool) == 0).all()
    assert arrays.full(3, 7, pool=writable_pool).dtype == np.asarray(7).dtype
    assert arrays.full((2, 2), 1.5, "f4", pool=writable_pool).tolist() == [[1.5, 1.5]] * 2


@pytest.mark.parametrize("shape", [0, (3, 0), (0, 0)])
def test_no_elements(writable_pool, shape):
    array = arrays.empty(shape, pool=writable_pool)
    assert array.shape == np.empty(shape).shape
    assert array.sum() == 0
    assert writable_pool.stats.allocated_bytes == 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((-1,), ValueError),
        (((2, -1),), ValueError),
        ((2.5,), TypeError),
        (("3",), TypeError),
        ((3, object), TypeError),
        ((3, "i4,O"), TypeError),
        ((3, "no type"), TypeError),
        ((3, "f4", "K"), ValueError),
        ((2**62,), OverflowError),
    ],
)
def test_bad_input(writable_pool, arguments, error):
    with unchanged(writable_pool), pytest.raises(error):
        arrays.empty(*arguments, pool=writable_pool)


def test_out_of_memory(writable_pool):
    with unchanged(writable_pool), pytest.raises(vpool.OutOfMemoryError):
        arrays.empty(1 << 40, "u1", pool=writable_pool)


def test_a_value_that_does_not_fit_leaves_nothing_behind(writable_pool):
    with pytest.raises(ValueError, match="could not"):
        arrays.full(3, "x", float, pool=writable_pool)
    assert writable_pool.stats.allocated_bytes == 0


def test_memory_that_the_host_cannot_reach():
    with simulated_pool() as pool, unchanged(pool), pytest.raises(ValueError, match="pinned"):
        arrays.empty(3, pool=pool)


def test_the_default_pool(no_default_pools):
    with host_pool() as pool:
        vpool.set_default_pool(pool)
        assert arrays.buffer_of(arrays.empty(3)).pool is pool


def test_a_block_that_a_copy_still_reads_is_not_written_by_the_host(pinned):
    """The trap of memory that is reused in stream order: the host is on no stream."""
    driver = pinned.source.driver
    stream = driver.create_stream()
    staging = pinned.empty(MIB, stream=stream)
    position = driver.queue_work(stream)
    number = driver.number_of(stream)
    staging.close()
    arrays.zeros(MIB, "u1", pool=pinned)
    assert driver.finished(number, position)


def test_a_stream_that_is_told_is_waited_for(pinned):
    driver = pinned.source.driver
    stream = driver.create_stream()
    array = arrays.zeros(MIB, "u1", pool=pinned)
    arrays.record_stream(array[5:].view("i1"), stream)
    position = driver.queue_work(stream)
    number = driver.number_of(stream)
    del array
    assert pinned.stats.pending_bytes == MIB
    assert not driver.finished(number, position)
    arrays.zeros(MIB, "u1", pool=pinned)
    assert driver.finished(number, position)


def test_whose_memory_an_array_has(writable_pool):
    buffer = writable_pool.empty(800)
    for array in (np.frombuffer(buffer), np.asarray(memoryview(buffer))[1:], np.ndarray(3, "u1", buffer)):
        assert arrays.buffer_of(array) is buffer
    assert arrays.buffer_of(np.zeros(3)) is None
    with pytest.raises(ValueError, match="no vpool pool"):
        arrays.record_stream(np.zeros(3), 0)

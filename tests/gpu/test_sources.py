"""Pinned and managed memory and that of the driver's own pool, on a real device.

Managed memory is never asked for beyond the device's: no test here takes more than a fiftieth of it.
"""

import ctypes

import pytest

import vpool
from tests.helpers.device import assert_follows
from tests.helpers.pools import GIB, MIB
from tests.helpers.traces import recorded
from vpool.errors import SourceError

pytestmark = pytest.mark.gpu

try:
    vpool.sources.Cuda()
except SourceError as error:
    pytest.skip(str(error), allow_module_level=True)

cudart = pytest.importorskip("cuda.bindings.runtime")

NAMES = ("cuda-async", "managed", "pinned")
SMALL = vpool.Dynamic(initial="16MiB", growth="64MiB", limit="2GiB")


def checked(answer):
    status, *values = answer
    assert status == cudart.cudaError_t.cudaSuccess
    return values[0] if len(values) == 1 else values


def roundtrip(ptr, nbytes, stream=0):
    """Bytes that the device writes and the host reads back."""
    checked(cudart.cudaMemsetAsync(ptr, 0x5A, nbytes, stream))
    host = (ctypes.c_char * nbytes)()
    checked(
        cudart.cudaMemcpyAsync(ctypes.addressof(host), ptr, nbytes, cudart.cudaMemcpyKind.cudaMemcpyDefault, stream)
    )
    checked(cudart.cudaStreamSynchronize(stream))
    return bytes(host) == b"\x5a" * nbytes


def kind_of(ptr):
    return checked(cudart.cudaPointerGetAttributes(ptr)).type


@pytest.mark.parametrize("name", NAMES)
class TestEach:
    def test_the_device_uses_it(self, name):
        types = cudart.cudaMemoryType
        kind = {
            "cuda-async": types.cudaMemoryTypeDevice,
            "managed": types.cudaMemoryTypeManaged,
            "pinned": types.cudaMemoryTypeHost,
        }[name]
        stream = checked(cudart.cudaStreamCreate())
        with vpool.Pool(SMALL, source=name, device=0) as pool:
            for nbytes in (1, 5000, 33 * MIB):
                ptr = pool.allocate(nbytes, stream)
                assert kind_of(ptr) == kind
                assert roundtrip(ptr, nbytes, stream)
                pool.deallocate(ptr, stream)
            assert pool.stats.reserved_bytes <= 2 * GIB
            pool.check()
        checked(cudart.cudaStreamDestroy(stream))

    def test_the_host_uses_what_it_can(self, name):
        with vpool.Pool(SMALL, source=name, device=0) as pool:
            if pool.source.host_accessible:
                ptr = pool.allocate(MIB)
                assert roundtrip(ptr, MIB)
                assert ctypes.string_at(ptr, MIB) == b"\x5a" * MIB
                ctypes.memset(ptr, 1, MIB)
                pool.deallocate(ptr)

    def test_it_goes_back(self, name):
        kept = []

        def take():
            pool = vpool.Pool(SMALL, source=name, device=0)
            ptr = pool.allocate(512 * MIB)
            checked(cudart.cudaMemset(ptr, 0, 512 * MIB))  # managed memory comes when it is touched
            checked(cudart.cudaDeviceSynchronize())
            kept.extend([ptr, pool])

        def give():
            pool = kept.pop()
            pool.deallocate(kept.pop())
            assert pool.trim() >= 512 * MIB
            pool.close()
            checked(cudart.cudaDeviceSynchronize())

        # When a driver takes memory of a device for these is its own affair; that it does not stay is not.
        assert_follows(lambda: checked(cudart.cudaMemGetInfo())[0], take, give)

    def test_debug_modes(self, name):
        with vpool.Pool(SMALL, source=name, device=0, debug=("guard", "poison")) as pool:
            ptr = pool.allocate(1000)
            assert roundtrip(ptr, 1000)
            pool.check()
            pool.deallocate(ptr)
            ptr = pool.allocate(1000)
            checked(cudart.cudaMemset(ptr + 1000, 0, 1))
            checked(cudart.cudaDeviceSynchronize())
            with pytest.raises(vpool.GuardError):
                pool.deallocate(ptr)

    def test_a_recorded_run(self, name):
        """The bundled run, scaled to what fits, with a pattern in every block."""
        trace = recorded("two_streams")
        scale = max(1, trace.peak_live_bytes // GIB)
        small = vpool.Trace(
            op=trace.op,
            id=trace.number,
            bytes=(trace.bytes + (scale - 1)) // scale,
            stream=trace.stream,
            t_us=trace.t_us,
        )
        result = vpool.replay(small, vpool.Dynamic(limit="3GiB"), source=name, patterns=True)
        assert result.oom is None
        assert result.verified_bytes > 0


def test_the_drivers_pool_is_shared():
    """What a pool took from the driver's pool counts there."""
    pools = cudart.cudaDeviceGetDefaultMemPool(0)
    mempool = checked(pools)
    used = cudart.cudaMemPoolAttr.cudaMemPoolAttrUsedMemCurrent
    before = int(checked(cudart.cudaMemPoolGetAttribute(mempool, used)))
    with vpool.Pool(vpool.Dynamic(initial=0, limit="2GiB"), source="cuda-async", device=0) as pool:
        ptr = pool.allocate(100 * MIB)
        assert int(checked(cudart.cudaMemPoolGetAttribute(mempool, used))) >= before + 100 * MIB
        pool.deallocate(ptr)
    assert int(checked(cudart.cudaMemPoolGetAttribute(mempool, used))) == before

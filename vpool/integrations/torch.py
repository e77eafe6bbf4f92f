"""PyTorch in a pool.

.. code-block:: python

   import vpool.integrations.torch
   segments = vpool.integrations.torch.mem_pool(pool)

   with torch.cuda.use_mem_pool(segments):
       model = Model().cuda()
"""

from vpool._interface.segments import bind
from vpool.defaults import default_pool
from vpool.integrations.packages import required

__all__ = ["mem_pool"]

_kept: list[object] = []  # what PyTorch calls as long as there is a segment


def mem_pool(pool=None, **options):
    """A ``torch.cuda.MemPool`` whose segments are blocks of a pool.

    Parameters
    ----------
    pool : Pool, optional
        The default pool of PyTorch's current device if not given.
    **options
        For ``torch.cuda.MemPool``.

    Returns
    -------
    torch.cuda.MemPool
        For ``torch.cuda.use_mem_pool``, and as ``pool=`` of ``torch.cuda.graph`` by its ``id``.

    Raises
    ------
    ValueError
        For a pool with debug modes, which need Python where PyTorch may not wait for it.
    RuntimeError
        Where 16 pools of this process serve in this way, or PyTorch was built without CUDA.

    Notes
    -----
    PyTorch's own allocator cuts the segments, so all that it offers goes on working, and its statistics count them.
    A pool that gives none is an out-of-memory error of PyTorch's own, once its cached segments are given back.

    A block that comes back waits for the device, as ``cudaFree`` does.
    """
    torch = required("torch", "torch")
    if not hasattr(torch._C, "_cuda_customAllocator"):
        raise RuntimeError(f"PyTorch {torch.__version__} was built without CUDA: it has no memory pools")
    pool = default_pool(torch.cuda.current_device()) if pool is None else pool
    lend, take, _ = bind(pool)
    with torch.cuda.device(pool.device):
        allocator = torch._C._cuda_customAllocator(lend, take)
        _kept.append(allocator)
        return torch.cuda.MemPool(allocator, **options)

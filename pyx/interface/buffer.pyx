"""Buffers: blocks that free themselves."""
cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.long cimport PyLong_FromUnsignedLongLong
from libc.stdint cimport uint64_t

from vpool._base.bias cimport Seat, bias_enter, bias_leave, bias_try_enter
from vpool._base.ending cimport is_finalizing
from vpool._base.lock cimport atomic_read
from vpool._base.types cimport BLOCK_LIVE, BLOCK_SUSPENDED, Block, BlockId, likely, unlikely
from vpool._interface.exchange cimport array_interface, device_of, dlpack, for_host
from vpool._management.arena cimport Arena
from vpool._management.cross cimport cross_free_record
from vpool._management.hit cimport hit_put_record
from vpool._management.state cimport STATE_FORKED, STATE_HOLDS
from vpool._management.suspended cimport suspended_free_record


cdef inline bint still_mine(Buffer buffer) noexcept:
    """Whether the block's record is still this buffer's: its address may have been freed by hand."""
    cdef Block* block
    cdef BlockId block_id = buffer.block_id or buffer.shared_id
    if block_id == 0:
        return False
    block = &buffer.arena.blocks[block_id]
    return (
        (block.state == BLOCK_LIVE or block.state == BLOCK_SUSPENDED and block.stamp != 0)
        and block.generation == buffer.generation
        and block.address + buffer.pool.front == buffer.address
        and (buffer.pool.debugger is None or buffer.pool.debugger.is_live(buffer.address))
    )


@cython.final
@cython.no_gc_clear   # a pool can lead to its buffers, by a callback or a subclass; `pool` stays for `__dealloc__`
@cython.freelist(256)
@cython.binding(False)
cdef class Buffer:
    """A block that frees itself when it is dropped or closed.  Made by `Pool.empty` and `vpool.empty`.

    Dropping it is safe at any moment: after its pool was closed, inside a garbage collection, at the
    end of the interpreter.  It keeps its pool alive.

    Other libraries use its memory without a copy, as bytes: by ``__dlpack__``, ``__cuda_array_interface__`` and, where
    the host can reach the memory, as a buffer of Python's own (``memoryview(buffer)``).
    """

    def __init__(self):
        raise TypeError("buffers are made by vpool.empty() and Pool.empty()")

    def __dealloc__(self):
        if self.block_id and not (unlikely(self.pool.core.state.word & STATE_HOLDS) and self.drop_held()):
            self.put()
            if self.pool.core.state.word:
                self.pool.after_free()

    def __reduce__(self):
        raise TypeError("a buffer cannot be copied or pickled: it owns memory of this process")

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def __int__(self):
        return self.ptr

    def __repr__(self):
        if self.closed:
            return "<vpool.Buffer, closed>"
        if self.pool.forked:
            return "<vpool.Buffer of the parent of this process>"
        return f"<vpool.Buffer of {self.requested} bytes at {self.address:#x}>"

    cdef int must_be_mine(self) except -1:
        if self.pool is not None:
            self.pool.must_be_mine()
        return 0

    cdef int must_be_usable(self) except -1:
        """BufferError for one that has nothing to give to others."""
        self.must_be_mine()
        if self.pool is None or self.closed:
            raise BufferError("the buffer is closed")
        return 0

    cdef int share(self) except -1:
        """Have one more user, until whom the block stays where it is."""
        self.must_be_usable()                     # to look at the arguments ran code
        if self.sharers == 0:
            self.shared_id = self.block_id
            self.block_id = 0
        self.sharers += 1
        return 0

    cdef void unshare(self) noexcept:
        self.sharers -= 1
        if self.sharers == 0:
            self.block_id = self.shared_id
            self.shared_id = 0

    def __getbuffer__(self, Py_buffer* view, int flags):
        self.must_be_usable()
        if self.requested and not self.pool.core.source.host_accessible:
            raise BufferError(f"memory of source {self.pool.core.source.name!r} is not for the host")
        for_host(self.pool, self.arena.slot)
        self.share()
        PyBuffer_FillInfo(view, self, <void*> self.address, self.requested, False, flags)

    def __releasebuffer__(self, Py_buffer* view):
        self.unshare()

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """A capsule of the bytes that were asked for, as a one-dimensional array of ``uint8``.

        Parameters
        ----------
        stream : int, optional
            The consumer's stream, as the array API numbers it: 1 or None for the legacy default one, 2 for the
            thread's own, a handle, or -1 for a consumer that sees to the order itself.  It comes after what the
            buffer's stream has queued, and the block, once freed, waits for what it has queued by then.
        max_version : tuple of int, optional
            From (1, 0) on the capsule is one with a version.
        dl_device : tuple of int, optional
            The buffer's own device, or (1, 0): the host, which gets a copy where it cannot reach the memory.
        copy : bool, optional

        Raises
        ------
        BufferError
            For a closed buffer, memory that cannot be given so, or while a graph is captured that would have to wait.

        Notes
        -----
        Until the consumer drops what it made of it, `close` raises ``BufferError``.

        Memory of a graph can be given while its capture goes on to that capture alone, and after it to anybody: then
        the device is waited for, since any stream may have launched the graph.
        """
        self.must_be_usable()
        return dlpack(
            self.pool, lambda: _Sharer(self), self.address, self.requested, self.arena.slot, stream, max_version,
            dl_device, copy)

    def __dlpack_device__(self):
        """Type and number of the device: 2 for CUDA, 3 for pinned memory, 13 for managed, 1 for the host."""
        self.must_be_usable()
        return device_of(self.pool)

    @property
    def __cuda_array_interface__(self):
        """The bytes for CUDA's array libraries (version 3), with the stream that their work has to come after.

        Consumers do not tell which stream they use: tell it by `record_stream`.  They keep the buffer, so it is not
        dropped; it must not be closed under them.
        """
        if self.pool is None or not self.pool.core.source.has_memory or self.pool.core.source.name == "host":
            raise AttributeError("__cuda_array_interface__: this memory is not a GPU's")
        self.must_be_usable()
        return array_interface(self.pool, self.address, self.requested, self.arena.slot)

    cdef bint put(self) noexcept:
        """Give the block back, which nobody else will then do; False where it was freed by hand before."""
        cdef Arena* arena = self.arena
        cdef BlockId block_id = self.block_id
        cdef Seat* seat
        cdef bint mine
        self.block_id = 0                         # before the GIL can go to another thread that closes it too
        if likely(bias_try_enter(&arena.lock, &seat)):
            mine = hit_put_record(arena, block_id, self.generation, self.address)
            bias_leave(&arena.lock, seat)
        else:
            with nogil:
                seat = bias_enter(&arena.lock)
                mine = hit_put_record(arena, block_id, self.generation, self.address)
                bias_leave(&arena.lock, seat)
        if unlikely(not mine):
            with nogil:
                mine = suspended_free_record(self.pool.core, arena, block_id, self.generation, -1)
        return mine

    cdef bint put_on(self, int slot) noexcept:
        """The same, as freed on the stream of a slot."""
        cdef BlockId block_id = self.block_id
        cdef bint mine
        self.block_id = 0
        with nogil:
            mine = cross_free_record(
                self.pool.areas.state_of(self.arena), self.arena, block_id, self.generation, slot
            ) or suspended_free_record(self.pool.core, self.arena, block_id, self.generation, slot)
        return mine

    cdef bint close_held(self, stream) except -1:
        """Of `close`: what the state word asks for; True where that was all.  It stays open where this fails."""
        cdef BlockId block_id = self.block_id
        cdef bint mine = self.pool.core.state.word & STATE_FORKED or still_mine(self)
        cdef bint done = True
        self.block_id = 0                         # before another thread, or the stream's own code, closes it too
        if mine:
            try:
                done = self.pool.held(self.address, stream)
            except BaseException:
                self.block_id = block_id
                if not still_mine(self):          # of a signal, once it was freed
                    self.block_id = 0
                    self.arena = NULL
                raise
        if not done:
            self.block_id = block_id
            return False
        self.arena = NULL
        if not mine:
            raise self.pool.stray_error(self.address)
        return True

    cdef bint drop_held(self) noexcept:
        """The same of a dropped one, which cannot raise."""
        if self.pool.core.state.word & STATE_FORKED:
            return True
        if self.pool.debugger is None:
            if still_mine(self):
                with nogil:
                    self.pool.areas.take_back(self.address, -1)
            self.pool.after_free()
            return True
        if is_finalizing():                       # what watches blocks is Python, and may be half gone
            self.address -= self.pool.front
            return False
        if still_mine(self):
            self.pool.debugger.drop(self.address)
            self.pool.after_free()
        return True

    def close(self, stream=None):
        """Give the block back now.  Closing twice does nothing.

        Parameters
        ----------
        stream : optional
            The stream whose work used the block last, as for `Pool.deallocate`.

        Raises
        ------
        DoubleFreeError
            Where its address was freed by hand before.
        GuardError
            Where bytes beside the block were written; the buffer stays open.  Only in a pool with guards.
        SourceError
            Where that stream is gone and its work cannot be waited for; the buffer stays open.
        BufferError
            While another library uses the memory; the buffer stays open.
        """
        cdef uint64_t address = self.address
        cdef bint mine = True
        cdef int slot = 0
        if self.block_id == 0:
            if self.sharers:
                raise BufferError(f"{self!r} is in use by {self.sharers} others: drop what was made of it first")
            self.arena = NULL
            return
        if unlikely(self.pool.core.state.word & STATE_HOLDS) and self.close_held(stream):
            return
        if stream is not None:
            # Runs the caller's code, which may close this very buffer.
            slot = self.pool.freeing_slot(stream, self.arena.slot)
            if self.pool.core.state.word & STATE_FORKED:
                self.block_id = 0
        if self.block_id:
            mine = self.put() if stream is None else self.put_on(slot)
            self.arena = NULL
        if not mine:
            raise self.pool.stray_error(address)
        if self.pool.core.state.word:
            self.pool.after_free()

    def record_stream(self, stream):
        """Tell that a stream uses the block too, as `Pool.record_stream` does."""
        if self.pool is not None:                 # made by `__new__` alone, it has no block
            self.pool.record_stream(self, stream)

    @property
    def ptr(self):
        """Address of the block; 0 for zero bytes and after `close`."""
        self.must_be_mine()
        return PyLong_FromUnsignedLongLong(self.address if self.block_id or self.shared_id else 0)

    @property
    def nbytes(self):
        """Bytes of the block, after rounding; with a guard behind it those that were asked for."""
        self.must_be_mine()
        if self.pool is not None and self.pool.front:
            return self.requested
        return self.arena.blocks[self.block_id or self.shared_id].nbytes if still_mine(self) else 0

    @property
    def requested(self):
        """Bytes that were asked for."""
        self.must_be_mine()
        return self.arena.blocks[self.block_id or self.shared_id].stamp if still_mine(self) else 0

    @property
    def stream(self):
        """Handle of the stream that the block was allocated for; 0 is the legacy default stream."""
        self.must_be_mine()
        return atomic_read(self.pool.core.state.table[self.arena.slot].stream) if self.arena != NULL else 0

    @property
    def device(self):
        """Ordinal of the device."""
        return self.pool.core.source.device if self.pool is not None else None

    @property
    def closed(self):
        """Whether the block was given back."""
        return self.arena == NULL or ((self.block_id or self.shared_id) != 0 and not still_mine(self))


@cython.final
@cython.no_gc_clear   # `__dealloc__` needs the buffer
cdef class _Sharer:
    """Keeps a buffer's block, for whoever has this."""

    cdef Buffer buffer

    def __cinit__(self, Buffer buffer not None):
        buffer.share()
        self.buffer = buffer

    def __dealloc__(self):
        if self.buffer is not None:
            self.buffer.unshare()

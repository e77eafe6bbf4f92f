"""Buffers: blocks that free themselves."""
cimport cython
from cpython.long cimport PyLong_FromUnsignedLongLong
from libc.stdint cimport uint64_t

from vpool._base.bias cimport Seat, bias_enter, bias_leave, bias_try_enter
from vpool._base.lock cimport atomic_read
from vpool._base.types cimport BLOCK_LIVE, BLOCK_SUSPENDED, Block, BlockId, likely, unlikely
from vpool._management.arena cimport Arena
from vpool._management.cross cimport cross_free_record
from vpool._management.hit cimport hit_put_record
from vpool._management.state cimport STATE_FORKED, STATE_HOLDS
from vpool._management.suspended cimport suspended_free_record

from vpool.errors import InvalidPointerError

cdef extern from *:
    """
    #if PY_VERSION_HEX >= 0x030D0000
    #define vpool_is_finalizing Py_IsFinalizing
    #else
    #define vpool_is_finalizing _Py_IsFinalizing
    #endif
    """
    bint is_finalizing "vpool_is_finalizing"() noexcept


cdef inline bint still_mine(Buffer buffer) noexcept:
    """Whether the block's record is still this buffer's: its address may have been freed by hand."""
    cdef Block* block
    if buffer.block_id == 0:
        return False
    block = &buffer.arena.blocks[buffer.block_id]
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
        cdef bint mine = self.pool.core.state.word & STATE_FORKED or still_mine(self)
        if mine:
            try:
                if not self.pool.held(self.address, stream):
                    return False
            except InvalidPointerError:
                if self.block_id:                 # 0: to look at the stream ran code that has closed it
                    raise
            except BaseException:
                if not still_mine(self):          # of a signal, once it was freed
                    self.block_id = 0
                    self.arena = NULL
                raise
        self.block_id = 0
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
        """
        cdef uint64_t address = self.address
        cdef bint mine = True
        cdef int slot = 0
        if self.block_id == 0:
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
        return PyLong_FromUnsignedLongLong(self.address if self.block_id else 0)

    @property
    def nbytes(self):
        """Bytes of the block, after rounding; with a guard behind it those that were asked for."""
        self.must_be_mine()
        if self.pool is not None and self.pool.front:
            return self.requested
        return self.arena.blocks[self.block_id].nbytes if still_mine(self) else 0

    @property
    def requested(self):
        """Bytes that were asked for."""
        self.must_be_mine()
        return self.arena.blocks[self.block_id].stamp if still_mine(self) else 0

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
        return self.arena == NULL or (self.block_id != 0 and not still_mine(self))

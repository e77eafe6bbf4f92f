"""What a pool does with memory below live blocks: it gives them another size, moves, suspends and resumes them."""
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport uint16_t, uint64_t

from vpool._base.lock cimport atomic_read
from vpool._base.types cimport BLOCK_LIVE, GRANULE, Block, BlockId
from vpool._interface.access cimport Access
from vpool._interface.arguments cimport address_of, size_of
from vpool._interface.buffer cimport Buffer
from vpool._interface.diagnosis cimport source_error
from vpool._interface.upkeep cimport Upkeep
from vpool._management.arena cimport Arena
from vpool._management.core cimport Core
from vpool._management.moves cimport STATUS_NO_ROOM
from vpool._management.areas cimport state_at
from vpool._management.placed cimport placed_exported, placed_find, placed_is, placed_take
from vpool._management.resize cimport RESIZED, RESIZED_STRANGE, resize_in_place
from vpool._management.suspended cimport GivenUp, suspended_bring_back, suspended_give_up
from vpool._storage.driver cimport STATUS_NOT_READY, STATUS_OK, STATUS_OUT_OF_MEMORY

from vpool._interface.tags import checked_tag, number_of
from vpool.compaction import moves_of
from vpool.debugging import NotLive
from vpool.errors import Error, ForeignPointerError, OutOfMemoryError, SourceError
from vpool.sizes import format_bytes
from vpool.sources import host_beside
from vpool.trimming import Suspended, why_suspended


cdef void swap(Buffer one, Buffer other) noexcept:
    """Let two buffers of a pool have each other's blocks."""
    one.arena, other.arena = other.arena, one.arena
    one.address, other.address = other.address, one.address
    one.block_id, other.block_id = other.block_id, one.block_id
    one.generation, other.generation = other.generation, one.generation


@cython.no_gc_clear   # as its base
@cython.binding(False)
cdef class Mover(Upkeep):
    """Resizing and suspending.  Made as `Pool`."""

    cdef uint64_t lent_address(self, ptr) except? 0:
        """The address that a caller has of a block, by number or as a buffer of this pool that is open."""
        cdef uint64_t address
        if not isinstance(ptr, Buffer):
            return address_of(ptr)
        self.must_own(ptr)
        address = (<Buffer> ptr).address
        if address and ptr.closed:                # whoever has the address now is somebody else
            raise self.stray_error(address)
        return address

    cdef int must_own(self, Buffer buffer) except -1:
        if buffer.pool is not self:
            owner = None if buffer.pool is None else buffer.pool.name
            raise ForeignPointerError(f"{buffer!r} is of pool {owner!r}, not {self.name!r}")
        return 0

    cdef Buffer lent_for(self, uint64_t requested, uint16_t slot, bint named):
        """A new buffer for the stream of a slot, which need not exist any more if it was not just named."""
        cdef Buffer buffer = Buffer.__new__(Buffer)
        buffer.pool = self
        buffer.arena = self.core.state.arenas[slot]
        if named or self.debugger is None:
            buffer.block_id = self.lend(&buffer.arena, requested, GRANULE, &buffer.address)
        elif requested:
            self.streams.settle()
            buffer.block_id = self.lend_watched(&buffer.arena, requested, GRANULE, &buffer.address, False)
        buffer.generation = buffer.arena.blocks[buffer.block_id].generation
        return buffer

    def resize(self, buf, nbytes, stream=None):
        """Give a buffer another size; what both sizes have of its content stays.

        In place where that can be: a block that shrinks is cut, one that grows takes free memory right behind it, or on
        ``cuda-vmm`` gets memory mapped there.  Else a new block is lent, the content copied on the stream, and the old
        block freed behind that.  It stays the same buffer, whose `ptr` may change.

        Parameters
        ----------
        buf : Buffer
            Of this pool, and open.
        nbytes : int-like
            Bytes wanted from now on.  With 0 it has no block, and address 0.
        stream : optional
            The stream that copies, comes after all work on the block and has it from then on; None is the block's own
            stream.  For another one than that the block is always copied.  Where that stream captures, or the block is
            of a capture's memory, only a stream that is passed has it grow: what is copied is then part of the graph.

        Raises
        ------
        OutOfMemoryError
            Where there is no memory for the new size; a block that is copied needs both for a moment.
        SourceError
            Where the driver does not copy.
        Error
            Where a capture goes on that the copy would become part of, or invalidate, and no stream was passed that
            captures; for a block of a capture's memory that shall grow and no stream was passed.
        InvalidPointerError
            Where the buffer is closed, or suspended, or of another pool.
        TypeError, ValueError, OverflowError
            For arguments that make no sense.
        ClosedPoolError, ForkedProcessError
            As for `allocate`.

        Notes
        -----
        After an error the buffer is what it was.  In a pool with debug modes, which look at what is beside a block, it
        is always copied.  Runtime complexity: O(1) in place and without a driver call, but where memory is mapped.

        Thread safety: one thread may resize a buffer that others only read `ptr` of; each sees the old or the new one.

        Examples
        --------
        >>> import vpool
        >>> pool = vpool.Pool(vpool.Dynamic(initial="1MiB"), source="host")
        >>> buf = pool.empty(1000)
        >>> before = buf.ptr
        >>> pool.resize(buf, 5000)
        >>> buf.ptr == before, buf.requested, buf.nbytes
        (True, 5000, 5120)
        >>> pool.close()
        """
        cdef uint64_t requested = size_of(nbytes)
        cdef Buffer buffer
        cdef int slot
        cdef int done = 0
        self.must_be_open()
        if not isinstance(buf, Buffer):
            raise TypeError(f"only a Buffer can be resized, since its address may change, not {type(buf).__name__}")
        buffer = buf
        slot = -1 if stream is None else self.streams.slot_of(stream)
        self.must_be_open()                       # to look at the arguments ran code
        self.lent_address(buffer)
        if buffer.closed or buffer.block_id and buffer.arena.blocks[buffer.block_id].state != BLOCK_LIVE:
            raise self.stray_error(buffer.address)
        if slot < 0:
            slot = buffer.arena.slot
            if atomic_read(buffer.arena.captured) and requested and (
                    self.debugger is not None or requested > buffer.arena.blocks[buffer.block_id].nbytes):
                # Once the capture is over all that is free there is what its graph writes to.
                raise Error(f"{buffer!r} is of a capture's memory: pass the stream that it shall grow on")
        if buffer.block_id and requested and slot == buffer.arena.slot and self.debugger is None:
            with nogil:
                done = resize_in_place(self.areas, buffer.arena, buffer.block_id, buffer.generation, requested)
        if done == RESIZED_STRANGE:
            raise self.stray_error(buffer.address)
        if done != RESIZED:
            self.resize_elsewhere(buffer, requested, slot, stream is not None)
        if self.core.state.word:
            self.after_free()

    cdef int resize_elsewhere(self, Buffer buffer, uint64_t requested, int slot, bint named) except -1:
        """Of `resize`: by a copy, on the stream of a slot."""
        cdef uint64_t kept = min(requested, <uint64_t> buffer.requested)
        cdef Buffer other = self.lent_for(requested, slot, named)
        cdef Access access = Access(self.areas)
        cdef int status = STATUS_OK
        if buffer.closed:                         # to make room ran code
            other.close()
            raise self.stray_error(buffer.address)
        # Before the copy, so that nobody frees what is being copied: the old block is this call's alone.
        swap(buffer, other)
        if kept and self.core.source.has_memory:
            with nogil:
                status = access.copy_on(slot, named, buffer.address, other.address, kept)
        try:
            if status != STATUS_OK:
                why = f"{kept:,} bytes are not copied to a block of another size"
                if status == STATUS_NOT_READY:
                    raise Error(f"{why} while a capture goes on{'' if named else ': pass the stream, if it captures'}")
                raise source_error(self.core, status, why)
            if other.block_id:
                self.free_on(other, slot)
        except BaseException:
            if not buffer.closed:
                swap(buffer, other)
            other.close()
            raise
        return 0

    cdef int free_on(self, Buffer buffer, int slot) except -1:
        """Close a buffer on the stream of a slot."""
        if slot == buffer.arena.slot:
            buffer.close()
            return 0
        if self.debugger is None:
            self.take_back_on(buffer.address, slot)
        else:
            try:
                error = self.debugger.free(buffer.address, slot)
            except NotLive:
                raise self.stray_error(buffer.address) from None
            if error is not None:
                raise error
        buffer.block_id = 0
        buffer.arena = NULL
        return 0

    cdef BlockId find(self, uint64_t address, Block* found) except? 0:
        """Number of a live block in the arena of its slot, which the copy of it names; 0 for none."""
        cdef BlockId block_id
        with nogil:
            block_id = placed_find(state_at(self.areas, address), address, found)
        return block_id

    def movable(self, ptr, on_move):
        """Let a live block be moved by `coalesce`, to make free memory whole.

        Parameters
        ----------
        ptr : int-like or Buffer
            A live block of this pool.
        on_move : callable or None
            Called as ``on_move(old, new)``, with addresses, once the content is copied in the order of the block's
            stream: what is queued there from then on shall use the new address.  The old block is freed behind it.  Of
            a buffer `ptr` is the new one by then.  What it raises leaves the block where it was, and goes on to who
            called `coalesce`.  None takes the leave back.

        Raises
        ------
        InvalidPointerError
            Where the block is not live.
        TypeError
            For what cannot be called.
        Error
            In a pool with debug modes, which look at what is beside blocks.

        Notes
        -----
        The new address is a multiple of 256, of no more.  A block that streams were recorded for is not moved, nor one
        in a capture's memory or in memory that its stream borrows, as on ``cuda-vmm`` all but the default one do, and
        nothing while another process may use a segment of the pool.  The leave ends with the block; `on_move` is kept
        until the next `coalesce` after that at the latest.

        Examples
        --------
        >>> import vpool
        >>> pool = vpool.Pool(vpool.Dynamic(initial="1MiB", limit="1MiB"), source="host")
        >>> blocks = [pool.empty(256 << 10) for _ in range(4)]
        >>> blocks[0].close(), blocks[2].close()
        (None, None)
        >>> pool.movable(blocks[1], lambda old, new: print("moved", new - old >> 10, "KiB"))
        >>> pool.coalesce() >> 10
        moved 256 KiB
        256
        """
        cdef uint64_t address
        cdef Block block
        cdef _Mover mover
        self.must_be_open()
        if on_move is not None and not callable(on_move):
            raise TypeError(f"on_move must be callable, not {type(on_move).__name__}")
        if self.debugger is not None:
            raise Error(f"pool {self.name!r} has debug modes, which look at memory beside blocks: nothing moves")
        address = self.lent_address(ptr)
        mover = _Mover()
        mover.block_id = self.find(address, &block)
        if mover.block_id == 0:
            raise self.stray_error(address)
        if self.movers is None:
            self.movers = {}
        if on_move is None:
            self.movers.pop(address, None)
            return
        mover.arena = state_at(self.areas, address).arenas[block.slot]
        mover.generation = block.generation
        mover.on_move = on_move
        mover.buffer = <PyObject*> ptr if isinstance(ptr, Buffer) else NULL
        self.movers[address] = mover

    cdef dict moving(self):
        """The movers whose blocks are still there, and may move now; those of others are forgotten."""
        cdef _Mover mover
        cdef Block* block
        found = {}
        for address, entry in list(self.movers.items()):
            mover = entry
            if not placed_is(mover.arena, mover.block_id, mover.generation):
                if self.movers.get(address) is mover:
                    del self.movers[address]
                continue
            block = &mover.arena.blocks[mover.block_id]
            if block.flags == 0 and not atomic_read(mover.arena.captured):
                found[address] = mover
        return found

    cdef bint move(self, _Mover mover, uint64_t target) except -1:
        """Move a block to a place, if that is free; whether it was."""
        cdef Access access = Access(self.areas)
        cdef Arena* arena = mover.arena
        cdef Block like
        cdef BlockId block_id, old_id
        cdef uint16_t generation
        cdef uint64_t address
        cdef Buffer buffer
        cdef Core area
        cdef int status = STATUS_OK
        if not placed_is(arena, mover.block_id, mover.generation):
            return False
        like = arena.blocks[mover.block_id]
        address = like.address
        if not access.may(arena.slot, False):
            return False
        area = self.areas.area_at(address)
        with nogil:
            block_id = placed_take(self.areas, area, arena, target, &like)
        if block_id == 0:
            return False
        old_id = mover.block_id
        # While the record is the same the buffer that has it is there: it frees its block when it goes.
        buffer = None if mover.buffer == NULL else <Buffer> <object> mover.buffer
        generation = arena.blocks[block_id].generation
        if self.core.source.has_memory:
            with nogil:
                status = access.copy_on(arena.slot, False, target, address, like.stamp)
        try:
            if status != STATUS_OK:
                raise source_error(self.core, status, f"{like.stamp:,} bytes are not moved")
            if buffer is not None and buffer.block_id == old_id:
                buffer.block_id, buffer.address, buffer.generation = block_id, target, generation
            mover.on_move(address, target)
        except BaseException:
            if buffer is not None and buffer.block_id == block_id and buffer.address == target:
                buffer.block_id, buffer.address, buffer.generation = old_id, address, mover.generation
            if placed_is(arena, block_id, generation):
                self.take_back_on(target, arena.slot)
            raise
        if self.movers.get(address) is mover:
            del self.movers[address]
        if placed_is(arena, old_id, mover.generation):
            self.take_back_on(address, arena.slot)
        mover.block_id, mover.generation = block_id, generation
        if placed_is(arena, block_id, generation):
            self.movers[target] = mover
        return True

    def coalesce(self):
        """Merge what can be merged without waiting, and move what may be moved.

        Memory that streams lent one another goes home where its last use is complete, and merges
        with its neighbours there; so does pending memory that has become ready.  Then blocks that their owners let
        move (`movable`) are moved where that makes the largest free range larger, as `vpool.defrag.report` has it:
        each by one copy on its stream.

        Returns
        -------
        int
            Bytes by which the largest free block has grown.

        Raises
        ------
        SourceError
            Where the driver does not copy; that block stays, and those that were moved before it are.

        Notes
        -----
        Runtime complexity: O(blocks); with blocks that may move O(blocks log blocks), and a copy for each move.
        """
        before = self.inspect().largest_block_bytes
        self.streams.settle()
        with nogil:
            self.areas.coalesce()
        moving = self.moving() if self.movers else None
        if moving:
            exported = placed_exported(self.areas.state)
            for source, target, _ in () if exported else moves_of(self.records()[1], moving):
                if source in moving:
                    self.move(moving[source], target)
        return max(0, self.inspect().largest_block_bytes - before)

    def suspend(self, tag=None, offload=False):
        """Give up the memory of live blocks, and keep their addresses.

        For programs that alternate, such as generation and training: what one phase does not touch need not be there.
        All work on the device is waited for, then the handles below the blocks go back to the source, and all that is
        free with them.  Until `resume` nothing may touch the blocks.  They may be freed, and others be allocated.

        Parameters
        ----------
        tag : str, optional
            Only blocks that were allocated under this tag; all if not given.
        offload : bool
            Whether to keep the contents, in pinned memory of the host.  Without it they are lost.

        Returns
        -------
        vpool.trimming.Suspended
            An int, the bytes that went back, whose ``kept`` has pairs of the bytes that stayed and the reason: a handle
            that other live blocks share stays, and so do a strategy's fixed core and what a capture's graph may use.

        Raises
        ------
        SourceError
            Where the source keeps no addresses: ``"cuda-vmm"`` does.  Where the driver fails, or the device cannot be
            waited for while a capture goes on.
        OutOfMemoryError
            Where the host has no memory for the contents.
        Error
            In a pool with debug modes, which look at what is beside blocks.
        ClosedPoolError, ForkedProcessError
            As for `allocate`.

        Notes
        -----
        After an error no block is suspended that was not before; free memory may have gone back.  Suspended blocks are
        ``suspended`` in a report, and count neither as allocated nor as reserved.  A tag's limit counts them.

        Thread safety: other threads go on; those that need memory from the source wait.  Runtime complexity: O(blocks),
        and some 35 µs of driver calls a handle on an H200, besides the copies.

        Examples
        --------
        >>> import vpool
        >>> pool = vpool.Pool(vpool.Dynamic(limit="1GiB"), source="simulated-vmm")
        >>> with vpool.tag("kv-cache"):
        ...     cache = pool.allocate(80 << 20)
        >>> pool.suspend("kv-cache") >> 20, pool.stats.reserved_bytes
        (80, 0)
        >>> pool.resume() >> 20, pool.stats.reserved_bytes >> 20
        (80, 80)
        >>> pool.close()
        """
        cdef GivenUp result
        cdef bint every = tag is None
        cdef bint copies = bool(offload)
        cdef uint16_t number = 0
        cdef int status
        self.must_be_open()
        if tag is not None:
            if checked_tag(tag) is None:
                raise ValueError("a tag has a name; None suspends all blocks")
            number = number_of(tag)
        if self.core.source.granularity == 0:
            raise SourceError(
                f"source {self.core.source.name!r} gives memory and addresses together, so a block cannot keep the one"
                ' without the other: "cuda-vmm" can; trim() gives back what is free', "cudaErrorNotSupported",
            )
        if self.debugger is not None:
            raise Error(f"pool {self.name!r} has debug modes, which look at memory beside blocks: it is not suspended")
        self.streams.settle()
        copies = copies and self.core.source.has_memory
        if copies and self.core.host is None:
            self.core.host = host_beside(self.core.source)
        with nogil:
            status = suspended_give_up(self.core, every, number, copies, &result)
        if status == STATUS_OUT_OF_MEMORY:
            raise OutOfMemoryError(
                f"pool {self.name!r} is not suspended: the host has no memory for the contents, or none for records", 0)
        if status != STATUS_OK:
            why = " while a capture goes on" if status == STATUS_NOT_READY else ""
            raise source_error(self.core, status, f"pool {self.name!r} is not suspended{why}")
        return Suspended(result.released, why_suspended(
            self.stats.reserved_bytes, 0 if self.areas.fixed is None else atomic_read(self.areas.fixed_state.reserved),
            result.shared, result.in_use, result.refused))

    def resume(self):
        """Give all suspended blocks memory again, at the same addresses, and the contents that were offloaded.

        Returns
        -------
        int
            Bytes that came from the source.

        Raises
        ------
        OutOfMemoryError
            Where the limit or the device has no room for it, also after idle memory went back.
        SourceError
            Where the driver fails.
        ForkedProcessError
            As for `allocate`.

        Notes
        -----
        All blocks are back or none, and after an error what was offloaded still is there to be brought back.  What was
        not offloaded has bytes of no meaning.  When this returns the blocks may be used on every stream.  A closed pool
        can be resumed too.  Runtime complexity: O(blocks), and some 50 µs of driver calls a handle on an H200,
        besides the copies.
        """
        cdef uint64_t nbytes = 0
        cdef int status
        self.must_be_mine()
        with nogil:
            status = suspended_bring_back(self.core, &nbytes)
        if status == STATUS_OUT_OF_MEMORY or status == STATUS_NO_ROOM:
            need = self.core.state.suspended.absent
            why = "growing would pass the limit" if status == STATUS_NO_ROOM else "the device has less"
            raise OutOfMemoryError(
                f"pool {self.name!r} cannot be resumed: its suspended blocks need {need:,} bytes"
                f" ({format_bytes(need)}), and {why}. Free or trim something, and call resume() again; nothing is lost",
                need, self.inspect())
        if status != STATUS_OK:
            raise source_error(self.core, status, f"pool {self.name!r} is not resumed")
        return nbytes

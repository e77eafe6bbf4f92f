"""The source of virtual memory: ranges of addresses, and handles that are mapped into them.

Every call is safe while something captures a graph: none waits for the device, and the thread says so.
"""
cimport cython
from libc.stdint cimport uint64_t

from vpool._base.lock cimport spin_lock, spin_unlock
from vpool._storage.driver cimport (
    ATTRIBUTE_FILE_HANDLES,
    ATTRIBUTE_VIRTUAL_MEMORY,
    STATUS_NOT_SUPPORTED,
    STATUS_OK,
    Driver,
)
from vpool._storage.source cimport Handle, Range, Source

from vpool.errors import SourceError


cdef bint _has(Driver driver, int device, int attribute) noexcept nogil:
    cdef int value = 0
    return driver.device_attribute(device, attribute, &value) == STATUS_OK and value != 0


@cython.no_gc   # as its base
cdef class MappedSource(Source):
    """Memory of one device in handles that are mapped where they are needed.

    Parameters
    ----------
    driver : Driver
    name : str
    device : int
    handle_bytes : int
        Of a handle where nothing else decides; a multiple of the granularity.
    slack : float
        Share of live memory that may be reserved beyond it before free memory is moved.
    peers : iterable of int
        Devices that may access the memory too.
    exportable : bool
        Whether handles can be given to another process, as file descriptors.
    host_accessible, has_memory
        As of `Source`.

    Raises
    ------
    SourceError
        Where the device has no virtual memory, or cannot export handles.
    ValueError
        For a size that is no multiple of the granularity, or a slack below 0.
    ForkedProcessError
        In a child of the process that made the driver table.

    Notes
    -----
    Thread safety: as of `Source`.
    """

    def __cinit__(self, Driver driver not None, str name not None, int device=0, *, uint64_t handle_bytes=34 << 20,
                  double slack=0.01, peers=(), bint exportable=False, **options):
        cdef uint64_t granularity = 0
        cdef int status
        cdef bint has
        driver.must_be_mine()
        with nogil:
            has = _has(driver, device, ATTRIBUTE_VIRTUAL_MEMORY)
            status = driver.handle_granularity(device, &granularity) if has else STATUS_NOT_SUPPORTED
            if exportable and status == STATUS_OK and not _has(driver, device, ATTRIBUTE_FILE_HANDLES):
                status = STATUS_NOT_SUPPORTED
        if status != STATUS_OK:
            reason = driver.error_name(status)
            what = "exportable virtual memory" if exportable and has else "virtual memory"
            raise SourceError(f"device {device} has no {what}: {reason}", reason)
        if handle_bytes == 0 or handle_bytes % granularity:
            raise ValueError(f"a handle's size must be a multiple of {granularity:,} bytes, not {handle_bytes:,}")
        if not 0 <= slack <= 1:
            raise ValueError(f"slack must be a share from 0 to 1, not {slack}")
        peers = sorted(set(peers) - {device})
        if len(peers) > MOST_PEERS:
            raise ValueError(f"at most {MOST_PEERS} peers, not {len(peers)}")
        for number, peer in enumerate(peers):
            self.peers[number] = peer
        self.peer_count = len(peers)
        self.granularity = granularity
        self.handle_bytes = handle_bytes
        self.slack = slack
        self.exportable = exportable

    def __dealloc__(self):
        if not self.driver.forked:
            self._free_strays()

    cdef int reserve(self, uint64_t nbytes, Range* span) noexcept nogil:
        """Address space without memory: `nbytes`, a multiple of the granularity."""
        cdef int previous, mode
        cdef int status
        span.address = 0
        span.nbytes = nbytes
        self._free_strays()
        status = self._enter_relaxed(&previous, &mode)
        if status != STATUS_OK:
            return status
        status = self._leave_relaxed(previous, mode, self.driver.address_reserve(nbytes, &span.address))
        if status != STATUS_OK and span.address:
            # The thread could not be left as it was; what was reserved is no use to anybody.
            if self.driver.address_free(span.address, nbytes) != STATUS_OK:
                self._free_later(span)
            span.address = 0
        return status

    cdef int create(self, uint64_t nbytes, Handle* handle) noexcept nogil:
        """Memory that is mapped nowhere.  Where this fails and the token is not 0, the driver did not take it back."""
        cdef int previous, mode
        cdef int status = self._enter_relaxed(&previous, &mode)
        handle.token = 0
        handle.nbytes = nbytes
        if status != STATUS_OK:
            return status
        status = self.driver.handle_create(self.device, nbytes, self.exportable, &handle.token)
        if status != STATUS_OK:
            handle.token = 0
        status = self._leave_relaxed(previous, mode, status)
        if status != STATUS_OK and handle.token and self.driver.handle_release(handle.token) == STATUS_OK:
            handle.token = 0
        return status

    cdef int map_at(self, uint64_t address, Handle* handle, bint* stays) noexcept nogil:
        """Put a handle at an address of a range, for the device and its peers to use.

        All or nothing; where this fails and it `stays`, the driver did not undo it: nobody can use it there, and it
        is to be unmapped later.
        """
        cdef int previous, mode
        cdef int status = self._enter_relaxed(&previous, &mode)
        cdef int mapped
        stays[0] = False
        if status != STATUS_OK:
            return status
        mapped = self.driver.handle_map(address, handle.nbytes, handle.token)
        status = mapped if mapped != STATUS_OK else self._open_mapping(address, handle.nbytes)
        status = self._leave_relaxed(previous, mode, status)
        if status != STATUS_OK and mapped == STATUS_OK:
            stays[0] = self.driver.handle_unmap(address, handle.nbytes) != STATUS_OK
        return status

    cdef int _open_mapping(self, uint64_t address, uint64_t nbytes) noexcept nogil:
        cdef int status = self.driver.access_set(address, nbytes, self.device)
        cdef int i
        for i in range(self.peer_count):
            if status == STATUS_OK:
                status = self.driver.access_set(address, nbytes, self.peers[i])
        return status

    cdef int unmap_at(self, uint64_t address, uint64_t nbytes) noexcept nogil:
        """Take what is mapped away from an address: one whole mapping, or more side by side."""
        cdef int previous, mode
        cdef int status = self._enter_relaxed(&previous, &mode)
        cdef int unmapped
        if status != STATUS_OK:
            return status
        unmapped = self.driver.handle_unmap(address, nbytes)
        status = self._leave_relaxed(previous, mode, unmapped)
        # It is unmapped, whatever became of the thread.
        return unmapped

    cdef int map(self, Range* span, uint64_t offset, Handle* handle) noexcept nogil:
        cdef bint stays
        return self.map_at(span.address + offset, handle, &stays)

    cdef int unmap(self, Range* span, uint64_t offset, Handle* handle) noexcept nogil:
        return self.unmap_at(span.address + offset, handle.nbytes) if span.address else STATUS_OK

    cdef int release(self, Handle* handle) noexcept nogil:
        """Give memory back.  The token becomes 0 when it is gone, whatever else then fails."""
        cdef int previous, mode
        cdef int status = self._enter_relaxed(&previous, &mode)
        if status != STATUS_OK:
            return status
        status = self.driver.handle_release(handle.token)
        if status == STATUS_OK:
            handle.token = 0
        return self._leave_relaxed(previous, mode, status)

    cdef int _free_range(self, uint64_t address, uint64_t nbytes) noexcept nogil:
        cdef int previous, mode
        cdef int status = self._enter_relaxed(&previous, &mode)
        cdef int freed
        if status != STATUS_OK:
            return status
        freed = self.driver.address_free(address, nbytes)
        if freed != STATUS_OK and self.driver.handle_unmap(address, nbytes) == STATUS_OK:
            # What could not be unmapped when it was mapped, and was released since.
            freed = self.driver.address_free(address, nbytes)
        self._leave_relaxed(previous, mode, freed)
        return freed

    cdef int unreserve(self, Range* span) noexcept nogil:
        """Give address space back; what the driver refuses now it is asked for again later."""
        cdef int status = STATUS_OK
        if span.address:
            status = self._free_range(span.address, span.nbytes)
            if status != STATUS_OK:
                self._free_later(span)
        span.address = 0
        return status

    cdef void _free_later(self, Range* span) noexcept nogil:
        spin_lock(&self.lock)
        if self.stray_count < MOST_STRAYS:
            self.strays[self.stray_count] = span[0]
            self.stray_count += 1
        spin_unlock(&self.lock)

    cdef void _free_strays(self) noexcept nogil:
        """Ask again for what the driver did not free."""
        cdef Range span
        cdef int _i
        for _i in range(MOST_STRAYS):
            spin_lock(&self.lock)
            span.address = 0
            if self.stray_count:
                self.stray_count -= 1
                span = self.strays[self.stray_count]
            spin_unlock(&self.lock)
            if span.address == 0:
                return
            if self._free_range(span.address, span.nbytes) != STATUS_OK:
                self._free_later(&span)
                return

    cdef int surrender(self, Range* span, Handle* handle) noexcept nogil:
        """Give back what `acquire` gave.  Where it is still mapped it stays as it was, to be given back later."""
        cdef int first = STATUS_OK
        cdef int status
        if handle.token == 0:
            return self.unreserve(span)
        if span.address:
            first = self.unmap(span, 0, handle)
            if first != STATUS_OK:
                return first
            # What is mapped nowhere has no address that anybody could use.
            first = self.unreserve(span)
        else:
            self._free_strays()                   # it may still be mapped there
        status = self.release(handle)
        return status if first == STATUS_OK else first

    cdef int share(self, uint64_t address, uint64_t nbytes, char* handle) noexcept nogil:
        """What ``cudaIpcGetMemHandle`` gives there is for memory of cudaMalloc alone."""
        return STATUS_NOT_SUPPORTED

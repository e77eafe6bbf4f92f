"""What a source is: ranges of address space, and handles of memory that are mapped into them."""
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from vpool._storage.driver cimport Driver

cdef struct Range:
    uint64_t address              # 0 until a source whose memory brings its own addresses maps it
    uint64_t nbytes

cdef struct Handle:
    uint64_t token                # the source's own name for the memory; 0: none
    uint64_t nbytes


cdef class Source:
    cdef readonly Driver driver
    cdef readonly str name
    cdef readonly int device
    cdef readonly bint host_accessible    # the CPU can read and write at the addresses
    cdef readonly bint has_memory         # there is something at the addresses
    cdef readonly uint64_t granularity    # bytes of the smallest handle that can be mapped elsewhere; 0: none can
    cdef readonly bint checks_handles     # a destroyed stream's handle is refused; CUDA's driver crashes on it

    cdef int _enter_device(self, int* previous) noexcept nogil
    cdef int _leave_device(self, int previous, int status) noexcept nogil
    cdef int _relax(self, int* mode) noexcept nogil
    cdef int _restore(self, int mode, int status) noexcept nogil
    cdef int _enter_relaxed(self, int* previous, int* mode) noexcept nogil
    cdef int _leave_relaxed(self, int previous, int mode, int status) noexcept nogil
    # Each returns a status; none may be called under a lock.
    cdef int reserve(self, uint64_t nbytes, Range* span) noexcept nogil
    cdef int create(self, uint64_t nbytes, Handle* handle) noexcept nogil
    cdef int map(self, Range* span, uint64_t offset, Handle* handle) noexcept nogil
    cdef int unmap(self, Range* span, uint64_t offset, Handle* handle) noexcept nogil
    cdef int release(self, Handle* handle) noexcept nogil
    cdef int unreserve(self, Range* span) noexcept nogil
    cdef int acquire(self, uint64_t nbytes, Range* span, Handle* handle) noexcept nogil
    cdef int surrender(self, Range* span, Handle* handle) noexcept nogil
    cdef int memory_info(self, uint64_t* free, uint64_t* total) noexcept nogil
    cdef int create_event(self, uint64_t* event) noexcept nogil
    cdef int record_event(self, uint64_t event, uint64_t stream) noexcept nogil
    cdef int wait_for_event(self, uint64_t stream, uint64_t event) noexcept nogil
    cdef int query_event(self, uint64_t event) noexcept nogil
    cdef int await_event(self, uint64_t event) noexcept nogil
    cdef int ask_capture(self, uint64_t stream, int* state) noexcept nogil
    cdef int capture_info(self, uint64_t stream, int* state, uint64_t* id, uint64_t* graph) noexcept nogil
    cdef int synchronize(self) noexcept nogil
    cdef int share(self, uint64_t address, uint64_t nbytes, char* handle) noexcept nogil
    cdef int fill(self, uint64_t address, uint32_t word, uint64_t words) noexcept nogil
    cdef int read(self, void* host, uint64_t address, uint64_t nbytes) noexcept nogil
    cdef int write(self, uint64_t address, const void* host, uint64_t nbytes) noexcept nogil
    cdef int fill_on(self, uint64_t stream, uint64_t address, uint8_t byte, uint64_t nbytes) noexcept nogil
    cdef int read_on(self, uint64_t stream, void* host, uint64_t address, uint64_t nbytes) noexcept nogil
    cdef int copy_on(self, uint64_t stream, uint64_t to, uint64_t address, uint64_t nbytes) noexcept nogil

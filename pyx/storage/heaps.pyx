"""What a profiler or sanitizer is told of memory that is lent in parts: NVTX's heaps and regions.

The functions come from a library that exports them, since NVTX itself is a header; where no tool listens they do
nothing.  The layouts are those of version 1 of its memory extension, which each call names.
"""
from libc.stdint cimport uint16_t, uint32_t, uint64_t

from vpool._base.lock cimport spin_lock, spin_unlock
from vpool._base.memory cimport lazy_release, lazy_reserve

cdef enum:
    MOST_HEAPS = 1 << 20
    VERSION = 0x0102              # of the extension
    SUB_ALLOCATOR = 1             # nothing of such a heap may be used before a region is registered
    VIRTUAL_ADDRESS = 1
    TEXT = 1                      # a message of bytes
    BY_POINTER = 1

cdef struct AddressRange:
    size_t nbytes
    const void* address

cdef struct HeapDescription:
    uint16_t version
    uint16_t struct_bytes
    uint32_t reserved
    uint32_t usage
    uint32_t kind
    size_t range_bytes
    const AddressRange* range
    uint32_t category
    uint32_t message_kind
    const char* message

cdef struct RegionsDescription:
    uint16_t version
    uint16_t struct_bytes
    uint32_t kind
    void* heap
    size_t count
    size_t range_bytes
    const AddressRange* ranges
    void** handles                # none: addresses name them

cdef struct EndsDescription:
    uint16_t version
    uint16_t struct_bytes
    uint32_t kind
    size_t count
    size_t element_bytes
    const void** addresses

cdef struct NameDescription:
    uint32_t kind
    uint32_t name_kind
    const void* address
    const char* name
    uint32_t category
    uint32_t reserved

cdef struct NamesDescription:
    uint16_t version
    uint16_t struct_bytes
    uint32_t reserved
    size_t count
    size_t element_bytes
    const NameDescription* names
    size_t reserved_too

ctypedef void* (*HeapRegister)(void* domain, const HeapDescription* heap) noexcept nogil
ctypedef void (*HeapUnregister)(void* domain, void* heap) noexcept nogil
ctypedef void (*RegionsRegister)(void* domain, const RegionsDescription* regions) noexcept nogil
ctypedef void (*RegionsName)(void* domain, const NamesDescription* names) noexcept nogil
ctypedef void (*RegionsUnregister)(void* domain, const EndsDescription* regions) noexcept nogil

FUNCTIONS = (
    "nvtxMemHeapRegister", "nvtxMemHeapUnregister", "nvtxMemRegionsRegister", "nvtxMemRegionsName",
    "nvtxMemRegionsUnregister",
)


cdef class Heaps:
    """The heaps of one pool: memory from its source, of which only regions may be used.

    Parameters
    ----------
    name : str
        Of the pool.
    domain : int
        A domain of NVTX.
    functions : sequence of int
        Addresses of what `FUNCTIONS` names.

    Notes
    -----
    Thread safety: every method may be called from any thread; the tool is called under no lock of this class.
    """

    def __cinit__(self, str name not None, uint64_t domain, functions):
        cdef uint64_t address
        self.name = name.encode("utf-8", "replace")
        self.text = self.name
        self.domain = <void*> domain
        for place, given in enumerate(functions[:5]):
            address = given
            self.functions[<int> place] = <void*> address
        self.known = <Heap*> lazy_reserve(MOST_HEAPS * sizeof(Heap))
        if self.known == NULL:
            raise MemoryError("no address space for the heaps of a pool")

    def __dealloc__(self):
        if self.known != NULL:
            lazy_release(self.known, MOST_HEAPS * sizeof(Heap))

    cdef void add(self, uint64_t address, uint64_t nbytes) noexcept nogil:
        """Memory came from the source.  Nobody uses it yet."""
        cdef AddressRange span
        cdef HeapDescription heap
        cdef void* handle
        span.nbytes = nbytes
        span.address = <void*> address
        heap.version = VERSION
        heap.struct_bytes = sizeof(HeapDescription)
        heap.reserved = heap.category = 0
        heap.usage = SUB_ALLOCATOR
        heap.kind = VIRTUAL_ADDRESS
        heap.range_bytes = sizeof(AddressRange)
        heap.range = &span
        heap.message_kind = TEXT
        heap.message = self.text
        handle = (<HeapRegister> self.functions[0])(self.domain, &heap)
        if handle == NULL or handle == <void*> -1:
            return                                # nobody listens
        spin_lock(&self.lock)
        if self.count < MOST_HEAPS:
            self.known[self.count].address = address
            self.known[self.count].nbytes = nbytes
            self.known[self.count].handle = handle
            self.count += 1
        spin_unlock(&self.lock)

    cdef void drop(self, uint64_t address) noexcept nogil:
        """Memory is about to go back.  Of what was not added, or was dropped, there is nothing to say."""
        cdef void* handle = NULL
        cdef uint32_t i
        spin_lock(&self.lock)
        for i in range(self.count):
            if self.known[i].address == address:
                handle = self.known[i].handle
                self.count -= 1
                self.known[i] = self.known[self.count]
                break
        spin_unlock(&self.lock)
        if handle != NULL:
            (<HeapUnregister> self.functions[1])(self.domain, handle)

    cdef void* heap_of(self, uint64_t address) noexcept nogil:
        """The heap that an address lies in, NULL where none is known.  O(heaps)."""
        cdef void* handle = NULL
        cdef uint32_t i
        spin_lock(&self.lock)
        for i in range(self.count):
            if address - self.known[i].address < self.known[i].nbytes:
                handle = self.known[i].handle
                break
        spin_unlock(&self.lock)
        return handle

    cdef void cover(self, uint64_t address, uint64_t nbytes, const char* name) noexcept nogil:
        """A block may be used from now on."""
        cdef AddressRange span
        cdef RegionsDescription regions
        cdef NameDescription called
        cdef NamesDescription names
        cdef void* heap = self.heap_of(address)
        if heap == NULL:
            return
        span.nbytes = nbytes
        span.address = <void*> address
        regions.version = VERSION
        regions.struct_bytes = sizeof(RegionsDescription)
        regions.kind = VIRTUAL_ADDRESS
        regions.heap = heap
        regions.count = 1
        regions.range_bytes = sizeof(AddressRange)
        regions.ranges = &span
        regions.handles = NULL
        (<RegionsRegister> self.functions[2])(self.domain, &regions)
        called.kind = BY_POINTER
        called.name_kind = TEXT
        called.address = <void*> address
        called.name = name
        called.category = called.reserved = 0
        names.version = VERSION
        names.struct_bytes = sizeof(NamesDescription)
        names.reserved = names.reserved_too = 0
        names.count = 1
        names.element_bytes = sizeof(NameDescription)
        names.names = &called
        (<RegionsName> self.functions[3])(self.domain, &names)

    cdef void uncover(self, uint64_t address) noexcept nogil:
        """A block that was covered may not be used any more: it is about to be free."""
        cdef EndsDescription ends
        cdef const void* pointer = <void*> address
        if self.heap_of(address) == NULL:
            return
        ends.version = VERSION
        ends.struct_bytes = sizeof(EndsDescription)
        ends.kind = BY_POINTER
        ends.count = 1
        ends.element_bytes = sizeof(void*)
        ends.addresses = &pointer
        (<RegionsUnregister> self.functions[4])(self.domain, &ends)

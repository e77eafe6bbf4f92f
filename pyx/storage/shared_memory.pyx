"""Memory of the fake CUDA that other processes can open, by files that exist in memory only.

What it keeps of the real one: a handle of 64 bytes, which is of a whole allocation; the process that
exports it cannot open it, and no process opens it twice, as with CUDA's older drivers.
"""
from libc.stdint cimport uint64_t
from libc.stdio cimport snprintf
from libc.string cimport memcpy, memset
from posix.fcntl cimport O_RDWR, open
from posix.mman cimport MAP_FAILED, MAP_FIXED, MAP_SHARED, PROT_READ, PROT_WRITE, mmap, munmap
from posix.stat cimport fstat, struct_stat
from posix.unistd cimport close, getpid, write

from vpool._storage.driver cimport (
    STATUS_ALREADY_MAPPED,
    STATUS_INVALID_CONTEXT,
    STATUS_INVALID_VALUE,
    STATUS_OK,
    STATUS_OUT_OF_MEMORY,
)

cdef extern from "sys/mman.h" nogil:
    int memfd_create(const char* name, unsigned int flags)
    unsigned int MFD_CLOEXEC

cdef struct Written:
    # What a handle says.
    uint64_t number
    uint64_t nbytes
    int process
    int file


cdef Shared* _find(Shared* table, uint64_t address, bint exported) noexcept nogil:
    """The entry of an address, or with address 0 a free place; NULL where there is none."""
    cdef int i
    for i in range(MOST_SHARED):
        if table[i].address == address and (address == 0 or (table[i].file >= 0) == exported):
            return &table[i]
    return NULL


cdef bint _write_all(int file, uint64_t address, uint64_t nbytes) noexcept nogil:
    cdef ssize_t written
    while nbytes:
        written = write(file, <const void*> address, nbytes)
        if written <= 0:
            return False
        address += written
        nbytes -= written
    return True


cdef int _number_of(int file, uint64_t* number) noexcept nogil:
    cdef struct_stat found
    if fstat(file, &found) != 0:
        return STATUS_INVALID_VALUE
    number[0] = found.st_ino
    return STATUS_OK


cdef int shared_export(Shared* table, uint64_t address, uint64_t nbytes, char* handle) noexcept nogil:
    """Make an allocation one that others can open, with what it holds.  The driver's lock is held."""
    cdef Shared* entry = _find(table, address, True)
    cdef Written written
    cdef int file
    if entry == NULL:
        entry = _find(table, 0, True)
        file = memfd_create(b"vpool", MFD_CLOEXEC) if entry != NULL else -1
        if file < 0:
            return STATUS_OUT_OF_MEMORY
        if not _write_all(file, address, nbytes) or _number_of(file, &entry.number) != STATUS_OK or mmap(
                <void*> address, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED:
            close(file)
            return STATUS_OUT_OF_MEMORY
        entry.address = address
        entry.nbytes = nbytes
        entry.file = file
    written.number = entry.number
    written.nbytes = entry.nbytes
    written.process = getpid()
    written.file = entry.file
    memset(handle, 0, 64)
    memcpy(handle, &written, sizeof(Written))
    return STATUS_OK


cdef int shared_open(Shared* table, const char* handle, uint64_t* address) noexcept nogil:
    cdef Written written
    cdef Shared* entry = _find(table, 0, False)
    cdef char path[64]
    cdef uint64_t number = 0
    cdef void* base
    cdef int i, file
    memcpy(&written, handle, sizeof(Written))
    if written.process == getpid():
        return STATUS_INVALID_CONTEXT
    for i in range(MOST_SHARED):
        if table[i].address and table[i].file < 0 and table[i].number == written.number:
            return STATUS_ALREADY_MAPPED
    snprintf(path, sizeof(path), b"/proc/%d/fd/%d", written.process, written.file)
    file = open(path, O_RDWR) if entry != NULL else -1
    if file < 0:
        return STATUS_INVALID_VALUE
    base = MAP_FAILED
    if _number_of(file, &number) == STATUS_OK and number == written.number:
        base = mmap(NULL, written.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)
    close(file)
    if base == MAP_FAILED:
        return STATUS_INVALID_VALUE
    entry.address = <uint64_t> base
    entry.nbytes = written.nbytes
    entry.file = -1
    entry.number = number
    address[0] = entry.address
    return STATUS_OK


cdef int shared_close(Shared* table, uint64_t address, bint exported) noexcept nogil:
    """Forget what was exported, whose owner unmaps it; or unmap what was opened here."""
    cdef Shared* entry = _find(table, address, exported)
    if address == 0 or entry == NULL:
        return STATUS_INVALID_VALUE
    if exported:
        close(entry.file)
    else:
        munmap(<void*> entry.address, entry.nbytes)
    entry.address = 0
    return STATUS_OK

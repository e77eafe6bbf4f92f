"""The words of vpool and the block record.  Declarations only: nothing to import at run time.

source     where device memory comes from (storage layer)
segment    one range that a source gave, minus what aligning its ends costs
block      a piece of a segment: live, free, pending, unmapped or suspended; blocks tile their segment
slot       a small integer that stands for a stream; handles become slots at the door (interface layer)
arena      the blocks of one slot, with the lists and the lock that keep them
granule    the unit of every size and address, 256 bytes
class      an interval of sizes that shares one free list
requested  bytes that the caller asked for; a block's ``nbytes`` is that after rounding

A block's record lives in host memory, out of band: device memory is never read or written.  Records
are numbered; number 0 is a sentinel that means "none" and may be written to, never read for meaning.
"""
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from *:
    """
    #ifndef VPOOL_BASE_TYPES
    #define VPOOL_BASE_TYPES
    #include <stdint.h>

    #define VPOOL_LIKELY(x) __builtin_expect(!!(x), 1)
    #define VPOOL_UNLIKELY(x) __builtin_expect(!!(x), 0)

    typedef struct vpool_block {
        uint64_t address;     /* a multiple of 256 */
        uint64_t nbytes;      /* a multiple of 256; 64 bits, so no block is limited to 2 TiB */
        uint64_t stamp;       /* live: requested bytes; free: the arena's `sequence` at the free; pending:
                                 that of `slot`, up to which its work is waited for, or 0 */
        uint32_t prev;        /* neighbours by address in the same segment: an edge before its first
                                 block, 0 behind its last */
        uint32_t next;
        uint32_t list_prev;   /* free: neighbours in the free list of the class */
        uint32_t list_next;   /* live: next in the chain of the address index; edge of an
                                 extent: the owner's lent block */
        uint16_t slot;        /* stream slot that the block was allocated for, or freed on; pending: of
                                 `stamp`; lent: of the arena that has it */
        uint16_t tag;
        uint16_t generation;  /* counts the frees of this record: an old (number, generation) is stale */
        uint8_t state;
        uint8_t flags;
    } vpool_block;

    /* The side record of block i (call sites, events) is entry i of a table that is mapped on first
       use, so its index is the block's own number and costs nothing until then. */
    #ifdef __cplusplus
    static_assert(sizeof(vpool_block) == 48, "a block record is 48 bytes");
    #else
    _Static_assert(sizeof(vpool_block) == 48, "a block record is 48 bytes");
    #endif
    #endif
    """
    ctypedef struct Block "vpool_block":
        uint64_t address
        uint64_t nbytes
        uint64_t stamp
        uint32_t prev
        uint32_t next
        uint32_t list_prev
        uint32_t list_next
        uint16_t slot
        uint16_t tag
        uint16_t generation
        uint8_t state
        uint8_t flags

    bint likely "VPOOL_LIKELY"(bint condition) noexcept nogil
    bint unlikely "VPOOL_UNLIKELY"(bint condition) noexcept nogil
    int count_leading_zeros "__builtin_clzll"(unsigned long long value) noexcept nogil
    int count_trailing_zeros "__builtin_ctzll"(unsigned long long value) noexcept nogil
    void prefetch "__builtin_prefetch"(const void* address) noexcept nogil

ctypedef uint32_t BlockId

cdef enum:
    GRANULE_BITS = 8
    GRANULE = 256                 # bytes
    MAX_ALIGNMENT = 2 << 20       # bytes
    SEGMENT_ROUNDING = 2 << 20    # bytes; steps of at least this much are rounded up to it
    MAX_SLOTS = 4096

cdef enum BlockState:
    BLOCK_UNUSED = 0              # a spare record, part of no segment
    BLOCK_LIVE = 1
    BLOCK_FREE = 2
    BLOCK_PENDING = 3             # freed, but some stream may still use it
    BLOCK_UNMAPPED = 4            # address space without memory
    BLOCK_EDGE = 5                # of no bytes, before the first block of a segment or an extent
    BLOCK_LENT = 6                # another slot's arena has the memory, as an extent of its own
    BLOCK_SUSPENDED = 7           # its memory, or a part of it, is given up; nobody's where nothing was requested

cdef enum BlockFlag:
    FLAG_USED = 1                 # live, and recorded for further streams
    FLAG_SOLID = 2                # one of equal blocks: never cut, never merged


cdef inline uint64_t round_up(uint64_t nbytes, uint64_t unit) noexcept nogil:
    """`nbytes` up to a multiple of `unit`, a power of two.  The caller has checked for overflow."""
    return (nbytes + unit - 1) & ~(unit - 1)


cdef inline uint64_t round_down(uint64_t nbytes, uint64_t unit) noexcept nogil:
    return nbytes & ~(unit - 1)

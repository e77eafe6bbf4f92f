"""Absences: places of handles that were given up below suspended blocks.  All locks are held, but to settle."""
from libc.stdint cimport uint64_t

from vpool._base.types cimport Block, BlockId
from vpool._management.arena cimport Arena
from vpool._management.core cimport Core
from vpool._management.mapped cimport Mapped
from vpool._management.state cimport Absence

# Of a block in the chain behind an edge; whether the chain has changed there.
ctypedef bint (*visit_t)(Core core, Arena* arena, BlockId edge_id, BlockId block_id, void* context) noexcept nogil

cdef void absences_visit(Core core, visit_t visit, void* context) noexcept nogil
cdef void absences_make(Block* block) noexcept nogil
cdef bint absences_may_cut(Core core, uint64_t handles) noexcept nogil
cdef bint absences_have(Mapped* mapped, Absence* absence) noexcept nogil
cdef bint absences_settle(Core core) noexcept nogil

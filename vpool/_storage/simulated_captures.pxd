"""Captures of simulated streams: what CUDA forbids meanwhile, and graphs that tell when they are gone."""
from libc.stdint cimport uint64_t

from vpool._base.lock cimport SpinLock
from vpool._storage.driver cimport gone_t

cdef struct Retained:
    gone_t gone
    void* data
    Retained* next

cdef struct SimulatedGraph:
    uint64_t id                   # of its capture
    int mode
    const char* thread            # that began it
    bint open                     # the capture goes on
    bint valid
    Retained* retained
    SimulatedGraph* next

cdef struct Captures:
    # Guarded by the lock of the streams, but for `open`.
    SimulatedGraph* first
    uint64_t next_id
    int open                      # captures that go on

cdef SimulatedGraph* capture_begin(Captures* captures, int mode) noexcept nogil
cdef Retained* capture_end(Captures* captures, SimulatedGraph* graph) noexcept nogil
cdef Retained* graph_drop(Captures* captures, SimulatedGraph* graph) noexcept nogil
cdef int graph_retain(Captures* captures, SpinLock* lock, uint64_t id, gone_t gone, void* data) noexcept nogil
cdef SimulatedGraph* graph_find(Captures* captures, uint64_t id) noexcept nogil
cdef void graph_tell(Retained* retained) noexcept nogil
cdef void graphs_delete(Captures* captures) noexcept nogil
cdef bint forbidden_here(Captures* captures) noexcept nogil
cdef int exchange_mode(int* mode) noexcept nogil

"""Captures of simulated streams: what CUDA forbids meanwhile, and graphs that tell when they are gone.

The rules are CUDA's, as they were seen on a device: a call that may wait (cudaMalloc, cudaFree,
cudaEventQuery, cudaEventSynchronize) is refused while a capture of the calling thread, or a global one of
any thread, goes on, and invalidates it, unless the thread has relaxed its mode; waiting for the device
is refused always.
"""
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free, malloc

from vpool._base.lock cimport spin_lock, spin_unlock
from vpool._storage.driver cimport (
    CAPTURE_GLOBAL,
    CAPTURE_RELAXED,
    STATUS_INVALID_VALUE,
    STATUS_OK,
    STATUS_OUT_OF_MEMORY,
)

cdef extern from *:
    """
    static __thread int vpool_capture_mode = 0;
    static __thread char vpool_capture_thread = 0;
    """
    int thread_mode "vpool_capture_mode"
    char this_thread "vpool_capture_thread"


cdef SimulatedGraph* capture_begin(Captures* captures, int mode) noexcept nogil:
    """Begin a capture; NULL without memory."""
    cdef SimulatedGraph* graph = <SimulatedGraph*> calloc(1, sizeof(SimulatedGraph))
    if graph == NULL:
        return NULL
    captures.next_id += 1
    graph.id = captures.next_id
    graph.mode = mode
    graph.thread = &this_thread
    graph.open = True
    graph.valid = True
    graph.next = captures.first
    captures.first = graph
    captures.open += 1
    return graph


cdef Retained* capture_end(Captures* captures, SimulatedGraph* graph) noexcept nogil:
    """End a capture; whom to tell if it leaves no graph, since it was invalidated."""
    graph.open = False
    captures.open -= 1
    return NULL if graph.valid else graph_drop(captures, graph)


cdef Retained* graph_drop(Captures* captures, SimulatedGraph* graph) noexcept nogil:
    """Destroy a graph; whom to tell, without the lock."""
    cdef Retained* retained = graph.retained
    cdef SimulatedGraph** link = &captures.first
    while link[0] != graph:
        link = &link[0].next
    link[0] = graph.next
    free(graph)
    return retained


cdef int graph_retain(Captures* captures, SpinLock* lock, uint64_t id, gone_t gone, void* data) noexcept nogil:
    """Have a graph tell once it is gone."""
    cdef SimulatedGraph* graph
    cdef Retained* retained = <Retained*> malloc(sizeof(Retained))
    if retained == NULL:
        return STATUS_OUT_OF_MEMORY
    retained.gone = gone
    retained.data = data
    spin_lock(lock)
    graph = graph_find(captures, id)
    if graph != NULL:
        retained.next = graph.retained
        graph.retained = retained
    spin_unlock(lock)
    if graph == NULL:
        free(retained)
        return STATUS_INVALID_VALUE
    return STATUS_OK


cdef SimulatedGraph* graph_find(Captures* captures, uint64_t id) noexcept nogil:
    cdef SimulatedGraph* graph = captures.first
    while graph != NULL and graph.id != id:
        graph = graph.next
    return graph


cdef void graph_tell(Retained* retained) noexcept nogil:
    """Tell everybody who wanted to know that a graph is gone."""
    cdef Retained* told
    while retained != NULL:
        told = retained
        retained = told.next
        told.gone(told.data)
        free(told)


cdef void graphs_delete(Captures* captures) noexcept nogil:
    while captures.first != NULL:
        graph_tell(graph_drop(captures, captures.first))


cdef bint forbidden_here(Captures* captures) noexcept nogil:
    """Whether this thread may not make a call that may wait; each capture that forbids it is invalid from now on."""
    cdef SimulatedGraph* graph = captures.first
    cdef bint forbidden = False
    while graph != NULL and thread_mode != CAPTURE_RELAXED:
        if graph.open and (
            graph.thread == &this_thread and graph.mode != CAPTURE_RELAXED
            or graph.mode == CAPTURE_GLOBAL and thread_mode == CAPTURE_GLOBAL
        ):
            graph.valid = False
            forbidden = True
        graph = graph.next
    return forbidden


cdef int exchange_mode(int* mode) noexcept nogil:
    """Set what this thread may do while something captures, and give what it was."""
    global thread_mode
    cdef int before = thread_mode
    thread_mode = mode[0]
    mode[0] = before
    return 0

"""The ladder as Python climbs it: with callbacks and a garbage collection between its rungs."""
import gc
import itertools
import logging
import operator
import threading

from vpool._base.lock cimport atomic_add, atomic_read
from vpool._interface.diagnosis cimport failure, forked
from vpool._management.areas cimport Areas
from vpool._management.core cimport core_deallocate, request_broken
from vpool._management.noted cimport noted_begin
from vpool._management.state cimport (
    RUNG_CALL,
    RUNG_COLLECT,
    RUNG_SEARCH,
    RUNG_TRIM,
    RUNG_WAIT,
    STATE_CLOSED,
    STATE_FORKED,
    Request,
)
from vpool._storage.driver cimport STATUS_OK

from vpool.errors import ClosedPoolError
from vpool.sizes import format_bytes

logger = logging.getLogger("vpool")


def _order(entry):
    return entry[:2]


cdef class Pressure:
    """What a pool does about a request that its lists cannot serve."""

    def __cinit__(self, Areas areas not None):
        self.areas = areas
        self.callbacks = []
        self.numbers = itertools.count()
        self.pressed = threading.local()

    def add(self, fn, priority):
        """Call a function before a request fails; higher priorities first, then older ones."""
        if not callable(fn):
            raise TypeError(f"a pressure callback must be callable, not {type(fn).__name__}")
        self.callbacks.append((-operator.index(priority), next(self.numbers), fn))

    cdef int climb(self, Request* request, str name, measures, debugger) except -1:
        """Find the request a block, or raise what it failed with.  No lock is held, and the GIL only between."""
        cause = None
        cdef bint futile
        with nogil:
            self.areas.climb(request, RUNG_SEARCH, RUNG_TRIM)
        futile = request.tried == 0
        if request.block_id == 0 and not futile and not request_broken(request):
            cause = self.ask_python(request, name, NULL)
            if request.block_id == 0 and self.areas.state.word & STATE_CLOSED:
                raise ClosedPoolError(f"pool {name!r} was closed meanwhile") from cause
        if request.block_id == 0 and not futile and self.areas.core.may_wait and not request_broken(request):
            with nogil:
                self.areas.climb(request, RUNG_WAIT, RUNG_WAIT)
        if request.block_id == 0:
            self.areas.core.count_failure(request.status)
            error = failure(self.areas, name, request, measures, debugger)
            logger.info("%s", error.args[0])
            if self.areas.state.word & STATE_FORKED:  # by a handler
                raise forked(name)
            raise error from cause
        if request.grown:
            try:
                self.tell(request, name)
            except BaseException:
                # A filter that raises, or a signal: nobody would ever free the block.
                if self.areas.state.word & STATE_FORKED == 0:
                    with nogil:
                        core_deallocate(request.arena, request.address)
                raise
            if self.areas.state.word & STATE_FORKED:
                raise forked(name)
        return 0

    cdef tell(self, Request* request, str name):
        """Log that the pool has grown."""
        logger.debug(
            "pool %r grew by %s to %s for a request of %s",
            name, format_bytes(request.grown), format_bytes(atomic_read(self.areas.state.reserved)),
            format_bytes(request.requested),
        )
        if request.refused:
            logger.info(
                "pool %r: the source refused %s (%s) and gave %s",
                name, format_bytes(request.refused), self.areas.core.source.driver.error_name(request.status),
                format_bytes(request.grown),
            )

    cdef ask_python(self, Request* request, str name, bint* fits):
        """Pressure callbacks, then a garbage collection; a callback's exception, if one raised.

        For memory if `fits` is NULL, else for room within the limit of the request's tag.  A request that fails inside
        a callback asks no callback again, so this is bounded.
        """
        raised = None
        if self.quarantine is not None and self.retry(request, RUNG_CALL, name, fits):
            return None
        if getattr(self.pressed, "now", False):
            return None
        self.pressed.now = True
        try:
            # A copy: others may be added meanwhile, also by these.
            for _, _, callback in sorted(self.callbacks, key=_order):
                try:
                    callback(request.requested)
                except Exception as error:
                    raised = error
                if self.retry(request, RUNG_CALL, name, fits):
                    return None
            gc.collect()
            self.retry(request, RUNG_COLLECT, name, fits)
        finally:
            self.pressed.now = False
        return raised

    cdef bint retry(self, Request* request, int rung, str name, bint* fits) except -1:
        """Count a rung that Python has tried, and climb the ones before it again; or see whether the tag has room."""
        if self.areas.state.word & STATE_FORKED:  # by what was called
            raise forked(name)
        if self.quarantine is not None:           # which what was called may have freed into
            self.quarantine()
        if fits != NULL:
            with nogil:
                fits[0] = self.areas.state.word & STATE_CLOSED == 0 and noted_begin(self.areas, request)
            return fits[0]
        with nogil:
            atomic_add(self.areas.state.rung_tries[rung], 1)
            request.tried |= <unsigned int> 1 << rung
            request.status = STATUS_OK
            if self.areas.state.word & STATE_CLOSED == 0 and self.areas.climb(request, RUNG_SEARCH, RUNG_TRIM):
                atomic_add(self.areas.state.rung_hits[rung], 1)
        return request.block_id != 0

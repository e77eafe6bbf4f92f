"""The cache policy of an adaptive pool: when idle memory goes back to the source."""
from libc.stdint cimport uint64_t

from vpool._base.lock cimport atomic_add, atomic_exchange, atomic_read, atomic_write
from vpool._management.core cimport Core, core_live_bytes
from vpool._management.idle cimport idle_trim
from vpool._management.state cimport STATE_MAPPED, Demand

cdef enum:
    FREES_A_LOOK = 2
    FREES_A_WINDOW = 128
    ENOUGH_LOOKS = 16
    MOST_PATIENCE = 1 << 14


cdef void _give_surplus(Core core, uint64_t number, uint64_t live, uint64_t keep) noexcept nogil:
    """Give idle segments back while there is a surplus, and plan the next try where none is idle."""
    cdef Demand* demand = &core.state.demand
    cdef uint64_t released = 0
    core.prove_idle()
    if core.state.word & STATE_MAPPED:
        idle_trim(core, max(keep, live + live // 32), &released)
    if core.give_idle(keep, live + live // 32) or released:
        demand.next_try = 0
        demand.tried_live = 0
        return
    # With less live there may soon be one; else not.
    demand.patience = FREES_A_WINDOW if live < demand.tried_live or demand.tried_live == 0 else (
        min(demand.patience * 2, <uint64_t> MOST_PATIENCE))
    demand.next_try = number + demand.patience
    demand.tried_live = live


cdef void adapt_look(Core core, bint now) noexcept nogil:
    """Give idle segments back where more stays reserved than live memory has needed of late.

    The low-excess cache policy of an adaptive pool.  Every few frees it looks at the excess: what is reserved
    beyond what is live.  Up to a sixteenth of what is live is kept.  Where it is more for a number of looks,
    or for two while live memory falls steeply, the least of these is surplus, and idle segments go back,
    mostly the newest first, until a thirty-second of what is live is left or no segment is small enough.  Where
    none is idle, the next try waits until less is live, or for a number of frees that doubles each time.
    """
    cdef Demand* demand = &core.state.demand
    cdef uint64_t number = atomic_add(demand.frees, 1)
    cdef uint64_t live, excess
    if not now and number % FREES_A_LOOK or atomic_exchange(demand.busy, 1):
        return
    if now:
        core.prove_idle()         # pending memory that is ready counts as idle
    live = core_live_bytes(&core.state)
    excess = atomic_read(core.state.reserved)
    excess = excess - live if excess > live else 0
    if number % FREES_A_WINDOW == 0:
        atomic_write(demand.low_before, demand.low)
        atomic_write(demand.low, live)
    elif live < demand.low:
        atomic_write(demand.low, live)
    if excess <= live // 16:
        demand.looks = 0
        demand.next_try = 0
        demand.tried_live = 0
    else:
        if demand.looks == 0:
            demand.first_live = live
        if demand.looks == 0 or excess < demand.least_excess:
            demand.least_excess = excess
        demand.looks += 1
        if now or (demand.looks >= ENOUGH_LOOKS or demand.looks > 1 and live + live // 64 < demand.first_live) and (
                number >= demand.next_try or live + live // 128 < demand.tried_live):
            # What was needed within these looks stays.
            _give_surplus(core, number, live, live + (0 if now else excess - demand.least_excess))
            demand.looks = 0
    atomic_write(demand.busy, 0)

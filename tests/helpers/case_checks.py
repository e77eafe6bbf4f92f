"""The checks of reported cases, by name: each takes the finished run and what the case wants."""

import re

import pytest

import vpool
from vpool.sizes import format_bytes

FIGURES = {
    "live_bytes": lambda pool, report: report.requested_bytes,
    "live_blocks": lambda pool, report: report.live_blocks,
    "reserved_bytes": lambda pool, report: report.reserved_bytes,
    "free_bytes": lambda pool, report: report.free_bytes,
    "pending_bytes": lambda pool, report: report.pending_bytes,
    "largest_free": lambda pool, report: report.largest_free_bytes,
    "peak_live_bytes": lambda pool, report: report.peak_requested_bytes,
    "peak_reserved_bytes": lambda pool, report: report.peak_reserved_bytes,
    "oom_count": lambda pool, report: pool.stats.ooms,
    "external_fragmentation": lambda pool, report: report.external_fragmentation,
    "internal_fragmentation": lambda pool, report: report.internal_fragmentation,
}
COMPARE = {
    "<=": lambda found, wanted: found <= wanted,
    ">=": lambda found, wanted: found >= wanted,
    "<": lambda found, wanted: found < wanted,
    ">": lambda found, wanted: found > wanted,
    "": lambda found, wanted: abs(found - wanted) < 1e-6,
}
FLAT = 3  # times
NOTICEABLE_NS = 20_000


def compare_figures(runner, pool, wanted):
    """Hold a report against the figures that a case wants at some moment; words are left out."""
    report = pool.inspect()
    for name, value in wanted.items():
        if name == "free_ge_request_but_largest_lt_request":
            for _, nbytes, error in runner.refused:
                within_limit = error.report.limit_bytes - error.report.allocated_bytes
                assert error.report.largest_free_bytes < nbytes <= within_limit
                assert error.report.unusable_bytes(nbytes) > 0
            continue
        sign = ""
        for suffix, of_suffix in (("_max", "<="), ("_min", ">=")):
            if name.endswith(suffix):
                name, sign = name.removesuffix(suffix), of_suffix
        if isinstance(value, str):
            match = re.fullmatch(r"([<>]=?)\s*([\d.]+)", value)
            if match is None:
                continue
            sign, value = match[1], float(match[2])
        if name in FIGURES and isinstance(value, (int, float)):
            found = FIGURES[name](pool, report)
            assert COMPARE[sign](found, value), f"{name} is {found}, wanted {sign}{value}"


def pairs_of(wanted):
    """``[[new, old], ...]``, also where a case gives one pair or an object."""
    if isinstance(wanted, dict):
        return list(wanted.items())
    return wanted if wanted and isinstance(wanted[0], list) else [wanted]


def names_of(wanted):
    return wanted if isinstance(wanted, list) else [wanted]


def never_unordered(runner, wanted):
    """The run itself has looked at every block that was given out; here, that the case had these blocks."""
    for pair in pairs_of(wanted):
        assert not set(pair) - set(runner.blocks), f"{pair} are not both blocks of the case"
        assert tuple(pair) not in runner.unordered


def calls_after(runner, column):
    index = min(runner.checks.get("upstream_calls_after_event", 0), len(runner.calls_by_event))
    before = runner.calls_by_event[index - 1][column] if index else 0
    return runner.calls_by_event[-1][column] - before


def source_calls_stay(runner, wanted):
    assert calls_after(runner, 0) <= wanted


def no_source_calls(runner, wanted):
    """The place that the limits of calls count from; without a limit there is to be none."""
    if not runner.checks.keys() & {"upstream_calls_after_max", "syncs_after_max"}:
        assert calls_after(runner, 0) == 0


def waits_stay(runner, wanted):
    assert calls_after(runner, 1) <= wanted


def no_wait(runner, wanted):
    """Requests of these ids or on these streams made nobody wait."""
    for name in names_of(wanted):
        for event, waits in runner.waits_by_event:
            if event[0] == "alloc" and (event[1] == name if isinstance(name, str) else event[3] == name):
                assert waits == 0, f"{event} waited"


def served(runner, wanted):
    missing = set(names_of(wanted)) - set(runner.served)
    assert not missing, f"not served: {missing}"


def aligned(runner, wanted):
    assert all(block.address % wanted == 0 for block in runner.blocks.values())


def reserved_stays(runner, wanted):
    assert runner.most_reserved <= wanted


def successes(runner, wanted):
    assert len(runner.served) >= wanted


def source_allocations_stay(runner, wanted):
    assert runner.count("malloc") <= wanted


def source_frees_stay(runner, wanted):
    assert runner.count("free") <= wanted


def time_is_flat(runner, wanted):
    early, late = runner.nanoseconds_early_and_late()
    times = wanted if isinstance(wanted, (int, float)) and not isinstance(wanted, bool) else FLAT
    assert late <= max(times * early, NOTICEABLE_NS), f"{early} ns at first, {late} ns at last"


def all_succeed(runner, wanted):
    assert not runner.refused


def message_reports_largest_free(runner, wanted):
    assert runner.refused
    for _, nbytes, error in runner.refused:
        assert isinstance(error, vpool.OutOfMemoryError)
        assert error.report.largest_free_bytes < nbytes
        assert format_bytes(error.report.largest_free_bytes) in str(error)


def any_of(runner, wanted):
    failures = []
    for name in wanted:
        try:
            KNOWN[name](runner, True)
            return
        except AssertionError as error:
            failures.append(f"{name}: {error}")
    raise AssertionError("; ".join(failures))


def driver_errors_stay_inside(runner, wanted):
    assert not any(isinstance(error, vpool.SourceError) for _, _, error in runner.refused)


KINDS = {
    "OutOfMemory": vpool.OutOfMemoryError,
    "ValueError": ValueError,
    "TypeError": TypeError,
    "OverflowError": OverflowError,
    "RuntimeError": RuntimeError,
    "MemoryError": MemoryError,
    "InvalidFree": vpool.InvalidPointerError,
    "DoubleFree": vpool.DoubleFreeError,
    "ForeignFree": vpool.ForeignPointerError,
    "Closed": vpool.ClosedPoolError,
}


def kinds_of(*given):
    """Exceptions by generic names: ``"A|B"``, a list, or None."""
    names = [name for one in given for name in (one if isinstance(one, list) else (one or "").split("|")) if name]
    return [KINDS.get(name, vpool.Error) for name in names]


def construction_fails(runner):
    """No pool is made, the message says why, and nothing was taken of the device; a smaller one can be made."""
    kinds = tuple(kinds_of(runner.checks["construct_raises"]))
    options = runner.case.get("options", {})
    source = vpool.sources.Simulated(options.get("device_total") or runner.case.get("capacity") or None)
    with pytest.raises(kinds) as caught:
        runner.make_pool(source)
    if "initial" in options:
        assert format_bytes(options["initial"]) in str(caught.value)
    assert source.driver.used == 0
    with vpool.Pool(vpool.Dynamic(initial=4096), source=source) as pool:
        pool.deallocate(pool.allocate(256))


def seen_by_the_run(runner, wanted):
    """What `Runner` makes sure of in every case."""


KNOWN = {
    "reserved_max": reserved_stays,
    "min_successes": successes,
    "all_distinct": seen_by_the_run,
    "aligned": aligned,
    "upstream_allocs_max": source_allocations_stay,
    "upstream_frees_max": source_frees_stay,
    "upstream_calls_after_event": no_source_calls,
    "upstream_calls_after_max": source_calls_stay,
    "syncs_after_max": waits_stay,
    "succeeds_on_first_call": served,
    "no_wait_on_stream": no_wait,
    "ordered_after_pending": never_unordered,
    "no_unordered_alias": never_unordered,
    "raises_any": seen_by_the_run,  # widens what `raises` allows
    "either": any_of,
    "time_flat": time_is_flat,
    "free_stream": seen_by_the_run,  # the run queues work on that stream at the free, and looks at who gets the bytes
    "construct_raises": seen_by_the_run,
    "no_driver_call_on_destroyed_stream": seen_by_the_run,
    "no_exception_leaks_from_driver": driver_errors_stay_inside,
    "no_unsafe_driver_calls_between": seen_by_the_run,
    "all_succeed": all_succeed,
    "oom_message_reports_largest_free": message_reports_largest_free,
}

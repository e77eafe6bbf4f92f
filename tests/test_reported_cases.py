"""Cases that users of other pools reported, each an event list or a description; see `tests.helpers.cases`.

``VPOOL_CASES`` names one more folder of such files.
"""

import re
from pathlib import Path

import pytest

from tests.helpers.cases import FOLDER, Runner, is_prose, load_all, needs_of

CASES = load_all()
OWN = load_all([FOLDER])
TESTS = Path(__file__).parent

# Cases with events that wait for a part of the pool.
NOT_YET = {}
# Cases without events: the test that covers each, or in words why none does.
PROSE = {
    "allocation_inside_a_captured_graph": "test_captures.py::test_allocation_inside_a_captured_graph",
    "cupy_set_allocator_defaults": "test_cupy_arrays.py::test_cupy_set_allocator_defaults",
    "cycles_are_collected_before_oom": "test_prose_cases.py::test_cycles_are_collected_before_oom",
    "failure_rows_in_rmm_logs": "test_prose_cases_formats.py::test_failure_rows_in_rmm_logs",
    "finaliser_runs_inside_the_pool": "test_prose_cases.py::test_finaliser_runs_inside_the_pool",
    "fork_after_first_use": "test_fork.py::test_fork_after_first_use",
    "four_threads_one_stream": "test_prose_cases.py::test_four_threads_one_stream",
    "hundred_thousand_size_classes": "test_prose_cases.py::test_hundred_thousand_size_classes",
    "initial_larger_than_device_is_an_error": "test_prose_cases.py::test_initial_larger_than_device_is_an_error",
    "numba_plugin_contract": "test_numba_arrays.py::test_numba_plugin_contract",
    "pool_alive_at_exit": "test_prose_cases.py::test_pool_alive_at_exit",
    "pool_context_is_per_thread": "test_cupy_arrays.py::test_pool_context_is_per_thread",
    "pool_on_the_current_device": "test_prose_cases.py::test_pool_on_the_current_device",
    "profiler_trace_signs_and_devices": "test_prose_cases_formats.py::test_profiler_trace_signs_and_devices",
    "same_address_live_twice_is_detected": "test_debug_sites.py::test_same_address_live_twice_is_detected",
    "torch_allocator_already_initialised": "test_torch_install.py::test_torch_allocator_already_initialised",
    "trace_starts_mid_life": "test_prose_cases_formats.py::test_trace_starts_mid_life",
    "two_records_for_one_event": "test_prose_cases_formats.py::test_two_records_for_one_event",
    "what_the_process_uses_is_not_what_the_pool_uses": (
        "test_prose_cases.py::test_what_the_process_uses_is_not_what_the_pool_uses"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_reported_case(name):
    case = CASES[name]
    if is_prose(case):
        pytest.skip(f"not run: only words describe it; see {PROSE.get(name, 'its scenario')}")
    needs = needs_of(case)
    if needs:
        pytest.skip(f"not run: needs {', '.join(needs)}")
    Runner(case).run()


def destroys_streams(case):
    return any(event[0] == "stream_destroy" for event in case.get("events") or ())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if destroys_streams(case)])
def test_reported_case_where_new_streams_get_the_handles_of_destroyed_ones(name):
    if needs_of(CASES[name]):
        pytest.skip("not run: see above")
    Runner(CASES[name], reuse_handles=True).run()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "construct_raises" in case.get("checks", {})])
def test_a_construction_that_must_fail(name):
    Runner({"events": [], **CASES[name]}).run()


def test_the_cases_that_are_not_run_are_these():
    """A case that can be run is to leave the list, and none may join it unseen."""
    with_events = {name: needs_of(case) for name, case in OWN.items() if not is_prose(case)}
    assert {name: needs for name, needs in with_events.items() if needs} == NOT_YET
    assert {name for name, case in OWN.items() if is_prose(case)} == PROSE.keys()
    assert (len(with_events), len(PROSE)) == (29, 19)


@pytest.mark.parametrize("where", sorted(where for where in PROSE.values() if "::" in where))
def test_the_tests_that_cover_prose_exist(where):
    file, function = where.split("::")
    assert re.search(rf"^def {function}\(", (TESTS / file).read_text(), re.M)

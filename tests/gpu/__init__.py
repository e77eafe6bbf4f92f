"""Tests on a real device: `pytest -m gpu tests/gpu`.

Under NVIDIA's memory checker, whose own findings alone count:

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 77 --require-cuda-init=no \
        --show-backtrace device python -m pytest -m "gpu and not torch" \
        -k "not destroyed_handle and not come_and_go and not only_blocks_may_be_used" \
        --ignore tests/gpu/test_bench.py --ignore tests/gpu/test_processes.py tests/gpu
    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 77 --require-cuda-init=no \
        --show-backtrace device --target-processes application-only \
        python -m pytest -m "gpu and not torch" tests/gpu/test_processes.py

For backtraces of the host the checker keeps Python's frames, and so every array that they name stays alive.
What is left out, `test_what_cuda_says_of_a_destroyed_handle`, makes CUDA's driver touch the handle of a destroyed
stream, which ends the process; and `test_streams_that_come_and_go_do_not_use_up_the_slots`, since under the checker
CUDA does not give the handles of destroyed streams again.  `test_only_blocks_may_be_used` runs the checker itself, on
accesses that are wrong.  `test_bench.py` measures time, and its peers' memory is theirs.  Of `test_processes.py` the
tests' own process is checked: those that it starts by the hundred end in every way, by illegal accesses too.
"""

"""The stress under gcc's sanitizers.  In full length: `python tests/sanitize/run.py thread --seconds 600`."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parent / "sanitize" / "run.py"
HOSTILE = ("tests/test_fuzz.py", "tests/test_fault_matrix.py")
MODEL = ("tests/test_model.py", "tests/test_stress.py", "tests/test_stream_order.py", "tests/test_threads.py")


def sanitized(*arguments, timeout):
    """Run in a session of its own: what is late ends with its compilers, which would slow all other tests."""
    command = [sys.executable, str(RUN), *arguments]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **output, start_new_session=True) as process:
        try:
            said, _ = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, said[-20000:]
    assert " 0 reports name vpool" in said


def test_a_stress_faults_and_hostile_calls_have_no_report(monkeypatch):
    """One build for all of them: addresses and undefined behaviour."""
    monkeypatch.setenv("VPOOL_FUZZ", "150")
    monkeypatch.setenv("VPOOL_FAULT_POSITIONS", "2")
    sanitized("address,undefined", "--seconds", "5", "--tests", *HOSTILE, timeout=1800)


@pytest.mark.long
@pytest.mark.parametrize("kinds", ["thread", "address,undefined"])
def test_a_long_stress_has_no_report(kinds):
    sanitized(kinds, "--seconds", "120", timeout=1200)


@pytest.mark.long
def test_the_tests_of_the_core_have_no_report():
    sanitized("address,undefined", "--tests", *MODEL, *HOSTILE, timeout=1800)


@pytest.mark.parametrize("text", ["int overflow", "out of bounds"])
def test_a_report_is_found(text, tmp_path, monkeypatch):
    """That a clean run means something: the reports of a faulty module are read as such."""
    monkeypatch.syspath_prepend(str(RUN.parent))
    import run

    (tmp_path / "report.1").write_text(
        f"vpool/_base/lock.pxd:3:7: runtime error: {text}\n    #0 in f\nnumpy/x.c:1:1: runtime error: {text}\n"
    )
    (tmp_path / "report.2").write_text(
        "==================\nWARNING: ThreadSanitizer: data race (pid=1)\n  #0 f cython/pyx/order.c:1\n"
        "==================\nWARNING: ThreadSanitizer: data race (pid=1)\n  #0 f Objects/obmalloc.c:1\n"
    )
    (tmp_path / "report.3").write_text("==12==ERROR: AddressSanitizer: heap-use-after-free\n  #0 f vpool/_x.so\n")
    ours, others = run.reports(tmp_path)
    assert (len(ours), others) == (3, 2)

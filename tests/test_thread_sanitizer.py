"""The stress under gcc's thread sanitizer: a build and a file of its own, beside which the other sanitizers run."""

from tests.test_sanitizers import sanitized


def test_a_stress_of_threads_has_no_report():
    sanitized("thread", "--seconds", "5", timeout=600)

"""What a test may say of a device's memory while other processes take of it and give back, GiBs at a time."""

import time

from tests.helpers.pools import MIB

SLACK = 64 * MIB  # of the device's own figures: contexts, and what a driver keeps of its own
PAIRS = {
    "malloc": "free",
    "handle_create": "handle_release",
    "handle_map": "handle_unmap",
    "address_reserve": "address_free",
}


def made(driver, name):
    """Calls of a driver that were not refused."""
    calls, failures, _ = driver.calls()[name]
    return calls - failures


def held(driver):
    """What this process has of a driver, by the call that takes it: exact, whoever else uses the device."""
    return {take: made(driver, take) - made(driver, give) for take, give in PAIRS.items()}


def assert_follows(look, first, second, nbytes=None, turns=40):
    """Two steps, one the other's opposite, change what a device has free by so many bytes, and back.

    One look proves nothing where others use the device too.  So this looks again until nobody disturbed the two
    steps: then the changes are the right ones to `SLACK`, which those of others are not.  Without `nbytes` all that
    is right is that both together change nothing.
    """
    seen = []
    for turn in range(turns):
        before = look()
        first()
        between = look()
        second()
        after = look()
        seen.append((between - before, after - between))
        if abs(after - before) <= SLACK and (nbytes is None or abs(between - before - nbytes) <= SLACK):
            return
        time.sleep(0.01 * turn)
    expected = "" if nbytes is None else f" by {nbytes:,} bytes"
    raise AssertionError(f"free memory did not change{expected} and then back, but by {seen}")

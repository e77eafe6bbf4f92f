"""What the tests on a device go by: looks at its free memory, which others change, and counts of calls."""

import random

import pytest

from tests.helpers.device import assert_follows, held
from tests.helpers.pools import GIB, MIB
from tests.test_mapped import fake, pool_on


class Device:
    """Free memory, some of which a step may keep and others take and give back between two looks."""

    def __init__(self, undisturbed, leak=0):
        self.free = 100 * GIB
        self.undisturbed = undisturbed
        self.leak = leak
        self.rng = random.Random(1)

    def look(self):
        if self.rng.random() > self.undisturbed:
            self.free += self.rng.randint(-4 * GIB, 4 * GIB)
        return self.free

    def take(self):
        self.free -= GIB

    def give(self):
        self.free += GIB - self.leak


@pytest.mark.parametrize("undisturbed", [1, 0.6])
def test_a_step_and_its_opposite_are_seen_through_what_others_do(undisturbed):
    device = Device(undisturbed)
    assert_follows(device.look, device.take, device.give, -GIB)
    assert_follows(device.look, device.take, device.give)


@pytest.mark.parametrize("undisturbed", [1, 0.6])
@pytest.mark.parametrize("nbytes", [-GIB, None])
def test_what_is_kept_is_no_opposite(undisturbed, nbytes, monkeypatch):
    monkeypatch.setattr("tests.helpers.device.time.sleep", lambda _: None)
    device = Device(undisturbed, leak=GIB // 2)
    with pytest.raises(AssertionError, match="free memory did not change"):
        assert_follows(device.look, device.take, device.give, nbytes)


def test_a_step_that_does_nothing_is_none(monkeypatch):
    monkeypatch.setattr("tests.helpers.device.time.sleep", lambda _: None)
    device = Device(1)
    with pytest.raises(AssertionError, match="free memory did not change"):
        assert_follows(device.look, lambda: None, lambda: None, -GIB)


def test_what_is_held_is_counted_without_what_was_refused():
    source = fake()
    before = held(source.driver)
    with pool_on(source) as pool:
        ptr = pool.allocate(20 * MIB)
        has = held(source.driver)
        assert has["handle_create"] == has["handle_map"] > before["handle_create"]
        source.driver.fail("handle_create", 2, times=1)
        other = pool.allocate(20 * MIB)
        assert held(source.driver)["handle_create"] == source.driver.virtual()[1]
        pool.deallocate(ptr)
        pool.deallocate(other)
    assert held(source.driver) == before

"""What stands for functions of NumPy gives what these do."""

import numpy as np
import pytest

from vpool.arrays import among, distinct

TEXTS = np.array(["live", "free", "live", "suspended", ""])


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (np.arange(5), [3, 1, 3]),
        (np.arange(5), []),
        (np.zeros(0, np.uint64), [1]),
        (np.array([1, 2, 3], np.uint8), (2, 3)),
        (np.array([2**63 + 1, 2**63, 5], np.uint64), [2**63]),
        (np.array([2**53, 2**53 + 1], np.uint64), [2**53 + 1]),
        (TEXTS, ("live", "unmapped")),
        (TEXTS, ("a name that is longer than all", "free")),
        (TEXTS.astype("U2"), ("live",)),
    ],
)
def test_among(values, wanted):
    expected = [value in list(wanted) for value in values.tolist()]
    assert among(values, wanted).tolist() == expected


def test_among_rows():
    values = np.array([(1, 2), (3, 4), (1, 3)], [("a", np.uint64), ("b", np.uint64)])
    assert among(values, values[[2, 0]]).tolist() == [True, False, True]


@pytest.mark.parametrize("values", [np.array([3, 1, 3]), TEXTS, np.zeros(0), np.array([[2, 1], [1, 0]])])
def test_distinct(values):
    assert distinct(values).tolist() == sorted(set(values.ravel().tolist()))

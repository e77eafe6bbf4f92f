"""What NumPy has functions for, where these would let the process end in the wrong way.

``numpy.unique`` without counts or indices, and ``numpy.isin`` which uses it, make a hash table in C++, and let other
threads run meanwhile.  A daemon thread that is in there when the interpreter ends is ended by force, and the C++ around
it answers with the end of the process: "terminate called without an active exception" (seen with NumPy 2.4.6 and
CPython 3.11).
"""

import numpy as np

__all__ = ["among", "distinct"]


def distinct(values):
    """The sorted values of an array, each once.  O(n log n)."""
    return np.unique(values, return_counts=True)[0]


def among(values, wanted):
    """Where the values of an array are some of those that are wanted.  O((n + m) log m).

    Parameters
    ----------
    values : ndarray
    wanted : array-like
        Of integers, those that fit the type of the values.

    Returns
    -------
    ndarray of bool
    """
    # Of integers of two types NumPy makes floats, which tell no addresses apart.
    wanted = distinct(np.asarray(wanted, values.dtype if values.dtype.kind in "iu" else None))
    if not len(wanted):
        return np.zeros(len(values), bool)
    return wanted[np.minimum(np.searchsorted(wanted, values), len(wanted) - 1)] == values

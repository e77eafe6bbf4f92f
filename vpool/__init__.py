"""vpool: a GPU memory pool for Python."""

from vpool import defrag, metrics, sources
from vpool._interface.buffer import Buffer
from vpool._interface.compiled import capi
from vpool._interface.lender import pools
from vpool._interface.pool import Pool
from vpool._interface.streams import stream
from vpool._interface.tags import tag
from vpool.compare import CompareResult, compare
from vpool.defaults import allocate, deallocate, default_pool, empty, inspect, set_default_pool
from vpool.errors import (
    ClosedPoolError,
    DoubleFreeError,
    Error,
    ForeignPointerError,
    ForkedProcessError,
    FormatError,
    GuardError,
    InvalidPointerError,
    OutOfMemoryError,
    PatternError,
    SourceError,
)
from vpool.explain import explain
from vpool.live import serve
from vpool.plan import Plan, plan
from vpool.policy import Policy
from vpool.recommendation import Recommendation
from vpool.replay import ReplayResult, replay
from vpool.report import Report
from vpool.snapshot import Snapshot
from vpool.strategies import Dynamic, Fixed, Hybrid
from vpool.trace import Trace
from vpool.tuning import tune
from vpool.version import __version__

__all__ = [
    "Buffer",
    "ClosedPoolError",
    "CompareResult",
    "DoubleFreeError",
    "Dynamic",
    "Error",
    "Fixed",
    "ForeignPointerError",
    "ForkedProcessError",
    "FormatError",
    "GuardError",
    "Hybrid",
    "InvalidPointerError",
    "OutOfMemoryError",
    "PatternError",
    "Plan",
    "Policy",
    "Pool",
    "Recommendation",
    "ReplayResult",
    "Report",
    "Snapshot",
    "SourceError",
    "Trace",
    "__version__",
    "allocate",
    "capi",
    "compare",
    "deallocate",
    "default_pool",
    "defrag",
    "empty",
    "explain",
    "get_include",
    "inspect",
    "metrics",
    "plan",
    "pools",
    "replay",
    "serve",
    "set_default_pool",
    "sources",
    "stream",
    "tag",
    "tune",
]


def get_include():
    """Folder for the include path of Cython, for ``cimport vpool``, and of C and C++, for ``<vpool/capi.h>``."""
    from pathlib import Path

    return str(Path(__file__).resolve().parent.parent)

"""The reports of many processes as one."""

import json

from vpool._interface.lender import pools
from vpool.errors import Error
from vpool.sizes import format_bytes
from vpool.tables import table

__all__ = ["Gathered", "reports_here"]

_SUMS = ("reserved_bytes", "allocated_bytes", "requested_bytes", "free_bytes", "pending_bytes", "live_blocks")
_HEADER = ("where", "pool", "device", "source", "live", "reserved", "peak", "limit", "in use", "fragmented")


def reports_here():
    """The reports of all open pools of this process, as `Report.to_dict` gives them, by device and name."""
    found = []
    for pool in sorted(pools(), key=lambda one: (one.device, one.name)):
        try:
            found.append(pool.inspect().to_dict())
        except Error:  # closed meanwhile
            continue
    return found


class Gathered:
    """The reports of the pools of many processes.  Those of different processes are not of one moment.

    ``str()`` is a table with a row for each pool and one for all of them.

    Parameters
    ----------
    reports : dict
        For the name of each process a list of what `Report.to_dict` gives.
    failed : dict
        Why there is none, by the name of each process that did not answer.

    Attributes
    ----------
    rows : list of dict
        Each report, and the name of its process as ``where``.
    total : dict
        Sums of bytes and blocks over all rows.
    failed : dict
    """

    def __init__(self, reports, failed=None):
        self.rows = [{"where": where, **report} for where, found in reports.items() for report in found]
        self.total = {name: sum(row[name] for row in self.rows) for name in _SUMS}
        self.failed = dict(failed or {})
        self._empty = [where for where, found in reports.items() if not found]

    def __repr__(self):
        return f"<vpool.gathered.Gathered of {len(self.rows)} pools, {len(self.failed)} without an answer>"

    def __str__(self):
        rows = [
            (
                *(row[name] for name in ("where", "name", "device", "source")),
                *(format_bytes(row[name]) for name in ("allocated_bytes", "reserved_bytes", "peak_reserved_bytes")),
                format_bytes(row["limit_bytes"]),
                *(f"{row[name]:.1%}" for name in ("utilization", "external_fragmentation")),
            )
            for row in self.rows
        ]
        if len(rows) > 1:
            live, reserved = self.total["allocated_bytes"], self.total["reserved_bytes"]
            share = f"{live / reserved:.1%}" if reserved else ""
            rows.append(("all", "", "", "", format_bytes(live), format_bytes(reserved), "", "", share, ""))
        rows += [(where, "no pool", *[""] * (len(_HEADER) - 2)) for where in self._empty]
        rows += [(where, "no answer", *[""] * (len(_HEADER) - 2)) for where in self.failed]
        return table(_HEADER, rows)

    def to_dict(self):
        """`rows`, `total` and `failed`."""
        return {"rows": self.rows, "total": self.total, "failed": self.failed}

    def to_json(self, indent=None):
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

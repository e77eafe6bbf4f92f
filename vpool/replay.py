"""Replay: a recorded trace through a real pool."""

import os
from dataclasses import replace

from vpool.policy import Policy
from vpool.runs import ReplayResult, run
from vpool.sizes import parse_size
from vpool.sizing import fixed_for
from vpool.strategies import Dynamic, Fixed, Hybrid, Strategy
from vpool.trace import Trace

__all__ = ["ReplayResult", "policy_of", "replay", "strategy_of"]

_STRATEGIES = ("fixed", "dynamic", "adaptive", "hybrid")


def strategy_of(strategy, trace=None, capacity=None, passes=1):
    """The strategy that a name or an object means; the default one for None.

    ``"fixed"`` is a slab of `capacity`, or else the smallest that is enough for `trace`, and ``"hybrid"``
    the one made for `trace`.
    """
    if strategy is None or strategy == "dynamic":
        return Dynamic()
    if strategy == "adaptive":
        return Dynamic(adaptive=True)
    if isinstance(strategy, str):
        if strategy not in _STRATEGIES:
            raise ValueError(f"no strategy {strategy!r}; a name ({', '.join(sorted(_STRATEGIES))}) or a policy file")
        if strategy == "fixed":
            return fixed_for(trace, passes) if capacity is None else Fixed(capacity)
        return Hybrid.from_trace(trace)
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"strategy must be a name, a policy, its file or a vpool strategy, not {type(strategy).__name__}"
        )
    return strategy


def policy_of(strategy, trace=None, capacity=None, passes=1):
    """The policy that a name, a path, a policy or a strategy means; the default one for None.

    A string that is no strategy's name is a path if there is such a file, or if it ends in ``.toml``.
    """
    if _is_path(strategy):
        strategy = Policy.load(strategy)
    if isinstance(strategy, Policy):
        return replace(strategy, strategy=strategy_of(strategy.strategy))
    return Policy(strategy_of(strategy, trace, capacity, passes))


def _is_path(strategy):
    if isinstance(strategy, str):
        return strategy not in _STRATEGIES and (strategy.endswith(".toml") or os.path.isfile(strategy))
    return isinstance(strategy, os.PathLike)


def replay(
    trace,
    strategy=None,
    source="simulated",
    capacity=None,
    passes=1,
    pessimistic=False,
    *,
    patterns=False,
    maintain=False,
    lag=0,
    progress=None,
):
    """Replay a trace through a pool of its own.

    Every event goes through the core that allocates for users, its lock and its address index
    included, and each of the trace's streams is a stream.  On a source without a device a free is
    complete for every stream at its event.  What is live at the end of a pass is freed before the next.

    Parameters
    ----------
    trace : Trace or path
    strategy : str, path, Policy or strategy, optional
        ``"dynamic"``, ``"adaptive"``, ``"fixed"`` (a slab of `capacity`, or the smallest that completes), ``"hybrid"``
        (`Hybrid.from_trace`), a policy or its file, or an object; the default strategy if not given.
    source : str or vpool.sources.Source
        Where the pool's memory comes from, whatever a policy says of it; None for the policy's own.
    capacity : int or str, optional
        Bytes that the pool may take, instead of the strategy's own limit.
    passes : int
        How often the trace is replayed into the same pool.
    pessimistic : bool
        Let a free be complete for other streams only at the trace's next mark.  Not on a real device,
        which knows itself.
    lag : int
        Let each event's work be complete only so many events later, as on a device that is behind its host.  Not on
        a real device.
    patterns : bool
        Write a pattern into each block when it is lent, and verify it when it is freed.
    maintain : bool
        Call `Pool.maintain` before each event.
    progress : callable, optional
        Called now and then with the events done and the events in all.

    Returns
    -------
    ReplayResult

    Raises
    ------
    PatternError
        Where a pattern was damaged.
    SourceError, ValueError, TypeError, FormatError
        Where source, strategy, numbers or trace cannot be used.
    OSError
        For a file that is not there or not readable.
    """
    if not isinstance(trace, Trace):
        trace = Trace.load(trace)
    capacity = None if capacity is None else parse_size(capacity, "capacity")
    policy = policy_of(strategy, trace, capacity, passes)
    return run(
        trace,
        policy,
        source,
        capacity,
        passes,
        pessimistic,
        patterns=patterns,
        maintain=maintain,
        lag=lag,
        progress=progress,
    )

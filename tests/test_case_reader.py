"""The reader of reported cases: it knows the whole vocabulary, and what must not pass does not pass."""

import pytest

import vpool
from tests.helpers.cases import Runner, needs_of, pool_of
from tests.helpers.pools import KIB, MIB


def case(*events, capacity=4 * MIB, strategy="dynamic", checks=None, **options):
    return {
        "capacity": capacity,
        "strategy": strategy,
        "options": options,
        "events": [list(event) for event in events],
        "checks": checks or {},
    }


GOOD = {
    "garbage": case(
        ("alloc", "a", 3 * MIB, 0), ("free", "a", {"deferred": True}),
        ("alloc", "b", 3 * MIB, 0), ("free", "b", {"deferred": True}),
        ("gc",), ("inspect", {"live_bytes": 0, "live_blocks": 0, "oom_count": 0}), ("alloc", "c", 4 * MIB, 0),
        checks={"min_successes": 3, "succeeds_on_first_call": ["c"]},
    ),
    "alignments and bad arguments": case(
        ("alloc", "a", 1, 0, {"align": 4096}), ("alloc", "b", 100, 0, {"align": 512}),
        ("alloc", "c", 100, 0, {"align": 3, "raises": "ValueError"}), ("alloc", "d", -4, 0, {"raises": "ValueError"}),
        ("alloc", "e", 1.5, 0, {"raises": "TypeError"}), ("alloc", "f", 2**63, 0, {"raises": "OutOfMemory"}),
        ("free", "foreign", {"raises": "InvalidFree"}), ("note", "nothing"),
        checks={"aligned": 256}, upstream_base_offset=16,
    ),
    "per-thread default streams": case(
        ("alloc", "a", MIB, 0, {"thread": "A"}), ("use", "a", 0, {"thread": "A"}), ("free", "a", {"thread": "B"}),
        ("alloc", "b", MIB, 0, {"thread": "B"}), ("use", "b", 2, {"thread": "B"}), ("sync", 2, {"thread": "B"}),
        ("free", "b", {"thread": "A", "stream": 2}), ("sync_all",),
        checks={"no_unordered_alias": [["b", "a"]]}, ptds=True,
    ),
    "no waiting": case(
        ("alloc", "a", MIB, 1), ("use", "a", 1), ("alloc", "b", MIB, 2), ("free", "a"), ("free", "b"),
        ("alloc", "c", MIB, 2), ("alloc", "d", MIB, 1),
        checks={"no_wait_on_stream": [1, 2], "time_flat": True, "free_stream": {"a": 1}, "syncs_after_max": 0},
    ),
    "a stream that dies with work pending": case(
        ("stream_create", 1), ("alloc", "a", 4 * MIB, 1), ("use", "a", 1), ("free", "a"), ("stream_destroy", 1),
        ("stream_create", 2), ("alloc", "b", 4 * MIB, 2), ("use", "b", 0), ("free", "b", {"stream": 0}),
        ("alloc", "c", 2 * MIB, 2),
        strategy="fixed", checks={"ordered_after_pending": [["b", "a"], ["c", "b"]]},
    ),
    "two devices": case(
        ("alloc", "a", 3 * MIB, 0, {"device": 0}), ("alloc", "b", 3 * MIB, 0, {"device": 1}), ("free", "b"),
        ("inspect", {"live_bytes": 0, "device": 1}), ("inspect", {"live_bytes": 3 * MIB}),
    ),
    "figures with bounds": case(
        ("alloc", "a", MIB, 0), ("inspect", {"reserved_bytes_max": 4 * MIB, "external_fragmentation": "<0.9"}),
        checks={"either": ["oom_message_reports_largest_free", "all_succeed"], "upstream_frees_max": 0},
    ),
    "a device that is too small": case(
        checks={"construct_raises": "ValueError|OutOfMemory"}, initial=100 * MIB, device_total=40 * MIB,
    ),
}  # fmt: skip
BAD = {
    "a request that fails": case(("alloc", "a", 4 * MIB, 0), ("alloc", "b", 1, 0)),
    "a request that should fail": case(("alloc", "a", 1, 0, {"raises": "OutOfMemory"})),
    "a free that should fail": case(("alloc", "a", 1, 0), ("free", "a", {"raises": "InvalidFree"})),
    "another exception": case(("alloc", "a", -1, 0, {"raises": "TypeError"})),
    "a figure": case(("alloc", "a", 1000, 0), ("inspect", {"live_bytes": 1024})),
    "a bound": case(("alloc", "a", 1000, 0), ("inspect", {"reserved_bytes": "<1000"})),
    "reserved_max": case(("alloc", "a", 1000, 0), checks={"reserved_max": 1000}),
    "upstream_allocs_max": case(("alloc", "a", 1000, 0), checks={"upstream_allocs_max": 0}),
    "upstream_calls_after_max": case(
        *(("alloc", name, MIB, 0) for name in "ab"), checks={"upstream_calls_after_event": 1}
    ),
    "syncs_after_max": case(
        *(("alloc", "a", 4 * MIB, 1), ("use", "a", 2), ("free", "a"), ("alloc", "b", 4 * MIB, 1)),
        checks={"syncs_after_max": 0, "no_wait_on_stream": ["b"]},
    ),
    "min_successes": case(("alloc", "a", 5 * MIB, 0, {"may_raise": "OutOfMemory"}), checks={"min_successes": 1}),
    "aligned": case(("alloc", "a", 1, 0), ("alloc", "b", 1, 0), checks={"aligned": 4096}),
    "ordered_after_pending": case(("alloc", "a", 1, 0), checks={"ordered_after_pending": [["a", "none"]]}),
    "either": case(
        ("alloc", "a", 5 * MIB, 0, {"may_raise": "OutOfMemory"}), checks={"either": ["all_succeed", "min_successes"]}
    ),
    "construct_raises": case(checks={"construct_raises": "ValueError"}),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_case_passes(name):
    assert needs_of(GOOD[name]) == []
    Runner(GOOD[name]).run()


@pytest.mark.parametrize("name", BAD)
def test_a_bad_case_fails(name):
    assert needs_of(BAD[name]) == []
    with pytest.raises((AssertionError, vpool.Error, ValueError, pytest.fail.Exception)):
        Runner(BAD[name]).run()


def test_an_unknown_word_is_not_passed_over():
    unknown = case(("alloc", "a", 1, 0), ("frobnicate", 1), checks={"magic": 1})
    assert needs_of(unknown) == ["a check 'magic'", "an event 'frobnicate'"]


class Forgetful(Runner):
    """Does not tell the pool that another stream uses a block."""

    def on_use(self, event):
        self.touch(self.blocks[event[1]], self.key(event[2], None))


def test_a_block_that_is_handed_out_under_unfinished_work_is_seen():
    events = (("alloc", "a", MIB, 1), ("use", "a", 2), ("free", "a"), ("alloc", "b", MIB, 1))
    Runner(case(*events)).run()
    with pytest.raises(AssertionError, match=r"unfinished work .*'b', 'a'"):
        Forgetful(case(*events)).run()


def test_blocks_that_overlap_are_seen(monkeypatch):
    runner = Runner(case(("alloc", "a", 512, 0), ("alloc", "b", 512, 0)))
    call = runner.call
    monkeypatch.setattr(runner, "call", lambda *arguments, **options: call(*arguments, **options) // 1024 * 1024)
    with pytest.raises(AssertionError, match="b and a are live on the same bytes"):
        runner.run()


@pytest.mark.parametrize(
    ("bins", "blocks"),
    [([256, 1000, 64 * KIB], (256, 1024, 64 * KIB)), ([256, 2 * MIB], (256,)), ([2 * MIB], ()), ([], ())],
)
def test_a_hybrid_case_has_a_pool_with_its_bins(bins, blocks):
    """Those that are small for the capacity; without any the core is a slab."""
    with pool_of(case(strategy="hybrid", bins=bins), vpool.sources.Simulated(4 * MIB)) as pool:
        core = pool.inspect().core
        assert tuple(nbytes for nbytes, _ in core["block_sizes"]) == blocks
        assert 0 < core["reserved_bytes"] <= MIB

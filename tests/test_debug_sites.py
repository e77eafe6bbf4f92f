"""Call sites, the report of what is live, the words that ask for debug modes, and the report at exit."""

import _thread
import sys
import threading
import time

import pytest

import vpool
from tests.helpers.debug import debug_pool, line_above, line_below
from tests.helpers.pools import MIB, run_cleanly, run_python, simulated_pool
from tests.helpers.processes import run_forking
from vpool.data import bundled_trace
from vpool.leaks import UNKNOWN_SITE
from vpool.modes import VARIABLE, Modes, modes_of
from vpool.sites import NO_PYTHON, NOT_SAMPLED, TOO_MANY


@pytest.fixture
def pool():
    with debug_pool("sites", "simulated") as pool:
        yield pool
        pool.check()


def sites_of(pool):
    return {group.site: group.blocks for group in pool.leaks().groups}


# Where a site is.


def test_a_site_is_the_line_that_called_vpool(pool, no_default_pools):
    pool.allocate(100)
    first = line_above()
    buffer = pool.empty(100)
    second = line_above()
    vpool.set_default_pool(pool)
    vpool.allocate(100)
    third = line_above()
    assert sites_of(pool) == {first: 1, second: 1, third: 1}
    assert buffer


def test_a_site_of_several_callers():
    with debug_pool("sites,depth=3", "simulated") as pool:

        def inner():
            return pool.allocate(100)

        outer = line_below()
        inner()
        (site,) = sites_of(pool)
        parts = site.split(" < ")
        assert len(parts) == 3
        assert parts[0].endswith("in inner")
        assert parts[1] == outer


def test_a_site_in_code_without_a_file(pool):
    exec("pool.allocate(100)", {"pool": pool})
    exec(compile("\n\npool.allocate(100)", "<made up>", "exec"), {"pool": pool})
    assert sites_of(pool) == {"<string>:1 in <module>": 1, "<made up>:3 in <module>": 1}


def test_a_call_without_any_python_code(pool):
    """The first function of a thread is compiled: there is no line to name."""
    _thread.start_new_thread(pool.allocate, (100,))
    deadline = time.monotonic() + 10
    while not pool.leaks() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert sites_of(pool) == {NO_PYTHON: 1}


def test_a_deep_stack_costs_no_more():
    limit = sys.getrecursionlimit()
    with debug_pool("sites,depth=5", "simulated") as pool:

        def descend(depth):
            return descend(depth - 1) if depth else timed()

        def timed():
            best = float("inf")
            for _ in range(50):
                started = time.perf_counter()
                pool.allocate(100)
                best = min(best, time.perf_counter() - started)
            return best

        sys.setrecursionlimit(20_000)
        try:
            shallow, deep = descend(1), descend(10_000)
        finally:
            sys.setrecursionlimit(limit)
        assert deep < 5 * shallow
        assert max(site.count(" < ") for site in sites_of(pool)) == 4


def test_equal_sites_are_one_object(pool):
    for _ in range(1000):
        pool.allocate(100)
    assert len({id(block.site) for block in vars_of(pool)}) == 1


def vars_of(pool):
    """The debugger's records of live blocks."""
    import gc

    (debugger,) = [one for one in gc.get_referents(pool) if type(one).__name__ == "Debugger"]
    return list(debugger.live.values())


def test_code_that_is_made_anew_has_no_end_of_sites(pool, monkeypatch):
    monkeypatch.setattr("vpool.sites.MOST_SITES", 20)
    for number in range(100):
        exec(compile("pool.allocate(100)", f"<code {number}>", "exec"), {"pool": pool})
    assert len(sites_of(pool)) == 21
    assert sites_of(pool)[TOO_MANY] == 80


def test_sampled_sites():
    with debug_pool("sites=4", "simulated") as pool:
        blocks = []
        for _ in range(100):
            blocks.append(pool.allocate(100))
        site = line_above()
        assert sites_of(pool) == {site: 25, NOT_SAMPLED: 75}
        pool.deallocate(blocks[1])
        with pytest.raises(vpool.DoubleFreeError, match=NOT_SAMPLED):
            pool.deallocate(blocks[1])


def test_threads_have_their_own_sites(pool):
    def work():
        for _ in range(500):
            pool.allocate(100)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (site,) = sites_of(pool)
    assert site.endswith("in work")
    assert pool.leaks().blocks == 2000


# What is live.


def test_leaks_are_grouped_by_site(pool):
    for nbytes in (100, 300):
        pool.allocate(nbytes, stream=nbytes)
    small = line_above()
    for _ in range(3):
        big = pool.allocate(MIB)
    large = line_above()
    pool.deallocate(big)
    leaks = pool.leaks()
    assert leaks
    assert [(group.site, group.blocks, group.requested_bytes, group.allocated_bytes) for group in leaks.groups] == [
        (large, 2, 2 * MIB, 2 * MIB),
        (small, 2, 400, 768),
    ]
    assert [group.streams for group in leaks.groups] == [(0,), (100, 300)]
    assert all(0 <= group.oldest_seconds < 60 for group in leaks.groups)
    assert (leaks.blocks, leaks.requested_bytes, leaks.allocated_bytes) == (4, 2 * MIB + 400, 2 * MIB + 768)
    first, second, third = str(leaks).splitlines()
    assert first == "pool 'watched': 4 blocks live, 2.00 MiB"
    assert large in second
    assert "in 2 blocks, oldest 0.0 s, stream 0x64, 0x12c" in third
    figures = leaks.to_dict()
    assert figures["blocks"] == 4
    assert figures["groups"][1]["streams"] == [100, 300]


def test_the_age_is_that_of_the_oldest(pool, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("vpool.debugging.time.monotonic", lambda: now[0])
    for _ in range(3):
        pool.allocate(100)
        now[0] += 1
    assert pool.leaks().groups[0].oldest_seconds == 3


def test_nothing_is_live(pool):
    pool.deallocate(pool.allocate(100))
    leaks = pool.leaks()
    assert not leaks
    assert (leaks.groups, leaks.blocks, str(leaks)) == ([], 0, "pool 'watched': nothing is live")
    assert repr(leaks) == "<vpool leaks of 'watched': 0 blocks, 0 B>"


@pytest.mark.parametrize("debug", [(), "quarantine"])
def test_without_sites_all_is_of_one_unknown_site(debug):
    with debug_pool(debug, "simulated") as pool:
        pool.deallocate(pool.allocate(500))
        pool.allocate(100, stream=7)
        pool.allocate(300)
        (group,) = pool.leaks().groups
        assert group[:4] == (UNKNOWN_SITE, 2, 400, 768)
        assert group.streams == (0, 7)
        assert (group.oldest_seconds is None) == (debug == ())


# The words.


@pytest.mark.parametrize(
    ("debug", "modes"),
    [
        ((), Modes()),
        ("", Modes()),
        ("guard", Modes(guard=256)),
        ("guard=257", Modes(guard=512)),
        (["guard=4KiB"], Modes(guard=4096)),
        ({"poison"}, Modes(poison=True)),
        ("quarantine", Modes(quarantine=64 << 20)),
        ("quarantine=10MB", Modes(quarantine=10**7)),
        ("sites", Modes(sites=1)),
        (" sites = 100 , depth=4,leaks", Modes(sites=100, depth=4, leaks=True)),
        (("guard", "poison", "quarantine", "sites"), Modes(256, True, 64 << 20, 1)),
    ],
)
def test_words_and_their_values(debug, modes, monkeypatch):
    monkeypatch.setenv(VARIABLE, "leaks")
    assert modes_of(debug, has_memory=True) == modes
    with vpool.Pool(source="host", debug=debug) as pool:
        assert pool.debug == modes


@pytest.mark.parametrize(
    ("debug", "error", "message"),
    [
        ("gaurd", ValueError, "no debug mode 'gaurd'; the modes are guard, poison, quarantine, sites, depth, leaks"),
        (["guard", "x=1"], ValueError, "no debug mode 'x=1'"),
        ("guard,,poison", ValueError, "no debug mode ''"),
        ("guard=0", ValueError, "1 byte to 2 MiB"),
        ("guard=3MiB", ValueError, "1 byte to 2 MiB"),
        ("guard=many", ValueError, "guard must be bytes or a size"),
        ("poison=1", ValueError, "poison takes no value"),
        ("leaks=yes", ValueError, "leaks takes no value"),
        ("quarantine=0", ValueError, "more than 0"),
        ("sites=0", ValueError, "sites must be a number from 1"),
        ("sites=-1", ValueError, "sites must be a number from 1"),
        ("depth=1000", ValueError, "depth must be a number from 1 to 100"),
        (5, TypeError, "not int"),
        ("guard,depth=4", ValueError, 'needs "sites"'),
        (True, TypeError, "not bool; the modes are guard, poison"),
        ({"guard": "64KiB"}, TypeError, "not dict"),
        (b"guard", TypeError, "not bytes"),
        ([b"guard"], TypeError, "not bytes"),
        (["guard", None], TypeError, "not NoneType"),
    ],
)
def test_words_that_make_no_sense(debug, error, message):
    source = vpool.sources.Host()
    with pytest.raises(error, match=message):
        vpool.Pool(source=source, debug=debug)
    assert source.driver.calls()["malloc"][0] == 0


def test_the_variable_is_for_pools_that_do_not_say(monkeypatch):
    monkeypatch.setenv(VARIABLE, "guard,sites=7")
    with vpool.Pool(source="host") as pool:
        assert pool.debug == Modes(guard=256, sites=7)
    with vpool.Pool(source="host", debug=()) as pool:
        assert pool.debug == Modes()
    with simulated_pool() as pool:
        assert pool.debug == Modes(sites=7), "there is nothing to write guards into"
    with vpool.Pool.from_policy(vpool.Dynamic(), source="host") as pool:
        assert pool.debug.guard == 256
    with vpool.Pool.from_policy(vpool.Dynamic(), source="host", debug="poison") as pool:
        assert pool.debug == Modes(poison=True)
    monkeypatch.setenv(VARIABLE, "guard,nonsense")
    with pytest.raises(ValueError, match=r"^VPOOL_DEBUG: no debug mode 'nonsense'"):
        vpool.Pool(source="host")


def test_what_vpool_measures_has_no_debug_modes(monkeypatch):
    """Replays, and what is built on them, come out the same whatever the variable says."""
    trace = bundled_trace()
    before = vpool.replay(trace).to_dict()
    monkeypatch.setenv(VARIABLE, "quarantine,sites")
    after = vpool.replay(trace).to_dict()
    for figures in (before, after):
        for key in [key for key in figures if "ns" in key]:
            del figures[key]
    assert before == after


# At exit.


AT_EXIT = """
import vpool
pool = vpool.Pool(source="host", name="mine")
kept = pool.empty(1000)
cycle = [pool.empty(500)]; cycle.append(cycle); del cycle
ptr = pool.allocate(3000)
pool.deallocate(pool.allocate(700))
"""


def test_the_report_at_exit(monkeypatch):
    monkeypatch.setenv(VARIABLE, "leaks,sites")
    done = run_python(AT_EXIT)
    first, second, third = done.stderr.splitlines()
    assert first == "vpool at exit: pool 'mine': 2 blocks live, 3.91 KiB"
    assert second.endswith("<string>:6 in <module>")
    assert third.endswith("<string>:4 in <module>")
    assert (done.returncode, done.stdout) == (0, "")


def test_no_report_at_exit_where_nothing_is_live_or_nobody_asked(monkeypatch):
    monkeypatch.setenv(VARIABLE, "sites")
    run_cleanly(AT_EXIT)
    monkeypatch.setenv(VARIABLE, "leaks")
    run_cleanly(AT_EXIT + "pool.deallocate(ptr); kept.close()")


@pytest.mark.parametrize("trouble", ["sys.stderr = None", "sys.stderr.close()", "import os; os.close(2)"])
def test_a_report_that_cannot_be_written_does_not_fail_the_exit(monkeypatch, trouble):
    monkeypatch.setenv(VARIABLE, "leaks")
    assert run_python(AT_EXIT + f"import sys; {trouble}").returncode in (0, 120 if "os.close" in trouble else 0)


@pytest.mark.parametrize("ending", ["", "pool.close()", "import sys; sys.exit()", "del pool, kept"])
def test_the_interpreter_ends_quietly_with_all_modes(monkeypatch, ending):
    monkeypatch.setenv(VARIABLE, "guard,poison,quarantine,sites")
    run_cleanly(AT_EXIT + ending)


FORKED = """
pool = make(debug='guard,poison,quarantine,sites,leaks')
buffer, other, ptr = pool.empty(1000), pool.empty(300, stream=5), pool.allocate(1000)
pool.deallocate(pool.allocate(700))
calls = pool.source.driver.calls()

def child():
    global other
    pool.deallocate(ptr)
    pool.deallocate(ptr)
    buffer.close()
    del other
    refused(pool.leaks)
    refused(pool.check)
    pool.close()
    assert pool.source.driver.calls() == calls
    works(make(debug='guard,poison,quarantine,sites'))

for _ in range(TIMES):
    ended(fork(child))
pool.check()
assert pool.leaks().blocks == 3
pool.deallocate(ptr), buffer.close(), other.close()
"""


def test_a_child_of_a_fork_neither_checks_nor_reports_its_parents_blocks():
    run_forking(FORKED, 3)


# Segments.


def test_same_address_live_twice_is_detected():
    """A source that gives the same memory for two segments: nothing of the second is lent."""
    source = vpool.sources.Simulated()
    with vpool.Pool(vpool.Dynamic(initial=MIB, growth=MIB), source) as pool:
        first = pool.allocate(MIB)
        source.driver.set_next_address(first + MIB // 2)
        before = pool.stats
        with pytest.raises(vpool.SourceError) as caught:
            pool.allocate(MIB)
        for address in (first, first + MIB, first + MIB // 2, first + MIB // 2 + MIB):
            assert hex(address) in str(caught.value)
        after = pool.stats
        assert (after.allocated_bytes, after.reserved_bytes) == (before.allocated_bytes, before.reserved_bytes)
        pool.check()
        source.driver.set_next_address(first + MIB)
        assert pool.allocate(MIB) == first + MIB, "beside it is not in it"


def test_memory_of_the_fixed_core_is_not_given_twice():
    source = vpool.sources.Simulated()
    with vpool.Pool(vpool.Hybrid(MIB, dynamic=vpool.Dynamic(initial=MIB)), source) as pool:
        ptr = pool.allocate(4096)
        source.driver.set_next_address(ptr // MIB * MIB)
        with pytest.raises(vpool.SourceError, match="the pool has"):
            pool.allocate(2 * MIB)
        pool.check()

"""The defragmentation report: it names what separates free memory, and its moves gain what it promised."""

import bisect
import json

import numpy as np
import pytest

import vpool
from tests.helpers.pools import GIB, KIB, MIB
from tests.helpers.traces import ALL, FOLDER, recorded
from vpool.commands import main
from vpool.moments import moment
from vpool.placing import placed


class Places:
    """What is taken, in the order of addresses: moves are done one after the other, and everything is looked up."""

    def __init__(self, snapshot):
        blocks = snapshot.blocks
        self.taken = [tuple(map(int, row)) for row in blocks[blocks["state"] != "free"][["address", "nbytes"]]]
        self.taken.sort()
        self.live = {int(row["address"]): int(row["nbytes"]) for row in blocks if row["state"] == "live"}
        self.segments = {}
        for segment in np.unique(blocks["segment"]):
            mine = blocks[blocks["segment"] == segment]
            self.segments[int(mine["address"].min())] = int((mine["address"] + mine["nbytes"]).max())

    def move(self, source, target, nbytes):
        """Copy a block, then free its old place."""
        assert self.live.pop(source) == nbytes
        low = max(low for low in self.segments if low <= target)
        assert target + nbytes <= self.segments[low]
        at = bisect.bisect(self.taken, (target,))
        assert at == 0 or sum(self.taken[at - 1]) <= target
        assert at == len(self.taken) or self.taken[at][0] >= target + nbytes
        self.taken.insert(at, (target, nbytes))
        self.taken.remove((source, nbytes))
        self.live[target] = nbytes

    def gaps(self):
        """Bytes of each free range, and of those that are a whole segment."""
        for low, high in sorted(self.segments.items()):
            end = low
            for address, nbytes in self.taken[bisect.bisect_left(self.taken, (low,)) :]:
                if address >= high:
                    break
                yield address - end, False
                end = address + nbytes
            yield high - end, end == low

    @property
    def largest_free(self):
        return max((nbytes for nbytes, _ in self.gaps()), default=0)

    @property
    def releasable(self):
        return sum(nbytes for nbytes, whole in self.gaps() if whole)


def worst(name, strategy=None, capacity=None):
    trace = placed(recorded(name), strategy, capacity)
    return moment(trace, trace.peak_event)


def follow(snapshot, plan):
    """Do the moves of a plan: what was gained must be what was promised."""
    blocks = Places(snapshot)
    longest, releasable = blocks.largest_free, blocks.releasable
    for move in plan.moves:
        blocks.move(*move)
    assert sum(move.nbytes for move in plan.moves) == plan.moved_bytes
    assert blocks.largest_free == plan.largest_free_bytes == longest + plan.gained_bytes
    assert blocks.releasable == releasable + plan.released_bytes


def half_free(source="simulated", blocks=32, nbytes=256 * MIB):
    """A pool of which every second block is free."""
    size = blocks * nbytes
    strategy = vpool.Dynamic(initial=size, limit=size)
    pool = vpool.Pool(strategy, source=vpool.sources.Simulated(size) if source == "simulated" else source)
    with vpool.tag("kv-cache"):
        ptrs = [pool.allocate(nbytes) for _ in range(blocks)]
    for ptr in ptrs[::2]:
        pool.deallocate(ptr)
    return pool


@pytest.fixture(scope="module")
def snapshot():
    return worst("llm_train")


@pytest.fixture(scope="module")
def found(snapshot):
    return vpool.defrag.report(snapshot)


class TestLlmTrain:
    """A recorded training run at the moment when the most is live."""

    def test_the_gain_is_what_was_promised(self, snapshot, found):
        assert found.releases
        for plan in found.joins + found.releases:
            follow(snapshot, plan)
        assert found.releases[-1].released_bytes > 9 * GIB  # of 49 that are reserved

    def test_the_blocks_that_matter_are_named(self, snapshot, found):
        """Without the blocks of the sizes that it names the segments would be free."""
        moves = found.releases[-1].moves
        sizes = {int(row["address"]): int(row["requested"]) for row in snapshot.blocks if row["state"] == "live"}
        held = [row for row in found.holders if row.kind == "requested"]
        assert {row.name for row in held} == {sizes[move.source] for move in moves}
        assert sum(row.blocks for row in held) == len(moves)
        assert held[0].name == 45_088_768
        assert held[0].segment_bytes > 9 * GIB
        assert "45,088,768" in str(found)

    def test_ages_are_those_of_the_trace(self, snapshot, found):
        trace = recorded("llm_train")
        now = int(trace.t_us[trace.peak_event])
        ages = snapshot.blocks["age_us"][snapshot.blocks["state"] == "live"]
        assert ages.min() == 0  # the event of the peak itself
        assert ages.max() <= now
        assert {row.name for row in found.separators if row.kind == "age"} == {"up to 1 ms", "up to 1 s", "up to 10 s"}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("strategy", ["dynamic", "adaptive", "capped"])
def test_every_plan_on_every_trace(name, strategy):
    most = int(1.03 * recorded(name).peak_live_bytes)
    chosen = vpool.Dynamic(adaptive=strategy == "adaptive")
    snapshot = worst(name, chosen, most if strategy == "capped" else None)
    found = vpool.defrag.report(snapshot)
    assert found.free_bytes == snapshot.report.free_bytes
    for plan in [*found.joins[-2:], *found.releases[-2:]]:
        follow(snapshot, plan)


def random_snapshot(seed, streams=3):
    """Of a pool after some thousand calls on some streams."""
    rng = np.random.default_rng(seed)
    pool = vpool.Pool(vpool.Dynamic(initial="1MiB", growth=1.2, limit="64MiB"), source="simulated")
    made = [0, *(pool.source.driver.create_stream() for _ in range(streams - 1))]
    live = []
    for _ in range(1500):
        if live and rng.random() < 0.48:
            pool.deallocate(live.pop(rng.integers(len(live))))
        else:
            live.append(pool.allocate(int(rng.choice([300, 4000, 60_000, 200_000])), made[rng.integers(streams)]))
    return pool.snapshot()


@pytest.mark.parametrize("seed", range(12))
def test_random_pools(seed):
    snapshot = random_snapshot(seed)
    found = vpool.defrag.report(snapshot)
    before = Places(snapshot)
    assert found.largest_free_bytes == before.largest_free
    assert found.at_once["released_bytes"] == before.releasable
    assert found.joins or found.releases
    for plan in found.joins + found.releases:
        follow(snapshot, plan)
    for wall in found.walls:
        assert wall.before > 0 < wall.after
        assert wall.nbytes - wall.fixed_bytes > 0 or wall.fixed_bytes


class TestWalls:
    """Small maps whose answer is known."""

    def test_every_second_block(self):
        with half_free() as pool:
            found = vpool.defrag.report(pool.snapshot())
        assert (found.free_bytes, found.free_ranges, found.largest_free_bytes) == (4 * GIB, 16, 256 * MIB)
        assert len(found.walls) == 15  # behind the last one nothing is free
        (tag,) = [row for row in found.separators if row.kind == "tag"]
        assert tag == ("tag", "kv-cache", 15, 15 * 256 * MIB, 4 * GIB, 4 * GIB)
        # Half of the memory is free: blocks of one half fit into the holes of the other.
        assert found.joins[-1].largest_free_bytes == 4 * GIB
        assert found.joins[-1].moved_bytes == 2 * GIB
        assert not found.releases

    def test_a_need(self):
        with half_free() as pool:
            snapshot = pool.snapshot()
        (plan,) = vpool.defrag.report(snapshot, "3GiB").joins
        assert (plan.largest_free_bytes, plan.moved_bytes, len(plan.moves)) == (3 * GIB, 1536 * MIB, 6)
        follow(snapshot, plan)
        found = vpool.defrag.report(snapshot, "4097MiB")
        assert found.joins == []
        assert "no moves were found that make a range of 4,296,015,872 bytes: only 4.00 GiB are free" in str(found)

    def test_pending_blocks_stay(self):
        """A block that is perhaps in use is no way to a longer range; the live one behind it is."""
        with vpool.Pool(vpool.Dynamic(initial="4MiB", limit="4MiB"), source="simulated") as pool:
            stream = pool.source.driver.create_stream()
            ptrs = [pool.allocate(MIB) for _ in range(4)]
            pool.source.driver.queue_work(stream)
            pool.record_stream(ptrs[1], stream)
            for ptr in ptrs[:3]:
                pool.deallocate(ptr)
            found = vpool.defrag.report(pool.snapshot())
        assert found.walls == [(ptrs[1], MIB, 0, MIB, MIB, MIB)]
        assert found.separators == []
        assert [plan.moves for plan in found.joins] == [[(ptrs[3], ptrs[0], MIB)]]
        assert found.joins[0].largest_free_bytes == 2 * MIB

    def test_equal_blocks_are_never_joined(self):
        with vpool.Pool(vpool.Fixed("4MiB", block="1MiB"), source="simulated") as pool:
            ptrs = [pool.allocate(MIB) for _ in range(4)]
            for ptr in ptrs[::2]:
                pool.deallocate(ptr)
            found = vpool.defrag.report(pool.snapshot())
        assert (found.walls, found.joins, found.releases) == ([], [], [])

    def test_a_slab_never_goes_back(self):
        with vpool.Pool(vpool.Fixed("4MiB"), source="simulated") as pool:
            ptrs = [pool.allocate(MIB) for _ in range(4)]
            for ptr in ptrs[::2]:
                pool.deallocate(ptr)
            found = vpool.defrag.report(pool.snapshot())
        assert found.joins[-1].largest_free_bytes == 2 * MIB
        assert found.releases == []

    def test_what_is_free_at_once(self):
        with vpool.Pool(vpool.Dynamic(initial="1MiB", growth="1MiB"), source="simulated") as pool:
            ptrs = [pool.allocate(MIB) for _ in range(3)]
            for ptr in ptrs[1:]:
                pool.deallocate(ptr)
            found = vpool.defrag.report(pool.snapshot())
            assert (found.at_once["released_bytes"], found.at_once["segments"]) == (2 * MIB, 2)
            assert pool.trim() == 2 * MIB

    def test_nothing(self, pool):
        found = vpool.defrag.report(pool.snapshot())
        assert (found.free_bytes, found.walls, found.joins, found.releases) == (0, [], [], [])
        assert "0 B free in 0 ranges" in str(found)

    def test_what_is_no_snapshot(self, pool):
        with pytest.raises(TypeError, match="of a Snapshot, not Report"):
            vpool.defrag.report(pool.inspect())
        with pytest.raises(ValueError, match="need"):
            vpool.defrag.report(pool.snapshot(), "3 elephants")

    def test_moves_are_done_on_host_memory(self):
        """The owner copies each block as it is told: the bytes are there, and then a long request succeeds."""
        import ctypes

        with vpool.Pool(vpool.Dynamic(initial="1MiB", limit="1MiB"), source="host") as pool:
            ptrs = [pool.allocate(64 * KIB) for _ in range(16)]
            for ptr in ptrs[1::2]:
                pool.deallocate(ptr)
            live = {ptr: bytes([number]) * 64 * KIB for number, ptr in enumerate(ptrs[::2])}
            for ptr, content in live.items():
                ctypes.memmove(ptr, content, len(content))
            with pytest.raises(vpool.OutOfMemoryError):
                pool.allocate(256 * KIB)
            (plan,) = vpool.defrag.report(pool.snapshot(), 256 * KIB).joins
            for move in plan.moves:
                holes = []
                while (ptr := pool.allocate(move.nbytes)) != move.target:
                    holes.append(ptr)
                ctypes.memmove(move.target, move.source, move.nbytes)
                live[move.target] = live.pop(move.source)
                for hole in (*holes, move.source):
                    pool.deallocate(hole)
            assert pool.allocate(256 * KIB)
            assert all(ctypes.string_at(ptr, len(content)) == content for ptr, content in live.items())


class TestShortage:
    """What an out-of-memory error says of it."""

    def test_three_gib_of_four_in_pieces(self):
        with half_free() as pool, pytest.raises(vpool.OutOfMemoryError) as caught:
            pool.allocate(3 * GIB)
        text = str(caught.value)
        assert "Free memory of 4.00 GiB is in 16 ranges of 1 segment; between them are:" in text
        assert "3.75 GiB in 15 x tag 'kv-cache', 4.00 GiB free beside" in text
        assert len(text.splitlines()) <= 30
        rows = {row.kind: row for row in caught.value.shortage.separators}
        assert (rows["tag"].name, rows["requested"].name) == ("kv-cache", 256 * MIB)

    def test_where_memory_moves_it_succeeds(self):
        size = 8 * GIB
        with vpool.Pool(vpool.Dynamic(limit=size), source=vpool.sources.SimulatedVmm(size)) as pool:
            ptrs = [pool.allocate(256 * MIB) for _ in range(32)]
            for ptr in ptrs[::2]:
                pool.deallocate(ptr)
            found = vpool.defrag.report(pool.snapshot())
            assert found.largest_free_bytes < 3 * GIB <= found.at_once["movable_bytes"]
            assert pool.allocate(3 * GIB)

    def test_sites_are_named_where_they_are_known(self):
        with vpool.Pool(vpool.Dynamic(initial="1MiB", limit="1MiB"), source="host", debug="sites") as pool:
            ptrs = [pool.allocate(64 * KIB) for _ in range(16)]
            for ptr in ptrs[1::2]:
                pool.deallocate(ptr)
            with pytest.raises(vpool.OutOfMemoryError) as caught:
                pool.allocate(256 * KIB)
        lines = str(caught.value).splitlines()
        (at,) = [number for number, line in enumerate(lines) if line.startswith("Free memory of")]
        assert "test_defrag.py" in lines[at + 1]
        assert len(lines) <= 30

    def test_nothing_is_said_where_there_is_too_little(self):
        with half_free() as pool, pytest.raises(vpool.OutOfMemoryError) as caught:
            pool.allocate(5 * GIB)
        assert "Free memory of" not in str(caught.value)
        assert caught.value.shortage.separators == []


class TestCommand:
    """``vpool defrag``."""

    def run(self, capsys, *arguments):
        assert main(["defrag", *map(str, arguments)]) == 0
        return capsys.readouterr().out

    def test_a_snapshot(self, tmp_path, capsys):
        with half_free() as pool:
            snapshot = pool.snapshot()
        snapshot.save(tmp_path / "snapshot.npz")
        found = vpool.defrag.report(snapshot, "3GiB")
        assert self.run(capsys, tmp_path / "snapshot.npz", "--need", "3GiB") == f"{found}\n"
        told = json.loads(self.run(capsys, tmp_path / "snapshot.npz", "--need", "3GiB", "--json"))
        assert told == {**json.loads(json.dumps(found.to_dict())), "notes": []}
        assert told["joins"][0]["moves"][0] == list(found.joins[0].moves[0])

    def test_a_recording(self, tmp_path, capsys):
        """As it was recorded, with its sites."""
        pool = vpool.Pool(vpool.Dynamic(initial="4MiB"), source="simulated")
        with pool, pool.record(sites=True) as recording:
            ptrs = [pool.allocate(MIB) for _ in range(4)]
            for ptr in ptrs[::2]:
                pool.deallocate(ptr)
            pool.allocate(3 * MIB)
        recording.save(tmp_path / "recording.npz")
        told = json.loads(self.run(capsys, tmp_path / "recording.npz", "--json"))
        assert told["live_bytes"] == recording.peak_live_bytes
        assert any(row["kind"] == "site" and "test_defrag.py" in row["name"] for row in told["separators"])

    def test_a_trace(self, capsys):
        path = FOLDER / "llm_train.npz"
        assert self.run(capsys, path) == f"{vpool.defrag.report(worst('llm_train'))}\n"
        capped = json.loads(self.run(capsys, path, "--strategy", "adaptive", "--capacity", "40GiB", "--json"))
        assert capped["live_bytes"] + capped["free_bytes"] <= 40 * GIB

    def test_a_replay_that_is_out_of_memory_says_so(self, capsys):
        """The moment is not the trace's worst then."""
        path = FOLDER / "llm_train.npz"
        assert "\nnote: out of memory at event 0, " in self.run(capsys, path, "--capacity", "256")
        (note,) = json.loads(self.run(capsys, path, "--capacity", "256", "--json"))["notes"]
        assert note.startswith("out of memory at event 0, ")

    def test_what_cannot_be_read(self, tmp_path, capsys):
        (tmp_path / "file").write_bytes(b"no such thing")
        assert main(["defrag", str(tmp_path / "file")]) == 1
        assert capsys.readouterr().err.count("\n") == 1

    @pytest.mark.parametrize("option", ["--need", "--capacity"])
    @pytest.mark.parametrize("size", ["much", "-1", "0"])
    def test_sizes_that_are_none_are_wrong_usage(self, option, size, capsys):
        with pytest.raises(SystemExit, match="2"):
            main(["defrag", str(FOLDER / "llm_train.npz"), option, size])
        assert capsys.readouterr().err.count("\n") == 1

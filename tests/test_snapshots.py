"""Snapshots of pools: kept, compared, and asked about an address."""

import contextlib
import json

import numpy as np
import pytest

import vpool
from tests.helpers.pools import GIB, KIB, MIB, host_pool, simulated_pool
from vpool._interface.lender import may_have
from vpool.snapshot import FORMAT_VERSION


class TestSnapshot:
    """What it holds."""

    def test_it_is_the_report_and_more(self, pool):
        with vpool.tag("kept"):
            pool.allocate(1000, stream=7)
        pool.deallocate(pool.allocate(MIB))
        snapshot, report = pool.snapshot(), pool.inspect()
        assert snapshot.report.to_dict() == report.to_dict()
        assert str(snapshot.report) == str(report)
        for field in report.blocks.dtype.names:
            assert np.array_equal(snapshot.blocks[field], report.blocks[field])
        assert np.array_equal(snapshot.segments, report.segment_table)
        assert snapshot.sites == [""]
        assert (snapshot.blocks["age_us"] == -1).all()

    def test_it_keeps_the_moment(self, pool):
        ptr = pool.allocate(1000)
        snapshot = pool.snapshot()
        pool.deallocate(ptr)
        pool.close()
        assert snapshot.report.live_blocks == 1

    @pytest.mark.parametrize("how", ["recording", "debug"])
    def test_sites_and_ages(self, how):
        debug = ("sites", "quarantine") if how == "debug" else ()
        with vpool.Pool(source="simulated", debug=debug) as pool, pool.record(sites=True):
            ptr = pool.allocate(1000)
            pool.deallocate(pool.allocate(2000))
            snapshot = pool.snapshot()
        (row,) = snapshot.blocks[snapshot.blocks["state"] == "live"]
        assert row["address"] == ptr
        assert "in test_sites_and_ages" in snapshot.sites[row["site"]]
        assert 0 <= row["age_us"] < 60e6

    def test_of_a_fixed_core(self):
        with vpool.Pool(vpool.Fixed(16 * MIB, block=MIB), source="simulated") as pool:
            pool.allocate(1000)
            snapshot = pool.snapshot()
            assert len(np.unique(snapshot.blocks["serial"])) == 16
            assert snapshot.report.core["allocated_bytes"] == MIB


class TestFiles:
    """Saved and loaded."""

    @pytest.fixture
    def snapshot(self):
        with vpool.Pool(vpool.Hybrid(16 * MIB, block=MIB), source="simulated", name="kept") as pool:
            pool.limit("large", 100 * MIB)
            with pool.record(sites=True):
                with vpool.tag("large"):
                    pool.allocate(30 * MIB, stream=9)
                pool.allocate(1000)
                return pool.snapshot()

    def test_round_trip(self, snapshot, tmp_path):
        snapshot.save(tmp_path / "snapshot.npz")
        loaded = vpool.Snapshot.load(tmp_path / "snapshot.npz")
        assert np.array_equal(loaded.blocks, snapshot.blocks)
        assert np.array_equal(loaded.segments, snapshot.segments)
        assert (loaded.sites, loaded.taken, loaded.name) == (snapshot.sites, snapshot.taken, "kept")
        assert json.loads(loaded.report.to_json()) == json.loads(snapshot.report.to_json())
        assert repr(loaded) == repr(snapshot)

    def test_a_newer_version(self, snapshot, tmp_path):
        path = tmp_path / "snapshot.npz"
        snapshot.save(path)
        np.savez(path, **{**np.load(path), "format_version": FORMAT_VERSION + 1})
        with pytest.raises(vpool.FormatError, match=r"version 2; this vpool reads snapshots up to version 1"):
            vpool.Snapshot.load(path)

    def test_what_is_none(self, snapshot, tmp_path):
        path = tmp_path / "file"
        path.write_bytes(b"PK")
        with pytest.raises(vpool.FormatError, match="no readable snapshot"):
            vpool.Snapshot.load(path)
        for content in (b"", b"text", b"\x80\x04."):
            path.write_bytes(content)
            with pytest.raises(vpool.FormatError, match=r"no snapshot of a pool$"):
                vpool.Snapshot.load(path)
        np.savez(tmp_path / "file.npz", op=np.zeros(3))
        with pytest.raises(vpool.FormatError, match="no snapshot"):
            vpool.Snapshot.load(tmp_path / "file.npz")
        with pytest.raises(OSError, match="nowhere"):
            vpool.Snapshot.load(tmp_path / "nowhere")
        snapshot.save(path)
        with pytest.raises(vpool.FormatError, match="a vpool snapshot, not a trace"):
            vpool.Trace.load(path)

    def test_values_that_are_none(self, snapshot, tmp_path):
        path = tmp_path / "snapshot.npz"
        snapshot.save(path)
        whole = dict(np.load(path))
        figures = json.loads(str(whole["figures"]))
        for name, values in (
            ("block_state", np.full_like(whole["block_state"], "strange")),
            ("block_age_us", np.full_like(whole["block_age_us"], -5)),
            ("figures", np.array(json.dumps({**figures, "name": 5}))),
        ):
            np.savez(path, **{**whole, name: values})
            with pytest.raises(vpool.FormatError, match="that is none"):
                vpool.Snapshot.load(path)

    @pytest.mark.parametrize(
        "figure", ["limit_bytes", "base_slack_bytes", "peak_reserved_bytes", "peak_requested_bytes"]
    )
    @pytest.mark.parametrize("value", ["x", [], float("nan")])
    def test_figures_that_are_no_numbers(self, figure, value, snapshot, tmp_path):
        """They are told when the file is read, and not when it is shown."""
        path = tmp_path / "snapshot.npz"
        snapshot.save(path)
        whole = dict(np.load(path))
        figures = {**json.loads(str(whole["figures"])), figure: value}
        np.savez(path, **{**whole, "figures": json.dumps(figures)})
        with pytest.raises(vpool.FormatError):
            vpool.Snapshot.load(path)

    def test_damage(self, snapshot, tmp_path):
        """Every array that is missing, of another type or too short is told; nothing else is raised."""
        path = tmp_path / "snapshot.npz"
        snapshot.save(path)
        whole = dict(np.load(path))
        for name in whole:
            if name == "taken":
                continue
            for change in ("missing", "type", "short"):
                arrays = dict(whole)
                array = arrays.pop(name)
                if change == "type":
                    arrays[name] = array.astype("S8") if array.dtype.names is None else np.zeros(3)
                elif change == "short" and array.ndim and len(array) > 1:
                    arrays[name] = array[:-1]
                elif change == "short":
                    continue
                np.savez(path, **arrays)
                with pytest.raises(vpool.FormatError):
                    vpool.Snapshot.load(path)
        cut = b""
        snapshot.save(path)
        whole = path.read_bytes()
        for length in range(0, len(whole) - 1, 97):
            cut = whole[:length]
            path.write_bytes(cut)
            with pytest.raises(vpool.FormatError):
                vpool.Snapshot.load(path)


class TestDiff:
    """What came, went and grew."""

    def test_blocks(self, pool):
        kept, gone = pool.allocate(1000), pool.allocate(2000)
        before = pool.snapshot()
        pool.deallocate(gone)
        same_place = pool.allocate(2000)
        new = pool.allocate(3000)
        diff = before.diff(pool.snapshot())
        assert same_place == gone
        assert diff.came["address"].tolist() == [gone, new]
        assert diff.went["address"].tolist() == [gone]
        assert diff.stayed == 1
        assert kept not in diff.came["address"]

    def test_nothing(self, pool):
        pool.allocate(1000)
        diff = pool.snapshot().diff(pool.snapshot())
        assert (len(diff.came), len(diff.went), diff.stayed) == (0, 0, 1)
        assert diff.by_tag == diff.by_size == diff.by_site == []
        assert "0 blocks of 0 B came" in str(diff)

    def test_by_tag_size_and_site(self, pool):
        with pool.record(sites=True):
            with vpool.tag("leaks"):
                first = [pool.allocate(10 * KIB) for _ in range(4)]
            before = pool.snapshot()
            with vpool.tag("leaks"):
                second = [pool.allocate(20 * KIB) for _ in range(6)]
            for ptr in first[:3]:
                pool.deallocate(ptr)
            diff = before.diff(pool.snapshot())
        assert len(second) == 6
        assert diff.by_tag == [{"tag": "leaks", "blocks": 3, "live_bytes": 90 * KIB, "now": 130 * KIB}]
        assert [(row["requested"], row["blocks"]) for row in diff.by_size] == [(20 * KIB, 6), (10 * KIB, -3)]
        grown, shrunk = diff.by_site
        assert (grown["blocks"], shrunk["blocks"]) == (6, -3)
        assert grown["site"] != shrunk["site"]
        assert all("test_snapshots.py" in row["site"] for row in diff.by_site)
        text = str(diff)
        assert max(map(len, text.splitlines())) <= 100
        for words in ("6 blocks of 120 KiB came", "3 of 30.0 KiB went", "leaks", "+90.0 KiB", "20,480"):
            assert words in text
        assert json.loads(json.dumps(diff.to_dict()))["came"] == {"blocks": 6, "live_bytes": 120 * KIB}

    def test_of_files(self, pool, tmp_path):
        pool.allocate(1000)
        pool.snapshot().save(tmp_path / "before.npz")
        ptr = pool.allocate(2000)
        diff = vpool.Snapshot.load(tmp_path / "before.npz").diff(pool.snapshot())
        assert diff.came["address"].tolist() == [ptr]

    def test_with_what_is_none(self, pool):
        with pytest.raises(TypeError, match="compared with a Snapshot"):
            pool.snapshot().diff(pool.inspect())


class TestExplain:
    """`vpool.explain`, of any address."""

    def test_a_live_block(self):
        with host_pool(name="mine") as pool, pool.record(sites=True):
            before = pool.allocate(3000)
            with vpool.tag("weights"):
                ptr = pool.allocate(1000)
            found = vpool.explain(ptr + 5)
            assert (found.pool, found.state, found.address, found.offset) == ("mine", "live", ptr, 5)
            assert (found.nbytes, found.requested, found.stream, found.tag) == (1024, 1000, 0, "weights")
            assert "in test_a_live_block" in found.site
            assert 0 <= found.age_seconds < 60
            assert (found.before.address, found.before.state, found.before.tag) == (before, "live", None)
            assert found.after.state == "free"
            for words in ("5 bytes inside a live block", "'mine'", "weights", "test_snapshots.py", "before"):
                assert words in str(found)

    def test_buffers(self, writable_pool):
        buffer = writable_pool.empty(1000)
        assert vpool.explain(buffer).address == buffer.ptr

    def test_other_states(self, pool):
        ptr = pool.allocate(1000)
        pool.record_stream(ptr, 7)
        pool.deallocate(ptr)
        assert vpool.explain(ptr).state == "pending"
        free = pool.allocate(2000, stream=9)
        pool.deallocate(free)
        found = vpool.explain(free)
        assert (found.state, found.tag, found.site, found.age_seconds) == ("free", None, None, None)
        assert "site" not in str(found)

    def test_every_address_of_a_segment(self):
        with simulated_pool(initial=MIB) as pool:
            for nbytes in (1000, 5000, 70 * KIB):
                pool.allocate(nbytes)
            (segment,) = pool.inspect().segment_table
            begin, end = int(segment["address"]), int(segment["address"] + segment["nbytes"])
            blocks = pool.inspect().blocks
            for address in range(begin, end, 509):
                found = vpool.explain(address)
                (row,) = blocks[(blocks["address"] <= address) & (address < blocks["address"] + blocks["nbytes"])]
                assert (found.address, found.state) == (int(row["address"]), str(row["state"]))
                assert found.segment == (begin, end - begin)
            assert vpool.explain(begin - 1).state == vpool.explain(end).state == "foreign"
            assert vpool.explain(begin).before is vpool.explain(end - 1).after is None

    @pytest.mark.parametrize(
        "strategy", [vpool.Dynamic(initial=MIB), vpool.Hybrid(core="1MiB", block="4KiB"), vpool.Fixed("1MiB")], ids=str
    )
    @pytest.mark.parametrize("base_offset", [0, 100])
    def test_only_pools_that_have_an_address_are_looked_through(self, strategy, base_offset):
        with vpool.Pool(strategy, source=vpool.sources.Simulated(GIB, base_offset=base_offset)) as pool:
            pool.allocate(1000)
            pool.allocate(100, stream=7)
            snapshot = pool.snapshot()
            for row in snapshot.blocks:
                begin, end = int(row["address"]), int(row["address"] + row["nbytes"])
                assert may_have(pool, begin)
                assert may_have(pool, end - 1)
            begins = snapshot.segments["address"]
            assert not may_have(pool, int(begins.min()) - 1)
            assert not may_have(pool, int((begins + snapshot.segments["nbytes"]).max()))

    def test_of_several_pools(self):
        with host_pool(name="one") as one, host_pool(name="other") as other:
            pointers = {"one": one.allocate(1000), "other": other.allocate(1000)}
            assert {vpool.explain(ptr).pool for ptr in pointers.values()} == set(pointers)
            assert vpool.explain(pointers["other"]).pool == "other"

    def test_of_simulated_pools_that_have_the_same_addresses(self):
        """The one that uses the address is meant, else the one that was made first."""
        with simulated_pool(initial=MIB, name="first") as first, simulated_pool(initial=MIB, name="second") as second:
            ptr = second.allocate(1000)
            assert first.allocate(5) == ptr
            first.deallocate(ptr)
            assert (vpool.explain(ptr).pool, vpool.explain(ptr).state) == ("second", "live")
            second.deallocate(ptr)
            assert (vpool.explain(ptr).pool, vpool.explain(ptr).state) == ("first", "free")

    def test_a_closed_pool(self):
        pool = host_pool(name="closed")
        ptr = pool.allocate(1000)
        pool.close()
        assert vpool.explain(ptr).pool == "closed"
        pool.deallocate(ptr)
        assert vpool.explain(ptr).state == "foreign"

    @pytest.mark.parametrize("address", [0, 12345, 2**64 - 1])
    def test_foreign(self, address, pool):
        found = vpool.explain(address)
        assert (found.state, found.pool, found.before) == ("foreign", None, None)
        assert "no pool of this process has it" in str(found)
        assert "under test" in found.searched
        assert repr(found.searched[0]) in str(found)

    def test_foreign_among_many_pools(self):
        with contextlib.ExitStack() as stack:
            for number in range(20):
                stack.enter_context(simulated_pool(name=f"one of many {number}"))
            found = vpool.explain(12345)
        assert len(found.searched) >= 20
        assert str(found).endswith(f" and {len(found.searched) - 8} more)")

    @pytest.mark.parametrize(
        ("what", "error"),
        [
            (True, TypeError),
            ("0x10", TypeError),
            ("16", TypeError),
            (16.5, TypeError),
            (-1, ValueError),
            (2**64, ValueError),
        ],
    )
    def test_what_is_no_address(self, what, error):
        with pytest.raises(error, match=r"an address must be an integer, not|is no address"):
            vpool.explain(what)

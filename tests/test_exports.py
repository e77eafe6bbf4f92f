"""What others' tools open: traces with addresses, tags and call sites in PyTorch's, Chrome's and pprof's formats."""

import base64
import gzip
import itertools
import json
import pickle
import pickletools
import re

import numpy as np
import pytest

import vpool
from tests.helpers import pprof
from tests.helpers.traces import ALL, FOLDER, SMALL, made, recorded
from vpool.commands import main
from vpool.moments import moment
from vpool.placing import placed

ARRAYS = ("op", "number", "bytes", "stream", "t_us", "failures")


@pytest.fixture(scope="module")
def recording():
    """A run with tags, sites, steps, a failed request, and segments that come and go."""
    random = np.random.default_rng(5)
    pool = vpool.Pool(vpool.Dynamic(initial="2MiB", growth="2MiB", limit="32MiB"), source="simulated")
    held = []
    with pool, pool.record(sites=True, depth=2) as trace:
        for step in range(8):
            trace.mark()
            with vpool.tag("even" if step % 2 else "odd"):
                held += [pool.empty(int(size)) for size in random.integers(1000, 900_000, 9)]
            with pytest.raises(vpool.OutOfMemoryError):
                pool.empty(1 << 30)
            held = [one for one in held if random.random() < 0.6]
            pool.trim()
        with vpool.tag("odd"):
            held.append(pool.empty(5000))
    assert len(trace.failures) == 8
    return trace


def expect_equal(trace, other, arrays=ARRAYS):
    for name in arrays:
        assert np.array_equal(getattr(trace, name), getattr(other, name)), name


@pytest.fixture(scope="module")
def snapshot(recording, tmp_path_factory):
    path = tmp_path_factory.mktemp("viz") / "trace.pickle"
    recording.save(path, "torch-pickle")
    return pickle.loads(path.read_bytes())


class TestRoundTrips:
    @pytest.mark.parametrize("name", ["moe_train", "two_streams"])
    def test_memory_viz_and_rmm_and_back(self, name, tmp_path):
        trace = recorded(name)
        trace.save(tmp_path / "trace.pickle", "torch-pickle")
        expect_equal(trace, vpool.Trace.load(tmp_path / "trace.pickle"), (*ARRAYS, "marks_us"))
        trace.save(tmp_path / "trace.csv", "rmm")
        expect_equal(trace, vpool.Trace.load(tmp_path / "trace.csv"))

    @pytest.mark.long
    @pytest.mark.parametrize("name", ALL)
    def test_every_trace(self, name, tmp_path):
        self.test_memory_viz_and_rmm_and_back(name, tmp_path)

    @pytest.mark.parametrize("form", ["torch-pickle", "torch-json", "rmm", "kineto"])
    def test_recordings(self, form, recording, tmp_path):
        recording.save(tmp_path / "trace", form)
        expect_equal(recording, vpool.Trace.load(tmp_path / "trace"))

    def test_the_other_way_round(self, recording, tmp_path):
        """A file of vpool's is the same again after a round of formats, but for what only it has."""
        path = FOLDER / "two_streams.npz"
        for form in ("torch-pickle", "rmm", "torch-json"):
            out = tmp_path / form
            assert main(["convert", str(path), str(out), "--to", form, "--json"]) == 0
            path = out
        expect_equal(recorded("two_streams"), vpool.Trace.load(path))


def expect_tiled(snapshot, recording):
    """The segments are those at the end of a recording, and blocks tile them."""
    last = moment(recording, len(recording) - 1)
    live = last.blocks[last.blocks["state"] == "live"]
    assert [(one["address"], one["total_size"]) for one in snapshot["segments"]] == [
        (int(one["address"]), int(one["nbytes"])) for one in last.segments if one["nbytes"]
    ]
    active = []
    for segment in snapshot["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            at += block["size"]
            if block["state"] == "active_allocated":
                active.append((block["address"], block["size"], block["requested_size"]))
        assert at == segment["address"] + segment["total_size"]
    assert active == [(int(one["address"]), int(one["nbytes"]), int(one["requested"])) for one in live]


class TestMemoryViz:
    """The rules by which the viewer opens a file."""

    def test_protocol_and_plain_types(self, recording, tmp_path):
        recording.save(tmp_path / "trace.pickle", "torch-pickle")
        content = (tmp_path / "trace.pickle").read_bytes()
        for opcode, value, _ in pickletools.genops(content):
            assert opcode.proto <= 4
            assert opcode.name not in ("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "NEWOBJ", "BINBYTES", "EMPTY_SET")
            assert not isinstance(value, int) or value < 2**53

    def test_blocks_tile_the_segments_that_the_pool_had(self, snapshot, recording):
        expect_tiled(snapshot, recording)

    def test_blocks_without_memory_are_in_no_segment(self, tmp_path):
        """Suspended ones before, between and behind segments, and one that shares a handle with another block."""
        with vpool.Pool(vpool.Dynamic(initial=0), source="simulated-vmm") as pool, pool.record() as recording:
            for tag, mebibytes in (("kv", 4), ("w", 3), ("kv", 3), ("w", 2), ("kv", 4)):
                with vpool.tag(tag):
                    pool.allocate(mebibytes << 20)
            pool.suspend(tag="kv")
            pool.allocate(100)
            assert pool.inspect().suspended_bytes == 11 << 20
        recording.save(tmp_path / "trace.pickle", "torch-pickle")
        expect_tiled(pickle.loads((tmp_path / "trace.pickle").read_bytes()), recording)
        expect_equal(vpool.Trace.load(tmp_path / "trace.pickle"), recording)

    def test_every_allocation_lies_in_a_segment(self, snapshot):
        there, seen = {}, 0
        for entry in snapshot["device_traces"][0]:
            if entry["action"] == "segment_alloc":
                there[entry["addr"]] = entry["size"]
            elif entry["action"] == "segment_free":
                assert there.pop(entry["addr"]) == entry["size"]
            elif entry["action"] == "alloc":
                seen += 1
                inside = [begin for begin, size in there.items() if begin <= entry["addr"] < begin + size]
                assert len(inside) == 1
                assert entry["addr"] + entry["size"] <= inside[0] + there[inside[0]]
        assert seen == 73

    def test_frees_come_in_pairs(self, snapshot):
        entries = snapshot["device_traces"][0]
        for one, other in itertools.pairwise(entries):
            assert (one["action"] == "free_requested") == (other["action"] == "free_completed")
            if one["action"] == "free_requested":
                assert one["addr"] == other["addr"]

    def test_sites_and_tags(self, snapshot, recording):
        allocations = [one for one in snapshot["device_traces"][0] if one["action"] == "alloc"]
        details, births = recording.details, np.flatnonzero(recording.op == 0)
        for entry, birth in zip(allocations, births, strict=True):
            assert entry["user_metadata"] == details.tags[details.tag[birth]]
            frames = " < ".join(f"{one['filename']}:{one['line']} in {one['name']}" for one in entry["frames"])
            assert frames == details.sites[details.site[birth]]
            assert entry["frames"][0]["filename"] == __file__

    @pytest.mark.long
    @pytest.mark.torch
    def test_pytorchs_own_reader(self, snapshot):
        """``pytest -m "long and torch" tests/test_exports.py``, where PyTorch is installed."""
        viz = pytest.importorskip("torch.cuda._memory_viz")
        reserved = sum(segment["total_size"] for segment in snapshot["segments"])
        assert f"segments: {len(snapshot['segments'])}" in viz.segsum(snapshot)
        assert f"total_reserved: {viz.Bytes(reserved)}" in viz.segsum(snapshot)
        text = viz.trace(snapshot)
        assert text.count("cudaMalloc(") == sum(
            one["action"] == "segment_alloc" for one in snapshot["device_traces"][0]
        )
        assert text.count("OutOfMemoryError") == 8
        for plot in (viz.trace_plot, viz.segment_plot):
            packed = re.search(r'"base64": "([^"]+)"', plot(snapshot))[1]
            shown = pickle.loads(base64.b64decode(packed))
            assert len(shown["device_traces"][0]) == len(snapshot["device_traces"][0])


def test_chrome_trace_has_curves_and_steps(recording, tmp_path):
    recording.save(tmp_path / "trace.json", "kineto")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "i", "C"}
    curves = {}
    for event in events:
        if event["ph"] == "C":
            curves.setdefault(event["name"], []).append(event["args"]["bytes"])
    assert set(curves) == {"requested bytes", "reserved bytes", "tag odd", "tag even"}
    last = moment(recording, len(recording) - 1).report
    assert curves["requested bytes"][-1] == last.requested_bytes
    assert curves["reserved bytes"][-1] == last.reserved_bytes
    tags = {row["tag"]: row["requested_bytes"] for row in last.tags}
    assert {f"tag {name}": nbytes for name, nbytes in tags.items()} == {
        name: values[-1] for name, values in curves.items() if name.startswith("tag")
    }
    steps = [event for event in events if event["ph"] == "X"]
    assert [event["ts"] for event in steps] == recording.marks_us.tolist()
    assert all(one["ts"] + one["dur"] == other["ts"] for one, other in itertools.pairwise(steps))


class TestPprof:
    def profile(self, trace, path):
        trace.save(path, "pprof")
        return pprof.parsed(gzip.decompress(path.read_bytes()))

    def test_who_holds_what(self, recording, tmp_path):
        profile = self.profile(recording, tmp_path / "heap.pb.gz")
        peak = moment(recording, recording.peak_event)
        live = peak.blocks[peak.blocks["state"] == "live"]
        expected = {}
        for block in live:
            key = peak.sites[block["site"]], peak.tag_name(int(block["tag"]))
            count, nbytes = expected.get(key, (0, 0))
            expected[key] = count + 1, nbytes + int(block["requested"])
        found, asked = {}, 0
        for stack, labels, values in pprof.rows(profile):
            assert len(stack) == 2
            assert stack[0][0] in ("<listcomp>", "recording")
            site = next(site for site in peak.sites if f":{stack[0][1]} in {stack[0][0]} <" in site)
            asked += values["alloc_space"]
            if values["inuse_objects"]:
                found[site, labels["tag"]] = values["inuse_objects"], values["inuse_space"]
        assert found == expected
        assert asked == recording.bytes[recording.op == 0].sum()
        texts = profile.string_table
        assert texts[profile.default_sample_type] == "inuse_space"
        assert [(texts[one.type], texts[one.unit]) for one in profile.sample_type][1] == ("inuse_space", "bytes")

    def test_streams_of_a_trace_without_sites(self, tmp_path):
        trace = recorded("two_streams")
        rows = list(pprof.rows(self.profile(trace, tmp_path / "heap.pb.gz")))
        assert [labels for _, labels, _ in rows] == [{}, {"stream": 1}]
        assert sum(values["inuse_space"] for _, _, values in rows) == trace.peak_live_bytes
        assert sum(values["alloc_objects"] for _, _, values in rows) == trace.allocations

    def test_a_clock_that_goes_back(self, tmp_path):
        whole = made(*SMALL)
        columns = {name: getattr(whole, name) for name in ("op", "id", "bytes", "stream")}
        profile = self.profile(vpool.Trace(**columns, t_us=whole.t_us[::-1] * 1000), tmp_path / "heap.pb.gz")
        assert profile.duration_nanos == (whole.t_us[-1] - whole.t_us[0]) * 1_000_000

    def test_it_is_not_read(self, tmp_path, capsys):
        made(*SMALL).save(tmp_path / "heap.pb.gz", "pprof")
        assert main(["convert", str(tmp_path / "heap.pb.gz"), str(tmp_path / "x.csv")]) == 1
        assert "a profile of pprof, which sums up" in capsys.readouterr().err


class TestPart:
    def test_what_was_live_before_comes_first(self, recording):
        part = recording.part(40, 80)
        live = recording.live_bytes
        assert part.live_bytes[-41] == live[39]
        assert np.array_equal(part.live_bytes[-40:], live[40:80])
        assert part.t_us[0] == 0
        before = len(part) - 40
        assert f"{before} blocks were live before event 40" in part.notes[-1]
        for event in (0, 20, 39):
            mine, whole = moment(part, before + event).report, moment(recording, 40 + event).report
            for name in (
                "reserved_bytes",
                "allocated_bytes",
                "free_bytes",
                "largest_free_bytes",
                "tags",
                "segment_rows",
            ):
                if name != "tags":
                    assert getattr(mine, name) == getattr(whole, name), name
            assert [(row["tag"], row["live_bytes"]) for row in mine.tags] == [
                (row["tag"], row["live_bytes"]) for row in whole.tags
            ]

    def test_ends(self):
        trace = made(*SMALL)
        assert trace.part(0, len(trace)) is trace
        assert trace.part(-5, 99) is trace
        assert trace.part(5, 5).live_bytes[-1] == trace.part(5, 2).live_bytes[-1] == trace.live_bytes[4]
        assert len(made().part(0, 0)) == 0
        joined = trace.part(3, 6)
        assert joined.op.tolist()[-3:] == trace.op[3:6].tolist()

    def test_command(self, tmp_path, capsys):
        out = tmp_path / "part.csv"
        command = ["convert", str(FOLDER / "two_streams.npz"), str(out), "--events"]
        assert main([*command, "1000:2000", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        whole = recorded("two_streams")
        assert result["events"] == len(whole.part(1000, 2000)) == len(vpool.Trace.load(out))
        assert main([*command, ":10"]) == 0
        assert len(vpool.Trace.load(out)) == 10
        for wrong in ("10", "5:5", "a:b", "-3:5"):
            with pytest.raises(SystemExit):
                main([*command, wrong])


@pytest.mark.parametrize("strategy", [None, "hybrid"])
def test_the_viewer_gets_addresses_of_a_replay(strategy, tmp_path):
    """Made-up ones would be right too, but say nothing of what a pool reserves."""
    out = tmp_path / "trace.pickle"
    more = ["--strategy", strategy] if strategy else []
    assert main(["convert", str(FOLDER / "two_streams.npz"), str(out), *more]) == 0
    trace = placed(recorded("two_streams"), strategy)
    snapshot = pickle.loads(out.read_bytes())
    addresses = [one["addr"] for one in snapshot["device_traces"][0] if one["action"] == "alloc"]
    assert addresses == trace.details.address[trace.op == 0].tolist()
    reserved = sum(segment["total_size"] for segment in snapshot["segments"])
    assert reserved == vpool.replay(trace, strategy).peak_reserved_bytes


def test_strategies_are_for_the_viewer(tmp_path, capsys):
    command = ["convert", str(FOLDER / "two_streams.npz"), str(tmp_path / "trace.csv"), "--strategy", "dynamic"]
    assert main(command) == 1
    assert "--strategy places blocks for torch-pickle" in capsys.readouterr().err

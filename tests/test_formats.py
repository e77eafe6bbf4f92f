"""Trace files of every format that users have: each sample gives the figures that were counted in it by hand."""

import bisect
import gzip
import json
from typing import ClassVar

import numpy as np
import pytest

import vpool
from tests.helpers.samples import NAMES, SAMPLES, content, live_at_end, load, noted, truth
from tests.helpers.traces import SMALL, made, recorded
from vpool.commands import main
from vpool.formats.writers import FORMATS, by_suffix

# Figures of the truth that a trace has itself, and those that no reader can know.
OF_THE_TRACE = {
    "peak_live": lambda trace: trace.peak_live_bytes,
    "peak_live_half_open": lambda trace: trace.peak_live_bytes,
    "peak_live_from_trace_alone": lambda trace: trace.peak_live_bytes,
    "peak_live_ignoring_reallocate": lambda trace: trace.peak_live_bytes,
    "peak_live_requested_from_trace_alone": lambda trace: trace.peak_live_bytes,
    "live_at_end": live_at_end,
    "live_at_end_from_trace": live_at_end,
    "live_bytes_requested_at_end_from_trace": lambda trace: int(trace.live_bytes[-1]),
}
UNKNOWABLE = ("known_feasible_capacity", "online_best_fit_one_segment_smallest_working_capacity")
# Samples that nobody counted: allocations, peak live bytes, live at the end.
COUNTED_HERE = {
    "kineto_trace/torch_profiler_mlp.json": (92, 195059200, 16),
    "rmm_csv/format_legacy_2019.csv": (7, 53136464, 5),
    "rmm_csv/rmm_cupy_etl.dev0.csv": (2576, 211479072, 0),
    "tensorflow_log/bfc_dump_old_style.txt": (7, 151994368, 7),
    "torch_snapshot/torch_snapshot_mlp.pickle": (373, 762581128, 68),
}


def test_a_trace_that_cannot_be_written_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    def fails(trace, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    path = tmp_path / "trace.csv"
    path.write_text("before")
    monkeypatch.setitem(FORMATS, "rmm", fails)
    with pytest.raises(OSError, match="No space left"):
        made(*SMALL).save(path, "rmm")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match=r"nowhere/trace\.npz") as caught:
        made(*SMALL).save(tmp_path / "nowhere" / "trace.npz")
    assert "part" not in str(caught.value)


def path_of(name):
    return SAMPLES / f"{name}.gz"


class TestSamples:
    """Every sample, as it is."""

    @pytest.mark.parametrize("name", NAMES)
    def test_figures(self, name):
        trace = vpool.Trace.load(path_of(name))
        told = truth(name)
        assert told or name in COUNTED_HERE
        for figure, value in told.items():
            if not figure.startswith(UNKNOWABLE):
                own = OF_THE_TRACE.get(figure)
                assert (own(trace) if own else trace.figures[figure]) == value, figure
        if name in COUNTED_HERE:
            assert (trace.allocations, trace.peak_live_bytes, live_at_end(trace)) == COUNTED_HERE[name]

    @pytest.mark.parametrize("name", NAMES)
    def test_content_counts_and_not_the_name_nor_gzip(self, name, tmp_path):
        odd = tmp_path / "trace.of.no.kind"
        odd.write_bytes(content(name))
        plain, packed = vpool.Trace.load(odd), vpool.Trace.load(path_of(name))
        for array in ("op", "id", "bytes", "stream", "t_us", "marks_us", "failures"):
            assert np.array_equal(getattr(plain, array), getattr(packed, array))
        assert (plain.notes, plain.figures) == (packed.notes, packed.figures)

    @pytest.mark.parametrize("name", NAMES)
    def test_it_replays(self, name):
        trace = vpool.Trace.load(path_of(name))
        result = vpool.replay(trace)
        assert result.oom is None
        assert result.peak_live_bytes == trace.peak_live_bytes
        assert result.notes == trace.notes

    @pytest.mark.parametrize("name", ["rmm_csv/format_modern_min.csv", "torch_snapshot/torch_snapshot_mlp.pickle"])
    def test_it_replays_on_the_command_line(self, name, capsys):
        assert main(["replay", str(path_of(name))]) == 0
        shown = capsys.readouterr().out
        assert vpool.Trace.load(path_of(name)).notes
        for note in vpool.Trace.load(path_of(name)).notes:
            assert note in shown

    def test_a_pickle_and_json_of_one_snapshot_agree(self):
        one = vpool.Trace.load(path_of("torch_snapshot/inference_128.pickle"))
        other = vpool.Trace.load(path_of("torch_snapshot/inference_128.json"))
        assert one.figures == other.figures
        for array in ("op", "id", "bytes", "stream", "t_us"):
            assert np.array_equal(getattr(one, array), getattr(other, array))

    def test_a_run_and_its_logs_agree(self):
        """The logs were derived from the snapshot of the same run."""
        snapshot = vpool.Trace.load(path_of("torch_snapshot/inference_128.pickle"))
        log = vpool.Trace.load(path_of("rmm_csv/derived_inference_128_one_stream.csv"))
        assert np.array_equal(snapshot.op, log.op)
        assert np.array_equal(snapshot.bytes, log.bytes)
        assert np.array_equal(snapshot.t_us, log.t_us)


class TestOwnForm:
    """What vpool's own files keep besides the events."""

    def test_notes_and_failures(self, tmp_path):
        trace = vpool.Trace.load(path_of("rmm_csv/derived_training_512_two_threads.csv"))
        trace.save(tmp_path / "trace.npz")
        again = vpool.Trace.load(tmp_path / "trace.npz")
        assert again.notes == trace.notes != []
        assert again.failures.tolist() == trace.failures.tolist() == [[1499 * n + 1, 1 << 34] for n in range(1, 6)]

    def test_compressed_once_more(self, tmp_path):
        trace = recorded("two_streams")
        trace.save(tmp_path / "trace.npz.gz")
        assert (tmp_path / "trace.npz.gz").read_bytes()[:2] == b"\x1f\x8b"
        assert np.array_equal(vpool.Trace.load(tmp_path / "trace.npz.gz").id, trace.id)

    @pytest.mark.parametrize(
        ("array", "value"),
        [
            ("notes", np.zeros(3)),
            ("notes", np.zeros((1, 1), "U1")),
            ("failures", np.zeros((2, 3), int)),
            ("failures", np.zeros(2, int)),
            ("failures", np.zeros((1, 2))),
            ("failures", np.array([[99, 1]])),
            ("failures", np.array([[-1, 1]])),
            ("failures", np.array([[0, 2**63]], np.uint64)),
        ],
    )
    def test_optional_arrays_that_are_none(self, tmp_path, array, value):
        made((1, 5), -1).save(tmp_path / "trace.npz")
        with np.load(tmp_path / "trace.npz") as arrays:
            np.savez(tmp_path / "other.npz", **{**arrays, array: value})
        with pytest.raises(vpool.FormatError, match=array):
            vpool.Trace.load(tmp_path / "other.npz")

    def test_failures_keep_their_place_when_traces_are_merged(self):
        one = vpool.Trace([0, 1], [0, 0], [7, 7], [0, 0], [0, 10], failures=[(1, 100), (2, 300)])
        other = vpool.Trace([0, 1], [0, 0], [9, 9], [0, 0], [5, 20], failures=[(0, 200), (1, 400)])
        merged = vpool.Trace.merge(one, other)
        # Events: one's first, other's first, one's last, other's last.
        assert merged.failures.tolist() == [[1, 200], [2, 100], [3, 300], [3, 400]]
        assert vpool.Trace.merge(made(), one).failures.tolist() == one.failures.tolist()

    def test_failures_are_scaled_with_the_rest(self):
        trace = vpool.Trace([0], [0], [1 << 20], [0], [0], failures=[(1, 1 << 30)])
        (failure,) = trace.scaled(1 << 10).failures.tolist()
        assert failure[0] == 1
        assert 0 < failure[1] <= 1 << 20


# A profile sums up, and is not read.
READ_BACK = [form for form in FORMATS if form != "pprof"]


class TestConvert:
    """From any format to any that a trace can be written in."""

    # What each has no place for.
    LOST: ClassVar = {
        "kineto": ("stream",),
        "umpire": ("stream", "marks_us", "failures"),
        "stalloc": ("t_us", "marks_us", "failures"),
        "rmm": ("marks_us",),
        "minimalloc": ("t_us", "stream", "marks_us", "failures"),
    }

    def trace(self):
        """Two streams, a free on another stream, empty and failed requests, steps."""
        return vpool.Trace(
            op=[0, 0, 1, 0, 0, 1, 1, 0],
            id=[0, 1, 0, 2, 3, 2, 1, 4],
            bytes=[512, 1000, 512, 700, 1 << 33, 700, 1000, 512],
            stream=[0, 1, 0, 1, 0, 1, 1, 0],
            t_us=[0, 10, 20, 20, 30, 90_000_000, 90_000_001, 90_000_001],
            marks_us=[0, 25],
            failures=[(3, 1 << 40), (8, 5)],
        )

    @pytest.mark.parametrize("form", READ_BACK)
    @pytest.mark.parametrize("packed", ["", ".gz"])
    def test_what_is_written_is_read_back(self, tmp_path, form, packed):
        trace, path = self.trace(), tmp_path / f"trace{packed}"
        trace.save(path, form)
        again = vpool.Trace.load(path)
        if form == "minimalloc":
            # A buffer whose end is not known lives until the end.
            for array in ("op", "number", "bytes"):
                assert getattr(again, array)[: len(trace)].tolist() == getattr(trace, array).tolist()
            assert live_at_end(again) == 0
            return
        for array in ("op", "number", "bytes", "stream", "t_us", "marks_us", "failures"):
            if array not in self.LOST.get(form, ()):
                assert getattr(again, array).tolist() == getattr(trace, array).tolist(), array

    @pytest.mark.parametrize("form", ["npz", "rmm", "torch-pickle", "torch-json", "umpire"])
    def test_a_clock_that_goes_back_below_its_first_time(self, tmp_path, form):
        """As in the log of two threads, the first of which wrote late."""
        trace = vpool.Trace([0, 0, 1], [0, 1, 0], [512, 512, 512], [0] * 3, [0, -1000, 1000])
        trace.save(tmp_path / "trace", form)
        assert vpool.Trace.load(tmp_path / "trace").t_us.tolist() == [0, -1000, 1000]

    @pytest.mark.parametrize("form", READ_BACK)
    def test_an_empty_trace(self, tmp_path, form):
        made().save(tmp_path / "trace", form)
        assert len(vpool.Trace.load(tmp_path / "trace")) == 0

    @pytest.mark.parametrize("form", READ_BACK)
    def test_a_recorded_trace(self, tmp_path, form):
        trace = recorded("two_streams")
        trace.save(tmp_path / "trace", form)
        again = vpool.Trace.load(tmp_path / "trace")
        assert again.peak_live_bytes == trace.peak_live_bytes
        assert np.array_equal(again.bytes[: len(trace)], trace.bytes)
        assert np.array_equal(again.op[: len(trace)], trace.op)

    def test_an_unknown_format(self, tmp_path):
        with pytest.raises(ValueError, match=r"xml.*npz"):
            made().save(tmp_path / "trace", "xml")
        assert not (tmp_path / "trace").exists()

    def test_blocks_of_a_written_snapshot_tile_its_segments(self, tmp_path):
        """The viewer sums sizes up to find addresses."""
        recorded("two_streams").save(tmp_path / "trace.json", "torch-json")
        snapshot = json.loads((tmp_path / "trace.json").read_text())
        live = 0
        for segment in snapshot["segments"]:
            at = segment["address"]
            for block in segment["blocks"]:
                assert block["address"] == at
                at += block["size"]
                live += block["requested_size"] * (block["state"] == "active_allocated")
            assert at == segment["address"] + segment["total_size"]
        assert live == recorded("two_streams").live_bytes[-1]

    def test_live_blocks_of_a_written_log_do_not_overlap(self, tmp_path):
        recorded("two_streams").save(tmp_path / "log", "stalloc")
        live, most = [], 0
        for line in (tmp_path / "log").read_text().splitlines():
            if line[0] in "01":
                kind, address, nbytes, _ = line.split()
                span = int(address, 16), int(nbytes)
                place = bisect.bisect(live, span)
                if kind == "0":
                    assert live.pop(place - 1) == span
                    continue
                assert not place or sum(live[place - 1]) <= span[0]
                assert place == len(live) or sum(span) <= live[place][0]
                live.insert(place, span)
                most = max(most, len(live))
        assert most > 100

    @pytest.mark.parametrize(
        ("name", "form"),
        [
            ("a.npz", "npz"),
            ("a.csv.gz", "rmm"),
            ("A.PICKLE", "torch-pickle"),
            ("a.json", "torch-json"),
            ("a.txt", "stalloc"),
            ("a.pb.gz", "pprof"),
            ("a", None),
            ("a.gz", None),
        ],
    )
    def test_endings(self, name, form):
        assert by_suffix(name) == form

    def test_command(self, tmp_path, capsys):
        out = tmp_path / "out.csv.gz"
        name = "torch_snapshot/training_512.pickle"
        assert main(["convert", str(path_of(name)), str(out)]) == 0
        shown = capsys.readouterr().out
        assert "14,523 events" in shown
        assert "438 frees" in shown
        assert gzip.decompress(out.read_bytes()).startswith(b"Thread,Time,Action,Pointer,Size,Stream\n")
        assert vpool.Trace.load(out).peak_live_bytes == truth(name)["peak_live_requested_from_trace_alone"]

    def test_command_needs_to_know_the_format(self, tmp_path, capsys):
        assert main(["convert", str(path_of(NAMES[0])), str(tmp_path / "out")]) == 1
        assert "--to" in capsys.readouterr().err
        assert main(["convert", str(path_of(NAMES[0])), str(tmp_path / "out"), "--to", "umpire"]) == 0
        with pytest.raises(SystemExit):
            main(["convert", str(path_of(NAMES[0])), str(tmp_path / "out"), "--to", "xml"])

    def test_command_never_writes_what_it_reads(self, tmp_path, capsys):
        path, link = tmp_path / "log.csv", tmp_path / "link.npz"
        content = b"Thread,Time,Action,Pointer,Size,Stream\n1,0:0:0.0,allocate,0x100,256,0\n"
        path.write_bytes(content)
        link.symlink_to(path)
        for out in (path, link):
            assert main(["convert", str(path), str(out)]) == 1
            assert "is the file to read: name another one to write" in capsys.readouterr().err
        assert path.read_bytes() == content
        assert main(["convert", str(tmp_path / "none.csv"), str(path)]) == 1
        assert "none.csv" in capsys.readouterr().err
        assert path.read_bytes() == content

    def test_a_reason_of_json_without_its_place(self, tmp_path, capsys):
        path = tmp_path / "trace.json"
        path.write_bytes(b'{"traceEvents": [{"name": "a\x01b"}]}')
        assert main(["replay", str(path)]) == 1
        assert capsys.readouterr().err.endswith(": character 28: Invalid control character\n")

    def test_command_with_a_device(self, tmp_path, capsys):
        out = tmp_path / "out.npz"
        path = str(path_of("kineto_trace/rank1_memory_events.json"))
        assert main(["convert", path, str(out), "--device", "cpu"]) == 0
        assert len(vpool.Trace.load(out)) <= 368
        assert main(["convert", path, str(out), "--device", "7"]) == 1
        capsys.readouterr()
        assert main(["replay", path, "--device", "cpu", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["events"] == len(vpool.Trace.load(out))
        assert main(["replay", path, "--device", "7"]) == 1


def test_a_note_for_each_kind_of_oddity():
    trace = load(
        "Thread,Time,Action,Pointer,Size,Stream\n"
        "1,23:59:59.5,allocate,0x100,10,0\n"
        "1,00:00:00.5,allocate,0x100,20,0\n"
        "1,00:00:00.4,free,0x999,10,0\n"
        "1,00:00:00.6,free,0x100,15,0x7\n"
        "1,00:00:00.6,resize,0x100,15,0x7\n"
        "1,00:00:00.7,allocate failure,,99,0\n"
        "1,00:00:00.7,allocate,0x200,5"
    )
    assert trace.t_us.tolist() == [0, 1_000_000, 1_100_000]
    assert noted(trace, "midnight", "1 time")
    assert noted(trace, "1 allocation", "live already")
    assert noted(trace, "1 free", "left out", "not live")
    assert noted(trace, "1 free on another stream")
    assert noted(trace, "1 free of another size")
    assert noted(trace, "1 row", "resize", "line 6")
    assert noted(trace, "1 request failed", "99 bytes", "20 bytes live")
    assert noted(trace, "line 8", "left out")
    assert noted(trace, "1 allocation of 20 bytes", "live at the end")

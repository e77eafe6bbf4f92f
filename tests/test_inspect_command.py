"""``vpool inspect``: snapshots, recordings, and files of other tools with the figures that were counted in them."""

import json

import pytest

import vpool
from tests.helpers.pools import MIB
from tests.helpers.samples import NAMES, SAMPLES, truth
from vpool.commands import main

# Figures of the truth that a trace has itself, by the key that the command shows them with.
OF_THE_TRACE = {
    "peak_live": "peak_live_bytes",
    "peak_live_half_open": "peak_live_bytes",
    "peak_live_from_trace_alone": "peak_live_bytes",
    "peak_live_ignoring_reallocate": "peak_live_bytes",
    "peak_live_requested_from_trace_alone": "peak_live_bytes",
    "live_at_end": "live_at_end",
    "live_at_end_from_trace": "live_at_end",
    "live_bytes_requested_at_end_from_trace": "live_bytes_at_end",
}
UNKNOWABLE = ("known_feasible_capacity", "online_best_fit_one_segment_smallest_working_capacity")


def inspect(capsys, *arguments):
    assert main(["inspect", *map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_samples(name, capsys):
    """Every figure of the truth that can be known is printed, as JSON and for people."""
    path = SAMPLES / f"{name}.gz"
    found = json.loads(inspect(capsys, path, "--json"))
    text = inspect(capsys, path)
    assert found["kind"] == "trace"
    for figure, value in truth(name).items():
        if figure.startswith(UNKNOWABLE):
            continue
        shown = found[OF_THE_TRACE[figure]] if figure in OF_THE_TRACE else found["figures"][figure]
        assert shown == value, figure
        if isinstance(value, int):
            assert f"{value:,}" in text, figure
    assert found["report"]["requested_bytes"] == found["peak_live_bytes"]
    assert all(f"note: {note}" in text for note in found["notes"])
    assert "utilization" in text


def test_figures_are_for_people(capsys):
    """Bytes have a unit beside them, and each part of a figure stands on a line of its own."""
    text = inspect(capsys, SAMPLES / "torch_snapshot" / "torch_snapshot_mlp.pickle.gz")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "reserved_bytes 1,090,519,040 (1.02 GiB)" in lines
    assert "actions: alloc 373" in lines


class TestPools:
    """What pools have left behind."""

    @pytest.fixture
    def files(self, pool, tmp_path):
        with pool.record() as recording:
            with vpool.tag("kept"):
                pool.allocate(3 * MIB)
            dropped = pool.allocate(5 * MIB)
            worst = pool.inspect()
            pool.snapshot().save(tmp_path / "snapshot.npz")
            pool.deallocate(dropped)
        recording.save(tmp_path / "recording.npz")
        return tmp_path, worst

    def test_a_snapshot(self, files, capsys):
        folder, worst = files
        found = json.loads(inspect(capsys, folder / "snapshot.npz", "--json"))
        assert found["kind"] == "snapshot"
        assert found["report"] == worst.to_dict()
        assert inspect(capsys, folder / "snapshot.npz") == f"{worst}\n"

    def test_a_recording(self, files, capsys):
        folder, worst = files
        found = json.loads(inspect(capsys, folder / "recording.npz", "--json"))
        assert (found["kind"], found["events"], found["peak_event"]) == ("trace", 3, 1)
        for figure in ("allocated_bytes", "reserved_bytes", "free_bytes", "segments", "size_classes"):
            assert found["report"][figure] == json.loads(worst.to_json())[figure]
        assert "as it was recorded" in inspect(capsys, folder / "recording.npz")

    @pytest.mark.parametrize("name", ["snapshot.npz", "recording.npz"])
    def test_a_drawing(self, name, files, capsys):
        folder, _ = files
        inspect(capsys, folder / name, "--plot", folder / "out.svg")
        assert "<svg" in (folder / "out.svg").read_text()

    def test_what_is_neither(self, tmp_path, capsys):
        (tmp_path / "file").write_bytes(b"no such thing")
        assert main(["inspect", str(tmp_path / "file")]) == 1
        assert main(["inspect", str(tmp_path / "nowhere")]) == 1
        assert capsys.readouterr().err.count("\n") == 2

    def test_an_empty_trace(self, tmp_path, capsys, pool):
        with pool.record() as recording:
            pass
        recording.save(tmp_path / "empty.npz")
        found = json.loads(inspect(capsys, tmp_path / "empty.npz", "--json"))
        assert (found["events"], found["report"]["live_blocks"]) == (0, 0)


def test_a_replay_that_is_out_of_memory_says_what_would_help(capsys):
    trace = str(SAMPLES.parents[1] / "traces" / "two_streams.npz")
    assert main(["replay", trace, "--capacity", "6GiB"]) == 1
    text = capsys.readouterr().out
    assert "Largest holders of" in text
    assert "What would help" in text

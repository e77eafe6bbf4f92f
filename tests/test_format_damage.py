"""Trace files that are cut, damaged or hostile: they load with a note or are refused, in bounded memory."""

import gzip
import json
import os
import pickle
import random
import re
import struct
import time
import tracemalloc
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vpool
from tests.helpers.damage import damaged
from tests.helpers.samples import NAMES, SMALL, content, events_of, load, noted
from vpool import formats

MIB = 1 << 20
# Formats by the folders of their samples.
FORMATS = sorted({name.split("/")[0] for name in NAMES})


def outcome(data):
    """The trace of some bytes, or the error that refuses them; anything else is a failure."""
    try:
        return load(data)
    except vpool.FormatError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message) < 1000
        return error


def loaded(data):
    result = outcome(data)
    assert isinstance(result, vpool.Trace), result
    return result


def assert_refused(data, *words):
    result = outcome(data)
    assert isinstance(result, vpool.FormatError), result
    for word in words:
        assert word in str(result)


def small(name, most=2500):
    """A sample, or so much of its beginning that tests of each byte are quick; with a whole line at its end."""
    data = content(name)
    if len(data) <= most or name.startswith(("kineto", "torch")):
        return data
    return data[: data.rindex(b"\n", 0, most) + 1]


def seed_of(name):
    """What is like a sample and so small that thousands of damaged copies are read in a minute."""
    if name.startswith("kineto"):
        events = json.loads(content(name))["traceEvents"]
        memory = [event for event in events if event["name"] == "[memory]"]
        return json.dumps({"schemaVersion": 1, "traceEvents": [*events[:5], *memory[:40]]}).encode()
    if name.startswith("torch_memory"):
        rows = json.loads(content(name))
        return json.dumps([*rows[:30], *rows[-200:]]).encode()
    return small(name)


def tiny_snapshot(protocol):
    def entry(action, address, t):
        return {"action": action, "addr": address, "size": 512, "stream": 0, "time_us": t, "frames": []}

    entries = [entry("alloc", 1 << 40, 1), entry("alloc", 2 << 40, 2), entry("free_completed", 1 << 40, 3)]
    block = {"address": 1 << 40, "size": 512, "state": "inactive"}
    segment = {"address": 1 << 40, "total_size": 512, "device": 0, "segment_pool_id": (0, 0), "blocks": [block]}
    snapshot = {"segments": [segment], "device_traces": [entries]}
    return json.dumps(snapshot).encode() if protocol == "json" else pickle.dumps(snapshot, protocol)


class TestCut:
    """A file that was not written to its end: what is there is read."""

    @pytest.mark.parametrize("name", ["minimalloc/A.1048576.csv", *SMALL[2:6], "umpire_replay/tut_replay_log.json"])
    def test_logs_at_each_byte(self, name):
        sound = small(name)
        whole, before = loaded(sound), 0
        for length in range(len(sound)):
            result = outcome(sound[:length])
            if isinstance(result, vpool.FormatError):
                # Only where nothing tells yet what it is.
                assert length < 800, length
                continue
            assert before <= len(result) <= len(whole)
            ended = sound[length - 1 : length] == b"\n"
            part_of_a_number = not ended and ("tensorflow" in name or len(result) == 1)
            if "minimalloc" not in name and not part_of_a_number:
                assert events_of(result) == events_of(whole)[: len(result)]
            before = len(result)
            if not ended:
                assert noted(result, "the last, has no end")

    @pytest.mark.parametrize("name", ["kineto_trace/torch_profiler_mlp.json", "torch_snapshot/inference_128.json"])
    def test_json_at_some_bytes(self, name):
        sound, whole, notes = content(name), load(content(name)), 0
        for length in random.Random(1).sample(range(len(sound) // 4, len(sound)), 25):
            result = loaded(sound[:length])
            if "kineto" not in name:
                assert events_of(result) == events_of(whole)[: len(result)]
            notes += bool(noted(result, "ends at character"))
        assert notes == 25

    @pytest.mark.parametrize("form", ["json", 0, 1, 2, 3, 4, 5])
    def test_snapshots_at_each_byte(self, form):
        sound = tiny_snapshot(form)
        whole, most = load(sound), 0
        for length in range(len(sound)):
            result = outcome(sound[:length])
            if isinstance(result, vpool.Trace):
                assert events_of(result) == events_of(whole)[: len(result)]
                assert noted(result, "the file ends at")
                most = max(most, len(result))
        assert most == len(whole)

    def test_a_pickle_at_some_bytes(self):
        name = "torch_snapshot/torch_snapshot_mlp.pickle"
        sound, whole, longest = content(name), load(content(name)), 0
        for length in random.Random(2).sample(range(len(sound) // 2, len(sound)), 25):
            result = loaded(sound[:length])
            if not noted(result, "no events"):
                assert events_of(result) == events_of(whole)[: len(result)]
                longest = max(longest, len(result))
            assert noted(result, "the file ends at")
        assert longest > len(whole) // 2

    @pytest.mark.parametrize("name", [name for name in SMALL if name != "minimalloc/input.12.csv"])
    def test_compressed_data(self, name):
        packed = gzip.compress(content(name), mtime=0)
        whole, loads = load(packed), 0
        for part in (0.2, 0.5, 0.8, 0.95):
            result = outcome(packed[: int(len(packed) * part)])
            if isinstance(result, vpool.Trace):
                loads += 1
                assert len(result) <= len(whole)
                assert any("ends" in note or "no end" in note for note in result.notes)
        assert loads or len(packed) < 1000
        assert_refused(packed[:5])

    def test_many_small_cuts_of_compressed_data(self):
        packed = gzip.compress(small("rmm_csv/derived_training_512_two_threads.csv"))
        for length in range(0, len(packed), 7):
            outcome(packed[:length])


class TestFlipped:
    @pytest.mark.parametrize("name", SMALL)
    @pytest.mark.parametrize("flips", [50, pytest.param(20_000, marks=pytest.mark.long)])
    def test_bits(self, name, flips):
        sound, chance = small(name), random.Random(3)
        for _ in range(flips):
            at = chance.randrange(8 * len(sound))
            outcome(sound[: at // 8] + bytes([sound[at // 8] ^ 1 << at % 8]) + sound[at // 8 + 1 :])

    def test_every_byte_of_a_small_snapshot(self):
        for form in (0, 2, 4):
            sound = tiny_snapshot(form)
            for at in range(len(sound)):
                for other in (0x28, 0x2E, 0x7F, 0x85):
                    outcome(sound[:at] + bytes([other]) + sound[at + 1 :])

    def test_damaged_compressed_data(self):
        packed = bytearray(gzip.compress(content("rmm_csv/derived_inference_128_one_stream.csv")))
        packed[len(packed) // 2] ^= 0xFF
        assert_refused(bytes(packed))
        packed = bytearray(gzip.compress(content("rmm_csv/derived_inference_128_one_stream.csv")))
        packed[-6] ^= 0xFF
        assert_refused(bytes(packed), "damaged gzip data")


def memory_of(function):
    """Bytes that a function takes at most."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value


class TestHostilePickles:
    @pytest.fixture
    def marker(self, tmp_path):
        return tmp_path / "exploded"

    def test_what_could_run_code(self, marker):
        command = f"touch {marker}".encode()
        call = [
            b"cos\nsystem\n(" + text(command) + b"tR.",
            b"\x80\x02cos\nsystem\n(" + text(command) + b"\x85R.",
            b"\x80\x04" + text(b"os") + text(b"system") + b"\x93" + text(command) + b"\x85R.",
            b"\x80\x02(" + text(command) + b"ios\nsystem\n.",
            b"\x80\x02(cos\nsystem\n" + text(command) + b"o.",
            b"\x80\x02cos\nsystem\n" + text(command) + b"\x85\x81.",
            b"\x80\x02cos\nsystem\n" + text(command) + b"\x85}\x92.",
            b"\x80\x02cos\nsystem\n)R}b.",
            b"\x80\x02Pid\n.",
            b"\x80\x02K\x01Q.",
            b"\x80\x02\x82\x01.",
            b"\x80\x02\x83\x01\x00.",
            b"\x80\x02\x84\x01\x00\x00\x00.",
            b"\x80\x05\x97.",
            b"\x80\x05\x96" + struct.pack("<Q", 4) + b"abcd.",
            b"\x80\x04\x8f(K\x01\x90.",
            b"\x80\x04\x8f\x91.",
            b"\x80\x02\xff.",
        ]
        for hostile in call:
            assert_refused(hostile)
            # Deep in what looks honest.
            inside = b"\x80\x02}(" + text(b"segments") + b"](" + hostile.removesuffix(b".").lstrip(b"\x80\x02") + b"eu."
            assert_refused(inside)
        assert not marker.exists()
        pickle.loads(call[0])
        assert marker.exists()

    def test_a_byte_that_is_no_opcode(self):
        assert str(outcome(b"\x80\x04}\xff.")) == "byte 3 of the pickle: 0xff is no opcode; nothing of it was run"

    def test_the_message_names_what_was_asked_for(self):
        assert_refused(
            b"\x80\x02}(" + text(b"segments") + b"cos\nsystem\n", "byte 17", "GLOBAL", "nothing of it was run"
        )

    def test_an_object_in_a_snapshot(self, marker):
        class Bomb:
            def __reduce__(self):
                return os.mkdir, (str(marker),)

        for protocol in range(2, 6):
            assert_refused(pickle.dumps({"segments": [Bomb()], "device_traces": []}, protocol), "plain data")
        assert not marker.exists()

    @pytest.mark.parametrize(
        "hostile",
        [
            # Levels of lists, of tuples, of dicts, of marks.
            b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
            b"\x80\x02)" + b"\x85" * 100_000 + b".",
            b"\x80\x02}" + text(b"a") * 3 + b"}" * 100_000 + b".",
            b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b".",
            b"\x80\x02(" + b"]" * 100_000 + b"l.",
            # A memo of four thousand million entries, and more.
            b"\x80\x02}r\xff\xff\xff\xff.",
            b"\x80\x02]r\x00\x00\x00\x7f.",
            b"(dp99999999999999\n.",
            b"(dp-5\n.",
            b"\x80\x02}g99999\n.",
            # Texts and numbers that are longer than the file.
            b"\x80\x02X\xff\xff\xff\xff",
            b"\x80\x04\x8d" + struct.pack("<Q", 2**62),
            b"\x80\x04\x8d" + struct.pack("<Q", 2**64 - 1),
            b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1),
            b"\x80\x02\x8b" + struct.pack("<i", -1),
            b"\x80\x02\x8a\xff" + b"\xff" * 255 + b".",
            b"\x80\x02L" + b"9" * 200_000 + b"L\n.",
            b"\x80\x02I" + b"9" * 20_000 + b"\n.",
            b"\x80\x04\x8e" + struct.pack("<Q", 2**62),
            b"\x80\x04B\xff\xff\xff\xff",
            b"\x80\x02V" + b"a" * 200_000,
            # Keys that are slow to hash, or hash alike.
            b"\x80\x02})" + b"\x85" * 900 + b"K\x01s.",
            b"\x80\x02}("
            + b"".join(b"\x8a\x09" + ((2**61 - 1) * n).to_bytes(9, "little") + b"N" for n in range(99))
            + b"u.",
            # Nothing to take, marks without an end, two objects.
            b"\x80\x02.",
            b"\x80\x02a.",
            b"\x80\x02]a.",
            b"\x80\x02s.",
            b"\x80\x02u.",
            b"\x80\x02}(Nu.",
            b"\x80\x02N(Nu.",
            b"\x80\x02N(Ne.",
            b"\x80\x02(\x85.",
            b"\x80\x02N(\x85.",
            b"\x80\x020.",
            b"\x80\x022.",
            b"\x80\x02\x94.",
            b"\x80\x02}}.",
            b"\x80\x02}(.",
            b"\x80\x09}.",
            b"\x80\x02S'a\n.",
            b"\x80\x02Fabc\n.",
        ],
    )
    def test_damage_that_takes_memory_or_time(self, hostile):
        begin = time.monotonic()
        used = memory_of(lambda: assert_refused(hostile))
        assert used < 24 * MIB
        assert time.monotonic() - begin < 10

    @pytest.mark.parametrize("opcode", [b"N", b"(", b"2"])
    def test_objects_that_no_container_holds(self, opcode):
        assert_refused(b"\x80\x02]" + opcode * 600_000, "objects that nothing holds")

    def test_a_list_within_itself(self):
        assert_refused(b"\x80\x02]q\x00h\x00a.")
        assert_refused(b"\x80\x02}q\x00" + text(b"segments") + b"]q\x01h\x01as.")
        assert_refused(b"\x80\x02}q\x00" + text(b"device_traces") + b"]q\x01h\x01as.")

    def test_one_list_many_times(self):
        """Few bytes that stand for a million million events are walked no further than the file is long."""
        entry = {"action": "alloc", "addr": 1, "size": 1, "stream": 0, "time_us": 1}
        entries = [entry] * 10_000
        assert_refused(pickle.dumps({"segments": [], "device_traces": [entries] * 10_000}), "more items")
        segment = {"total_size": 1, "blocks": [{"size": 1, "state": "inactive"}] * 10_000}
        assert_refused(pickle.dumps({"segments": [segment] * 10_000}), "more items")
        assert_refused(pickle.dumps({"device_traces": [[entry]] * 2000, "x": "y" * 10_000}), "devices")


class TestHostileText:
    @pytest.mark.parametrize(
        "hostile",
        [
            b"[" * 1_000_000,
            b'{"a":' * 200_000,
            b'{"traceEvents": ' + b"[" * 1_000_000,
            b'{"traceEvents": [{"name": "[memory]", "args": ' + b"[" * 1_000_000,
            b'{"traceEvents": [' + b'{"a":' * 200_000,
            b'{"segments": [{"blocks": ' + b"[" * 100_000,
            b'{"other": ' + b"[" * 1_000_000 + b', "segments": []}',
            b'{"traceEvents": [' + b'"' + b"a" * 30_000_000 + b'"]}',
            b'{"traceEvents": [1' + b"0" * 10_000 + b"]}",
            b'{"traceEvents": []}}',
            b'{"traceEvents": [}',
            b'{"traceEvents": [,]}',
            b'{"traceEvents" []}',
            b"{'traceEvents': []}",
            b'{"segments": [NaN]}',
            b'{"device_traces": [[NaN]]}',
            b'{"device_traces": [' + b"[[]]," * 10 + b"[]]}",
            b'{"segments": [\xff\xff]}',
            b"x" * 3_000_000,
            b"\x00" * 3_000_000,
            b"Thread,Time,Action,Pointer,Size,Stream\n" + b"1" * 3_000_000,
            b"Thread,Time,Action,Pointer,Size,Stream\n1,12:00:00,allocate,0x1," + b"1" * 100_000 + b",0\n1,",
            "Thread,Time,Action,Pointer,Size,Stream\n".encode("utf-16"),
            b"id,lower,upper,size\na,0,9223372036854775807,1\n\n",
            b"id,lower,upper,size\na,0,1,9223372036854775807\nb,0,1,9223372036854775807\n",
            b"1 0x10 9223372036854775807 0\n1 0x20 9223372036854775807 0\n",
        ],
        ids=lambda hostile: repr(hostile[:40]),
    )
    def test_is_refused(self, hostile):
        used = memory_of(lambda: assert_refused(hostile))
        assert used < 160 * MIB

    def test_an_array_that_would_be_a_cut_file_is_one(self):
        """Not every odd file is hostile: without its end it might have been this."""
        assert noted(loaded(b'{"traceEvents": [{"name": "x"'), "ends at character")

    @pytest.mark.parametrize("line", [b"x" * 100, b"1 0x10 5 0", b" ", b""])
    def test_a_gzip_bomb(self, line, monkeypatch):
        monkeypatch.setattr("vpool.formats.source.BOMB_BYTES", MIB)
        packed = gzip.compress((line + b"\n") * (2 * MIB // (len(line) + 1)))
        assert len(packed) < MIB // 100
        assert memory_of(lambda: assert_refused(packed, "grows without end")) < 12 * MIB

    @pytest.mark.parametrize("load", [vpool.Trace.load, vpool.Snapshot.load, vpool.Plan.load])
    def test_an_archive_that_fills_the_memory(self, load, tmp_path):
        path = tmp_path / "small.npz"
        np.savez_compressed(path, kind={vpool.Snapshot: "vpool snapshot", vpool.Plan: "plan"}.get(load.__self__, ""))
        with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
            for name in ("op", "id", "segments", "offsets"):
                with archive.open(f"{name}.npy", "w") as member:
                    np.lib.format.write_array_header_1_0(
                        member, {"descr": "|u1", "fortran_order": False, "shape": (32 * MIB,)}
                    )
                    for _ in range(32):
                        member.write(bytes(MIB))

        honest = path.read_bytes()
        # The size that it says its data has, in the entry of each member at its end.
        boastful = re.sub(rb"(PK\x01\x02.{16}).{4}", lambda entry: entry[1] + b"\0\0\0\x70", honest, flags=re.DOTALL)
        assert len(honest) == len(boastful)
        assert honest != boastful

        def refused():
            with pytest.raises(vpool.FormatError, match=r"an archive of \d+ bytes that grows to \d+"):
                load(path)

        for written in (honest, boastful):
            path.write_bytes(written)
            assert memory_of(refused) < MIB

    def test_trailing_bytes_after_compressed_data(self):
        assert_refused(gzip.compress(content("rmm_csv/format_modern_min.csv")) + b"more", "damaged gzip data")
        assert loaded(gzip.compress(content("rmm_csv/format_modern_min.csv")) + bytes(512))

    def test_several_compressed_parts(self):
        lines = content("rmm_csv/format_modern_min.csv").splitlines(keepends=True)
        parts = b"".join(gzip.compress(line) for line in lines)
        assert events_of(loaded(parts)) == events_of(load(b"".join(lines)))


class TestMemory:
    """What a reader takes grows with the allocations and frees, and not with the rest of a file."""

    def test_a_profiler_trace(self):
        other = {
            "ph": "X",
            "cat": "cpu_op",
            "name": "aten::add",
            "pid": 1,
            "tid": 1,
            "ts": 1,
            "dur": 1,
            "args": {"a": "b" * 500},
        }
        memory = {
            "ph": "i",
            "name": "[memory]",
            "ts": 1,
            "args": {"Bytes": 512, "Addr": 1, "Device Type": 1, "Device Id": 0},
        }
        data = (
            b'{"traceEvents": ['
            + b",".join([json.dumps(memory).encode(), *[json.dumps(other).encode()] * 30_000])
            + b"]}"
        )
        assert len(data) > 17 * MIB
        assert memory_of(lambda: loaded(data)) < 6 * MIB

    def test_a_log_of_rmm(self):
        rows = "".join(f"1,12:00:00.0,allocate,0x{n:x},5,0\n1,12:00:00.0,free,0x{n:x},5,0\n" for n in range(1, 20_001))
        data = ("Thread,Time,Action,Pointer,Size,Stream\n" + rows).encode()
        # Twenty-odd bytes an event, and as much again while it is checked.
        assert memory_of(lambda: loaded(data)) < 40_000 * 70 + 3 * MIB

    @pytest.mark.parametrize(
        ("begin", "row", "end"),
        [
            ("Thread,Time,Action,Pointer,Size,Stream\n", "1,12:00:00.0,allocate failure,0,5,NAME\n", ""),
            ("Thread,Time,Action,Pointer,Size,Stream\n", "NAME,12:00:00.0,allocate failure,0,5,0\n", ""),
            ("Thread,Time,Action,Pointer,Size,Stream\n", "1,12:00:00.0,NAME,0,5,0\n", ""),
            ("1 0x10 5 0\n", "NAME\n", ""),
            ('{"kind": "replay", "event": "a"}\n', '{"kind": "replay", "event": "NAME"}\n', ""),
            ('{"segments": [], "device_traces": [[', '{"action": "NAME", "size": 1},', "]]}"),
            ('{"segments": [], "external_annotations": [', '{"name": "NAME", "stage": "END", "time_us": 1},', "]}"),
            ('{"traceEvents": [', '{"ph": "X", "name": "ProfilerStepNAME", "ts": 1},', "]}"),
        ],
        ids=["stream", "thread", "action", "line", "event", "torch-action", "annotation", "step"],
    )
    def test_long_names_are_not_kept(self, begin, row, end):
        rows = (row.replace("NAME", f"{n:x}" + "z" * 500_000) for n in range(40))
        data = (begin + "".join(rows) + end).encode()
        assert memory_of(lambda: outcome(data)) < 12 * MIB

    def test_a_snapshot_with_stacks(self):
        frames = [{"name": "forward", "filename": "model.py", "line": n} for n in range(100)]
        entries = [
            {
                "action": "alloc",
                "addr": 512 * n,
                "size": 512,
                "stream": 0,
                "time_us": n,
                "frames": frames[n % 50 :][:40],
            }
            for n in range(8000)
        ]
        data = pickle.dumps({"segments": [], "device_traces": [entries]}, 4)
        assert memory_of(lambda: pickle.loads(data)) > 5 * MIB
        assert memory_of(lambda: loaded(data)) < 4 * MIB

    def test_other_lines_around_a_dump(self):
        data = b"some line of a program that runs for days\n" * 100_000 + b"Chunk at 0x7f00 of size 256\n"
        assert memory_of(lambda: loaded(data)) < 4 * MIB


class TestFuzz:
    """Damaged samples, and bytes that were made up."""

    @pytest.mark.parametrize("form", FORMATS)
    @pytest.mark.parametrize("seconds", [1, pytest.param(600, marks=pytest.mark.long)])
    def test_damaged_samples(self, form, seconds):
        """``VPOOL_FUZZ_SECONDS`` is how long the short run takes for each format, instead of a second."""
        seconds = float(os.environ.get("VPOOL_FUZZ_SECONDS", seconds)) if seconds == 1 else seconds
        seeds = [seed_of(name) for name in NAMES if name.startswith(form)]
        if form == "torch_snapshot":
            tiny = [tiny_snapshot(form) for form in ("json", 0, 1, 2, 4)]
            seeds = [seed for seed in seeds if len(seed) < 200_000] + tiny * 2
        end, number, loads = time.monotonic() + seconds, 0, 0
        while time.monotonic() < end:
            number += 1
            chance = random.Random(number)
            data = damaged(chance, chance.choice(seeds))
            if not number % 10:
                data = gzip.compress(data, 1)
            loads += isinstance(outcome(data), vpool.Trace)
        print(f"{form}: {number} inputs, {loads} of them loaded")
        assert number > loads

    @given(st.binary(max_size=200))
    @settings(max_examples=300, deadline=None)
    def test_bytes(self, data):
        outcome(data)

    @given(
        st.lists(
            st.sampled_from(
                [bytes([code]) for code in b"()]}aestu\x85\x86\x87012hjqr\x94KMJGXVSLIFNdlp\x80\x95\x8c\x8a."]
            )
            | st.binary(max_size=4)
        )
    )
    @settings(max_examples=500, deadline=None)
    def test_opcodes(self, codes):
        outcome(b"\x80\x04" + b"".join(codes))

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.dictionaries(
                    st.sampled_from(
                        [
                            "action",
                            "addr",
                            "size",
                            "stream",
                            "time_us",
                            "blocks",
                            "state",
                            "total_size",
                            "name",
                            "args",
                            "ts",
                            "Bytes",
                            "Addr",
                            "Device Type",
                            "device",
                        ]
                    ),
                    inner,
                    max_size=5,
                )
            ),
        )
    )
    @settings(max_examples=400, deadline=None)
    def test_values_in_the_place_of_others(self, value):
        for name in ("segments", "device_traces", "external_annotations", "traceEvents"):
            outcome(json.dumps({name: value}).encode())
            outcome(json.dumps({name: [value]}).encode())
            if name != "traceEvents":
                outcome(pickle.dumps({"segments": [], name: [value]}, 4))
        outcome(json.dumps([value]).encode())
        outcome(json.dumps({"kind": "replay", "event": "allocate", "payload": value, "result": value}).encode())

    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["allocate", "free", "allocate failure"]),
                st.integers(0, 5),
                st.integers(0, 3),
                st.integers(0, 86_399),
            )
        )
    )
    @settings(max_examples=200, deadline=None)
    def test_any_order_of_rows_is_a_trace(self, rows):
        """However frees and allocations follow each other, what is read is consistent and complete."""
        text = "Thread,Time,Action,Pointer,Size,Stream\n" + "".join(
            f"1,{t // 3600:02}:{t // 60 % 60:02}:{t % 60:02},{action},{address:#x},{address and size},0\n"
            for action, address, size, t in rows
        )
        trace = loaded(text.encode())
        told = trace.figures["rows"]
        assert trace.allocations + len(trace.failures) == told.get("allocate", 0) + told.get("allocate failure", 0)
        assert len(trace) - trace.allocations == told.get("free", 0) - trace.figures["orphan_or_double_frees"]
        assert vpool.replay(trace).oom is None


def test_no_reader_knows_errors_by_other_names(tmp_path):
    """What loading raises for damage is a FormatError with the file's name."""
    path = tmp_path / "snapshot"
    path.write_bytes(b"\x80\x02cos\nsystem\n.")
    with pytest.raises(vpool.FormatError, match=r"snapshot: byte 2"):
        vpool.Trace.load(path)
    with open(path, "rb") as file, pytest.raises(vpool.FormatError, match=r"^byte 2"):
        formats.read(file)

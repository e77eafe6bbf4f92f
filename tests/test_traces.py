"""Trace files: what is written is read back, and every kind of damage is named."""

import io
import shutil
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vpool
from tests.helpers.traces import ALL, FOLDER, SMALL, arrays_of, made, recorded

NAMES = ("op", "id", "bytes", "stream", "t_us", "marks_us")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.npz"


def write(path, **arrays):
    np.savez_compressed(path, **arrays)
    return path


def assert_refused(path, *words):
    """Loading gives FormatError, whose message names the file and what is wrong in it."""
    with pytest.raises(vpool.FormatError) as caught:
        vpool.Trace.load(path)
    message = str(caught.value)
    assert path.name in message
    for word in words:
        assert word in message
    assert "\n" not in message


def equal(one, other):
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in NAMES)


class TestRoundTrip:
    """What a trace holds survives saving and loading."""

    @pytest.mark.parametrize("name", ALL)
    def test_recorded(self, path, name):
        trace = recorded(name)
        trace.save(path)
        again = vpool.Trace.load(path)
        assert equal(trace, again)
        for array in NAMES:
            assert getattr(again, array).dtype == getattr(trace, array).dtype

    def test_made_by_hand(self, path):
        trace = vpool.Trace(**arrays_of(*SMALL), marks_us=[0, 3])
        trace.save(path)
        assert equal(trace, vpool.Trace.load(str(path)))

    def test_empty(self, path):
        made().save(path)
        trace = vpool.Trace.load(path)
        assert (len(trace), trace.allocations, trace.peak_live_bytes) == (0, 0, 0)

    @given(st.data())
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_random(self, tmp_path, data):
        live, events = [], []
        for number in range(data.draw(st.integers(0, 30))):
            if live and data.draw(st.booleans()):
                events.append(-live.pop(data.draw(st.integers(0, len(live) - 1))))
            else:
                events.append((number + 1, data.draw(st.integers(0, 2**40))))
                live.append(number + 1)
        trace = made(*events)
        trace.save(tmp_path / "random.npz")
        assert equal(trace, vpool.Trace.load(tmp_path / "random.npz"))

    def test_the_content_counts_and_not_the_name(self, tmp_path):
        odd = tmp_path / "trace.of.no.kind"
        made(*SMALL).save(odd)
        assert len(vpool.Trace.load(odd)) == len(SMALL)

    def test_other_integer_types_are_converted_where_nothing_is_lost(self, path):
        arrays = {name: array.astype(np.int64) for name, array in arrays_of(*SMALL).items()}
        assert equal(vpool.Trace.load(write(path, **arrays)), made(*SMALL))

    def test_a_file_without_a_version_is_read(self, path):
        assert len(vpool.Trace.load(write(path, **arrays_of(*SMALL)))) == len(SMALL)


class TestFigures:
    """What a trace says of itself."""

    def test_counts(self):
        trace = made(*SMALL)
        assert len(trace) == 8
        assert trace.allocations == 5
        assert trace.live_bytes.tolist() == [1000, 6000, 5000, 5300, 5000, 1053576, 1048576, 1048583]
        assert (trace.peak_event, trace.peak_live_bytes) == (5, 1053576)
        assert trace.number.tolist() == [0, 1, 0, 2, 2, 3, 1, 4]

    def test_ids_may_have_gaps(self):
        assert made((900, 5), (2**32 - 1, 6), -900).number.tolist() == [0, 1, 0]

    @pytest.mark.parametrize("peak", [10, 1000, 10**6, 2**40])
    def test_scaled(self, peak):
        trace = made(*SMALL)
        smaller = trace.scaled(peak)
        assert smaller.peak_live_bytes <= max(peak, trace.allocations)
        assert np.array_equal(smaller.op, trace.op)
        assert (smaller.bytes > 0).all()
        if peak > trace.peak_live_bytes:
            assert smaller is trace

    def test_live_sizes_beyond_a_float(self):
        assert made((1, 2**53 + 1), (2, 2**53 + 1)).peak_live_bytes == 2**54 + 2

    def test_live_sizes_beyond_63_bits_are_exact_or_refused(self, path):
        write(path, **arrays_of((1, 2**63 - 1), (2, 2**63 - 1), -1))
        try:
            trace = vpool.Trace.load(path)
        except vpool.FormatError:
            trace = None
        assert trace is None or trace.peak_live_bytes == 2**64 - 2


class TestContradictions:
    """Arrays that are sound each and make no trace together; the message names the event."""

    @pytest.mark.parametrize(
        ("events", "place", "reason"),
        [
            ([(1, 5), (2, 6), (1, 7)], "event 2", "allocated before"),
            ([(1, 5), -1, (1, 5)], "event 2", "allocated before"),
            ([(1, 5), -1, -1], "event 2", "freed before"),
            ([(1, 5), -2], "event 1", "never allocated"),
            ([-1], "event 0", "never allocated"),
            ([-1, (1, 5)], "event 0", "before its allocation"),
            ([(3, 5), (1, 2**63)], "event 1", "63 bits"),
        ],
    )
    def test_of_births_and_frees(self, path, events, place, reason):
        assert_refused(write(path, **arrays_of(*events)), place, reason)

    def test_of_sizes(self, path):
        arrays = arrays_of((1, 5), (2, 6), -1)
        arrays["bytes"][2] = 6
        assert_refused(write(path, **arrays), "event 2", "bytes")

    @pytest.mark.parametrize("op", [2, 255])
    def test_of_kinds(self, path, op):
        arrays = arrays_of((1, 5), (2, 6), -1)
        arrays["op"][1] = op
        assert_refused(write(path, **arrays), "event 1", "op")

    @pytest.mark.parametrize("name", NAMES[:-1])
    def test_of_lengths(self, path, name):
        arrays = arrays_of(*SMALL)
        arrays[name] = arrays[name][:-1]
        assert_refused(write(path, **arrays), "lengths", name)

    @pytest.mark.parametrize(
        ("name", "values"),
        [
            ("op", np.array([0, 256])),
            ("op", np.array([-1, 0])),
            ("id", np.array([1, 2**32])),
            ("id", np.array([-1, 2])),
            ("bytes", np.array([-5, 5])),
            ("stream", np.array([0, 2**16])),
            ("t_us", np.array([0, 2**63], np.uint64)),
        ],
    )
    def test_of_ranges(self, path, name, values):
        assert_refused(write(path, **arrays_of((1, 5), (2, 5), **{name: values})), "event", name, "range")

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize(
        "array",
        [
            np.zeros(2, float),
            np.zeros(2, complex),
            np.zeros((2, 1), int),
            np.array(5),
            np.array(["a", "b"]),
            np.array([1, 2], "datetime64[s]"),
            np.zeros(2, [("x", "u4")]),
        ],
        ids=lambda array: str(array.dtype),
    )
    def test_of_types(self, path, name, array):
        assert_refused(write(path, **{**arrays_of((1, 5), (2, 5)), name: array}), name)


class TestDamage:
    """Files that are no trace files, or not any more."""

    @pytest.fixture
    def sound(self, path):
        made(*SMALL).save(path)
        return path.read_bytes()

    @pytest.mark.parametrize("name", NAMES[:-1])
    def test_a_missing_array_is_named(self, path, name):
        arrays = arrays_of(*SMALL)
        del arrays[name]
        assert_refused(write(path, **arrays), name)

    @pytest.mark.parametrize("name", NAMES)
    def test_an_object_array_runs_no_code(self, path, tmp_path, name):
        class Bomb:
            def __reduce__(self):
                return open, (str(tmp_path / "exploded"), "w")

        assert_refused(write(path, **{**arrays_of(*SMALL), name: np.array([Bomb()] * 8, object)}))
        assert not (tmp_path / "exploded").exists()

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"PK",
            b"PK\x03\x04" + bytes(100),
            b"PK\x05\x06" + bytes(18),
            b"\x93NUMPY",
            b"\x80\x04.",
            b"op,id,bytes\n",
            bytes(1000),
            b"\x1f\x8b",
        ],
    )
    def test_other_content(self, path, content):
        path.write_bytes(content)
        assert_refused(path)

    def test_one_array_is_no_trace(self, path):
        with open(path, "wb") as file:
            np.save(file, np.zeros(5))
        assert_refused(path)

    def test_another_archive(self, path):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("op.txt", "hello")
            for name in NAMES:
                archive.writestr(f"{name}.npy", b"no array")
        assert_refused(path)

    def test_an_encrypted_archive(self, path, sound):
        """The flag of encryption set on every entry: there is no password to ask for."""
        damaged = bytearray(sound)
        for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            at = damaged.find(mark)
            while at >= 0:
                damaged[at + flags] |= 1
                at = damaged.find(mark, at + 1)
        path.write_bytes(damaged)
        assert_refused(path)

    def test_damage_inside_a_compressed_array(self, path):
        """Every byte of an entry's compressed data is spoilt in turn."""
        trace = recorded("two_streams")
        trace.save(path)
        sound = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            entry = archive.getinfo("id.npy")
        begin = entry.header_offset + 60
        for at in range(begin, begin + entry.compress_size - 200, 1 + entry.compress_size // 60):
            path.write_bytes(sound[:at] + bytes([sound[at] ^ 0xFF]) + sound[at + 1 :])
            assert_refused(path)

    def test_truncated_anywhere(self, path, sound):
        for length in range(len(sound)):
            path.write_bytes(sound[:length])
            assert_refused(path)

    @pytest.mark.parametrize("name", ["two_streams", "moe_train"])
    def test_a_truncated_recording(self, path, name):
        sound = (FOLDER / f"{name}.npz").read_bytes()
        for part in (0.1, 0.5, 0.9, 0.999):
            path.write_bytes(sound[: int(len(sound) * part)])
            assert_refused(path)

    def assert_loads_or_is_refused(self, path, damaged):
        """A flipped bit may hit what nobody reads; otherwise it is a FormatError and nothing else."""
        path.write_bytes(damaged)
        try:
            trace = vpool.Trace.load(path)
        except vpool.FormatError as error:
            return path.name in str(error)
        return isinstance(trace, vpool.Trace)

    @pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.long)])
    def test_flipped_bits(self, path, sound, stride):
        for position in range(0, 8 * len(sound), stride):
            damaged = bytearray(sound)
            damaged[position // 8] ^= 1 << position % 8
            assert self.assert_loads_or_is_refused(path, damaged), f"bit {position}"

    @given(st.data())
    @settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_random_damage(self, path, sound, data):
        damaged = bytearray(sound)
        for _ in range(data.draw(st.integers(1, 20))):
            at = data.draw(st.integers(0, len(damaged) - 1))
            kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
            if kind == "flip":
                damaged[at] = data.draw(st.integers(0, 255))
            elif kind == "cut":
                del damaged[at : at + data.draw(st.integers(1, 50))]
            else:
                damaged[at:at] = data.draw(st.binary(max_size=20))
            damaged = damaged or bytearray(1)
        assert self.assert_loads_or_is_refused(path, damaged)

    def test_an_uncompressed_file_with_flipped_bits(self, path):
        """Without compression a flip reaches the arrays themselves; the archive's checksum notices."""
        buffer = io.BytesIO()
        np.savez(buffer, **arrays_of(*SMALL))
        sound = buffer.getvalue()
        for position in range(0, 8 * len(sound), 7):
            damaged = bytearray(sound)
            damaged[position // 8] ^= 1 << position % 8
            assert self.assert_loads_or_is_refused(path, damaged), f"bit {position}"

    def test_an_array_that_claims_to_be_huge(self, path, sound):
        buffer = io.BytesIO()
        np.lib.format.write_array_header_1_0(buffer, {"descr": "<u4", "fortran_order": False, "shape": (2**50,)})
        with zipfile.ZipFile(path, "w") as archive:
            for name in NAMES:
                archive.writestr(f"{name}.npy", buffer.getvalue())
        assert_refused(path)

    @pytest.mark.parametrize("version", [2, 3, 10**6])
    def test_a_newer_format_names_both_versions(self, path, version):
        assert_refused(write(path, **arrays_of(*SMALL), format_version=version), str(version), "version 1")

    @pytest.mark.parametrize("version", ["one", [1, 2], 1.5, -1, 0, 2**70])
    def test_a_version_that_is_none(self, path, version):
        assert_refused(write(path, **arrays_of(*SMALL), format_version=np.array(version)))

    def test_a_file_that_is_not_there(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            vpool.Trace.load(tmp_path / "nothing.npz")

    def test_a_folder(self, tmp_path):
        with pytest.raises(OSError, match="directory"):
            vpool.Trace.load(tmp_path)

    def test_a_refused_file_is_closed_again(self, path, sound):
        """No handle stays open: the file can be replaced and its folder removed (warnings are errors here)."""
        path.write_bytes(sound[: len(sound) // 2])
        assert_refused(path)
        shutil.rmtree(path.parent)

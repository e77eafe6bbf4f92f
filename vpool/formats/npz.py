"""vpool's own form: arrays in an ``.npz`` archive."""

import io
import zipfile
from typing import Any

import numpy as np

from vpool.details import Details
from vpool.errors import FormatError
from vpool.formats.source import BOMB_BYTES, BOMB_RATIO

__all__ = ["ARRAYS", "FORMAT_VERSION", "arrays_of", "read", "write"]

FORMAT_VERSION = 1
ARRAYS = {"op": "u1", "id": "u4", "bytes": "u8", "stream": "u2", "t_us": "i8"}


def read(source, device=None):
    """The arrays of an archive, by the names of `Trace`'s parameters."""
    try:
        return _arrays(source.seekable())
    except (FormatError, MemoryError):
        raise
    except Exception as reason:
        # Whatever a damaged file makes zip, zlib and numpy raise: there is no end to the kinds.
        raise FormatError(f"not a readable .npz file: {type(reason).__name__}: {reason}") from None


def arrays_of(file):
    """An archive whose arrays can be read by name, each when it is asked for; None for a file of another kind.

    Raises
    ------
    FormatError
        For an archive that was made to fill the memory.
    """
    if file.read(2) != b"PK":
        return None
    file.seek(0)
    # Plain arrays only: an object array would run code on loading.
    loaded = np.load(file, allow_pickle=False)
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    # All together: a single array of an honest file may be the same number all along.
    whole, packed = sum(one.file_size for one in members), sum(one.compress_size for one in members)
    packed = min(packed, file.seek(0, io.SEEK_END))  # an archive may say what it likes
    if whole > BOMB_BYTES and whole > BOMB_RATIO * packed:
        raise FormatError(f"an archive of {packed} bytes that grows to {whole}")
    return loaded


def _arrays(file):
    loaded = arrays_of(file)
    if loaded is None:
        raise FormatError("one array, not a trace of several")
    version = loaded["format_version"] if "format_version" in loaded else np.array(FORMAT_VERSION)
    if version.shape or version.dtype.kind not in "iu" or version < 1:
        raise FormatError(f"format version {version} is none")
    if version > FORMAT_VERSION:
        raise FormatError(f"format version {version}; this vpool reads up to version {FORMAT_VERSION}")
    if "kind" in loaded and "op" not in loaded:
        raise FormatError(f"a {loaded['kind']}, not a trace")
    missing = [name for name in ARRAYS if name not in loaded]
    if missing:
        raise FormatError(f"no array named {', '.join(missing)}")
    arrays: dict[str, Any] = {name: loaded[name] for name in ARRAYS}
    if "marks_us" in loaded:
        arrays["marks_us"] = loaded["marks_us"]
    if "failures" in loaded:
        arrays["failures"] = loaded["failures"]
    details = Details.from_arrays(loaded, len(arrays["op"]))
    if details is not None:
        arrays["details"] = details
    if "notes" in loaded:
        notes = loaded["notes"]
        if notes.ndim != 1 or (notes.dtype.kind != "U" and notes.size):
            raise FormatError(f"array notes must be one row of text, not {notes.dtype} of shape {notes.shape}")
        arrays["notes"] = [str(note) for note in notes]
    return arrays


def write(trace, file):
    """Write a trace with everything it has."""
    optional: dict[str, Any] = {}
    if len(trace.failures):
        optional["failures"] = trace.failures
    if trace.notes:
        optional["notes"] = np.array(trace.notes, str)
    if trace.details is not None:
        optional |= trace.details.to_arrays()
    # An archive is written forwards and backwards, which a file that compresses cannot.
    archive = io.BytesIO()
    np.savez_compressed(
        archive,
        op=trace.op,
        id=trace.id,
        bytes=trace.bytes,
        stream=trace.stream,
        t_us=trace.t_us,
        marks_us=trace.marks_us,
        format_version=FORMAT_VERSION,
        **optional,
    )
    file.write(archive.getbuffer())

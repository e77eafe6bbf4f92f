"""Trace files of other tools, and what is true of them."""

import gzip
import io
import json
from pathlib import Path

import vpool
from vpool import formats

SAMPLES = Path(__file__).parents[1] / "data" / "formats"
TRUTH = json.loads((SAMPLES / "truth.json").read_text())
NAMES = sorted(str(path.relative_to(SAMPLES)).removesuffix(".gz") for path in SAMPLES.glob("*/*.gz"))
# The smallest of each format and variant.
SMALL = (
    "kineto_trace/torch_profiler_mlp.json",
    "minimalloc/input.12.csv",
    "rmm_csv/format_legacy_2019.csv",
    "rmm_csv/format_modern_min.csv",
    "stalloc_log/mem_log_dev0.txt",
    "tensorflow_log/bfc_dump_old_style.txt",
    "torch_memory_timeline/timeline_part1.raw.json",
    "torch_snapshot/inference_128.json",
    "torch_snapshot/torch_snapshot_mlp.pickle",
    "umpire_replay/tut_replay_log.json",
)


def content(name):
    """The bytes of a sample, as its tool wrote them."""
    return gzip.decompress((SAMPLES / f"{name}.gz").read_bytes())


def truth(name):
    """What is true of a sample; nothing where nobody counted."""
    return TRUTH.get(name) or TRUTH.get(f"{name}.gz") or {}


def load(text, device=None):
    """The trace of some content."""
    data = text.encode() if isinstance(text, str) else text
    return vpool.Trace(**formats.read(io.BytesIO(data), device))


def events_of(trace):
    """Pairs as ``(id, bytes)`` for an allocation and ``-id`` for a free, ids from 1 in the order of birth."""
    columns = zip(trace.op.tolist(), trace.number.tolist(), trace.bytes.tolist(), strict=True)
    return [-(one + 1) if op else (one + 1, nbytes) for op, one, nbytes in columns]


def live_at_end(trace):
    return 2 * trace.allocations - len(trace)


def noted(trace, *words):
    """The note that has all these words; None if there is none."""
    return next((note for note in trace.notes if all(word in note for word in words)), None)

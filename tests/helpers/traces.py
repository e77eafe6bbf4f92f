"""Recorded traces, and small ones made by hand."""

from pathlib import Path

import numpy as np

import vpool

FOLDER = Path(__file__).parents[1] / "traces"
EIGHT = (
    "bert_finetune", "llm_generate", "llm_lora", "llm_train", "maskrcnn_train", "moe_train", "resnet_train",
    "two_streams",
)  # fmt: skip
ALL = (*EIGHT, "fsdp_train")


def recorded(name):
    return vpool.Trace.load(FOLDER / f"{name}.npz")


def arrays_of(*events, **changes):
    """Arrays of a trace: an event is ``(id, bytes)`` to allocate, and ``-id`` to free."""
    sizes = {event[0]: event[1] for event in events if isinstance(event, tuple)}
    ids = [event[0] if isinstance(event, tuple) else -event for event in events]
    arrays = {
        "op": np.array([0 if isinstance(event, tuple) else 1 for event in events], np.uint8),
        "id": np.array(ids, np.uint32),
        "bytes": np.array([sizes.get(number, 1) for number in ids], np.uint64),
        "stream": np.zeros(len(events), np.uint16),
        "t_us": np.arange(len(events), dtype=np.int64),
    }
    return {**arrays, **changes}


def made(*events):
    """A trace of such events."""
    return vpool.Trace(**arrays_of(*events))


SMALL = ((1, 1000), (2, 5000), -1, (3, 300), -3, (4, 1 << 20), -2, (5, 7))

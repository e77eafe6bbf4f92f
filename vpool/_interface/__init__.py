"""Interface layer: pools, buffers, snapshots, and what replays and measures them."""

from importlib.util import find_spec
from pathlib import Path

if find_spec(f"{__name__}.pool") is None:  # as in a checkout whose folder Python was started in
    raise ImportError(
        f"the vpool in {Path(__file__).parents[2]} is not compiled for this Python: run pip install -e . there, or "
        "start Python in another folder to use one that is installed",
        name=f"{__name__}.pool",
    )

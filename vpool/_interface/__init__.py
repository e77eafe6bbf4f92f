"""Interface layer: pools, buffers, snapshots, and what replays and measures them."""

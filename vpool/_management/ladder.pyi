"""What Python code sees of `vpool._management.ladder`."""

RUNG_NAMES: tuple[str, ...]

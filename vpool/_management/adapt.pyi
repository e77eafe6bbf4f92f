"""What Python code sees of `vpool._management.adapt`: nothing."""

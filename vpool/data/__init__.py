"""Recorded traces that come with vpool."""

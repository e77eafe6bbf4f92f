"""Declarations that every layer shares: block records, words, the lock."""

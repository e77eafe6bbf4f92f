"""Management layer: block records, free lists, address index, arenas, growth."""

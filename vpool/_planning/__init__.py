"""Planning: the placement of blocks whose lifetimes are known."""

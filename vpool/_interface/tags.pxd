"""Tags: names for what blocks are for."""

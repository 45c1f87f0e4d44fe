"""Draft trees: type, builders, sizes; torch only."""

"""Slow, readable twins of fast code, for tests to compare with."""

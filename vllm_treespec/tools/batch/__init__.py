"""Batch jobs: each row of a file answered exactly once, whatever happens meanwhile."""

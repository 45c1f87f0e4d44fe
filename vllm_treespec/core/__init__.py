"""The algorithm without an engine: trees, sampling, schedules; torch only."""

"""Schemas of custom resources, of other projects (README.md)."""

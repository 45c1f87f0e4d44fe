"""Lossless tree speculative decoding through stock vLLM."""

__version__ = "0.2.0"

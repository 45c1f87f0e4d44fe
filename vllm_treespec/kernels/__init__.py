"""Triton kernels of the GPU path: torch and triton only, no vLLM."""

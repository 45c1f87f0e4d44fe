"""Settings of all tests."""

import gc

import torch

# The tests' tensors are small: threads only wait for each other.
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Leave what the tests have imported out of garbage collection.

    The Trainer collects at the end of every run: over the objects of torch, vLLM and
    transformers that takes longer than training a tiny model.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let Python collect them at its end, which triton's bindings wait for."""
    gc.unfreeze()

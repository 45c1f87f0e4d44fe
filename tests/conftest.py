"""Settings of all tests."""

import gc
from collections.abc import Generator

import pytest
import torch

from vllm_treespec.aids import Aid

# The tests' tensors are small: threads only wait for each other.
torch.set_num_threads(1)


SWITCH_OFF = Aid.switch_off


@pytest.fixture(autouse=True)
def aids_end_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what only serves speed raise its errors in tests."""

    def raise_it(self: Aid, error: Exception) -> None:
        raise error

    monkeypatch.setattr(Aid, "switch_off", raise_it)


@pytest.fixture
def aids_may_fail(monkeypatch: pytest.MonkeyPatch, aids_end_tests: None) -> None:
    """Let it be switched off by its first error, as outside of tests."""
    monkeypatch.setattr(Aid, "switch_off", SWITCH_OFF)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a doctor look into vLLM's source files that are parsed already."""
    from tests.fingerprints import installed_sources
    from vllm_treespec.engine.seams.source_files import SourceFiles

    sources = installed_sources()
    monkeypatch.setattr(SourceFiles, "installed", lambda: sources)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what the tests import out of garbage collection.

    The Trainer collects at the end of every run: over the objects of torch, vLLM and
    transformers that takes longer than training a tiny model.
    """
    gc.disable()
    collected = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return collected


def pytest_sessionfinish() -> None:
    """Let Python collect them at its end, which triton's bindings wait for."""
    gc.unfreeze()

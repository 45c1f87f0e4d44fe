"""When draft models run beside the target in vLLM's dummy runs."""

import copy
from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from tests.fast.small_engine import engine_config
from vllm_treespec.engine.graphed_draft_model import draft_graph

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


@pytest.fixture
def dispatcher(has_graphs: bool) -> CudagraphDispatcher:
    """vLLM's dispatcher, with graphs of every eighth size, or with none."""
    config = engine_config({"method": "suffix_tree"})
    compilation = copy.copy(config.compilation_config)
    compilation.cudagraph_capture_sizes = [8, 16, 24]
    compilation.max_cudagraph_capture_size = 24
    config.compilation_config = compilation
    made = CudagraphDispatcher(config)
    made.initialize_cudagraph_keys(PIECEWISE if has_graphs else NONE)
    return made


@pytest.mark.parametrize(
    ("options", "has_graphs", "runs"),
    [
        ({"cudagraph_runtime_mode": PIECEWISE}, True, (PIECEWISE, 16)),
        ({"cudagraph_runtime_mode": NONE}, True, (NONE, 13)),
        ({"cudagraph_runtime_mode": PIECEWISE}, False, (NONE, 13)),
        ({"cudagraph_runtime_mode": FULL}, True, None),
        ({"cudagraph_runtime_mode": NONE, "uniform_decode": True}, True, None),
        ({"is_profile": True}, True, None),
    ],
    ids=["capture", "warm-up", "LoRA", "whole trees", "their warm-up", "profile"],
)
def test_drafts_follow_piecewise_runs(
    dispatcher: CudagraphDispatcher,
    options: dict[str, Any],
    runs: tuple[CUDAGraphMode, int] | None,
) -> None:
    """Red when draft models miss their graphs, or run before there is a KV cache."""
    found = draft_graph(dispatcher, 13, options)
    assert runs == (None if found is None else (found[0], found[1].num_tokens))

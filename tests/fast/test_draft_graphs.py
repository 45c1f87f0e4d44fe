"""When draft models run beside the target in vLLM's dummy runs."""

from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_treespec.engine.graphed_draft_model import GraphedDraftModel
from vllm_treespec.engine.v1.gpu_runner import TreeGPUModelRunner

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


class Drafts(GraphedDraftModel):
    """Notes its dummy runs."""

    def __init__(self) -> None:
        self.runs: list[tuple[CUDAGraphMode, int]] = []

    def dummy_run(self, mode: CUDAGraphMode, desc: BatchDescriptor) -> None:
        self.runs.append((mode, desc.num_tokens))


class Dispatcher:
    """Has graphs of every eighth size, or none that fit."""

    def __init__(self, has_graphs: bool) -> None:
        self.has_graphs = has_graphs

    def dispatch(self, num_tokens: int, valid_modes: set[CUDAGraphMode]) -> Any:
        if self.has_graphs and PIECEWISE in valid_modes:
            return PIECEWISE, BatchDescriptor(-(-num_tokens // 8) * 8)
        assert NONE in valid_modes
        return NONE, BatchDescriptor(num_tokens)


@pytest.mark.parametrize(
    ("options", "has_graphs", "runs"),
    [
        ({"cudagraph_runtime_mode": PIECEWISE}, True, [(PIECEWISE, 16)]),
        ({"cudagraph_runtime_mode": NONE}, True, [(NONE, 13)]),
        ({"cudagraph_runtime_mode": PIECEWISE}, False, [(NONE, 13)]),
        ({"cudagraph_runtime_mode": FULL}, True, []),
        ({"cudagraph_runtime_mode": NONE, "uniform_decode": True}, True, []),
        ({"is_profile": True}, True, []),
    ],
    ids=["capture", "warm-up", "LoRA", "whole trees", "their warm-up", "profile"],
)
def test_drafts_follow_piecewise_runs(
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    has_graphs: bool,
    runs: list[tuple[CUDAGraphMode, int]],
) -> None:
    """Red when draft models miss their graphs, or run before there is a KV cache."""
    monkeypatch.setattr(GPUModelRunner, "_dummy_run", lambda *_, **__: "outputs")
    runner: Any = TreeGPUModelRunner.__new__(TreeGPUModelRunner)
    drafts = Drafts()
    runner.drafter = type("Drafter", (), {"draft_models": [drafts]})
    runner.cudagraph_dispatcher = Dispatcher(has_graphs)
    assert runner._dummy_run(13, **options) == "outputs"
    assert drafts.runs == runs

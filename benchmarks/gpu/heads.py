"""EAGLE-3 heads of random weights for the step table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm_treespec.config import parse_spec_config
from vllm_treespec.engine.adapters import GPU_V2
from vllm_treespec.heads import EagleHead, EagleHeadConfig, save_head
from vllm_treespec.plugin import stock_arguments

if TYPE_CHECKING:
    from benchmarks.gpu.shapes import Shape

DRAFT_VOCABULARY = 32000
DEPTH, WIDTH = 3, 8
# by the family of sides for whose trees such a head drafts, on vLLM's V2 runner
TREES: dict[str, dict[str, Any]] = {
    "eagle-v2": {"method": "eagle_tree", "depth": DEPTH},
    "hybrid-v2": {"method": "hybrid", "drafter": "eagle", "model_depth": DEPTH},
}


def tree_arguments(
    family: str,
    models: Path,
    shape: str,
    num_drafts: int,
    max_trees: int,
    device: str,
) -> dict[str, Any]:
    """Stock vLLM arguments of an engine whose head draws trees as full as they may be.

    Args:
        family: see ``TREES``.
        models: folder of models.
        shape: name of the target's.
        num_drafts: draft nodes of a tree; beside an index the head drafts 16 at most.
        max_trees: in a step.
        device: ``"cpu"`` or ``"cuda"``.

    """
    spec = {
        **TREES[family],
        "model": str(folder_of(models, shape)),
        "num_drafts": num_drafts,
        "top_k": WIDTH,
        "min_probability": 0.0,
        "max_trees": max_trees,
        "schedule": "fixed",
    }
    return stock_arguments(parse_spec_config(spec), None, device, GPU_V2)


def folder_of(models: Path, shape: str) -> Path:
    """Where the head of a shape lies."""
    return models / f"{shape}-eagle3-weights"


def write_weights(models: Path, name: str, shape: Shape) -> None:
    """Write the head of a shape, as wide as the target, once."""
    folder = folder_of(models, name)
    if (folder / "model.safetensors").is_file():
        return
    last = shape.num_hidden_layers - 3
    config = EagleHeadConfig(
        hidden_size=shape.hidden_size,
        target_hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        num_hot_tokens=min(shape.vocab_size, DRAFT_VOCABULARY),
        num_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_key_value_heads,
        head_size=shape.head_dim,
        norm_eps=1e-5,
        rope={"rope_theta": 500000.0, "rope_type": "default"},
        max_positions=131072,
        combines=True,
        target_layers=(2, shape.num_hidden_layers // 2, last),
        share_output=False,
        depth=DEPTH,
    )
    torch.manual_seed(0)
    head = EagleHead(config)
    if head.hot_token_ids is not None:
        head.hot_token_ids.copy_(torch.arange(len(head.hot_token_ids)))
    save_head(head, folder)

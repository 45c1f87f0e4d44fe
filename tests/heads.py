"""Heads with random weights, for tests of what does not depend on their weights."""

from pathlib import Path
from typing import Any

import torch

from vllm_treespec.config import HEAD_METHODS
from vllm_treespec.heads import (
    MedusaHeadConfig,
    ReDrafterHeadConfig,
    build_head,
    save_head,
)

KINDS: dict[str, type[ReDrafterHeadConfig | MedusaHeadConfig]] = {
    "redrafter": ReDrafterHeadConfig,
    "medusa": MedusaHeadConfig,
}
# The kind of head by method.
HEADS = {method: kind for kind, method in HEAD_METHODS.items()}
# By level and rank, as an evaluation would measure them.
RANK_ACCURACIES = ((0.5, 0.2, 0.1), (0.3, 0.1, 0.05), (0.2, 0.1, 0.05))


def write_head(folder: Path, kind: str, **config: Any) -> str:
    """Write a head of a small target, or of one as ``config`` says; its folder."""
    sizes: dict[str, Any] = {"hidden_size": 8, "vocab_size": 32, "depth": 3}
    if kind == "medusa":
        sizes["rank_accuracies"] = RANK_ACCURACIES
    torch.manual_seed(0)
    save_head(build_head(KINDS[kind](**{**sizes, **config})), folder)
    return str(folder)

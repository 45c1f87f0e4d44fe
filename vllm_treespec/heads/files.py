"""A head's folder: ``config.json`` and ``model.safetensors``."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vllm_treespec.config.weights import weights_problem
from vllm_treespec.heads.base import DraftHead
from vllm_treespec.heads.config import (
    HeadError,
    MedusaHeadConfig,
    ReDrafterHeadConfig,
    read_head_config,
)
from vllm_treespec.heads.medusa import MedusaHead
from vllm_treespec.heads.redrafter import ReDrafterHead


def build_head(config: ReDrafterHeadConfig | MedusaHeadConfig) -> DraftHead:
    """Make a fresh head."""
    if isinstance(config, MedusaHeadConfig):
        return MedusaHead(config)
    return ReDrafterHead(config)


def load_head(folder: Path) -> DraftHead:
    """Load a head; shared weights are missing until ``DraftHead.share``.

    Raises:
        HeadError: a file is missing, or its tensors are not those of the config.

    """
    head = build_head(read_head_config(folder))
    path = folder / "model.safetensors"
    if not path.is_file():
        raise HeadError(f"{folder} holds no model.safetensors; train the head again")
    if problem := weights_problem(path):
        raise HeadError(f"{problem}; copy the head again, or train it again")
    try:
        head.load_state_dict(load_file(path))
    except RuntimeError as error:
        raise HeadError(f"{path} does not fit its config.json: {error}") from None
    return head.eval().requires_grad_(False)


def save_head(
    head: DraftHead,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
) -> float:
    """Write a head's folder; return the size of the weights in MB (10^6 bytes)."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in head.state_dict().items()
    }
    path = folder / "model.safetensors"
    save_file(tensors, path)
    (folder / "config.json").write_text(head.config.model_dump_json(indent=2) + "\n")
    return path.stat().st_size / 1e6

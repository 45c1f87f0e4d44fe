"""Heads and draft models for tests of what does not depend on their weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from tests.published import Published
from tests.published_dflash import PublishedDFlash
from tests.published_heads import PublishedHead
from vllm_treespec.config import HEAD_METHODS
from vllm_treespec.heads import (
    LyannaHead,
    LyannaHeadConfig,
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
DRAFT_SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 128,
}


def llama(**sizes: Any) -> LlamaConfig:
    """Configuration of a small Llama, of these sizes where they are given."""
    return LlamaConfig(**{**DRAFT_SIZES, **sizes})


DRAFT_CONFIG = llama().to_dict()


def write_head(folder: Path, kind: str, **config: Any) -> str:
    """Write a head of a small target, or of one as ``config`` says; its folder."""
    if kind in ("eagle", "dflash"):
        return str(published_head(kind, **config).write(folder))
    if kind == "lyanna":
        save_head(lyanna_head(**config), folder)
        return str(folder)
    sizes: dict[str, Any] = {"hidden_size": 8, "vocab_size": 32, "depth": 3}
    if kind == "medusa":
        sizes["rank_accuracies"] = RANK_ACCURACIES
    torch.manual_seed(0)
    save_head(build_head(KINDS[kind](**{**sizes, **config})), folder)
    return str(folder)


def published_head(
    kind: str,
    hidden_size: int = 64,
    vocab_size: int = 32,
    num_hot_tokens: int | None = None,
    layer_ids: tuple[int, ...] | None = None,
    **published: Any,
) -> Published:
    """An EAGLE-3 or DSpark head as it is published, or one as ``published`` says.

    ``layer_ids`` are published numbers: DSpark's are of the layers that end.
    """
    sizes: dict[str, Any] = {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "vocab_size": vocab_size,
        "draft_vocab_size": num_hot_tokens,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 64,
        "max_positions": 512,
    }
    if kind == "eagle":
        return PublishedHead(**sizes, layer_ids=layer_ids or (0, 1, 2), **published)
    sizes |= {"form": "dspark", "target_layer_ids": layer_ids or (0, 1)}
    sizes |= {"mask_token_id": vocab_size - 1, "markov_rank": 4, "lm_head": True}
    return PublishedDFlash(**{**sizes, **published})


def lyanna_head(seed: int = 0, **config: Any) -> LyannaHead:
    """A Lyanna head whose layers, and token info, do something."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "vocab_size": 32, "depth": 3, "num_heads": 2}
    sizes |= {"num_kv_heads": 1, "head_size": 64, "intermediate_size": 128}
    sizes |= {"max_positions": 512, "token_info_rank": 4, **config}
    sizes["target_hidden_size"] = sizes["hidden_size"]
    head = LyannaHead(LyannaHeadConfig.model_validate(sizes))
    for name, weight in head.named_parameters():
        mean = float(name.endswith("norm.weight"))
        torch.nn.init.normal_(weight, mean=mean, std=weight.shape[-1] ** -0.5)
    return head.eval().requires_grad_(False)


def write_draft(folder: Path) -> Path:
    """Write a draft model whose weights are one matrix; its folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(DRAFT_CONFIG))
    save_file({"weight": torch.zeros(64, 64)}, folder / "model.safetensors")
    return folder

"""Folders of heads as they are published, with random weights: what all forms share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

# Parts of names of weights that are not scaled down.
PLAIN = ("embed_tokens", "mask_embedding", "codebook", "markov", "base_kernel")


@dataclass(frozen=True)
class Published(ABC):
    """What a published head is made of, in its authors' words."""

    form: str = ""
    hidden_size: int = 16
    target_hidden_size: int | None = None
    intermediate_size: int = 24
    vocab_size: int = 40
    draft_vocab_size: int | None = None
    num_heads: int = 4
    num_kv_heads: int | None = 2
    # not hidden_size / num_heads
    head_dim: int | None = 6
    num_layers: int = 1
    embed_tokens: bool = False
    lm_head: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    max_positions: int = 128
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_theta": 500.0})
    # keys that config.json has besides, or instead; None: it has no such key
    keys: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def head_size(self) -> int:
        """Of one attention head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def target_size(self) -> int:
        """Width of the target's hidden states."""
        return self.target_hidden_size or self.hidden_size

    def hot_tokens(self) -> Tensor | None:
        """The target's id of each row of lm_head, not ascending; None: all tokens."""
        if self.draft_vocab_size is None:
            return None
        generator = torch.Generator().manual_seed(self.seed + 1)
        order = torch.randperm(self.vocab_size, generator=generator)
        return order[: self.draft_vocab_size]

    @abstractmethod
    def own_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights of this kind of head."""

    @abstractmethod
    def said(self) -> dict[str, Any]:
        """The ``config.json`` without ``keys``."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all weights, by their names with ``layers.0.``."""
        shapes, size = self.own_shapes(), self.hidden_size
        if self.embed_tokens:
            shapes["embed_tokens.weight"] = (self.vocab_size, size)
        if self.lm_head:
            rows = self.draft_vocab_size or self.vocab_size
            shapes["lm_head.weight"] = (rows, size)
        return shapes

    def layer_shapes(self, layer: str, wide: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a decoder layer whose attention reads ``wide`` numbers."""
        size, inner = self.hidden_size, self.intermediate_size
        kv_heads = self.num_kv_heads or self.num_heads
        counts = {"q": self.num_heads, "k": kv_heads, "v": kv_heads}
        rows = {name: count * self.head_size for name, count in counts.items()}
        shapes: dict[str, tuple[int, ...]] = {
            f"{layer}self_attn.o_proj.weight": (size, rows["q"]),
            f"{layer}mlp.gate_proj.weight": (inner, size),
            f"{layer}mlp.up_proj.weight": (inner, size),
            f"{layer}mlp.down_proj.weight": (size, inner),
            f"{layer}post_attention_layernorm.weight": (size,),
        }
        for name, num_rows in rows.items():
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (num_rows, wide)
            if self.qkv_bias:
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (num_rows,)
            if self.qk_norm and name != "v":
                shapes[f"{layer}self_attn.{name}_norm.weight"] = (self.head_size,)
        return shapes

    def tensors(self) -> dict[str, Tensor]:
        """Random weights, float32, by their published names."""
        generator = torch.Generator().manual_seed(self.seed)
        tensors: dict[str, Tensor] = {}
        for name, shape in self.shapes().items():
            noise = torch.randn(shape, generator=generator)
            if not any(part in name for part in PLAIN):
                matrix = len(shape) == 2
                scale = shape[1] ** -0.5 if matrix else 0.3
                noise = scale * noise + ("norm" in name and not matrix)
            tensors[name] = noise
        ids = self.hot_tokens()
        if ids is not None:
            tensors["d2t"] = ids - torch.arange(len(ids))
            tensors["t2d"] = torch.zeros(self.vocab_size, dtype=torch.bool)
            tensors["t2d"][ids] = True
        return tensors

    def target_weights(self) -> Tensor:
        """Embedding and output layer of a target, [2, vocab_size + 3, hidden_size]."""
        generator = torch.Generator().manual_seed(9)
        shape = (2, self.vocab_size + 3, self.hidden_size)
        return torch.randn(shape, generator=generator)

    def layer_config(self) -> dict[str, Any]:
        """What a config.json says of the decoder layers."""
        return {
            "model_type": "qwen3" if self.qk_norm else "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.num_layers,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "vocab_size": self.vocab_size,
            **self.rope,
        }

    def config(self) -> dict[str, Any]:
        """The ``config.json``."""
        config = self.said() | self.keys
        return {key: value for key, value in config.items() if value is not None}

    def write(self, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
        """Write the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in self.tensors().items()
        }
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.config()))
        return folder

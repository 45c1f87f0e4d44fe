"""Folders as EAGLE heads are published, with random weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

Form = Literal["eagle", "eagle3", "eagle3 layers.0", "speculators"]


@dataclass(frozen=True)
class PublishedHead:
    """What a published head is made of, in its authors' words."""

    form: Form = "eagle3"
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
    # EAGLE-1
    fc_bias: bool = False
    norms: tuple[str, ...] = ()
    # EAGLE-3
    layer_ids: tuple[int, ...] | None = (2, 4, 5)
    use_aux_hidden_state: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    # both
    qkv_bias: bool = False
    qk_norm: bool = False
    embed_tokens: bool = False
    lm_head: bool = True
    # the target's ids of the draft vocabulary; None: a random part, ascending
    draft_ids: tuple[int, ...] | None = None
    max_positions: int = 128
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_theta": 500.0})
    # keys that config.json has besides, or instead; None: it has no such key
    keys: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def version(self) -> int:
        """1 or 3."""
        return 1 if self.form == "eagle" else 3

    @property
    def head_size(self) -> int:
        """Of one attention head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def target_size(self) -> int:
        """Width of the target's hidden states."""
        return self.target_hidden_size or self.hidden_size

    @property
    def num_states(self) -> int:
        """Number of the target's hidden states that make a feature."""
        if self.version == 1 or not self.use_aux_hidden_state:
            return 1
        return 3 if self.layer_ids is None else len(self.layer_ids)

    def hot_tokens(self) -> Tensor | None:
        """The target's id of each row of lm_head; None: all tokens."""
        if self.draft_vocab_size is None:
            return None
        if self.draft_ids is not None:
            return torch.tensor(self.draft_ids)
        generator = torch.Generator().manual_seed(self.seed + 1)
        order = torch.randperm(self.vocab_size, generator=generator)
        return order[: self.draft_vocab_size].sort().values

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all weights, by their names with ``layers.0.``."""
        size = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        for number in range(self.num_layers):
            first = number == 0
            wide = 2 * size if self.version == 3 and first else size
            shapes |= self._layer_shapes(f"layers.{number}.", wide)
            if self.version == 3 or not first:
                shapes[f"layers.{number}.input_layernorm.weight"] = (size,)
        if self.version == 1:
            shapes["fc.weight"] = (size, 2 * size)
            shapes |= {"fc.bias": (size,)} if self.fc_bias else {}
            shapes |= {f"{name}.weight": (size,) for name in self.norms}
        else:
            shapes["norm.weight"] = (size,)
            shapes["layers.0.hidden_norm.weight"] = (size,)
            if self.use_aux_hidden_state:
                shapes["fc.weight"] = (size, self.num_states * self.target_size)
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (self.num_states * self.target_size,)
        if self.fc_norm:
            shapes |= {
                f"fc_norm.{n}.weight": (self.target_size,)
                for n in range(self.num_states)
            }
        if self.embed_tokens:
            shapes["embed_tokens.weight"] = (self.vocab_size, size)
        if self.lm_head:
            rows = self.draft_vocab_size or self.vocab_size
            shapes["lm_head.weight"] = (rows, size)

        return shapes

    def _layer_shapes(self, layer: str, wide: int) -> dict[str, tuple[int, ...]]:
        size, inner = self.hidden_size, self.intermediate_size
        kv_heads = self.num_kv_heads or self.num_heads
        rows = {
            "q": self.num_heads * self.head_size,
            "k": kv_heads * self.head_size,
            "v": kv_heads * self.head_size,
        }
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
            if len(shape) == 2:
                scaled = noise if "embed" in name else noise / shape[1] ** 0.5
            else:
                scaled = 0.3 * noise + ("norm" in name)
            if self.form == "eagle3":
                name = name.replace("layers.0.", "midlayer.")
            tensors[name] = scaled
        ids = self.hot_tokens()
        if ids is not None:
            tensors["d2t"] = ids - torch.arange(len(ids))
            tensors["t2d"] = torch.zeros(self.vocab_size, dtype=torch.bool)
            tensors["t2d"][ids] = True
        return tensors

    def config(self) -> dict[str, Any]:
        """The ``config.json``."""
        layer = {
            "architectures": ["LlamaForCausalLM"],
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
        own = {
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "norm_before_residual": self.norm_before_residual,
            "norm_output": self.norm_output,
            "fc_norm": self.fc_norm,
        }
        if self.form == "eagle":
            config = layer | {"bias": self.fc_bias, "qkv_bias": self.qkv_bias}
        elif self.form == "speculators":
            config = own | {
                "speculators_model_type": "eagle3",
                "architectures": ["Eagle3Speculator"],
                "transformer_layer_config": layer,
                "norm_before_fc": self.norm_before_fc,
                "eagle_aux_hidden_state_layer_ids": self.layer_ids,
                "speculators_config": {
                    "algorithm": "eagle3",
                    "proposal_methods": [
                        {"proposal_type": "greedy", "speculative_tokens": 3}
                    ],
                    "verifier": {
                        "name_or_path": "target",
                        "architectures": ["LlamaForCausalLM"],
                    },
                },
            }
        else:
            eagle = {
                "eagle_aux_hidden_state_layer_ids": self.layer_ids,
                "use_aux_hidden_state": self.use_aux_hidden_state,
                "norm_before_fc": self.norm_before_fc,
            }
            config = layer | own | {"eagle_config": eagle}
            config["architectures"] = ["LlamaForCausalLMEagle3"]
        config = config | self.keys
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

"""Folders as EAGLE heads are published, with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tests.published import Published

Form = Literal["eagle", "eagle3", "eagle3 layers.0", "speculators"]


@dataclass(frozen=True)
class PublishedHead(Published):
    """What a published EAGLE head is made of, in its authors' words."""

    form: Form = "eagle3"
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
    # the target's ids of the draft vocabulary; None: a random part, ascending
    draft_ids: tuple[int, ...] | None = None

    @property
    def version(self) -> int:
        """1 or 3."""
        return 1 if self.form == "eagle" else 3

    @property
    def num_states(self) -> int:
        """Number of the target's hidden states that make a feature."""
        if self.version == 1 or not self.use_aux_hidden_state:
            return 1
        return 3 if self.layer_ids is None else len(self.layer_ids)

    def hot_tokens(self) -> Tensor | None:
        """The target's id of each row of lm_head; None: all tokens."""
        if self.draft_ids is not None:
            return torch.tensor(self.draft_ids)
        drawn = super().hot_tokens()
        return None if drawn is None else drawn.sort().values

    def own_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights of this version."""
        size = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        for number in range(self.num_layers):
            first = number == 0
            wide = 2 * size if self.version == 3 and first else size
            shapes |= self.layer_shapes(f"layers.{number}.", wide)
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
        return shapes

    def tensors(self) -> dict[str, Tensor]:
        """Random weights, float32, by their published names."""
        if self.form != "eagle3":
            return super().tensors()
        named = super().tensors().items()
        return {name.replace("layers.0.", "midlayer."): x for name, x in named}

    def said(self) -> dict[str, Any]:
        """What a form says."""
        layer = {"architectures": ["LlamaForCausalLM"], **self.layer_config()}
        if self.form == "eagle":
            return layer | {"bias": self.fc_bias, "qkv_bias": self.qkv_bias}
        own = {
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "norm_before_residual": self.norm_before_residual,
            "norm_output": self.norm_output,
            "fc_norm": self.fc_norm,
        }
        read = {
            "eagle_aux_hidden_state_layer_ids": self.layer_ids,
            "norm_before_fc": self.norm_before_fc,
        }
        if self.form == "speculators":
            return {
                **own,
                **read,
                "speculators_model_type": "eagle3",
                "architectures": ["Eagle3Speculator"],
                "transformer_layer_config": layer,
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
        return {
            **layer,
            **own,
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {"use_aux_hidden_state": self.use_aux_hidden_state, **read},
        }

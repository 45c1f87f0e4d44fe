"""EAGLE heads from the papers' equations, one pair at a time, in float64.

arXiv 2401.15077 (EAGLE-1) and 2503.01840 (EAGLE-3); RoPE of arXiv 2104.09864. Weights
go by their published names, the first layer is ``layers.0.``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.published_heads import PublishedHead

EPS = 1e-5


class ReferenceEagle:
    """A head that reads pairs in order and remembers their keys and values."""

    def __init__(
        self, head: PublishedHead, tensors: dict[str, Tensor], embedding: Tensor
    ) -> None:
        """Take published weights, and the embedding that the head reads tokens by."""
        self.head = head
        self.weights = {
            name.replace("midlayer.", "layers.0."): tensor.double()
            for name, tensor in tensors.items()
        }
        self.embedding = embedding.double()
        self.keys: list[list[Tensor]] = [[] for _ in range(head.num_layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(head.num_layers)]

    def feature(self, states: list[Tensor]) -> Tensor:
        """f, or g = fc([r_a, r_b, r_c])."""
        joined = torch.cat([state.double() for state in states])
        if self.head.version == 1 or not self.head.use_aux_hidden_state:
            return joined
        if self.head.norm_before_fc:
            joined = self.norm("input_norm", joined)
        if self.head.fc_norm:
            parts = joined.split(self.head.target_size)
            parts_normed = [self.norm(f"fc_norm.{n}", x) for n, x in enumerate(parts)]
            joined = torch.cat(parts_normed)
        return self.weights["fc.weight"] @ joined

    def read(self, feature: Tensor, token: int, position: int) -> Tensor:
        """The next feature."""
        head = self.head
        embedded = self.embedding[token]
        feature = feature.double()
        if head.version == 1:
            if "embed_layernorm" in head.norms:
                embedded = self.norm("embed_layernorm", embedded)
            x = self.weights["fc.weight"] @ torch.cat([embedded, feature])
            if head.fc_bias:
                x = x + self.weights["fc.bias"]
            attended = x
            if "hidden_layernorm" in head.norms:
                attended = self.norm("hidden_layernorm", x)
        else:
            normed = self.norm("layers.0.hidden_norm", feature)
            embedded = self.norm("layers.0.input_layernorm", embedded)
            attended = torch.cat([embedded, normed])
            x = normed if head.norm_before_residual else feature
        for layer in range(head.num_layers):
            if layer > 0:
                attended = self.norm(f"layers.{layer}.input_layernorm", x)
            x = x + self.attention(layer, attended, position)
            x = x + self.mlp(
                layer, self.norm(f"layers.{layer}.post_attention_layernorm", x)
            )
        return self.norm("norm", x) if head.norm_output else x

    def logits(self, feature: Tensor, output: Tensor) -> Tensor:
        """Over the rows of an output layer."""
        if self.head.version == 3 and not self.head.norm_output:
            feature = self.norm("norm", feature)
        if "lm_head_layernorm" in self.head.norms:
            feature = self.norm("lm_head_layernorm", feature)
        return output.double() @ feature

    def norm(self, name: str, x: Tensor) -> Tensor:
        """RMSNorm."""
        scale = 1 / math.sqrt(sum(float(value) ** 2 for value in x) / len(x) + EPS)
        return x * scale * self.weights[f"{name}.weight"]

    def attention(self, layer: int, x: Tensor, position: int) -> Tensor:
        """softmax(q K^T / sqrt(d)) V over all pairs read so far, head by head."""
        queries = self.heads(layer, "q", x, position)
        self.keys[layer].append(torch.stack(self.heads(layer, "k", x, position)))
        self.values[layer].append(torch.stack(self.heads(layer, "v", x, position)))
        shared = len(queries) // self.keys[layer][0].shape[0]
        results = []
        for number, query in enumerate(queries):
            keys = [key[number // shared] for key in self.keys[layer]]
            values = [value[number // shared] for value in self.values[layer]]
            scores = [float(query @ key) / math.sqrt(len(query)) for key in keys]
            weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
            results.append(
                sum(w * value for w, value in zip(weights, values, strict=True))
            )
        return self.weights[f"layers.{layer}.self_attn.o_proj.weight"] @ torch.cat(
            results
        )

    def heads(self, layer: int, name: str, x: Tensor, position: int) -> list[Tensor]:
        """Queries, keys or values, one a head."""
        prefix = f"layers.{layer}.self_attn.{name}"
        y = self.weights[f"{prefix}_proj.weight"] @ x
        if self.head.qkv_bias:
            y = y + self.weights[f"{prefix}_proj.bias"]
        heads = list(y.split(self.head.head_size))
        if name == "v":
            return heads
        if self.head.qk_norm:
            heads = [self.norm(f"{prefix}_norm", one) for one in heads]
        return [self.rotated(one, position) for one in heads]

    def rotated(self, x: Tensor, position: int) -> Tensor:
        """Pairs (i, i + d/2) turned by the position times theta^(-2i/d)."""
        half = len(x) // 2
        turned = x.clone()
        for i in range(half):
            angle = position * self.frequency(i, len(x))
            cos, sin = math.cos(angle), math.sin(angle)
            turned[i] = x[i] * cos - x[i + half] * sin
            turned[i + half] = x[i + half] * cos + x[i] * sin
        return turned

    def frequency(self, i: int, size: int) -> float:
        """Of the i-th pair; scaled linearly, or as Llama 3 does."""
        rope = self.head.rope
        scaling = rope.get("rope_scaling") or rope.get("rope_parameters") or {}
        theta = rope.get("rope_theta", scaling.get("rope_theta", 10_000.0))
        plain: float = theta ** (-2 * i / size)
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "default":
            return plain
        slow = plain / scaling["factor"]
        if kind == "linear":
            return slow
        assert kind == "llama3"
        turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        return (1 - share) * slow + share * plain

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x))."""
        prefix = f"layers.{layer}.mlp"
        gate = self.weights[f"{prefix}.gate_proj.weight"] @ x
        up = self.weights[f"{prefix}.up_proj.weight"] @ x
        return self.weights[f"{prefix}.down_proj.weight"] @ (
            gate / (1 + torch.exp(-gate)) * up
        )

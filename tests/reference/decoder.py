"""Parts of a decoder layer, one row and one head at a time, in float64.

RoPE is that of arXiv 2104.09864. Nothing of the package is used.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.published import Published

EPS = 1e-5


class ReferenceDecoder:
    """The layers of a head; weights go by their published names."""

    # where a file names none
    theta = 10_000.0

    def __init__(self, head: Published, weights: dict[str, Tensor]) -> None:
        """Begin without keys and values."""
        self.head = head
        self.weights = {name: weight.double() for name, weight in weights.items()}
        # layer -> one [num_kv_heads, head_size] a token
        self.keys: list[list[Tensor]] = [[] for _ in range(head.num_layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(head.num_layers)]

    def linear(self, name: str, x: Tensor) -> Tensor:
        """W x, and b where there is one."""
        y = self.weights[f"{name}.weight"] @ x
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def norm(self, name: str, x: Tensor) -> Tensor:
        """RMSNorm."""
        scale = 1 / math.sqrt(sum(float(value) ** 2 for value in x) / len(x) + EPS)
        return x * scale * self.weights[f"{name}.weight"]

    def heads(self, layer: int, name: str, x: Tensor, position: int) -> list[Tensor]:
        """Queries, keys or values, one a head; queries and keys normed and turned."""
        prefix = f"layers.{layer}.self_attn.{name}"
        heads = list(self.linear(f"{prefix}_proj", x).split(self.head.head_size))
        if name == "v":
            return heads
        if self.head.qk_norm:
            heads = [self.norm(f"{prefix}_norm", one) for one in heads]
        return [self.rotated(one, position) for one in heads]

    def keys_values(self, layer: int, x: Tensor, position: int) -> tuple[Tensor, ...]:
        """Keys and values of a row, each [num_kv_heads, head_size]."""
        return tuple(torch.stack(self.heads(layer, n, x, position)) for n in "kv")

    def attended(
        self,
        layer: int,
        queries: list[Tensor],
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        """softmax(q K^T / sqrt(d)) V of one row, head by head, then o_proj."""
        shared = len(queries) // len(keys[0])
        parts = []
        for number, query in enumerate(queries):
            own = number // shared
            scores = [float(query @ key[own]) / math.sqrt(len(query)) for key in keys]
            weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
            terms = [w * value[own] for w, value in zip(weights, values, strict=True)]
            parts.append(torch.stack(terms).sum(0))
        return self.linear(f"layers.{layer}.self_attn.o_proj", torch.cat(parts))

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
        theta = rope.get("rope_theta", scaling.get("rope_theta", self.theta))
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
        gate = self.linear(f"{prefix}.gate_proj", x)
        up = self.linear(f"{prefix}.up_proj", x)
        return self.linear(f"{prefix}.down_proj", gate / (1 + torch.exp(-gate)) * up)

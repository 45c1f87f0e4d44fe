"""DFlash heads from the papers' equations, one row and one head at a time, in float64.

Sources: arXiv 2602.06036 (DFlash), 2606.18394 (JetSpec), 2607.05147 (DSpark) and, for
DFlash2, the layout of github.com/z-lab/dflash. Nothing of the package is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tests.published_dflash import PublishedDFlash

EPS = 1e-5
Part = Callable[[list[Tensor]], list[Tensor]]


class ReferenceDFlash:
    """One request: its context, then one block."""

    def __init__(
        self, head: PublishedDFlash, embedding: Tensor, output: Tensor
    ) -> None:
        """Take a head, and the target's embedding and output layer."""
        self.head = head
        self.weights = {name: t.double() for name, t in head.tensors().items()}
        self.embedding = self.weights.get("embed_tokens.weight", embedding.double())
        hot = head.hot_tokens()
        self.ids = list(range(head.vocab_size)) if hot is None else hot.tolist()
        self.output = self.weights.get("lm_head.weight", output.double()[self.ids])
        self.mask = self.weights.get("mask_embedding")
        # layer -> one [num_kv_heads, head_size] a token
        layers = range(head.num_layers)
        self.keys: list[list[Tensor]] = [[] for _ in layers]
        self.values: list[list[Tensor]] = [[] for _ in layers]
        self.states: list[Tensor] = []
        self.root = 0

    def read_context(self, hidden_states: list[Tensor]) -> None:
        """Take hidden states as transformers gives them, each [length, size]."""
        for position in range(len(hidden_states[0])):
            parts = [
                hidden_states[i + 1][position].double() for i in self.head.layer_ids
            ]
            feature = self.norm("hidden_norm", self.linear("fc", torch.cat(parts)))
            for layer in range(self.head.num_layers):
                key = self.heads(layer, "k", feature, position)
                self.keys[layer].append(torch.stack(key))
                value = self.heads(layer, "v", feature, position)
                self.values[layer].append(torch.stack(value))

    def read_block(self, root: int, depth: int) -> list[Tensor]:
        """The states that predict, one a level."""
        self.root = root
        masks = depth - 1 if self.head.predicts_from_root else depth
        rows = [self.embed(root)]
        rows += [self.embed(self.head.mask_token_id) for _ in range(masks)]
        start = len(self.keys[0])
        for layer in range(self.head.num_layers):
            prefix = f"layers.{layer}"
            x = [self.norm(f"{prefix}.input_layernorm", row) for row in rows]
            attention = partial(self.attention, layer, start=start)
            attended = self.around(f"{prefix}.attention_conv", x, attention)
            rows = [row + one for row, one in zip(rows, attended, strict=True)]
            x = [self.norm(f"{prefix}.post_attention_layernorm", row) for row in rows]
            made = self.around(f"{prefix}.mlp_conv", x, partial(self.mlps, layer))
            rows = [row + one for row, one in zip(rows, made, strict=True)]
        states = [self.norm("norm", row) for row in rows]
        self.states = states if self.head.predicts_from_root else states[1:]
        return self.states

    def logits(self, level: int, parent: int) -> dict[int, float]:
        """Logits of level ``level`` below a node of token ``parent``, by token."""
        state = self.states[level]
        logits = (self.output @ state) * self.head.output_multiplier
        cap = self.head.final_logit_softcapping
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        if self.head.markov_rank:
            first = self.weights["markov_head.markov_w1.weight"][parent]
            logits = logits + self.weights["markov_head.markov_w2.weight"] @ first
        by_token = {token: float(logits[row]) for row, token in enumerate(self.ids)}
        if not self.head.selector_rank:
            return by_token
        prefix = "candidate_selector"
        left = self.weights[f"{prefix}.predecessor_codebook"][parent]
        left = left * self.linear(f"{prefix}.hidden_projection", state)
        right = self.weights[f"{prefix}.successor_codebook"]
        best = sorted(by_token, key=lambda token: -by_token[token])
        scores = dict.fromkeys(by_token, -math.inf)
        for token in best[: self.head.selector_top_k]:
            scores[token] = by_token[token] + float(left @ right[token])
        return scores

    def embed(self, token: int) -> Tensor:
        """Embedding of a token, or of the mask."""
        row = self.embedding[token] if token < len(self.embedding) else None
        if self.mask is not None and token == self.head.mask_token_id:
            row = self.mask
        assert row is not None
        return row * self.head.input_embedding_scale

    def linear(self, name: str, x: Tensor) -> Tensor:
        """W x, and b where there is one."""
        y = self.weights[f"{name}.weight"] @ x
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def norm(self, name: str, x: Tensor) -> Tensor:
        """RMSNorm."""
        scale = 1 / math.sqrt(sum(float(value) ** 2 for value in x) / len(x) + EPS)
        return x * scale * self.weights[f"{name}.weight"]

    def around(self, name: str, rows: list[Tensor], part: Part) -> list[Tensor]:
        """A part of a layer between two convolutions, if the head has them."""
        if not self.head.conv_kernel_size:
            return part(rows)
        kernels = [self.kernel(name, row) for row in rows]
        rows = [self.convolved(rows, row, kernels[row][0]) for row in range(len(rows))]
        rows = part(rows)
        return [self.convolved(rows, row, kernels[row][1]) for row in range(len(rows))]

    def kernel(self, name: str, x: Tensor) -> Tensor:
        """[2, taps, hidden_size]: base, plus what the row adds to each group."""
        taps, size = self.head.conv_kernel_size, self.head.hidden_size
        added = self.linear(f"{name}.kernel_projection", x)
        kernel = self.weights[f"{name}.base_kernel"].clone()
        groups = size // self.head.conv_group_size
        for side in range(2):
            for tap in range(taps):
                for channel in range(size):
                    group = channel // self.head.conv_group_size
                    index = (side * taps + tap) * groups + group
                    kernel[side, tap, channel] += added[index]
        return kernel

    def convolved(self, rows: list[Tensor], row: int, kernel: Tensor) -> Tensor:
        """The row and those before it, weighed channel by channel."""
        terms = [
            kernel[tap] * rows[row - tap] for tap in range(len(kernel)) if tap <= row
        ]
        return torch.stack(terms).sum(0)

    def attention(self, layer: int, rows: list[Tensor], start: int) -> list[Tensor]:
        """softmax(q K^T / sqrt(d)) V over the context and the block.

        A key is seen that lies fewer positions before the row than the window has, if
        the layer has one.
        """
        sliding = layer in self.head.sliding_layers
        causal = self.head.sliding_causal if sliding else self.head.causal
        block = range(len(rows))
        keys = [torch.stack(self.heads(layer, "k", rows[i], start + i)) for i in block]
        values = [
            torch.stack(self.heads(layer, "v", rows[i], start + i)) for i in block
        ]
        results = []
        for i in block:
            seen = i + 1 if causal else len(rows)
            first = 0
            if sliding:
                first = max(start + i - self.head.sliding_window + 1, 0)
            seen_keys = self.keys[layer][first:] + keys[:seen]
            seen_values = self.values[layer][first:] + values[:seen]
            parts = []
            for number, query in enumerate(self.heads(layer, "q", rows[i], start + i)):
                shared = number // (self.head.num_heads // self.head.num_kv_heads)
                scores = [
                    float(query @ key[shared]) / math.sqrt(len(query))
                    for key in seen_keys
                ]
                weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
                terms = [
                    weight * value[shared]
                    for weight, value in zip(weights, seen_values, strict=True)
                ]
                parts.append(torch.stack(terms).sum(0))
            results.append(
                self.linear(f"layers.{layer}.self_attn.o_proj", torch.cat(parts))
            )
        return results

    def heads(self, layer: int, name: str, x: Tensor, position: int) -> list[Tensor]:
        """Queries, keys or values, one a head; queries and keys normed and turned."""
        prefix = f"layers.{layer}.self_attn.{name}"
        heads = list(self.linear(f"{prefix}_proj", x).split(self.head.head_size))
        if name == "v":
            return heads
        return [
            self.rotated(self.norm(f"{prefix}_norm", one), position) for one in heads
        ]

    def rotated(self, x: Tensor, position: int) -> Tensor:
        """Pairs (i, i + d/2) turned by the position times theta^(-2i/d)."""
        rope, half = self.head.rope, len(x) // 2
        theta = rope.get("rope_theta", 1e6)
        factor = rope.get("rope_scaling", {}).get("factor", 1.0)
        turned = x.clone()
        for i in range(half):
            angle = position * theta ** (-2 * i / len(x)) / factor
            cos, sin = math.cos(angle), math.sin(angle)
            turned[i] = x[i] * cos - x[i + half] * sin
            turned[i + half] = x[i + half] * cos + x[i] * sin
        return turned

    def mlps(self, layer: int, rows: list[Tensor]) -> list[Tensor]:
        """The MLP, row by row."""
        return [self.mlp(layer, row) for row in rows]

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x))."""
        prefix = f"layers.{layer}.mlp"
        gate, up = (
            self.linear(f"{prefix}.gate_proj", x),
            self.linear(f"{prefix}.up_proj", x),
        )
        return self.linear(f"{prefix}.down_proj", gate / (1 + torch.exp(-gate)) * up)

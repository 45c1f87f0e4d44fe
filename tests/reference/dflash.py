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
from tests.reference.decoder import ReferenceDecoder

Part = Callable[[list[Tensor]], list[Tensor]]


class ReferenceDFlash(ReferenceDecoder):
    """One request: its context, then one block."""

    head: PublishedDFlash
    theta = 1e6

    def __init__(
        self, head: PublishedDFlash, embedding: Tensor, output: Tensor
    ) -> None:
        """Take a head, and the target's embedding and output layer."""
        super().__init__(head, head.tensors())
        self.embedding = self.weights.get("embed_tokens.weight", embedding.double())
        hot = head.hot_tokens()
        self.ids = list(range(head.vocab_size)) if hot is None else hot.tolist()
        self.output = self.weights.get("lm_head.weight", output.double()[self.ids])
        self.mask = self.weights.get("mask_embedding")
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
                key, value = self.keys_values(layer, feature, position)
                self.keys[layer].append(key)
                self.values[layer].append(value)

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
        """Attention over the context and the block.

        A key is seen that lies fewer positions before the row than the window has, if
        the layer has one.
        """
        sliding = layer in self.head.sliding_layers
        causal = self.head.sliding_causal if sliding else self.head.causal
        made = [self.keys_values(layer, x, start + i) for i, x in enumerate(rows)]
        keys, values = ([*part] for part in zip(*made, strict=True))
        results = []
        for i, x in enumerate(rows):
            seen = i + 1 if causal else len(rows)
            first = 0
            if sliding:
                first = max(start + i - self.head.sliding_window + 1, 0)
            results.append(
                self.attended(
                    layer,
                    self.heads(layer, "q", x, start + i),
                    self.keys[layer][first:] + keys[:seen],
                    self.values[layer][first:] + values[:seen],
                )
            )
        return results

    def mlps(self, layer: int, rows: list[Tensor]) -> list[Tensor]:
        """The MLP, row by row."""
        return [self.mlp(layer, row) for row in rows]

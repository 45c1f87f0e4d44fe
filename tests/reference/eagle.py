"""EAGLE heads from the papers' equations, one pair at a time, in float64.

arXiv 2401.15077 (EAGLE-1) and 2503.01840 (EAGLE-3). The first layer is ``layers.0.``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.published_heads import PublishedHead
from tests.reference.decoder import ReferenceDecoder


class ReferenceEagle(ReferenceDecoder):
    """A head that reads pairs in order and remembers their keys and values."""

    head: PublishedHead

    def __init__(
        self, head: PublishedHead, tensors: dict[str, Tensor], embedding: Tensor
    ) -> None:
        """Take published weights, and the embedding that the head reads tokens by."""
        named = tensors.items()
        super().__init__(
            head, {n.replace("midlayer.", "layers.0."): t for n, t in named}
        )
        self.embedding = embedding.double()

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
            x = self.linear("fc", torch.cat([embedded, feature]))
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

    def attention(self, layer: int, x: Tensor, position: int) -> Tensor:
        """Attention over all pairs read so far."""
        key, value = self.keys_values(layer, x, position)
        self.keys[layer].append(key)
        self.values[layer].append(value)
        queries = self.heads(layer, "q", x, position)
        return self.attended(layer, queries, self.keys[layer], self.values[layer])

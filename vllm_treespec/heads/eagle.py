"""EAGLE's head: a decoder layer over the target's features, with its own context."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm_treespec.heads.base import ContextHead
from vllm_treespec.heads.config import EagleHeadConfig
from vllm_treespec.heads.decoder import Attend, DecoderLayer, RMSNorm, Rotary


class EagleHead(ContextHead):
    """The drafters of arXiv 2401.15077 (EAGLE-1, and 2 by its weights) and 2503.01840.

    It reads *pairs*: pair i is the target's feature of token i and the embedding of
    token i + 1, at position i. What it makes of a pair guesses token i + 2, and stands
    for the feature of token i + 1 where the target has not computed it. Letters there:
    feature f, embedding e::

        EAGLE-1   x = fc([e, f]);          y = x + attention(x)
        EAGLE-3   z = [norm(e), norm(f)];  y = f + attention(z)
        both      out = y + MLP(norm(y))

    EAGLE-1's feature is the target's final hidden state; EAGLE-3's is made of several
    layers' hidden states by a linear layer.
    """

    config: EagleHeadConfig
    # pairs of the text before are attended to
    context = True

    def __init__(self, config: EagleHeadConfig) -> None:
        """Make a fresh head."""
        super().__init__(config)
        size, eps = config.hidden_size, config.norm_eps
        wide = config.target_hidden_size * config.num_target_layers

        def norm(wanted: bool, width: int = size) -> nn.Module:
            return RMSNorm(width, eps) if wanted else nn.Identity()

        self.layer_norms = nn.ModuleList(
            RMSNorm(config.target_hidden_size, eps)
            for _ in range(config.num_target_layers if config.norm_layers else 0)
        )
        self.combine_norm = norm(config.norm_before_combine, wide)
        self.combine: nn.Module = nn.Identity()
        if config.combines:
            self.combine = nn.Linear(wide, size, bias=False)
        first = config.version == 1
        self.embedding_norm = norm(not first or "embedding" in config.norms)
        self.feature_norm = norm(not first)
        self.fuse: nn.Module = nn.Identity()
        if first:
            self.fuse = nn.Linear(2 * size, size, bias=config.fuse_bias)
        self.fused_norm = norm("fused" in config.norms)
        input_sizes = [size if first else 2 * size] + [size] * (config.num_layers - 1)
        self.layers = nn.ModuleList(
            DecoderLayer(config, number, input_size)
            for number, input_size in enumerate(input_sizes)
        )
        # of the layers after the first, by their number
        self.input_norms = nn.ModuleDict(
            {str(n): RMSNorm(size, eps) for n in range(1, config.num_layers)}
        )
        self.norm = norm(not first or "output" in config.norms)
        self.rotary = Rotary(config)

    def features(self, states: Tensor) -> Tensor:
        """What is kept of a token, [n, feature_size].

        Args:
            states: [n, len(target_layers) * target_hidden_size], the target's hidden
                states before these layers, one beside the other.

        """
        states = self.combine_norm(states)
        if self.layer_norms:
            parts = states.chunk(len(self.layer_norms), dim=-1)
            normed = [n(part) for n, part in zip(self.layer_norms, parts, strict=True)]
            states = torch.cat(normed, dim=-1)
        features: Tensor = self.combine(states)
        return features

    def read(
        self, features: Tensor, token_ids: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Read pairs.

        Args:
            features: [n, feature_size], of tokens of the target, or what this returned
                for drafted ones.
            token_ids: int64 [n], the tokens after those.
            positions: int64 [n], of the features' tokens.
            attend: attention over all pairs up to these.

        Returns:
            [n, hidden_size], for ``logits``, and the features of ``token_ids``.

        """
        embedded = nn.functional.embedding(token_ids, self.embedding.weight)
        embedded = self.embedding_norm(embedded)
        if self.config.version == 1:
            fused = self.fuse(torch.cat([embedded, features], dim=-1))
            return self.decode(self.fused_norm(fused), fused, positions, attend)
        normed = self.feature_norm(features)
        residual = normed if self.config.norm_before_residual else features
        attended = torch.cat([embedded, normed], dim=-1)
        return self.decode(attended, residual, positions, attend)

    def read_drafted(
        self, states: Tensor, token_ids: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Read drafted tokens, with what ``read`` returned as the features before."""
        return self.read(states, token_ids, positions, attend)

    def decode(
        self, attended: Tensor, residual: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Run the decoder layers; for ``read``.

        Args:
            attended: [n, width], what the first layer's attention reads.
            residual: [n, hidden_size], what its result is added to.
            positions: int64 [n].
            attend: attention over all pairs up to these.

        """
        angles = self.rotary.angles(positions)
        first, *others = self.layers
        out: Tensor = first(attended, residual, angles, attend)
        for norm, layer in zip(self.input_norms.values(), others, strict=True):
            out = layer(norm(out), out, angles, attend)
        return self.norm(out) if self.config.norm_output else out

    def output_inputs(self, features: Tensor) -> Tensor:
        """What the output layer reads of what ``read`` returned, same shape."""
        normed: Tensor = features if self.config.norm_output else self.norm(features)
        return normed

    def output_inputs_after(self, features: Tensor, token_ids: Tensor) -> Tensor:
        """What ``output_weight`` is applied to, where these tokens stand before."""
        return self.output_inputs(features)

    def logits(self, features: Tensor) -> Tensor:
        """Logits after pairs, [..., draft_vocab_size], from what ``read`` returned."""
        return super().logits(self.output_inputs(features))
